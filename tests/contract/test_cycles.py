"""No way of the package leaves a reference cycle: what is dropped goes at once.

A cycle with one frame in it keeps the frames of all callers, with all that their variables refer
to, until the garbage collector comes. A lease in it stays held and is renewed until then.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager, suppress
from types import CoroutineType, FrameType, GeneratorType, TracebackType

import pytest
from django.urls import reverse

from django_redislock import (
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    distributed_lock,
    held,
    leadership,
    signals,
    single_instance,
    single_instance_task,
    take_up,
)
from tests.support.celery_app import EAGER, celery_app
from tests.support.interrupts import alarm
from tests.support.matrix import MEMORY, QUORUM, UNSCRIPTED, everywhere, needs_scripts, places
from tests.support.others import held_by_other, waiters
from tests.support.servers import KIND
from tests.support.stored import keys_of
from tests.support.ways import WAYS

# What a list of locks is made of. Django's change list leaves a cycle with it, whatever it lists.
ROWS = ("django_redislock.admin.", "django_redislock.held_lock", "django_redislock.rules.stored")


@contextmanager
def no_cycle(but=()):
    """Without a garbage collection, nothing of the block stays behind.

    Args:
        but: Modules of the package whose objects do not count.
    """
    gc.collect()
    # A backend of an earlier test may go now, as its last thread ends.
    before = set(map(id, gc.get_objects()))
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [
            described(one)
            for one in gc.garbage
            if id(one) not in before and not type(one).__module__.startswith(but or "-")
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert sorted(filter(None, kept)) == []


def leave_no_cycle(work, but=()):
    """What is made the first time stays."""
    work()
    with no_cycle(but):
        work()


def described(one):
    """What an object is that only the collector has found; "" if it is none of ours.

    Results of Celery, clients of redis-py and transports of asyncio leave cycles of their own. But
    they must not refer to any frame of ours, or to an event loop.
    """
    code = None
    match one:
        case FrameType():
            code = one.f_code
        case TracebackType():
            code = one.tb_frame.f_code
        case GeneratorType():
            code = one.gi_code
        case CoroutineType():
            code = one.cr_code
        case BaseException() | asyncio.AbstractEventLoop():
            return repr(one)
    if code is not None:
        is_ours = "/django_redislock/" in code.co_filename or code.co_filename == __file__
        return f"{type(one).__name__} of {code.co_qualname}" if is_ours else ""
    return repr(type(one)) if type(one).__module__.startswith("django_redislock") else ""


by_each_way = pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
in_two_places = places(KIND, MEMORY)


# --- locks ----------------------------------------------------------------------------------------


async def taken(way, place):
    async with way.entered(distributed_lock("lottery", reentrant=True)):
        async with way.entered(distributed_lock("lottery", reentrant=True)) as lease:
            await way.renew(lease)
        assert await way.locked(distributed_lock("lottery"))


async def refused(way, place):
    for wait in (0, 0.1):
        lock = distributed_lock("lottery", wait=wait)
        with held_by_other("lottery"):
            assert not await way.acquire(lock)
            with suppress(LockTimeout):
                async with way.entered(lock):
                    pytest.fail("the block ran")


async def waited(way, place):
    lock = distributed_lock("lottery", wait=60)

    async def wait():
        async with way.entered(lock):
            pass

    async with way.entered(distributed_lock("lottery")):
        waiter = way.start(wait)
        await way.until(lambda: awaits("lottery", place))
    await waiter.result()


async def expired_holder(way, place):
    with held_by_other("lottery", ttl=1):
        async with way.entered(distributed_lock("lottery", wait=60)):
            pass


async def misused(way, place):
    lock = distributed_lock("lottery")
    async with way.entered(lock):
        with suppress(LockMisuse):
            await way.acquire(lock)
    with suppress(LockMisuse):
        await way.release(lock)


async def lost(way, place):
    with suppress(LockLost):
        async with way.entered(distributed_lock("lottery", renew=False, ttl=1)) as lease:
            lease.on_lost(note)
            await way.until(lambda: lease.lost_reason)
            with suppress(LockLost):
                await way.renew(lease)
            with suppress(LockLost):
                await way.ensure_held(lease)


async def failed(way, place):
    with suppress(ZeroDivisionError):
        async with way.entered(distributed_lock("lottery")):
            raise ZeroDivisionError


async def several(way, place):
    lock = distributed_lock("a", "b", wait=0.1)
    async with way.entered(lock):
        pass
    with held_by_other("b"):
        assert not await way.acquire(lock)

    async def wait():
        async with way.entered(distributed_lock("a", "b", wait=60)):
            pass

    async with way.entered(distributed_lock("b")):
        waiter = way.start(wait)
        await way.until(lambda: awaits("b", place))
        with suppress(LockMisuse):
            await way.acquire(lock)
    await waiter.result()


async def renewed(way, place):
    async with way.entered(distributed_lock("lottery", ttl=1)) as lease:
        await way.until(lambda: lease.renewals)


WAYS_OF_LOCKS = [taken, refused, waited, expired_holder, misused, lost, failed, several, renewed]


def awaits(name, place):
    """Whether somebody waits for the lock; nobody knows where waiters merely ask again."""
    return place.name in {UNSCRIPTED, QUORUM} or waiters(name) == 1


def note(lease):
    """A callback."""


@everywhere
@by_each_way
def test_no_way_of_a_lock_leaves_a_cycle(way, place):
    def work():
        for each in WAYS_OF_LOCKS:
            way.run(each(way, place))

    leave_no_cycle(work)


# --- servers that do not answer -------------------------------------------------------------------


async def ask_in_vain(way):
    with suppress(LockUnavailable):
        await way.acquire(distributed_lock("lottery", wait=0))
    with suppress(LockUnavailable):
        await way.acquire(distributed_lock("a", "b", wait=0))
    with suppress(LockUnavailable):
        await way.locked(distributed_lock("lottery"))


def at_host(host, fault):
    def trouble(locks, proxy):
        locks.configure(LOCATION=f"redis://{host}:{proxy.port}/0")
        getattr(proxy, fault)()

    return trouble


def of_backend(backend, **options):
    def trouble(locks, proxy):
        proxy.refuse()
        locks.configure(
            BACKEND=f"django_redislock.backends.{backend}",
            LOCATION=[f"redis://127.0.0.1:{proxy.port}"],
            OPTIONS={"socket_timeout": 0.2, **options},
        )

    return trouble


def of_command(action):
    return lambda locks, proxy: proxy.rule("EVALSHA", action, times=None)


def a_refusal(locks, proxy):
    locks.redis.lpush(keys_of(locks, "lottery").lock, "a list")


TROUBLES = {
    "refused": at_host("127.0.0.1", "refuse"),
    "silent": at_host("127.0.0.1", "blackhole"),
    "refused by name": at_host("localhost", "refuse"),
    "silent by name": at_host("localhost", "blackhole"),
    "nodes": of_backend("ClusterBackend"),
    "sentinels": of_backend("SentinelBackend", service_name="m1"),
    "cut before": of_command("cut_before"),
    "cut after": of_command("cut_after"),
    "hanging": of_command("hang_before"),
    "a refusal": a_refusal,
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
@by_each_way
def test_what_is_asked_in_vain_leaves_no_cycle(way, trouble, locks, proxy):
    locks.on(proxy)
    way.run(taken_once(way))  # The server knows the scripts.
    locks.configure(OPTIONS={"socket_timeout": 0.2}, UNAVAILABLE_AFTER=0)
    trouble(locks, proxy)
    leave_no_cycle(lambda: way.run(ask_in_vain(way)))


async def taken_once(way):
    async with way.entered(distributed_lock("lottery")):
        pass


@by_each_way
def test_a_release_that_is_not_answered_leaves_no_cycle(way, locks, proxy):
    locks.on(proxy, OPTIONS={"socket_timeout": 0.2})

    async def release_in_vain():
        lock = distributed_lock("lottery", wait=60, ttl=1, renew=False)
        assert await way.acquire(lock)
        proxy.blackhole()
        try:
            with suppress(LockError):
                await way.release(lock)
        finally:
            proxy.heal()

    leave_no_cycle(lambda: way.run(release_in_vain()))


@by_each_way
def test_a_quorum_without_a_majority_leaves_no_cycle(way, make_quorum):
    quorum = make_quorum()
    quorum.configure(socket_timeout=0.2, UNAVAILABLE_AFTER=0)
    way.run(taken_once(way))
    for proxy in quorum.proxies[:2]:
        proxy.refuse()
    leave_no_cycle(lambda: way.run(ask_in_vain(way)))


# --- what is made of locks ------------------------------------------------------------------------


@needs_scripts
def test_leaders_and_batons_leave_no_cycle(place):
    def work():
        with leadership("lead") as term:
            term.beat()
        with held_by_other("lead"), suppress(LockTimeout), leadership("lead", wait=0):
            pytest.fail("the block ran")
        if place.name == QUORUM:
            return
        with distributed_lock("lottery") as lease:
            baton = lease.hand_over()
        with take_up(baton):
            pass
        with suppress(LockLost), take_up(baton):
            pytest.fail("the block ran")

    leave_no_cycle(work)


@needs_scripts
@by_each_way
def test_jobs_and_permits_leave_no_cycle(way, place):
    def body(number):
        return 1 / number

    job = single_instance("job", wait=0.1, on_conflict="wait")(way.function(body))
    permit = distributed_lock("lottery", limit=1, wait=0.1)

    async def work():
        await way.call(job, 1)
        with suppress(ZeroDivisionError):
            await way.call(job, 0)
        with held_by_other("job"):
            assert not await way.call(job, 1)
        with held_by_other("lottery", limit=1):
            assert not await way.acquire(permit)
        async with way.entered(permit):
            with suppress(LockMisuse):
                await way.acquire(permit)

    leave_no_cycle(lambda: way.run(work()))


@in_two_places
def test_a_task_leaves_no_cycle(place):
    with celery_app(**EAGER):

        @single_instance_task(key="task", name="task")
        def task(number: int) -> float:
            return 1 / number

        def work():
            for run in (task, lambda number: task.delay(number).get()):
                run(1)
                with suppress(ZeroDivisionError):
                    run(0)
                with held_by_other("task"):
                    assert not run(1)

        leave_no_cycle(work)


@in_two_places
def test_receivers_of_signals_leave_no_cycle(place):
    def fail(**news):
        raise ZeroDivisionError

    def work():
        with distributed_lock("lottery"):
            pass

    signals.lock_acquired.connect(fail)
    try:
        leave_no_cycle(work)
    finally:
        signals.lock_acquired.disconnect(fail)


@in_two_places
@pytest.mark.django_db
def test_the_admin_leaves_no_cycle(place, admin_client):
    def work():
        with distributed_lock("lottery"):
            page = admin_client.get(reverse("admin:django_redislock_heldlock_changelist"))
            assert "lottery" in page.rendered_content
            assert held.get("lottery") is not None
            held.records()

    leave_no_cycle(work, but=ROWS)


class TooLong(Exception):
    """What a signal handler raises."""


class TooLongToo(TimeoutError):
    """What a signal handler raises, and a client takes for its own time limit."""


@pytest.mark.parametrize("error", [TooLong, TooLongToo])
def test_an_interrupt_leaves_no_cycle(error, locks, proxy):
    def work():
        with held_by_other("lottery"), alarm(error) as set_alarm, suppress(error):
            set_alarm(0.2)
            distributed_lock("lottery", wait=60).acquire()

    def dial():
        with alarm(error) as set_alarm, suppress(error):
            set_alarm(0.2)
            distributed_lock("tombola", wait=60).acquire()

    leave_no_cycle(work)
    locks.on(proxy)
    proxy.blackhole()
    with no_cycle():
        dial()
