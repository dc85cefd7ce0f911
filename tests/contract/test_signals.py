"""Signals tell what happened to locks, after the fact, and no receiver can do harm."""

import asyncio
import signal as os_signals
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest

from django_redislock import (
    Lease,
    Limit,
    LockLost,
    LockTimeout,
    LockUnavailable,
    distributed_lock,
    held,
    signals,
)
from django_redislock.backends.registry import backends
from django_redislock.deferred_work import catch_up, later
from django_redislock.held import HeldLock
from django_redislock.lock import Lock
from django_redislock.testing import OTHER
from tests.support.faults import slack
from tests.support.matrix import MEMORY, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

pytestmark = places(KIND, MEMORY)  # They are sent by the same code everywhere.


@contextmanager
def connected(receiver, *to):
    """Let these signals have a receiver during a block."""
    for signal in to:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal in to:
            signal.disconnect(receiver)


@contextmanager
def received(signal):
    """Collect what a signal says during a block; beside a receiver that always fails."""
    got = []

    def fail(**kwargs):
        raise ZeroDivisionError("of a receiver")

    def collect(**kwargs):
        assert kwargs.pop("signal") is signal
        got.append(kwargs)

    with connected(fail, signal), connected(collect, signal):
        yield got


@both_ways
async def test_lock_acquired(way, place):
    lock = distributed_lock("lottery", reentrant=True)
    with received(signals.lock_acquired) as got, received(signals.lock_released) as released:
        async with way.entered(lock) as lease:
            assert [(one["sender"], one["lease"]) for one in got] == [(Lock, lease)]
            assert 0 <= got[0]["waited"] < 5
            async with way.entered(lock):
                pass
            assert (len(got), released) == (1, [])  # Nesting tells of one lease only.
    assert (len(got), len(released)) == (1, 1)


@pytest.mark.waits
@both_ways
async def test_lock_acquired_tells_how_long_it_was_waited_for(way, place):
    with received(signals.lock_acquired) as got, held_by_other("lottery", ttl=5):
        async with way.entered(distributed_lock("lottery", wait=HUNG)):
            assert 0.2 < got[-1]["waited"] < 5 + 2 + slack()  # It looks every 2 s.


@both_ways
@pytest.mark.parametrize("success", [True, False])
async def test_lock_released(way, place, success):
    lock = distributed_lock("lottery")
    with received(signals.lock_released) as got:
        assert await way.acquire(lock)
        lease = lock.lease
        await way.sleep(0.05)
        await way.release(lock, success)
        with pytest.raises(ZeroDivisionError):
            async with way.entered(lock) as failed:
                raise ZeroDivisionError
    assert [(one["sender"], one["lease"], one["success"]) for one in got] == [
        (Lock, lease, success),
        (Lock, failed, False),
    ]
    assert 0.05 <= got[0]["held_for"] < 5


@both_ways
@pytest.mark.no_permit("the bystander may be named")
async def test_lock_timed_out(way, place):
    with received(signals.lock_timed_out) as got, held_by_other("lottery"):
        assert not await way.acquire(distributed_lock("lottery", wait=0))
        with pytest.raises(LockTimeout):
            async with way.entered(distributed_lock("lottery", wait=0.1)):
                pytest.fail("the block ran")
    assert [one["waited"] >= wait for one, wait in zip(got, (0, 0.1), strict=True)] == [True, True]
    for one in got:
        del one["waited"]
        assert one == {
            "sender": Lock,
            "name": "lottery",
            "template": "lottery",
            "using": "default",
            "holder": "another-host:1 simulated",
            "blocked_by": OTHER,
        }


@both_ways
@pytest.mark.no_permit("a permit whose key is not ours leaves the others to be had")
async def test_lock_unavailable(way, locks, proxy):
    locks.on(proxy, WAIT=0)
    with received(signals.lock_unavailable) as got:
        locks.redis.lpush(f"{locks.prefix}:{{tombola}}:lock", "of another type")
        with pytest.raises(LockUnavailable, match="WRONGTYPE"):
            await way.acquire(distributed_lock("tombola"))
        proxy.refuse()
        with pytest.raises(LockUnavailable):
            await way.acquire(distributed_lock("raffle"))
        proxy.heal()
        lock = distributed_lock("raffle", ttl=3)
        assert await way.acquire(lock)
        lease = lock.lease
        proxy.blackhole()
        with pytest.raises(LockUnavailable) as raised:
            await way.release(lock)
        proxy.heal()
    assert raised.value.reason == "timeout"
    assert [one.pop("reason") for one in got] == ["refused", "connection", "timeout"]
    assert all(one.pop("waited") >= least for one, least in zip(got, (0, 0, 0.5), strict=True))
    assert got == [
        {"sender": Lock, "name": name, "template": name, "using": "default", "lease": of}
        for name, of in (("tombola", None), ("raffle", None), ("raffle", lease))
    ]


@both_ways
async def test_each_signal_says_how_the_name_was_written(way, place):
    written = []

    def note(lease, template, **kwargs):
        assert lease.template == template
        written.append((lease.name, template))

    one = distributed_lock("report:{report}")(way.function(lambda report: None))
    two = distributed_lock("b:{report}", "a:{report}")(way.function(lambda report: None))
    limits = [Limit("export:{report}", 2), Limit("export", 3)]
    limited = distributed_lock(limits=limits)(way.function(lambda report: None))
    for signal in (signals.lock_acquired, signals.lock_released):
        with connected(note, signal):
            for function in (one, two, limited):
                await way.call(function, 42)
            async with way.entered(distributed_lock("report:43")):
                pass
        assert written == [
            ("report:42", "report:{report}"),
            ("a:42", "a:{report}"),
            ("b:42", "b:{report}"),
            ("export:42", "export:{report}"),
            ("export", "export"),
            ("report:43", "report:43"),
        ]
        written.clear()
    with received(signals.lock_acquired) as acquired, received(signals.lock_timed_out) as got:
        for busy, names in (("report:42", ["report:{report}"]), ("b:42", ["b:{report}", "a"])):
            function = distributed_lock(*names, wait=0)(way.function(lambda report: None))
            with held_by_other(busy), pytest.raises(LockTimeout):
                await way.call(function, 42)
    assert acquired == []
    assert [(one["name"], one["template"]) for one in got] == [
        ("report:42", "report:{report}"),
        ("b:42", "b:{report}"),
    ]


@both_ways
async def test_lock_lost_once_and_not_released(way, place):
    lock = distributed_lock("lottery")
    with received(signals.lock_lost) as got, received(signals.lock_released) as released:
        assert await way.acquire(lock)
        lease = lock.lease
        place.lose_data()
        for _ in range(2):
            with pytest.raises(LockLost):
                await way.renew(lease)
        await way.until(lambda: got)
        with pytest.raises(LockLost):
            await way.release(lock)
    assert 0 <= got[0].pop("held_for") < 30
    assert got == [{"sender": Lease, "lease": lease, "reason": "expired", "template": "lottery"}]
    assert released == []


@both_ways
@pytest.mark.no_permit("the name has the number of the permit")
async def test_lock_force_released(way, place):
    lock = distributed_lock("lottery")
    assert await way.acquire(lock)
    lease = lock.lease
    with received(signals.lock_force_released) as got:
        assert not held.force_release("lottery", "0" * 16, by="ann")
        assert held.force_release("lottery", lease.id, by="ann")
    assert got == [
        {
            "sender": HeldLock,
            "name": "lottery",
            "template": "lottery",
            "using": "default",
            "id": lease.id,
            "holder": str(lease.owner),
            "by": "ann",
        }
    ]


class TooLong(Exception):
    """As Celery raises in a task at its soft time limit."""


def too_long(number, frame):
    raise TooLong


def interrupted(*_, **news):
    os_signals.raise_signal(os_signals.SIGALRM)


async def ainterrupted(**news):
    interrupted()


def block():
    with distributed_lock("lottery"):
        pytest.fail("the block has begun")


def block_in_a_loop():
    async def ablock():
        async with distributed_lock("lottery"):
            pytest.fail("the block has begun")

    asyncio.run(ablock())


def work_for_later():
    later(interrupted)
    catch_up()


def callback_of_a_loss():
    lock = distributed_lock("lost", ttl=1)
    assert lock.acquire()
    backends["default"].lost(lock.lease, "expired")
    lock.lease.on_lost(interrupted)


@contextmanager
def connected_prompt(receiver, signal):
    signal.connect_prompt(receiver)
    try:
        yield
    finally:
        signal.disconnect_prompt(receiver)


@pytest.mark.parametrize(
    ("listening", "receiver", "use"),
    [
        (connected, interrupted, block),
        (connected_prompt, interrupted, block),
        (connected, ainterrupted, block_in_a_loop),
        (nullcontext, None, work_for_later),
        (nullcontext, None, callback_of_a_loss),
    ],
    ids=["receiver", "own receiver", "coroutine", "later", "callback"],
)
def test_what_a_signal_handler_raises_in_a_receiver_is_not_taken_for_its_failure(
    listening, receiver, use, place
):
    """So a task hears of its soft time limit, and not only of its hard one."""
    to = [receiver, signals.lock_acquired] if receiver else []
    before = os_signals.signal(os_signals.SIGALRM, too_long)
    try:
        with listening(*to), pytest.raises(TooLong):
            use()
    finally:
        os_signals.signal(os_signals.SIGALRM, before)
    assert not distributed_lock("lottery").locked()


@pytest.mark.waits
@both_ways
async def test_a_slow_receiver_of_a_loss_delays_no_renewal(way, place):
    def slow(**kwargs):
        entered.append(kwargs)
        go_on.wait(HUNG)

    entered = []
    go_on = threading.Event()
    with connected(slow, signals.lock_lost):
        lost = distributed_lock("tombola", ttl=1.5)
        assert await way.acquire(lost)
        place.lose_data()
        await way.until(lambda: entered)
        try:
            async with way.entered(distributed_lock("lottery", ttl=6)) as lease:
                await way.until(lambda: lease.renewals)
                assert lease.held
        finally:
            go_on.set()


@both_ways
async def test_a_receiver_may_be_a_coroutine_function(way, place):
    got = []

    async def receive(signal, **kwargs):
        got.append(names[signal])

    names = {
        signals.lock_acquired: "acquired",
        signals.lock_released: "released",
        signals.lock_timed_out: "timed out",
    }
    with connected(receive, *names):
        async with way.entered(distributed_lock("lottery")) as lease:
            assert lease.held
        with held_by_other("lottery"):
            assert not await way.acquire(distributed_lock("lottery", wait=0))
    assert got == ["acquired", "released", "timed out"]
    assert held.get("lottery") is None


@pytest.mark.parametrize("what", ["lock_acquired", "lock_released"])
def test_a_receiver_keeps_no_connection_from_others(what, locks):
    # As few as each of the two threads has one of: there is no second one for a receiver.
    locks.on(locks.server, OPTIONS={"max_connections": 4})
    at_once, told = threading.Barrier(2, timeout=HUNG), []

    def take_another(lease, **kwargs):
        if lease.name.startswith("first"):
            at_once.wait()
            with distributed_lock(f"of the receiver of {lease.name}"):
                told.append(lease.name)

    def work(name):
        with distributed_lock(name):
            pass

    with connected(take_another, getattr(signals, what)):
        for one in [in_thread(partial(work, f"first-{number}")) for number in (1, 2)]:
            one.result(HUNG)
    assert sorted(told) == ["first-1", "first-2"]


# --- receivers that never block -------------------------------------------------------------------


@pytest.mark.parametrize("is_alone", [True, False])
async def test_an_event_loop_calls_receivers_that_never_block(locks, is_alone):
    threads = []

    def prompt(**kwargs):
        threads.append(threading.get_ident())
        raise ZeroDivisionError("of a receiver")

    beside = nullcontext([]) if is_alone else received(signals.lock_acquired)
    with connected_prompt(prompt, signals.lock_acquired), beside as got:
        async with distributed_lock("lottery"):
            pass
    # Django calls all receivers in a thread if it must call one there.
    assert (threads == [threading.get_ident()]) is is_alone
    assert len(threads) == 1
    assert is_alone or [one["lease"].name for one in got] == ["lottery"]
    async with distributed_lock("lottery"):
        assert len(threads) == 1


@both_ways
async def test_a_program_may_replace_the_list_of_receivers(way, locks, monkeypatch):
    told = []

    def prompt(**kwargs):
        told.append("prompt")

    def other(**kwargs):
        told.append("other")

    signal, lock = signals.lock_acquired, distributed_lock("lottery")

    async def told_now():
        signal.sender_receivers_cache.clear()  # As all do who replace the list.
        told.clear()
        async with way.entered(lock):
            return [*told]

    with received(signal), connected(other, signal):
        (*_, of_other) = signal.receivers
    with connected_prompt(prompt, signal):
        before = signal.receivers
        for receivers, expected in (
            ([], []),
            ([of_other], ["other"]),
            ([*before, of_other], ["prompt", "other"]),
            ([*before], ["prompt"]),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(signal, "receivers", receivers)
                assert await told_now() == expected
    assert await told_now() == []
