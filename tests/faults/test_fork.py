"""A fork leaves the parent's locks, waiters and connections alone, and gives the child its own."""

import asyncio
import json
import os
import signal
import ssl
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest

from django_redislock import LockLost, LockMisuse, LockUnavailable, distributed_lock, held
from django_redislock.backends import watchdog
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts, stored
from tests.support.backends import UNHURRIED
from tests.support.faults import fork_in_c, hands_over, in_fork, runs
from tests.support.others import add_rival, bells, queued, rival
from tests.support.processes import hear, say
from tests.support.stored import NAME, is_left_clean, load_scripts, value_of
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import Blocking, in_thread


@pytest.fixture
def locks(locks, proxy, settings):
    """The default alias goes through a proxy, the rival straight to the server."""
    locks.on(proxy, TTL=30, WAIT=HUNG, OPTIONS=UNHURRIED)
    add_rival(settings, locks)
    load_scripts(locks)
    return locks


def use_a_lock_of_its_own():
    """In a forked child: take a lock, and say whether that works at once."""
    begin = time.monotonic()
    with distributed_lock(f"of {os.getpid()}", wait=0) as lease:
        # On a connection of its parent it would wait for an answer: three quarters of HUNG.
        return lease.held and time.monotonic() - begin < HUNG / 2


def somebody_waits():
    seen = held.get(NAME)
    return seen is not None and seen.waiters == 1


def end(how):
    """End a forked child: with all that Python does at its end, or without."""
    assert use_a_lock_of_its_own()
    if how == "os._exit":
        os._exit(0)
    sys.exit(0)


def has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def status_of(pid):
    """The exit status of a forked child, once it has ended."""
    wait_until(lambda: has_ended(pid))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Waiters


def take_late_bells_too():
    """In a child: do not ask about a bell that was heard late. Nobody else wants the lock."""
    flows.CONFIRM_WITHIN = 20


def take():
    """Wait for the lock and give it back; returns whether it was had."""
    lock = distributed_lock(NAME)
    had = lock.acquire()
    lock.release()
    return had


def wait_in_a_thread_and_fork(how):
    """In a child: fork while a thread waits for the lock."""
    take_late_bells_too()
    waiter = in_thread(take)
    wait_until(somebody_waits)
    if not (pid := os.fork()):
        end(how)
    say(status_of(pid))
    say(waiter.result(HUNG))


async def wait_in_a_task_and_fork(how):
    """In a child: fork while a task of this loop waits for the lock."""

    async def atake():
        lock = distributed_lock(NAME)
        had = await lock.aacquire()
        await lock.arelease()
        return had

    take_late_bells_too()
    waiter = asyncio.create_task(atake())
    await await_until(somebody_waits)
    if not (pid := os.fork()):
        end(how)
    # Polled: a child that closes the loop it was forked in makes ours deaf for other threads.
    await await_until(lambda: has_ended(pid))
    say(status_of(pid))
    say(await waiter)


@pytest.mark.parametrize("how", ["os._exit", "sys.exit"])
@pytest.mark.parametrize("wait", [wait_in_a_thread_and_fork, wait_in_a_task_and_fork])
def test_a_fork_and_the_end_of_the_child_do_not_disturb_a_waiter(wait, how, locks, proxy, spawn):
    holder = rival()
    assert holder.acquire()
    child = spawn(wait, how)
    assert child.read() == 0
    assert queued(locks) == 1
    holder.release()
    assert child.read() is True
    # It has not asked again, but for its own look every 2 s, and nobody else has spoken for it.
    first, *others = runs(proxy, scripts.ACQUIRE)
    asked = [first.time, *(run.time for run in others if run.token == first.token)]
    assert all(later - earlier > 1 for earlier, later in pairwise(asked))
    assert first.token not in {run.token for run in runs(proxy, scripts.LEAVE)}
    assert child.stderr == ""


# Connections and internal locks


def backend():
    return backends["default"]


def fork_beside_busy_threads(times):
    """In a child: fork again and again while threads take, give, lose and dial connections."""
    # If its block has not confirmed a lease that was handed over, the watchdog does. Its first try
    # has a sixth of a second, and a machine may stand still for longer. A loss is logged as ever.
    watchdog.SHORTEST_TRY = HUNG
    pool, stop = backend()._pool, threading.Event()
    done = [0] * 6

    def work(number):
        while not stop.is_set():
            with distributed_lock(f"{NAME}-{number % 3}") as lease:
                lease.ensure_held(verify=True)
            done[number] += 1

    threads = [in_thread(partial(work, number)) for number in range(len(done))]
    own = []
    for _ in range(times):
        pool.close()
        own.append(in_fork(use_a_lock_of_its_own))
    before = list(done)
    wait_until(lambda: all(now > then for now, then in zip(done, before, strict=True)))
    stop.set()
    for thread in threads:
        thread.result(HUNG)
    say(own)


@pytest.mark.proves("P10", "R8")
def test_a_fork_amid_the_use_of_connections_harms_neither_side(locks, spawn):
    # Fewer than threads: some wait for one.
    locks.configure(OPTIONS={**UNHURRIED, "max_connections": 5})
    child = spawn(fork_beside_busy_threads, 20)
    assert child.read() == [True] * 20
    assert child.stderr == ""


@pytest.mark.proves("P10", "R5")
def test_a_child_forked_while_a_thread_was_inside_openssl_waits_no_longer_than_it_may(
    locks, make_server, monkeypatch
):
    """In the child, who wants a mutex of OpenSSL that another thread had waits for ever."""
    server = make_server("redis", tls=True)
    options = {"ssl_ca_certs": server.ca, "socket_timeout": 1}
    locks.configure(LOCATION=server.url, OPTIONS=options, UNAVAILABLE_AFTER=0, WAIT=0)
    with distributed_lock("of the parent"):  # So the child inherits what has dialed before.
        monkeypatch.setattr(ssl, "create_default_context", threading.Event().wait)
        assert in_fork(reasons_not_to_lock) == ["timeout", "timeout"]


def reasons_not_to_lock():
    reasons = []
    for acquire in (take, lambda: asyncio.run(distributed_lock(NAME).aacquire())):
        try:
            acquire()
        except LockUnavailable as error:
            reasons.append(error.reason)
    return reasons


def test_a_fork_amid_the_first_acquire_of_a_thread_does_not_hang_the_child(locks, monkeypatch):
    def encode(owner):
        if threading.current_thread() is not threading.main_thread():
            is_amid.set()
            is_over.wait(HUNG)
        return json.dumps(owner)

    is_amid, is_over = threading.Event(), threading.Event()
    monkeypatch.setattr(stored, "_encoder", SimpleNamespace(encode=encode))
    thread = in_thread(take)
    assert is_amid.wait(HUNG)  # It writes down who it is, which it does once.
    try:
        assert in_fork(use_a_lock_of_its_own)
    finally:
        is_over.set()
        assert thread.result(HUNG)


@pytest.mark.proves("R8")
def test_a_fork_amid_a_write_sends_nothing_to_a_new_connection_of_the_child(locks):
    def write_to_the_number_that_was_looked_up():
        """In a forked child of a signal handler that came in between."""
        with distributed_lock(f"of {os.getpid()}", wait=0) as lease:
            os.write(number, packed("PING"))
            lease.ensure_held(verify=True)  # Its answer would be that of the PING.
            return lease.held

    pool = backend()._pool

    def fork_amid_it(connection):
        nonlocal number
        number = connection._socket.fileno()
        return in_fork(write_to_the_number_that_was_looked_up)

    number = -1
    assert pool.use(fork_amid_it, HUNG)


def test_a_fork_amid_the_end_of_a_dial_does_not_hang_the_child(locks, proxy):
    def have_the_mutex():
        with dial._condition:  # As a thread has that says what came of its dial.
            has_it.set()
            is_over.wait(HUNG)

    has_it, is_over = threading.Event(), threading.Event()
    proxy.blackhole()
    backend().prepare_watchdog()
    dial = backend()._renewing_connection._dial
    assert dial is not None
    thread = in_thread(have_the_mutex)
    assert has_it.wait(HUNG)
    proxy.heal()
    try:
        assert in_fork(use_a_lock_of_its_own)
    finally:
        is_over.set()
        thread.result(HUNG)


def wait_in_a_thread_and_leave_a_child():
    """In a child: die while waiting, but leave a forked process behind that lives on."""
    in_thread(distributed_lock(NAME, wait=60).acquire)
    wait_until(somebody_waits)
    if not os.fork():
        say("waiting")  # Its copies of connections are closed by now.
    hear()


async def wait_in_a_task_and_leave_a_child():
    """In a child: the same, in an event loop."""
    task = asyncio.create_task(distributed_lock(NAME, wait=60).aacquire())
    await await_until(somebody_waits)
    if os.fork():
        await task
    say("waiting")  # The forked process: its copies of connections are closed by now.
    hear()


@pytest.mark.proves("P6")
@pytest.mark.parametrize(
    "wait", [wait_in_a_thread_and_leave_a_child, wait_in_a_task_and_leave_a_child]
)
def test_a_killed_waiter_is_passed_over_at_once_though_its_forked_child_lives(wait, locks, spawn):
    holder, next_lock = rival(), rival(wait=HUNG)
    assert holder.acquire()
    child = spawn(wait)
    assert child.read() == "waiting"
    waiter = Blocking().begin_waiting(next_lock, locks)
    listening = bells(locks)
    child.kill()
    wait_until(lambda: bells(locks) < listening)  # The forked child does not keep its open.
    with hands_over(locks, waiter, next_lock):
        holder.release()


# Leases


FORKS = {"by Python": os.fork, "in C": fork_in_c}


def hold_and_fork(how):
    """In a child: fork while the lock is held and renewed, and the child renews one of its own."""
    with distributed_lock(NAME, ttl=5) as lease:
        wait_until(lambda: lease.renewals)
        before = lease.renewals

        def hold_too():
            with distributed_lock(NAME + " of the child", ttl=5) as own:
                wait_until(lambda: own.renewals > 1)
                return [own.id, own.held, lease.held, lease.renewals - before]

        seen = in_fork(hold_too, fork=FORKS[how])
        wait_until(lambda: lease.renewals > before + 1)
        lease.ensure_held(verify=True)
        say([lease.id, *seen])


@pytest.mark.as_permit
@pytest.mark.proves("P10", "R8")
@pytest.mark.parametrize("how", FORKS)
def test_after_a_fork_each_process_renews_its_own_leases_only(how, locks, proxy, spawn):
    child = spawn(hold_and_fork, how)
    id_, own_id, *seen = child.read()
    assert seen == [True, False, 0]
    assert id_ != own_id
    parents, childs = dict.fromkeys(run.token for run in runs(proxy, scripts.ACQUIRE))
    links = {parents: set(), childs: set()}
    for run in [*runs(proxy, scripts.ACQUIRE), *runs(proxy, scripts.RENEW)]:
        links[run.token].add(run.link)
    assert all(links.values())
    assert not links[parents] & links[childs]
    assert child.stderr == ""


def try_to_rely_on(lease):
    """In a forked child: what becomes of the attempts to use the lease of the parent."""
    outcomes = []
    for use in (lease.ensure_held, partial(lease.ensure_held, verify=True), lease.renew):
        try:
            use()
        except LockLost as error:
            outcomes.append(error.over)
        else:
            outcomes.append("relied on it")
    return [*outcomes, str(lease.held), str(lease.lost_reason)]


def fork_with_a_lease(is_handed_over):
    """In a child: fork while a lock is held; before the confirmation of a hand-over was read."""
    if is_handed_over:
        take_late_bells_too()
    with distributed_lock(NAME) as lease:
        assert lease.is_unconfirmed or not is_handed_over
        say(in_fork(lambda: try_to_rely_on(lease)))
        lease.ensure_held(verify=True)


@pytest.mark.proves("P10", "R8")
@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_child_cannot_renew_the_lease_of_its_parent(is_handed_over, locks, spawn):
    with rival() if is_handed_over else nullcontext():
        child = spawn(fork_with_a_lease, is_handed_over)
        wait_until(lambda: queued(locks) or not is_handed_over)
    over = "it belongs to the process that this one was forked from"
    assert child.read() == [over] * 3 + ["False", "None"]
    assert child.wait() == 0
    assert child.stderr == ""  # Nothing was lost, so no error is logged.


@pytest.mark.proves("R8")
@pytest.mark.no_permit("it has permits")
def test_a_forked_child_has_no_permit_of_its_parent_and_takes_another_one(locks):
    first, second = (distributed_lock(NAME, limit=3, wait=0) for _ in range(2))

    def in_child():
        told = [lease.held, second.locked()]
        try:
            second.release()
        except LockMisuse:
            told.append("refused")
        with distributed_lock(NAME, limit=3, wait=0) as own:
            return [*told, own.permit]

    with first as lease:
        assert second.acquire()
        assert in_fork(in_child) == [False, False, "refused", 3]
        for one, permit in ((lease, 1), (second.lease, 2)):
            one.ensure_held(verify=True)
            assert one.permit == permit
        second.release()


def leave_a_block_in_a_fork(how):
    """In a child: the forked process leaves the block, entered once or twice, and ends."""
    lock = distributed_lock(NAME, reentrant=True)
    with lock, lock if how == "nested" else nullcontext():
        if not (pid := os.fork()):
            sys.exit(0)
        say(status_of(pid))
        lock.lease.ensure_held(verify=True)


async def leave_an_asynchronous_block_in_a_fork(how):
    """In a child: the same, in an event loop."""
    async with distributed_lock(NAME) as lease:
        if not (pid := os.fork()):
            sys.exit(0)
        say(status_of(pid))
        await lease.aensure_held(verify=True)


@pytest.mark.proves("R8")
@pytest.mark.parametrize("how", ["once", "nested", "async"])
def test_a_child_that_leaves_the_block_and_ends_does_not_release(how, locks, spawn):
    by_way = leave_an_asynchronous_block_in_a_fork if how == "async" else leave_a_block_in_a_fork
    child = spawn(by_way, how)
    assert child.read() == 0
    assert child.wait() == 0
    assert is_left_clean(locks)
    assert child.stderr == ""


# In the middle of a call


def wait_and_fork_in_a_signal_handler():
    """In a child: a signal handler forks, so the child returns into a wait for the lock."""
    signal.signal(signal.SIGUSR1, lambda *_: os.fork())
    parent = os.getpid()
    say("ready")
    try:
        outcome = distributed_lock(NAME).acquire()
    except LockUnavailable as error:
        outcome = error.problem
    say(["parent" if os.getpid() == parent else "child", outcome])
    os._exit(0)


def fork_behind_the_first_try():
    """In a child: fork when a try was answered, and nobody has looked at the answer yet."""
    with distributed_lock("warm-up", wait=HUNG):
        pass  # It brings the connection.
    begin, parent = backend().begin, os.getpid()

    def begin_and_fork(form):
        begin(form)
        assert form.reply
        os.fork()

    backend().begin = begin_and_fork
    try:
        outcome = distributed_lock(NAME, wait=HUNG).acquire()
    except LockUnavailable as error:
        outcome = error.problem
    say(["parent" if os.getpid() == parent else "child", outcome])
    os._exit(0)


@pytest.mark.proves("R8")
@pytest.mark.parametrize("is_free", [True, False], ids=["free", "busy"])
def test_a_child_does_not_take_what_its_parent_was_answered(is_free, locks, spawn):
    holder = rival()
    if not is_free:
        assert holder.acquire()
    child = spawn(fork_behind_the_first_try)
    said = [child.read()]
    if not is_free:
        assert queued(locks) == 1
        holder.release()
    said.append(child.read())
    assert dict(said)["parent"] is True
    assert "forked" in dict(said)["child"]
    assert value_of(locks), "the child has undone what its parent was granted"


def test_a_child_does_not_go_on_with_a_wait_of_its_parent(locks, spawn):
    holder = rival()
    assert holder.acquire()
    child = spawn(wait_and_fork_in_a_signal_handler)
    child.read()
    wait_until(lambda: queued(locks))
    os.kill(child.pid, signal.SIGUSR1)
    who, problem = child.read()
    assert who == "child"
    assert "forked" in problem
    assert queued(locks) == 1
    holder.release()
    assert child.read() == ["parent", True]
