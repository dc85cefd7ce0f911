"""Arguments are checked where they are written, before any server is asked."""

import math
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_redislock import LockTimeout, distributed_lock
from django_redislock.backends.registry import backends
from django_redislock.holder import current_owner
from django_redislock.options import lock_options
from django_redislock.rules.arguments import database, part
from django_redislock.rules.keys import lock_keys
from tests.support.matrix import MEMORY, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.ways import both_ways

pytestmark = places(KIND, MEMORY)

TEN_YEARS = timedelta(days=3650).total_seconds()


def refused(says, **arguments):
    """These arguments are refused with such a message."""
    with pytest.raises(ValueError, match=says):
        distributed_lock("lottery", **arguments)


@pytest.mark.parametrize("argument", ["ttl", "wait", "max_hold", "min_hold"])
def test_what_is_no_duration_is_refused(argument):
    for value in ("5", b"5", True, [5], math.nan, -1, -0.001, timedelta(days=-1)):
        refused(f"^{argument} must be ", **{argument: value})


@pytest.mark.parametrize("argument", ["ttl", "max_hold"])
def test_a_lease_that_is_too_short_to_be_renewed_is_refused(argument):
    for value in (0, 0.049, timedelta(milliseconds=49)):
        refused(f"^{argument} must be at least 0.05 seconds", **{argument: value})
    distributed_lock("lottery", **{argument: 0.05})


@pytest.mark.proves("P2")
@pytest.mark.parametrize("argument", ["ttl", "min_hold", "max_hold"])
def test_a_lease_without_end_is_refused(argument):
    for value in (TEN_YEARS + 1, math.inf, 10**400, timedelta.max):
        refused(f"^{argument} must be ", **{argument: value})
    distributed_lock("lottery", **{argument: TEN_YEARS})


@pytest.mark.parametrize("argument", ["renew", "reentrant", "release_on_commit"])
def test_what_is_not_true_or_false_is_refused(argument):
    for value in (1, 0, "yes", []):
        refused(f"^{argument} must be True or False", **{argument: value})


def test_what_is_no_alias_and_no_database_is_refused():
    for value in (None, 7, [], ("default",)):
        refused("^using must be", using=value)
    for value in (1, 0, "", ["default"]):
        refused("^atomic must be True or the alias", atomic=value)
    refused("atomic and release_on_commit exclude each other", atomic=True, release_on_commit=True)


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.1, True, False, "0.5", None, math.nan], ids=repr)
def test_what_is_no_part_of_the_ttl_is_refused(value):
    with pytest.raises(ValueError, match=r"^left must be more than 0 and less than 1, not "):
        part(value, "left")


def test_a_part_is_a_float_between_0_and_1():
    assert [part(value, "left") for value in (0.001, 0.5, 0.999)] == [0.001, 0.5, 0.999]


def test_a_database_is_named_by_its_alias_or_is_the_default_one():
    named = [database(value, "atomic") for value in (True, "other", False, None)]
    assert named == ["default", "other", None, None]


def test_an_unknown_alias_is_named_with_those_that_are_known(place):
    with pytest.raises(ImproperlyConfigured, match=r"no alias 'elsewhere'.*'default'"):
        distributed_lock("lottery", using="elsewhere").acquire()


@both_ways
async def test_seconds_and_timedeltas_say_the_same(way, place):
    for ttl in (30, 30.0, timedelta(seconds=30)):
        async with way.entered(distributed_lock("lottery", ttl=ttl)) as lease:
            assert lease.ttl == 30.0
            assert 20 < lease.expires_in < 30
    in_no_time = distributed_lock("lottery", wait=timedelta(0), max_hold=timedelta(minutes=1))
    with held_by_other("lottery"):
        assert not await way.acquire(in_no_time)


@both_ways
async def test_none_means_the_setting_and_an_argument_wins_over_it(way, place):
    place.configure(TTL=30, MAX_HOLD=20, WAIT=0)
    async with way.entered(distributed_lock("lottery", ttl=None, max_hold=None)) as lease:
        assert lease.ttl == 30.0
        assert lease.expires_in < 20
    with held_by_other("lottery"):
        assert not await way.acquire(distributed_lock("lottery", wait=None))
        with pytest.raises(LockTimeout):
            async with way.entered(distributed_lock("lottery")):
                pytest.fail("the block ran")
    place.configure(WAIT=math.inf)
    async with way.entered(distributed_lock("lottery", ttl=40)) as lease:
        assert lease.ttl == 40.0
    with held_by_other("lottery"):
        assert not await way.acquire(distributed_lock("lottery", wait=0))


def test_what_an_acquire_is_made_of_is_made_once(place):
    """Anew for each acquire, it would cost about as much as the acquire itself."""
    given = {"ttl": 30, "wait": timedelta(seconds=5)}
    options = lock_options(**given)
    assert lock_options(**given) is options
    backend = backends["default"]
    assert backend.terms(options) is backend.terms(options)
    assert lock_keys(backend.prefix, "lottery") is lock_keys(backend.prefix, "lottery")
    assert current_owner() is current_owner()
