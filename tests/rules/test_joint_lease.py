"""What several leases come to, which are granted and released together."""

import pytest

from django_redislock.joint_handle import JointLease
from tests.rules.test_lease_state import END, TTL, claimed, is_renewed, me, state


def joint(**of_second):
    """Two of a joint lease, and the parts."""
    first, second = state(name="a"), state(name="b", **of_second)
    return JointLease([first, second], None), first, second


def test_it_is_called_by_all_names_and_belongs_to_whom_its_parts_belong():
    caller = object()
    parts = (
        state(name="a", caller=caller, permit_number=2, granted_at=1.0),
        state(name="b", is_of_run=True),
    )
    both = JointLease(parts, None)
    assert (both.name, both._token, both.times_held, both.permit_number) == ("a, b", "", 1, 2)
    assert both.granted_at == 1.0
    assert both.holder() is me
    assert both.caller is caller
    assert both.is_of_run
    assert both.is_ours
    assert not joint()[0].is_of_run


def test_of_one_lock_it_is_what_that_one_is():
    one = JointLease([state(name="a")], None)
    assert (one.name, one.deadline, one.holder()) == ("a", END, me)
    assert one.is_ours
    assert one.loss(END).name == "a"
    assert one.loss(1.0).name == "a"


def test_it_lasts_as_long_as_the_part_that_ends_first():
    both, first, second = joint(ttl=2 * TTL, deadline=1.0, ends=5.0)
    assert (both.ttl, both.deadline, both.ends, both.renewals) == (TTL, 1.0, 5.0, 0)
    is_renewed(second, sent=0.5)
    assert (both.ttl, both.renewals) == (TTL, 0)
    assert both.deadline == both.ends == END
    is_renewed(first, sent=0.5)
    assert both.renewals == 1


@pytest.mark.proves("P1")
def test_p1_it_is_held_while_all_parts_are():
    both = JointLease([state(), claimed(ends=5.0)], None)
    assert both.is_held(0.9)
    assert not both.is_in_doubt(0.9)
    assert not both.is_held(1.0)
    assert both.is_in_doubt(1.0)
    assert both.may_be_held(4.9)
    assert not both.may_be_held(5.0)
    assert not both.is_in_doubt(5.0)


@pytest.mark.parametrize("number", [0, 1])
def test_it_is_lost_with_the_first_part_that_is(number):
    both, *parts = joint()
    assert both.is_active
    assert not both.is_lost
    assert both.loss_reason(1.0) is None
    parts[number].lose("forced")
    assert both.is_lost
    assert not both.is_active
    assert both.loss_reason(1.0) == "forced"
    assert (both.loss(1.0).name, both.loss(1.0).reason) == ("ab"[number], "forced")


def test_it_is_no_longer_active_once_a_part_is_ended():
    both, first, second = joint()
    first.unnest()
    assert not both.is_active
    second.unnest()
    assert "released" in str(both.loss(1.0))


def test_what_concerns_the_parts_is_left_to_them():
    both = joint()[0]
    assert both.lose("forced", at_release=True) is False
    assert both.unnest() == 0
    assert both.is_active


def test_transactions_hold_all_parts_until_they_are_over():
    both, *parts = joint()
    assert both.hold_for_transactions() is True
    assert [(one.transactions, one.times_held) for one in parts] == [(1, 2), (1, 2)]
    both.transactions_are_over()
    assert [one.transactions for one in parts] == [0, 0]
