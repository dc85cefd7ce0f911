"""Fixtures for the samples of pages."""

import sys

import pytest

from tests.samples.pages import Page
from tests.support.celery_app import EAGER, celery_app


@pytest.fixture
def paste(tmp_path, monkeypatch):
    """Paste the samples of a page into a project, see pages.py; its tasks run in eager mode."""
    monkeypatch.syspath_prepend(tmp_path)

    def pasted(path, others=None, changes=None):
        return Page(path, tmp_path, others or {}, changes or {})

    with celery_app(**EAGER):
        yield pasted
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]
