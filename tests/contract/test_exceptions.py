"""The errors: one tree, sentences that name the lock, and data that travels."""

import copy
import math
import pickle

import pytest

from django_redislock import (
    InvalidLockName,
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    StaleFence,
    distributed_lock,
)
from django_redislock.rules.keys import lock_keys
from tests.support.matrix import everywhere, on_servers
from tests.support.ways import both_ways

ERRORS = [
    LockTimeout("lottery", "host:1 draw", 2.34),
    LockTimeout("lottery", cooling=True, alias="jobs"),
    LockTimeout("lottery"),
    LockLost("lottery", "forced"),
    LockLost("lottery"),
    LockLost("lottery", over="it was released"),
    LockUnavailable("lottery", "connection refused", "connection"),
    LockUnavailable("lottery"),
    LockMisuse("lottery", "this thread holds it already."),
    StaleFence("lottery", 7, 9),
    InvalidLockName("'lottery\\n'", "it contains control characters"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_every_error_is_a_lock_error_that_names_the_lock(error):
    assert isinstance(error, LockError)
    assert error.name in str(error)
    assert str(error).endswith(".")


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_errors_survive_the_way_to_another_process(error):
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), type(error)(*error.args)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


@pytest.mark.parametrize("kind", [LockTimeout, LockLost, LockUnavailable])
def test_an_error_of_a_newer_version_with_more_data_can_be_read(kind):
    error = kind("lottery")
    error.args += ("something new",)
    assert str(pickle.loads(pickle.dumps(error))) == str(kind(*error.args)) == str(kind("lottery"))


def test_an_invalid_name_is_a_value_error_too():
    assert issubclass(InvalidLockName, ValueError)


def test_no_error_is_a_kind_of_another():
    kinds = {type(error) for error in ERRORS}
    assert len(kinds) == 6
    assert all(kind.__bases__[0] is LockError for kind in kinds)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            LockTimeout("lottery", "web1:7 draw", 2.34),
            (
                "Lock 'lottery' is busy: held by web1:7 draw; its lease ends in 2.3 s unless it is"
                " renewed."
            ),
        ),
        (
            LockTimeout("lottery", "web1:7 draw", 2.34, cooling=True),
            "Lock 'lottery' is busy: it cools down after web1:7 draw, and is free in 2.3 s.",
        ),
        (
            LockTimeout("lottery", "web1:7 draw", math.inf),
            "Lock 'lottery' is busy: held by web1:7 draw.",
        ),
        (LockTimeout("lottery"), "Lock 'lottery' is busy: held by another owner."),
        (
            LockLost("lottery", "taken"),
            "The lease of lock 'lottery' was lost: another owner holds the lock now.",
        ),
        (
            StaleFence("lottery", 7, 9),
            (
                "Fence 7 of lock 'lottery' is stale: another lease has claimed fence 9 in the"
                " database. Nothing was written."
            ),
        ),
        (
            LockUnavailable("lottery", "the disk is full"),
            "Lock 'lottery' is unavailable: the disk is full.",
        ),
    ],
)
def test_errors_read_as_sentences(error, sentence):
    assert str(error) == sentence


# --- what the server refuses is "unavailable": at once, with its cause, never "busy" -------------


@pytest.mark.proves("P4", "R13")
@everywhere
@on_servers
@both_ways
@pytest.mark.no_permit("the other permit may be had later")
async def test_a_key_of_the_wrong_type_is_unavailable_at_once(way, place):
    place.locks.redis.lpush(_lock_key(place), "not ours")
    with pytest.raises(LockUnavailable, match=r"'lottery'.*WRONGTYPE") as raised:
        await way.acquire(distributed_lock("lottery", wait=60))
    assert raised.value.__cause__ is not None
    assert place.locks.redis.lrange(_lock_key(place), 0, -1) == [b"not ours"]


@everywhere
@on_servers
@both_ways
@pytest.mark.no_permit("the other permit may be had later")
async def test_a_key_without_expiry_is_unavailable_at_once(way, place):
    place.locks.redis.set(_lock_key(place), "not ours")
    with pytest.raises(LockUnavailable, match=r"'lottery'.*no expiry"):
        await way.acquire(distributed_lock("lottery", wait=60))
    assert place.locks.redis.get(_lock_key(place)) == b"not ours"


@everywhere
@on_servers
@both_ways
async def test_a_foreign_key_with_expiry_is_busy(way, place):
    place.locks.redis.set(_lock_key(place), "not ours", px=60_000)
    with pytest.raises(LockTimeout, match="'lottery' is busy: held by unknown"):
        async with way.entered(distributed_lock("lottery", wait=0)):
            pytest.fail("the block ran")


@pytest.mark.proves("R13")
@everywhere
@on_servers
@both_ways
async def test_a_wrong_password_is_unavailable_at_once(way, place):
    place.configure(OPTIONS={"username": "unknown", "password": "hunter2"})
    with pytest.raises(LockUnavailable, match="'lottery'") as raised:
        await way.acquire(distributed_lock("lottery", wait=60))
    assert raised.value.__cause__ is not None
    assert "hunter2" not in str(raised.value)


@pytest.mark.proves("R13")
@everywhere
@on_servers
@both_ways
async def test_missing_rights_are_unavailable_at_once(way, place):
    rules = ("on", ">reader", "~*", "&*", "-@all", "+@connection")
    place.locks.redis.execute_command("ACL", "SETUSER", "reader", *rules)
    place.configure(OPTIONS={"username": "reader", "password": "reader"})
    with pytest.raises(LockUnavailable, match=r"'lottery'.*NOPERM") as raised:
        await way.acquire(distributed_lock("lottery", wait=60))
    assert raised.value.__cause__ is not None


@pytest.mark.proves("P4", "R13")
@both_ways
async def test_no_server_at_all_is_unavailable_not_busy(way):
    # The settings of the suite name an address where nothing listens.
    with pytest.raises(LockUnavailable, match="'lottery'") as raised:
        await way.acquire(distributed_lock("lottery", wait=0))
    assert raised.value.__cause__ is not None


def _lock_key(place):
    return lock_keys(place.locks.prefix, "lottery").lock
