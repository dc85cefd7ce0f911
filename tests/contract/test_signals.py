"""Signals tell what happened to locks, after the fact, and no receiver can do harm."""

import signal as os_signals
import threading
from contextlib import contextmanager, nullcontext

import pytest
from django.dispatch import Signal

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
from tests.support.matrix import needs_scripts
from tests.support.others import held_by_other
from tests.support.waiting import HUNG
from tests.support.ways import both_ways


@contextmanager
def received(signal):
    """Collect what a signal says during a block; beside a receiver that always fails."""
    got = []

    def fail(**kwargs):
        raise ZeroDivisionError("of a receiver")

    def collect(**kwargs):
        assert kwargs.pop("signal") is signal
        got.append(kwargs)

    signal.connect(fail)
    signal.connect(collect)
    try:
        yield got
    finally:
        signal.disconnect(fail)
        signal.disconnect(collect)


@both_ways
async def test_lock_acquired(way, place):
    with received(signals.lock_acquired) as got:
        async with way.entered(distributed_lock("lottery")) as lease:
            assert [(one["sender"], one["lease"]) for one in got] == [(Lock, lease)]
            assert 0 <= got[0]["waited"] < 5


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
    assert [(one["sender"], one["lease"], one["success"]) for one in got] == [
        (Lock, lease, success)
    ]
    assert 0.05 <= got[0]["held_for"] < 5


@both_ways
async def test_lock_released_after_an_exception_is_no_success(way, place):
    with received(signals.lock_released) as got, pytest.raises(ZeroDivisionError):
        async with way.entered(distributed_lock("lottery")):
            raise ZeroDivisionError
    assert [one["success"] for one in got] == [False]


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
async def test_lock_unavailable(way, locks, proxy):
    locks.on(proxy, WAIT=0)
    reasons = ["refused", "connection", "timeout"]
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
    assert [one.pop("reason") for one in got] == reasons
    assert [one.pop("waited") >= least for one, least in zip(got, (0, 0, 0.5), strict=True)] == [
        True
    ] * 3
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
        signal.connect(note)
        try:
            for function in (one, two, limited):
                await way.call(function, 42)
            async with way.entered(distributed_lock("report:43")):
                pass
        finally:
            signal.disconnect(note)
        assert written == [
            ("report:42", "report:{report}"),
            ("a:42", "a:{report}"),
            ("b:42", "b:{report}"),
            ("export:42", "export:{report}"),
            ("export", "export"),
            ("report:43", "report:43"),
        ]
        written.clear()
    with received(signals.lock_timed_out) as got:
        for busy, names in (("report:42", ["report:{report}"]), ("b:42", ["b:{report}", "a"])):
            function = distributed_lock(*names, wait=0)(way.function(lambda report: None))
            with held_by_other(busy), pytest.raises(LockTimeout):
                await way.call(function, 42)
    assert [(one["name"], one["template"]) for one in got] == [
        ("report:42", "report:{report}"),
        ("b:42", "b:{report}"),
    ]


@both_ways
async def test_lock_lost_once(way, place):
    lock = distributed_lock("lottery")
    with received(signals.lock_lost) as got:
        assert await way.acquire(lock)
        lease = lock.lease
        assert lease is not None
        place.lose_data()
        for _ in range(2):
            with pytest.raises(LockLost):
                await way.renew(lease)
        await way.until(lambda: got)
        with pytest.raises(LockLost):
            await way.release(lock)
    assert 0 <= got[0].pop("held_for") < 30
    assert got == [{"sender": Lease, "lease": lease, "reason": "expired", "template": "lottery"}]


@both_ways
async def test_a_lost_lease_is_not_told_as_released(way, place):
    with received(signals.lock_released) as got, pytest.raises(LockLost):
        async with way.entered(distributed_lock("lottery")):
            place.lose_data()
    assert got == []


@needs_scripts
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


@both_ways
async def test_nesting_tells_of_one_lease_only(way, place):
    lock = distributed_lock("lottery", reentrant=True)
    with received(signals.lock_acquired) as acquired, received(signals.lock_released) as released:
        async with way.entered(lock):
            async with way.entered(lock):
                pass
            assert released == []
    assert (len(acquired), len(released)) == (1, 1)


@pytest.mark.parametrize("how", ["receiver", "own receiver", "later", "callback"])
def test_what_a_signal_handler_raises_in_a_receiver_is_not_taken_for_its_failure(how, place):
    """So a task hears of its soft time limit, and not only of its hard one."""

    class TooLong(Exception):
        pass

    def interrupted(**news):
        os_signals.raise_signal(os_signals.SIGALRM)

    def ring(number, frame):
        raise TooLong

    signal, connect, disconnect = signals.lock_acquired, Signal.connect, Signal.disconnect
    if how == "own receiver":
        connect, disconnect = type(signal).connect_prompt, type(signal).disconnect_prompt
    before = os_signals.signal(os_signals.SIGALRM, ring)
    try:
        if how == "later":
            later(interrupted)
            with pytest.raises(TooLong):
                catch_up()
        elif how == "callback":
            lock = distributed_lock("lost", ttl=1)
            assert lock.acquire()
            backends["default"].lost(lock.lease, "expired")
            with pytest.raises(TooLong):
                lock.lease.on_lost(lambda _: interrupted())
        else:
            connect(signal, interrupted)
            with pytest.raises(TooLong), distributed_lock("lottery"):
                pytest.fail("the block has begun")
    finally:
        os_signals.signal(os_signals.SIGALRM, before)
        if how.endswith("receiver"):
            disconnect(signal, interrupted)
    assert not distributed_lock("lottery").locked()


async def test_what_a_signal_handler_raises_in_a_coroutine_that_receives_is_no_failure(place):
    class TooLong(Exception):
        pass

    async def interrupted(**news):
        os_signals.raise_signal(os_signals.SIGALRM)

    def ring(number, frame):
        raise TooLong

    before = os_signals.signal(os_signals.SIGALRM, ring)
    signals.lock_acquired.connect(interrupted)
    try:
        with pytest.raises(TooLong):
            async with distributed_lock("lottery"):
                pytest.fail("the block has begun")
    finally:
        os_signals.signal(os_signals.SIGALRM, before)
        signals.lock_acquired.disconnect(interrupted)
    assert not await distributed_lock("lottery").alocked()


@pytest.mark.waits
@both_ways
async def test_a_slow_receiver_of_a_loss_delays_no_renewal(way, place):
    def slow(**kwargs):
        entered.append(kwargs)
        go_on.wait(HUNG)

    entered = []
    go_on = threading.Event()
    signals.lock_lost.connect(slow)
    try:
        lost = distributed_lock("tombola", ttl=1.5)
        assert await way.acquire(lost)
        place.lose_data()
        await way.until(lambda: entered)
        async with way.entered(distributed_lock("lottery", ttl=6)) as lease:
            await way.until(lambda: lease.renewals)
            assert lease.held
    finally:
        go_on.set()
        signals.lock_lost.disconnect(slow)


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
    for signal in names:
        signal.connect(receive)
    try:
        async with way.entered(distributed_lock("lottery")) as lease:
            assert lease.held
        with held_by_other("lottery"):
            assert not await way.acquire(distributed_lock("lottery", wait=0))
    finally:
        for signal in names:
            signal.disconnect(receive)
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

    signal = getattr(signals, what)
    signal.connect(take_another)
    try:
        threads = [threading.Thread(target=work, args=(f"first-{n}",)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        signal.disconnect(take_another)
    assert sorted(told) == ["first-1", "first-2"]


# --- receivers that never block -------------------------------------------------------------------


@pytest.mark.parametrize("is_alone", [True, False])
async def test_an_event_loop_calls_receivers_that_never_block(locks, is_alone):
    threads = []

    def prompt(**kwargs):
        threads.append(threading.get_ident())
        raise ZeroDivisionError("of a receiver")

    signals.lock_acquired.connect_prompt(prompt)
    try:
        with nullcontext([]) if is_alone else received(signals.lock_acquired) as got:
            async with distributed_lock("lottery"):
                pass
    finally:
        signals.lock_acquired.disconnect_prompt(prompt)
    # Django calls all receivers in a thread if it must call one there.
    assert (threads == [threading.get_ident()]) is is_alone
    assert len(threads) == 1
    assert is_alone or [one["lease"].name for one in got] == ["lottery"]
    async with distributed_lock("lottery"):
        assert len(threads) == 1


@both_ways
async def test_a_program_may_replace_the_list_of_receivers(way, locks):
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

    with received(signal):
        signal.connect(other)
        (*_, of_other) = signal.receivers
    signal.disconnect(other)
    signal.connect_prompt(prompt)
    try:
        before = signal.receivers
        signal.receivers = []
        assert await told_now() == []
        signal.receivers = [of_other]
        assert await told_now() == ["other"]
        signal.receivers = [*before, of_other]
        assert await told_now() == ["prompt", "other"]
        signal.receivers = [*before]
        assert await told_now() == ["prompt"]
    finally:
        signal.receivers = before
        signal.disconnect_prompt(prompt)
    assert await told_now() == []
