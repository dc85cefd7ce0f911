"""Versions are mixed while much goes wrong: nothing is lost, and nobody has what another one has.

Longer, and for each backend:

    python -m tests.support.soak --upgrade --seconds 600
    make jepsen SECONDS=600 ARGS=--upgrade
"""

import pytest

from tests.jepsen.places import CONTENDERS
from tests.jepsen.trial import run
from tests.support.soak import soak
from tests.support.wheels import NEW, OLD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.no_permit("both versions have locks here"),
]

TTL = 2.0
BACKENDS = [name for name, contender in CONTENDERS.items() if contender.lock == "ours"]


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        everywhere = metafunc.config.getoption("everywhere")
        metafunc.parametrize("backend", BACKENDS if everywhere else BACKENDS[:1])


def test_while_replies_are_lost_and_processes_are_stopped_killed_and_replaced(
    packages, make_server
):
    """With each that is killed, one of the other version takes its place: forth, and back."""
    both = (packages[OLD], packages[NEW])
    findings = soak(make_server(), seconds=9, ttl=TTL, packages=both, leases=30)
    print(findings)
    assert findings.grants > 20
    assert findings.stops
    assert findings.kills
    assert {"cut_after", "cut_before"} <= (+findings.faults).keys()
    assert findings.overlaps == 0
    assert findings.false_busy == 0
    assert findings.lost_updates == 0
    assert findings.fences_out_of_order == 0
    assert findings.longest_orphan <= TTL + 1.5, findings.orphan
    assert findings.longest_gap <= 3 * TTL + 1


def test_nothing_is_lost_under_the_fence_while_servers_fail_too(
    backend, packages, django_db_blocker
):
    with django_db_blocker.unblock():
        report = run(backend, seconds=0, seed=2, packages=(packages[OLD], packages[NEW]))
    print(report)
    assert report.wrong == []
    assert report.verdict.lost > 0, "nobody was too late, so nothing is proven"
