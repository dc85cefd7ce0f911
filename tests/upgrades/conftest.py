"""Fixtures: the two versions, and a process of each for the locks of the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from tests.conftest import on_failure, skip_or_fail
from tests.support.wheels import NEW, OLD, VERSIONS, NoHistory, unpacked
from tests.upgrades.sides import Side

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_django import Settings


class Start(Protocol):
    """The type of the fixture `start`."""

    def __call__(self, package: str, *, forked: bool = True) -> Side: ...


@pytest.fixture(scope="session")
def packages() -> Mapping[str, str]:
    """The folder of each version."""
    try:
        return {version: unpacked(version) for version in VERSIONS}
    except NoHistory as why:
        skip_or_fail(str(why))
        raise


@pytest.fixture
def start(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Start]:
    """Start a process with the package in this folder, and with the REDISLOCK of this moment."""
    sides: list[Side] = []

    def start(package: str, *, forked: bool = True) -> Side:
        side = Side(package, settings.REDISLOCK, forked=forked)
        sides.append(side)
        on_failure(request, f"stderr of side {side.pid}", lambda: side.child.stderr)
        return side

    yield start
    for side in sides:
        side.close()


@pytest.fixture
def old(packages: Mapping[str, str], start: Start) -> Side:
    """A process with the version before this one."""
    return start(packages[OLD])


@pytest.fixture
def new(packages: Mapping[str, str], start: Start) -> Side:
    """A process with this version."""
    return start(packages[NEW])
