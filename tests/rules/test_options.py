"""What the arguments of a lock and the settings come to."""

from datetime import timedelta

import pytest

from django_redislock.conf import Conf
from django_redislock.options import lock_options
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
