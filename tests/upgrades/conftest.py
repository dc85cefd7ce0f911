"""Fixtures: the two versions, and a process of each for the locks of the test."""

import pytest

from tests.conftest import closed_later, skip_or_fail
from tests.support.wheels import NEW, OLD, VERSIONS, NoHistory, unpacked
from tests.upgrades.sides import Side


@pytest.fixture(scope="session")
def packages():
    try:
        return {version: unpacked(version) for version in VERSIONS}
    except NoHistory as why:
        skip_or_fail(str(why))
        raise


@pytest.fixture
def start(request, settings):
    """Start a process with the package in this folder, and with the REDISLOCK of this moment."""
    with closed_later(request, "stderr of a side", lambda side: side.child.stderr) as note:

        def start(package, *, forked=True):
            return note(Side(package, settings.REDISLOCK, forked=forked))

        yield start


@pytest.fixture
def old(packages, start):
    """A process with the version before this one."""
    return start(packages[OLD])


@pytest.fixture
def new(packages, start):
    return start(packages[NEW])
