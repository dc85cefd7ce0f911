"""What the arguments of a lock and the settings come to."""

from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest

from django_redislock.conf import Conf
from django_redislock.options import lock_options
from django_redislock.rules.arguments import period
from django_redislock.rules.options import Options, Terms, operation_timeout, terms_of


def test_what_is_not_given_is_left_to_the_settings():
    assert lock_options() == Options()
    assert not Options().reentrant
    assert not Options().release_on_commit


def test_the_names_of_one_lock_are_under_one_alias():
    with pytest.raises(ValueError, match="using must be one alias"):
        lock_options(using=("default", "other"))


def test_without_a_limit_there_is_one_permit_and_with_one_there_are_so_many():
    conf = Conf(alias="default")
    assert terms_of(lock_options(), conf).limit == Terms.limit == 1
    assert terms_of(lock_options(limit=2), conf).limit == 2


def test_a_wait_may_be_endless_and_a_ttl_may_not():
    assert lock_options(wait=float("inf")).wait == float("inf")
    assert lock_options(wait=timedelta(seconds=2)).wait == 2.0
    with pytest.raises(ValueError, match="ttl"):
        lock_options(ttl=float("inf"))


def test_a_number_is_no_flag_although_it_equals_one():
    assert lock_options(reentrant=True).reentrant
    with pytest.raises(ValueError, match="reentrant"):
        lock_options(reentrant=1)


@pytest.mark.parametrize(("ttl", "timeout"), [(3.0, 1.0), (15.0, 5.0), (600.0, 5.0)])
def test_a_server_is_given_a_third_of_the_ttl_to_answer_but_five_seconds_at_most(ttl, timeout):
    assert operation_timeout(ttl) == timeout


@pytest.mark.parametrize(("setting", "seconds"), [(None, 4.0), (7.0, 7.0), (0.0, 0.0)])
def test_a_server_is_unavailable_after_the_setting_or_else_the_operation_timeout(setting, seconds):
    conf = Conf(alias="default", unavailable_after=setting)
    assert terms_of(Options(), conf, lambda ttl: 4.0).unavailable_after == seconds


def test_terms_stay_as_they_are():
    with pytest.raises(FrozenInstanceError):
        terms_of(Options(), Conf(alias="default")).wait = 1


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ({}, 5),
        ({"durable": True}, 60),
        ({"durable": True, "ttl": 2}, 5),
        ({"durable": True, "wait": 1}, 1),
        ({"replace": True}, 30 + 2),
        ({"replace": True, "replace_within": 4}, 4 + 2),
    ],
)
def test_a_durable_call_outlasts_a_dead_holder_and_the_newest_call_one_that_must_end(options, wait):
    terms = terms_of(Options(**options), Conf(alias="default", ttl=30, wait=5))
    assert terms.wait == wait
    assert terms.replace_within == (wait - 2 if options.get("replace") else None)


@pytest.mark.parametrize(
    ("value", "every"),
    [
        ("day", timedelta(days=1)),
        ("hour", timedelta(hours=1)),
        *((every, every) for every in (timedelta(seconds=1), timedelta(days=7))),
        (timedelta(minutes=15), timedelta(minutes=15)),
    ],
    ids=repr,
)
def test_a_period_is_whole_days_or_divides_the_day(value, every):
    assert period(value, "once_per") == every


@pytest.mark.parametrize(
    "value",
    [
        "week",
        3600,
        None,
        *(timedelta(hours=hours) for hours in (0, -24, 5, 36)),
        timedelta.resolution,
    ],
    ids=repr,
)
def test_any_other_period_is_refused(value):
    with pytest.raises(ValueError, match='once_per must be "day", "hour" or a timedelta of whole'):
        period(value, "once_per")
