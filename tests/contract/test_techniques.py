"""The techniques of locking that this package grew out of, each as one visible test.

Four of the ten are what other files are about: a check before the resource is touched (6,
test_lease.py), holds that are counted (7, test_reentrant.py), a wait time and a lease time (8,
test_wait.py), renewals up to a maximum (9, test_holds.py). The eleventh, the lottery that all of
them are for, is tests/demo/test_lottery.py and `make demo`.
"""

import os
import signal
from contextlib import nullcontext, suppress
from functools import partial
from itertools import count, pairwise
from statistics import median

import pytest
import redis
from django.conf import settings

from django_redislock import LockLost, LockMisuse, distributed_lock, held
from django_redislock.backends.registry import backends
from django_redislock.rules import flows, scripts
from django_redislock.rules.forms import release
from django_redislock.rules.keys import fence_key, index_key, lock_keys
from tests.support.matrix import everywhere, needs_scripts, on_servers, unscripted
from tests.support.others import held_by_other, release_of, waiters
from tests.support.processes import hear, say
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import both_ways, in_thread


def sent_after(proxy, count):
    """The names of the commands that came after the first so many."""
    return [command.name for command in proxy.log[count:]]


@pytest.mark.proves("P1")
@on_servers
def test_01_set_nx_px_excludes_all_but_the_owner_of_a_token(place):
    key = lock_keys(place.locks.prefix, "lottery").lock
    tokens = set()
    for _ in range(2):
        with distributed_lock("lottery", ttl=30) as lease:
            # A plain client that follows the same recipe is kept out...
            assert place.locks.redis.set(key, "somebody else", nx=True, px=60_000) is None
            assert 25_000 < place.locks.redis.pttl(key) <= 30_000
            value = place.locks.redis.get(key)
            assert isinstance(value, bytes)
            assert value.startswith(lease._token.encode())
            tokens.add(lease._token)
    assert len(tokens) == 2
    # ... and so are we, by its lock.
    assert place.locks.redis.set(key, "somebody else", nx=True, px=60_000)
    assert not distributed_lock("lottery", wait=0).acquire()


@pytest.mark.proves("P3", "R12")
@everywhere
def test_02_release_is_one_atomic_compare_and_delete_in_lua(locks, proxy, monkeypatch):
    # A lease that was held for some time is noted at its end, by another script.
    monkeypatch.setattr("django_redislock.handle.NOTED_FROM", HUNG)
    locks.on(proxy)
    lock = distributed_lock("lottery")
    for _ in range(2):  # The first cycle brings the scripts to the server.
        assert lock.acquire()
        before = len(proxy.log)
        lock.release()
    assert sent_after(proxy, before) == ["EVALSHA"]
    assert proxy.log[-1].args[0] == scripts.RELEASE.sha.encode()
    assert locks.redis.get(lock_keys(locks.prefix, "lottery").lock) is None


@pytest.fixture
def unscripted_proxy(place, make_proxy):
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    return proxy


@unscripted
def test_03_release_by_watch_multi_exec_where_scripting_is_forbidden(
    place, unscripted_proxy, caplog
):
    proxy = unscripted_proxy
    lock = distributed_lock("lottery", wait=0)
    assert lock.acquire()
    (set_lock,) = [command for command in proxy.commands("SET") if b"NX" in command.args]
    assert set_lock.args[0] == lock_keys(place.locks.prefix, "lottery").lock.encode()
    assert b"PX" in set_lock.args
    before = len(proxy.log)
    lock.release()
    names = sent_after(proxy, before)
    assert names[0] == "WATCH"
    assert names[names.index("MULTI") :] == ["MULTI", "DEL", "ZREM", "EXEC"]
    # Only the first attempt was by a script, and it is said what is lost with them.
    assert len(proxy.commands("EVALSHA", "EVAL")) == 1
    (warning,) = [record for record in caplog.records if "forbids scripts" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "waiters poll instead of being served in turn" in warning.getMessage()


@pytest.mark.proves("P3")
@unscripted
def test_03_a_lock_that_changes_hands_before_exec_is_left_alone(place, unscripted_proxy):
    key = lock_keys(place.locks.prefix, "lottery").lock
    lock = distributed_lock("lottery", wait=0)
    assert lock.acquire()
    exec_ = unscripted_proxy.rule("EXEC", "hold")

    def steal():
        exec_.wait()
        place.locks.redis.set(key, "of the next owner", px=60_000)
        unscripted_proxy.forward_held()

    thief = in_thread(steal)
    with pytest.raises(LockLost):
        lock.release()
    thief.result(HUNG)
    assert place.locks.redis.get(key) == b"of the next owner"


@pytest.mark.waits
@unscripted
def test_03_waiters_come_back_by_bounded_backoff(place, unscripted_proxy):
    with held_by_other("lottery"):
        before = len(unscripted_proxy.log)
        assert not distributed_lock("lottery", wait=5).acquire()
    looks = [command.time for command in unscripted_proxy.log[before:] if command.name == "WATCH"]
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    # 1 ms, doubled up to 128 ms, each jittered: no stampede, and no second lost.
    assert 12 <= len(looks) <= 90
    assert median(pauses[:7]) < median(pauses[7:-1])  # The last one ends with the wait.
    assert median(pauses) < 0.128 + 0.1


WAIT = {"holder": 0, "waiter": 0.02, "heir": 5}  # An heir has the lock handed over while it waits.


def use_the_lock(role):
    """Do all that holders and waiters do."""
    lock = distributed_lock("lottery", ttl=5, wait=WAIT[role], min_hold=3)
    if lock.acquire():
        lock.lease.renew()
        lock.release()


def use_a_naive_lock():
    """Lock as it was done before SET had NX and PX."""
    client = redis.Redis.from_url(settings.REDISLOCK["default"]["LOCATION"])
    key = lock_keys(settings.REDISLOCK["default"]["KEY_PREFIX"], "lottery").lock
    if client.setnx(key, "ours"):
        client.expire(key, 5)
        client.delete(key)


def fork_on_demand():
    """In a child: whenever told to, let a new process use the lock, and say when it is gone."""
    while True:
        role = hear()
        if not (pid := os.fork()):
            use_a_naive_lock() if role == "naive" else use_the_lock(role)
            os._exit(0)
        say(pid)
        os.waitpid(pid, 0)
        say("gone")


class Victims:
    """Processes that use the lock through a proxy, each killed at another command."""

    def __init__(self, place, proxy, spawn):
        self._proxy = proxy
        place.on(proxy)
        self._nursery = spawn(fork_on_demand)
        place.on(place.locks.server)

    def kill_at(self, step, role, action):
        """Kill one before or after the server has run its command of that number, from 0.

        Returns that command; None if it was through before.
        """
        numbers = count()
        rule = self._proxy.rule("*", action, match=lambda args: next(numbers) == step)
        with held_by_other("lottery", ttl=5) if WAIT.get(role) else nullcontext():
            self._nursery.send(role)
            pid = self._nursery.read()
            wait_until(
                lambda: rule.hits or _has_ended(pid) or (role == "heir" and waiters("lottery"))
            )
        wait_until(lambda: rule.hits or _has_ended(pid))
        if rule.hits:
            # A connection that the watchdog dials keeps nobody from ending.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._nursery.read() == "gone"
        self._proxy.clear_rules()
        return next((one for one in reversed(self._proxy.log) if one.rule is rule), None)


def _has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
def victims(place, make_proxy, spawn):
    return Victims(place, make_proxy(place.locks.server), spawn)


@pytest.mark.proves("P2")
@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang_before", "hang_after"])
@pytest.mark.parametrize("role", ["holder", "waiter", "heir"])
@on_servers
@needs_scripts
def test_04_nothing_is_left_without_ttl_wherever_the_client_is_killed(victims, place, role, action):
    """There is no moment between SETNX and EXPIRE, nor any other like it."""
    kill_at_each_step(victims, place, role, action)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang_before", "hang_after"])
@unscripted
def test_04_nor_where_scripting_is_forbidden(victims, place, action):
    kill_at_each_step(victims, place, "holder", action)  # There is no queue to wait in.


def kill_at_each_step(victims, place, role, action):
    """Kill a process at each of its commands, and look for keys without ttl."""
    common = {key(place.locks.prefix).encode() for key in (fence_key, index_key)}
    lock_key = lock_keys(place.locks.prefix, "lottery").lock
    use_the_lock("holder")  # So that the server has the scripts.
    place.lose_data()
    killed_at = []
    for step in count():
        command = victims.kill_at(step, role, action)
        if command is None:
            break
        killed_at.append(command.name)
        assert set(place.locks.without_ttl()) <= common, f"killed at {command}"
        assert place.locks.redis.pttl(lock_key) <= 5000 + flows.CONFIRM_WITHIN * 1000
        place.lose_data()
    assert len(killed_at) >= 3  # Connecting, acquiring, and what came then.


@pytest.mark.proves("P2")
@pytest.mark.slow
@on_servers
@needs_scripts
@pytest.mark.no_permit("the lock of another package has no permits")
def test_04_a_naive_lock_does_not_stand_this_test(victims, place):
    left = []
    for step in count():
        if (command := victims.kill_at(step, "naive", "hang_after")) is None:
            break
        left += [command.name for _ in place.locks.without_ttl()]
        place.lose_data()
    assert left == ["SETNX"]


@pytest.mark.proves("P3")
@on_servers
@both_ways
async def test_05_a_release_by_the_wrong_owner_is_refused(way, place):
    backend = backends["default"]
    async with way.entered(distributed_lock("lottery")) as lease:
        form = release_of(lease)
        form.token = "0" * 32
        assert backend.run(release(form)) == "taken"
        with pytest.raises(LockMisuse):
            await way.release(distributed_lock("lottery"))
        await way.ensure_held(lease, verify=True)


def test_10_64_threads_never_exceed_the_pool_nor_share_a_connection_unsafely(locks):
    limit, threads, cycles = 8, 64, 8
    locks.configure(OPTIONS={"max_connections": limit, "client_name": locks.prefix})

    def work(name):
        fences = []
        for _ in range(cycles):
            # Nobody else wants this name: any other answer is one to somebody else's question.
            with distributed_lock(name, wait=0) as lease:
                lease.renew()
                seen = held.get(name)
                assert (seen.name, seen.id, seen.fence) == (name, lease.id, lease.fence)
                fences.append(lease.fence)
        assert fences == sorted(set(fences))

    workers = [in_thread(partial(work, f"lottery:{number}")) for number in range(threads)]
    most = 0
    while not all(worker.done() for worker in workers):
        most = max(most, locks.connections())
    for worker in workers:
        worker.result()
    most = max(most, locks.connections())  # They are kept; the loop may not have looked.
    assert 2 <= most <= limit


def test_10_sleeping_waiters_starve_no_release_and_keep_nobody_from_a_free_lock(locks):
    limit = 6
    locks.configure(OPTIONS={"max_connections": limit})
    served = []

    def wait(number):
        with distributed_lock("lottery", wait=HUNG):
            served.append(number)

    with distributed_lock("lottery"):
        workers = [in_thread(partial(wait, number)) for number in range(16)]
        # So many can sleep at once; the others wait for a connection.
        wait_until(lambda: waiters("lottery") >= limit - 3)
        with distributed_lock("tombola", wait=2) as lease:
            assert lease.held
        # Busy, which is not unavailable.
        assert in_thread(distributed_lock("lottery", wait=0.2).acquire).result(HUNG) is False
    for worker in workers:
        worker.result(HUNG)
    assert sorted(served) == list(range(16))
