"""Fixtures: the two versions, and a process of each for the locks of the test."""

import pytest

from tests.conftest import on_failure, skip_or_fail
from tests.support.wheels import NEW, OLD, VERSIONS, NoHistory, unpacked
from tests.upgrades.sides import Side


@pytest.fixture(scope="session")
def packages():
    """The folder of each version."""
    try:
        return {version: unpacked(version) for version in VERSIONS}
    except NoHistory as why:
        skip_or_fail(str(why))
        raise


@pytest.fixture
def start(request, settings):
    """Start a process with the package in this folder, and with the REDISLOCK of this moment."""
    sides = []

    def start(package, *, forked=True):
        side = Side(package, settings.REDISLOCK, forked=forked)
        sides.append(side)
        on_failure(request, f"stderr of side {side.pid}", lambda: side.child.stderr)
        return side

    yield start
    for side in sides:
        side.close()


@pytest.fixture
def old(packages, start):
    """A process with the version before this one."""
    return start(packages[OLD])


@pytest.fixture
def new(packages, start):
    """A process with this version."""
    return start(packages[NEW])
