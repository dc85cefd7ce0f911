"""The checker tells what was lost, by histories that are made up."""

from dataclasses import replace

import pytest

from tests.jepsen.checker import Ledger, Operation, judge


def done(number, client=1, **other):
    """The operation of that number: one second after the other, all of them well."""
    well = Operation(
        client=client,
        asked=float(number),
        granted=number + 0.5,
        fence=100 + number,
        plain=True,
        fenced=True,
    )
    return replace(well, **other)


WELL = [done(number) for number in range(1, 6)]
FENCES = [one.fence for one in WELL]
ALL = Ledger(value=5, fences=FENCES)


def test_nothing_is_wrong_with_operations_one_after_the_other():
    verdict = judge(WELL, ALL, ALL)
    assert verdict.wrong == []
    assert (verdict.granted, verdict.lost, verdict.refused) == (5, 0, 0)
    assert verdict.longest_gap == 1.0


def test_an_acknowledged_increment_that_is_missing_in_the_value_is_lost():
    overwritten = Ledger(value=3, fences=FENCES)
    verdict = judge(WELL, overwritten, ALL)
    assert verdict.lost == 2
    assert verdict.wrong == []  # Nothing else is to be expected without guard.
    verdict = judge(WELL, ALL, overwritten)
    assert verdict.lost_with_fence == 2
    assert verdict.wrong == ["2 increments under the fence are lost"]


def test_an_acknowledged_increment_that_the_database_has_forgotten_is_lost():
    assert judge(WELL, ALL, Ledger(value=4, fences=FENCES[:-1])).lost_with_fence == 1


def test_an_increment_whose_client_was_killed_before_it_could_tell_is_none_too_many():
    verdict = judge(WELL[:-1], ALL, ALL)
    assert (verdict.lost, verdict.lost_with_fence) == (0, 0)


def test_nor_does_it_make_up_for_one_that_is_lost():
    assert judge(WELL[:-1], ALL, Ledger(value=4, fences=FENCES)).lost_with_fence == 1


def test_who_was_too_late_is_refused_and_not_lost():
    late = replace(WELL[2], fenced=False, error="StaleFence")
    fenced = Ledger(value=4, fences=[fence for fence in FENCES if fence != late.fence])
    verdict = judge([*WELL[:2], late, *WELL[3:]], Ledger(value=4, fences=FENCES), fenced)
    assert (verdict.lost, verdict.lost_with_fence, verdict.refused) == (1, 0, 1)
    assert verdict.wrong == []


def test_who_was_not_granted_the_lock_is_neither():
    busy = Operation(client=2, asked=2.0, error="LockUnavailable")
    verdict = judge([*WELL, busy], ALL, ALL)
    assert (verdict.granted, verdict.lost, verdict.refused) == (5, 0, 0)


@pytest.mark.parametrize("fences", [[101, 103, 102, 104, 105], [101, 102, 102, 103, 104]])
def test_a_write_after_one_with_a_newer_fence_is_wrong(fences):
    verdict = judge(WELL, ALL, Ledger(value=5, fences=fences))
    assert verdict.wrong == ["1 writes under the fence are out of order"]


@pytest.mark.parametrize("fence", [101, 102])
def test_a_fence_not_above_that_of_a_lease_before_is_wrong(fence):
    verdict = judge([*WELL[:2], done(3, fence=fence), *WELL[3:]], ALL, ALL)
    assert verdict.wrong == ["1 leases have a fence that is not above one before"]


def test_a_lease_that_was_asked_for_before_the_other_was_granted_may_have_any_fence():
    # Its client was stopped with the answer before it could write down when that came.
    slow = done(3, client=2, asked=1.0, fence=100)
    assert judge([*WELL[:2], slow, *WELL[3:]], ALL, ALL).wrong == []


def test_the_gap_is_the_longest_time_from_one_grant_to_the_next():
    assert judge([*WELL[:2], WELL[4]], ALL, ALL).longest_gap == 3.0
