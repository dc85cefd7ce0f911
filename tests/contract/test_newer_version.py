"""A lease that a newer version has written, in a format that this one cannot read, is held."""

from __future__ import annotations

import pytest

from django_redislock import LockTimeout, Skipped, distributed_lock, held, single_instance
from tests.support.matrix import needs_scripts
from tests.support.stored import NAME, NEWER_HOLDER, NEWER_ID, newer_lease
from tests.support.waiting import HUNG

SAYS = f"{NEWER_HOLDER}, which runs a newer version of django_redislock (update this one too)"


def test_an_acquire_is_refused_and_says_by_whom_and_what_to_do(place):
    place.write(NAME, newer_lease())
    with pytest.raises(LockTimeout) as refused, distributed_lock(NAME, wait=0):
        pytest.fail("the block ran")
    assert refused.value.holder == SAYS
    assert f"'lottery' is busy: held by {SAYS}; its lease ends in " in str(refused.value)
    assert distributed_lock(NAME).locked()
    assert place.read(NAME) == newer_lease()


def test_a_waiter_leaves_it_alone_and_has_the_lock_when_it_is_over(place):
    place.write(NAME, newer_lease(), seconds=0.5)
    with distributed_lock(NAME, wait=HUNG) as lease:
        assert lease.held
        assert place.read(NAME) != newer_lease()


def test_a_wait_that_is_over_before_says_so_too(place):
    place.write(NAME, newer_lease())
    with pytest.raises(LockTimeout) as refused, distributed_lock(NAME, wait=0.2):
        pytest.fail("the block ran")
    assert refused.value.holder == SAYS
    assert place.read(NAME) == newer_lease()


@needs_scripts
def test_operators_see_it_as_held_and_only_they_end_it(place):
    place.write(NAME, newer_lease())
    assert not distributed_lock(NAME, wait=0).acquire()  # From now on it is listed.
    (found,) = held.list()
    assert (found.state, found.shown_state) == ("held", "held (newer)")
    assert (found.id, found.holder, found.newer_format) == (NEWER_ID, NEWER_HOLDER, 2)
    assert found.note == (
        "Its holder runs a newer version of django_redislock, and this one cannot read its lease,"
        " of format 2: update this program."
    )
    assert (found.fence, found.held_for, found.ttl) == (None, None, None)
    assert not held.force_release(NAME, "0" * 16)
    assert not held.resume(NAME)
    assert place.read(NAME) == newer_lease()
    place.write(NAME, newer_lease(renewals="00001"))  # It is the same lease.
    assert held.force_release(NAME, NEWER_ID)
    assert held.get(NAME) is None
    assert held.detail(NAME).past == []


@needs_scripts
def test_a_run_of_a_job_is_skipped_and_says_why(place):
    @single_instance(NAME)
    def draw() -> str:
        pytest.fail("the body ran")

    place.write(NAME, newer_lease())
    assert draw() == Skipped(skipped="busy", lock=NAME, holder=SAYS)
