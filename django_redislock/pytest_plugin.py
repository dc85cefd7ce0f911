"""The ``redislock`` fixture: locks in memory and the test kit, without a server."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from django_redislock.testing import LockTestKit

INI = "redislock_in_memory"
MARKER = "redislock_servers"


@pytest.fixture
def redislock() -> Iterator[LockTestKit]:
    """Keep all locks of this test in memory, and return the test kit.

    Every alias of REDISLOCK becomes in-memory and keeps its other settings. After the test
    everything is as before.
    """
    from django.conf import settings

    from django_redislock.testing import LockTestKit

    if not (settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ):
        raise pytest.UsageError(
            "The redislock fixture needs Django's settings: install pytest-django and set"
            " DJANGO_SETTINGS_MODULE, or call django.conf.settings.configure() in conftest.py."
        )
    with LockTestKit() as kit:
        yield kit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let projects keep all tests from their servers."""
    parser.addini(
        INI,
        f"Keep the locks of every test in memory, as the redislock fixture does, unless the test"
        f" is marked {MARKER}.",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line(
        "markers", f"{MARKER}: the test may use the servers in REDISLOCK, in spite of {INI}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keep each test's locks in memory. A fixture would come after those of a class or session."""
    if not item.config.getini(INI) or item.get_closest_marker(MARKER) is not None:
        return (yield)
    from django_redislock.testing import LockTestKit

    with LockTestKit():
        return (yield)
