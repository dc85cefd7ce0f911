"""The errors: one tree, sentences that name the lock, data that travels, and which one comes."""

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
    Skipped,
    StaleFence,
    distributed_lock,
    held,
    single_instance,
)
from django_redislock.rules.keys import lock_keys
from tests.support.matrix import everywhere, needs_scripts, on_servers
from tests.support.stored import NAME, NEWER_HOLDER, NEWER_ID, newer_lease
from tests.support.waiting import HUNG
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
def test_every_error_names_the_lock_and_survives_the_way_to_another_process(error):
    assert type(error).__bases__[0] is LockError  # No error is a kind of another.
    assert error.name in str(error)
    assert str(error).endswith(".")
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


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            LockTimeout("lottery", "web1:7 draw", 2.34),
            "is busy: held by web1:7 draw; its lease ends in 2.3 s unless it is renewed.",
        ),
        (
            LockTimeout("lottery", "web1:7 draw", 2.34, cooling=True),
            "is busy: it cools down after web1:7 draw, and is free in 2.3 s.",
        ),
        (LockTimeout("lottery", "web1:7 draw", math.inf), "is busy: held by web1:7 draw."),
        (LockTimeout("lottery"), "is busy: held by another owner."),
        (LockUnavailable("lottery", "the disk is full"), "is unavailable: the disk is full."),
    ],
)
def test_errors_read_as_sentences(error, sentence):
    assert str(error) == f"Lock 'lottery' {sentence}"


def test_others_begin_with_the_lease_or_the_fence():
    assert str(LockLost("lottery", "taken")) == (
        "The lease of lock 'lottery' was lost: another owner holds the lock now."
    )
    assert str(StaleFence("lottery", 7, 9)) == (
        "Fence 7 of lock 'lottery' is stale: another lease has claimed fence 9 in the database."
        " Nothing was written."
    )


# --- what the server refuses is "unavailable": at once, with its cause, never "busy" -------------


async def refused(way, **options):
    """How an acquire fails that would wait for long; with its cause, if a server said no."""
    with pytest.raises(LockError) as raised:
        async with way.entered(distributed_lock("lottery", **options)):
            pytest.fail("the block ran")
    assert "'lottery'" in str(raised.value)
    return raised.value


@pytest.mark.proves("P4", "R13")
@everywhere
@on_servers
@both_ways
@pytest.mark.no_permit("the other permit may be had later")
async def test_a_key_that_is_not_ours_is_unavailable_at_once_unless_it_will_end(way, place):
    server = place.locks.redis
    key = lock_keys(place.locks.prefix, "lottery").lock
    server.lpush(key, "not ours")
    error = await refused(way, wait=60)
    assert isinstance(error, LockUnavailable)
    assert error.__cause__ is not None
    assert "WRONGTYPE" in str(error)
    assert server.lrange(key, 0, -1) == [b"not ours"]
    server.set(key, "not ours")
    error = await refused(way, wait=60)
    assert isinstance(error, LockUnavailable)
    assert "no expiry" in str(error)
    assert server.get(key) == b"not ours"
    server.pexpire(key, 60_000)
    error = await refused(way, wait=0)
    assert isinstance(error, LockTimeout)
    assert "'lottery' is busy: held by unknown" in str(error)


@pytest.mark.proves("R13")
@everywhere
@on_servers
@pytest.mark.parametrize(("user", "says"), [("unknown", ""), ("reader", "NOPERM")])
@both_ways
async def test_a_wrong_password_and_missing_rights_are_unavailable_at_once(way, place, user, says):
    rules = ("on", ">hunter2", "~*", "&*", "-@all", "+@connection")
    place.locks.redis.execute_command("ACL", "SETUSER", "reader", *rules)
    place.configure(OPTIONS={"username": user, "password": "hunter2"})
    error = await refused(way, wait=60)
    assert isinstance(error, LockUnavailable)
    assert error.__cause__ is not None
    assert says in str(error)
    assert "hunter2" not in str(error)


@pytest.mark.proves("P4", "R13")
@both_ways
async def test_no_server_at_all_is_unavailable_not_busy(way):
    # The settings of the suite name an address where nothing listens.
    error = await refused(way, wait=0)
    assert isinstance(error, LockUnavailable)
    assert error.__cause__ is not None


# --- what a newer version has written, in a format that this one cannot read, is held ------------

SAYS = f"{NEWER_HOLDER}, which runs a newer version of django_redislock (update this one too)"


@pytest.mark.parametrize("wait", [0, 0.2])
def test_a_lease_of_a_newer_version_is_left_alone_and_the_error_says_what_to_do(place, wait):
    place.write(NAME, newer_lease())
    with pytest.raises(LockTimeout) as raised, distributed_lock(NAME, wait=wait):
        pytest.fail("the block ran")
    assert raised.value.holder == SAYS
    assert f"'lottery' is busy: held by {SAYS}; its lease ends in " in str(raised.value)
    assert distributed_lock(NAME).locked()
    assert place.read(NAME) == newer_lease()


def test_a_waiter_has_the_lock_when_it_is_over(place):
    place.write(NAME, newer_lease(), seconds=0.5)
    with distributed_lock(NAME, wait=HUNG) as lease:
        assert lease.held
        assert place.read(NAME) != newer_lease()


@needs_scripts
@pytest.mark.no_permit("a refusal lists the one permit that it looked at")
def test_operators_see_it_as_held_and_only_they_end_it(place):
    @single_instance(NAME)
    def draw() -> str:
        pytest.fail("the body ran")

    place.write(NAME, newer_lease())
    assert draw() == Skipped(skipped="busy", lock=NAME, holder=SAYS)  # From now on it is listed.
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
