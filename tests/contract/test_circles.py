"""A wait that can never end says so: the youngest wait of a circle, after a second."""

import asyncio
import re
import threading
import time

import pytest

from django_redislock import Limit, LockMisuse, LockTimeout, distributed_lock
from django_redislock.rules import scripts
from tests.support.circles import Ring, outcomes_of, waiters_of
from tests.support.matrix import in_turn
from tests.support.others import add_rival, queued
from tests.support.processes import hear, say
from tests.support.stored import is_left_clean, keys_of
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import Blocking, Sync, both_ways

pytestmark = [
    pytest.mark.waits,
    pytest.mark.no_permit("a bystander that waits for nobody is no part of a circle"),
]


@in_turn
@both_ways
async def test_of_two_who_wait_for_each_other_the_younger_is_told(way, place):
    place.configure(TTL=30, WAIT=HUNG)
    begun = time.monotonic()
    elder, younger = await outcomes_of(Ring(way, "a", "b").start())
    assert time.monotonic() - begun < HUNG / 2
    assert elder == "went on"
    who = "thread" if way.name == "sync" else "asyncio task"
    assert re.fullmatch(
        r"Lock 'a': this wait would never end: 'a' is held by \S+:\d+ .*, which waits for 'b';"
        rf" 'b' is held by this {who}, which waits for 'a'\. Take them together, by"
        r" distributed_lock\('a', 'b'\), or in one order everywhere\.",
        younger,
    )
    left = place.keys()
    assert not [key for key in left if b"waits" in key]


@both_ways
async def test_three_in_a_circle(way, locks):
    locks.configure(TTL=30, WAIT=HUNG)
    one, two, three = await outcomes_of(Ring(way, "a", "b", "c").start())
    assert (one, two) == ("went on", "went on")
    assert [three.count(f"'{name}' is held by") for name in "abc"] == [1, 1, 1]


@both_ways
async def test_one_who_has_some_of_several_names_and_waits_for_the_rest(way, locks):
    locks.configure(TTL=30, WAIT=HUNG)
    entered = set()

    async def takes_two():
        await way.until(lambda: "c" in entered)
        async with way.entered(distributed_lock("b", "c")):
            return "went on"

    async def takes_the_first():
        async with way.entered(distributed_lock("c")):
            entered.add("c")
            await way.until(lambda: waiters_of("c"))
            async with way.entered(distributed_lock("b")):
                return "went on"

    runs = [way.start(takes_two), way.start(takes_the_first)]
    two, first = await outcomes_of(runs)
    assert two == "went on"
    assert "'b' is held by" in first
    assert first.endswith(
        "Take them together, by distributed_lock('b', 'c'), or in one order everywhere."
    )


@both_ways
async def test_waits_that_converge_are_left_alone(way, locks):
    locks.configure(TTL=30, WAIT=HUNG)
    entered = set()

    async def converge(own):
        async with way.entered(distributed_lock(own)):
            entered.add(own)
            await way.until(lambda: "goal" in entered)
            async with way.entered(distributed_lock("goal")):
                return "went on"

    async with way.entered(distributed_lock("goal")):
        runs = [way.start(lambda own=own: converge(own)) for own in ("a", "b")]
        await way.until(lambda: entered >= {"a", "b"})
        entered.add("goal")
        await way.until(lambda: locks.redis.exists(keys_of(locks, "a").waits))
        await way.until(lambda: locks.redis.exists(keys_of(locks, "b").waits))
        await way.sleep(2.5)  # Each looks twice.
    assert await outcomes_of(runs) == ["went on", "went on"]
    assert not locks.redis.exists(keys_of(locks, "a").waits, keys_of(locks, "b").waits)


@pytest.mark.parametrize("both_wait", [True, False])
@both_ways
async def test_a_wait_for_a_permit_never_ends_only_if_all_who_have_one_wait(way, locks, both_wait):
    locks.configure(TTL=30, WAIT=HUNG)
    holding = set()
    told = threading.Event()

    async def computes(who):
        async with way.entered(distributed_lock("gpu", limit=2)):
            holding.add(who)
            await way.until(lambda: len(holding) == 3)
            if who == "second" and not both_wait:
                await way.until(told.is_set)
                return "went on"
            async with way.entered(distributed_lock("a")):
                return "went on"

    async def plans():
        async with way.entered(distributed_lock("a")):
            holding.add("plans")
            await way.until(lambda: waiters_of("a") == 1 + both_wait)
            async with way.entered(distributed_lock("gpu", limit=2)):
                return "went on"

    runs = [way.start(lambda who=who: computes(who)) for who in ("first", "second")]
    runs.append(way.start(plans))
    if not both_wait:
        await way.until(lambda: locks.redis.exists(keys_of(locks, "a").waits))
        await way.sleep(2.5)
        told.set()
    first, second, third = await outcomes_of(runs)
    assert (first, second) == ("went on", "went on")
    if both_wait:
        assert "permit 1 of 'gpu' is held by" in third
        assert "permit 2 of 'gpu' is held by" in third
        assert third.endswith(
            "Take them together, by distributed_lock(limits=[Limit('a', 1), Limit('gpu', 2)]),"
            " or in one order everywhere."
        )
    else:
        assert third == "went on"
    assert notes(locks) == []


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (
            lambda: distributed_lock(limits=[Limit("a", 1)]),
            lambda: distributed_lock(limits=[Limit("b", 1)]),
            ["by distributed_lock(limits=[Limit('a', 1), Limit('b', 1)]), or in one order every"],
        ),
        (
            lambda: distributed_lock("gpu", limit=2),
            lambda: distributed_lock("gpu", limit=2),
            ["Wait for no second permit of a lock while you hold one."],
        ),
        (
            lambda: distributed_lock("a"),
            lambda: distributed_lock("a", using="rival"),
            [
                "'a' of 'rival' is held by",
                "'a' of 'default' is held by",
                "Take these locks in one order everywhere.",
            ],
        ),
    ],
    ids=["limits", "permits of one lock", "aliases"],
)
def test_a_circle_of_what_two_threads_take_in_two_orders(one, other, says, locks, settings):
    locks.configure(TTL=30, WAIT=HUNG)
    add_rival(settings, locks, KEY_PREFIX=f"{locks.prefix}-other", TTL=30, WAIT=HUNG)
    way = Sync()
    starts = threading.Barrier(2, timeout=HUNG)

    async def take(first, second):
        with first():
            starts.wait()
            with second():
                return "went on"

    runs = [way.start(lambda: take(one, other)), way.start(lambda: take(other, one))]
    said = way.run(outcomes_of(runs))
    assert said.count("went on") == 1
    (told,) = (one for one in said if one != "went on")
    assert [part for part in says if part not in told] == []


def cross(first, second, wait):
    """In a child: hold the first lock, and when told so wait for the second."""
    with distributed_lock(first, ttl=20):
        say("holds")
        hear()
        try:
            with distributed_lock(second, wait=wait):
                say("went on")
        except (LockMisuse, LockTimeout) as error:
            say(f"{type(error).__name__}: {error}")


def test_two_processes(locks, spawn):
    one, other = spawn(cross, "a", "b", HUNG), spawn(cross, "b", "a", HUNG)
    assert (one.read(), other.read()) == ("holds", "holds")
    one.send("go")
    wait_until(lambda: queued(locks, "b"))
    other.send("go")
    assert other.read().startswith("LockMisuse: Lock 'a': this wait would never end")
    assert one.read() == "went on"


def test_a_killed_holder_is_in_no_circle(locks, spawn):
    one = spawn(cross, "a", "b", HUNG)
    assert one.read() == "holds"
    with distributed_lock("b", ttl=60):
        one.send("go")
        wait_until(lambda: locks.redis.exists(keys_of(locks, "a").waits))
        one.kill()
        # Its lease lasts 20 s, and for some seconds it seems to stand in the queue.
        with pytest.raises(LockTimeout), distributed_lock("a", wait=4):
            pass


def test_a_wait_that_ends_when_the_circle_is_told(locks, spawn):
    for wait in (1.0, 1.05, 1.1):
        one, other = spawn(cross, "a", "b", wait), spawn(cross, "b", "a", wait)
        assert (one.read(), other.read()) == ("holds", "holds")
        one.send("go")
        other.send("go")
        said = {child.read().partition(":")[0] for child in (one, other)}
        assert said <= {"LockMisuse", "LockTimeout", "went on"}
        assert said & {"LockMisuse", "LockTimeout"}
        for child in (one, other):
            assert child.wait() == 0
        assert not locks.redis.exists(*(keys_of(locks, name).queue for name in "ab"))


@both_ways
async def test_a_waiter_that_holds_nothing_asks_nothing_more(way, locks, proxy):
    locks.on(proxy, TTL=30, WAIT=HUNG)

    async def waits():
        async with way.entered(distributed_lock("a")):
            return "went on"

    async with way.entered(distributed_lock("a")):
        run = way.start(waits)
        await way.until(lambda: queued(locks, "a"))
        before = len(proxy.log)
        until = proxy.log[-1].time + 1.9  # It looks by itself after two seconds.
        await way.sleep(1.5)
        asked = {one.args[0].decode() for one in proxy.log[before:] if one.time < until}
    assert await outcomes_of([run]) == ["went on"]
    assert not asked & {
        one.sha for one in (scripts.ACQUIRE, scripts.NOTE_WAIT, scripts.FOLLOW_WAIT)
    }


def notes(locks):
    return [key for key in locks.keys() if key.endswith(b":waits")]  # noqa: SIM118


@both_ways
async def test_a_wait_that_has_run_out_is_noted_no_more(way, locks):
    locks.configure(TTL=30)
    goal = distributed_lock("goal")
    assert Blocking().begin(goal).result(HUNG)

    async def waits():
        async with way.entered(distributed_lock("a")):
            try:
                return await way.acquire(distributed_lock("goal", wait=2.5))
            finally:
                assert notes(locks) == []

    run = way.start(waits)
    await way.until(lambda: notes(locks))
    assert await run.result() is False
    goal.release()


async def test_a_cancelled_wait_is_noted_no_more(locks):
    locks.configure(TTL=30, WAIT=HUNG)

    async def waits():
        async with distributed_lock("a"):
            try:
                await distributed_lock("goal").aacquire()
            finally:
                assert notes(locks) == []

    async with distributed_lock("goal"):
        task = asyncio.create_task(waits())
        await await_until(lambda: notes(locks))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert is_left_clean(locks, "goal")
