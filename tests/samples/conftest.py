"""Fixtures for the samples of pages."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.samples.pages import Page
from tests.support.celery_app import EAGER, celery_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Paste(Protocol):
    """The type of the fixture `paste`."""

    def __call__(
        self,
        path: str,
        others: dict[str, str] | None = None,
        changes: dict[str, str] | None = None,
    ) -> Page: ...


@pytest.fixture
def paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paste]:
    """Paste the samples of a page into a project, see pages.py; its tasks run in eager mode."""
    monkeypatch.syspath_prepend(tmp_path)

    def pasted(
        path: str,
        others: dict[str, str] | None = None,
        changes: dict[str, str] | None = None,
    ) -> Page:
        return Page(path, tmp_path, others or {}, changes or {})

    with celery_app(**EAGER):
        yield pasted
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]
