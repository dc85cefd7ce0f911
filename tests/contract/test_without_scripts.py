"""Where scripts are forbidden: plain commands answer and write what the scripts would."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from itertools import cycle

import pytest
import redis

from django_redislock import (
    LockLost,
    LockUnavailable,
    distributed_lock,
    held,
    single_instance_task,
    task_runs,
)
from django_redislock.backends import drivers
from django_redislock.backends.redis import sessions, without_scripts
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.steps import Call
from tests.support.backends import UNHURRIED
from tests.support.matrix import everywhere, unscripted
from tests.support.others import RIVAL, add_rival, rival
from tests.support.waiting import HUNG

MINE, OTHERS = "1" * 32, "2" * 32


class Client:
    """Runs operations on one lock, by script or by plain commands."""

    def __init__(self, locks, name):
        self.redis = locks.redis
        self.keys = lock_keys(locks.prefix, name)

    def run(self, script, args, *, scripting, meanwhile=lambda commands: None):
        if scripting:
            keys = script.given(self.keys)
            return self.redis.eval(script.source, len(keys), *keys, *script.told(args, ""))
        return self.perform(script, args, meanwhile)

    def perform(self, script, args, meanwhile):
        """By plain commands; *meanwhile* is called with those of each round trip, before it."""
        connection = self.redis.connection_pool.get_connection()

        def reply():
            try:
                return connection.read_response()
            except redis.ResponseError as error:
                return ReplyError(str(error))

        def ask(*commands):
            meanwhile(commands)
            connection.send_packed_command(connection.pack_commands(commands))
            return [reply() for _ in commands]

        try:
            return without_scripts.perform(Call(script, "", args, 1.0), self.keys, ask)
        finally:
            self.redis.connection_pool.release(connection)

    def claim(self, token, seconds):
        """Let the lock be handed over to a waiter who has so long to confirm it."""
        now = self.redis.time()[0] * 1000
        until = now + 1000 * seconds
        value = f"{token}cr00000{token[:16]}|5|{now}|20000|{until}|bell:1|{{}}"
        self.redis.set(self.keys.lock, value, px=90_000)

    def state(self):
        """All that is on the server, but for the history, which only scripts keep."""
        ends = self.redis.zscore(self.keys.held, self.keys.lock)
        return [
            self.redis.get(self.keys.lock),
            self.redis.pttl(self.keys.lock),
            self.redis.zrange(self.keys.fence, 0, -1),
            self.redis.pttl(self.keys.fence),
            ends and int(ends),
        ]


def acquire(token, ttl=20000, mode="try"):
    return scripts.ACQUIRE, (token, token[:16], ttl, mode, "0", "", "r", '{"host":"web-1"}')


def renew(token, ttl, count):
    return scripts.RENEW, (token, ttl, count)


def conclude(token, min_hold):
    return scripts.CONCLUDE, (token, token[:16], min_hold, 0, "", "done", "", 0, "")


LOOK = scripts.LOOK, ()
SEQUENCES = {
    "release": [acquire(MINE), LOOK, (scripts.RELEASE, (MINE,)), LOOK, (scripts.RELEASE, (MINE,))],
    "busy": [acquire(OTHERS), acquire(MINE), (scripts.RELEASE, (MINE,)), (scripts.LEAVE, (MINE,))],
    "resent": [acquire(MINE), acquire(MINE, 90_000), acquire(MINE, 20_000), LOOK],
    "undone": [acquire(MINE), (scripts.LEAVE, (MINE,)), LOOK, acquire(OTHERS)],
    "another grant undone": [
        acquire(MINE),
        (scripts.LEAVE, (MINE, "1")),
        LOOK,
        (scripts.LEAVE, (MINE, "")),
        LOOK,
    ],
    "renewed": [
        acquire(MINE),
        renew(MINE, 90_000, "r00002"),
        renew(MINE, 20_000, "r00001"),  # Overtaken by the other.
        renew(MINE, 40_000, "-00003"),
        renew(OTHERS, 40_000, "r00004"),
        LOOK,
    ],
    "gone": [renew(MINE, 20_000, "r00001"), (scripts.LEAVE, (MINE,)), conclude(MINE, 5000), LOOK],
    "cooling": [
        acquire(MINE),
        conclude(MINE, 50_000),
        LOOK,
        acquire(MINE),
        renew(MINE, 90_000, "r00001"),
        conclude(MINE, 50_000),
        (scripts.LEAVE, (MINE,)),
    ],
    "without min_hold": [acquire(MINE), conclude(MINE, 0), LOOK],
}


def without_times(value):
    """What was answered or written, but for moments, and for the seconds that a test may take."""
    if isinstance(value, list | tuple):
        return [without_times(one) for one in value]
    if isinstance(value, bytes | str):
        text = value.decode() if isinstance(value, bytes) else value
        return re.sub(r"\d{13,16}(?!\d)", "TIME", text)
    if isinstance(value, int) and value > 10**12:
        return "TIME"
    return round(value, -4) if isinstance(value, int) else value


@everywhere
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_scripts_and_plain_commands_in_two_trips_answer_and_write_the_same(sequence, locks):
    told, trips = [], []
    for ways in ([True], [False], [True, False], [False, True]):  # They take turns too.
        client = Client(locks, f"{sequence}{ways}")
        said = []
        for (script, args), scripting in zip(SEQUENCES[sequence], cycle(ways), strict=False):
            trips.clear()
            answer = client.run(script, args, scripting=scripting, meanwhile=trips.append)
            assert scripting or len(trips) == 2
            # To what a look answers, scripts add what makes a list of the strange.
            said.append([answer[:4] if script is scripts.LOOK else answer, client.state()])
        told.append(without_times(said))
    assert all(others == told[0] for others in told)


@pytest.mark.parametrize("scripting", [True, False], ids=["scripts", "plain"])
def test_a_claim_that_nobody_confirmed_is_free_and_one_that_runs_is_not(scripting, locks):
    client = Client(locks, "lottery")
    for seconds, free in ((60, False), (-1, True)):
        client.claim(OTHERS, seconds)
        assert (client.run(*LOOK, scripting=scripting)[1] == -2) is free
        answer = client.run(*acquire(MINE), scripting=scripting)
        assert (answer[0] != b"busy") is free


def test_a_claim_is_confirmed_also_after_scripts_were_forbidden(locks):
    client = Client(locks, "lottery")
    for confirm in (acquire(MINE), renew(MINE, 20_000, "r00000")):
        client.claim(MINE, 1)
        assert client.run(*confirm, scripting=False) in (b"5", b"renewed")
        assert 15_000 < client.redis.pttl(client.keys.lock) <= 20_000
        assert client.run(*LOOK, scripting=True)[0][32:33] == b"h"


def test_r9_the_fence_grows_whoever_asks_also_after_a_clock_was_set_back(locks):
    client = Client(locks, "lottery")
    later = client.redis.time()[0] * 1_000_000 + 10**12
    client.redis.zadd(client.keys.fence, {"last": later})
    for count, scripting in enumerate((False, True, False, False, True), start=1):
        assert int(client.run(*acquire(MINE), scripting=scripting)) == later + count
        client.run(scripts.RELEASE, (MINE,), scripting=scripting)


@pytest.mark.proves("R9")
def test_r9_the_mark_of_all_names_never_falls_whoever_raises_it_between_read_and_write(locks):
    client, other = Client(locks, "lottery"), Client(locks, "report")
    fences = []

    def meanwhile(commands):
        if commands[-1] == ("EXEC",):  # What it decided on is read.
            fences.append(int(other.run(*acquire(OTHERS), scripting=True)))

    fences.insert(0, int(client.perform(*acquire(MINE), meanwhile)))
    assert fences == sorted(set(fences))
    assert locks.redis.zscore(client.keys.fence, "last") == fences[-1]


def test_a_lock_that_changes_hands_during_every_try_is_no_answer(locks):
    client, tries = Client(locks, "lottery"), []

    def meanwhile(commands):
        if commands[-1] == ("EXEC",):  # By then somebody else has had the lock since it was read.
            tries.append(client.run(*acquire(OTHERS), scripting=True))
            client.run(scripts.RELEASE, (OTHERS,), scripting=True)

    with pytest.raises(ConnectionError, match="changed hands during every try"):
        client.perform(*acquire(MINE), meanwhile)
    assert len(tries) == without_scripts.ATTEMPTS
    assert client.redis.get(client.keys.lock) is None


@pytest.mark.no_permit("the bystander is in the index too")
def test_no_key_stays_for_ever_nor_an_expired_lease_in_the_index(locks):
    client = Client(locks, "lottery")
    client.redis.set(client.keys.lock, "by hand")
    assert client.run(*acquire(MINE), scripting=False) == [b"endless"]
    client.redis.delete(client.keys.lock)
    client.redis.zadd(client.keys.held, {"expired": 1})
    client.run(*acquire(MINE), scripting=False)
    assert client.redis.zrange(client.keys.held, 0, -1) == [client.keys.lock.encode()]


@unscripted
def test_who_may_run_scripts_lists_and_frees_what_plain_commands_hold(place, settings):
    add_rival(settings, place.locks, OPTIONS={})
    lock = distributed_lock("lottery", wait=0)
    assert lock.acquire()
    assert [one.id for one in held.list(using=RIVAL)] == [lock.lease.id]
    assert not rival("lottery").acquire()
    assert held.force_release("lottery", lock.lease.id, using=RIVAL)
    with pytest.raises(LockLost, match="operator"):
        lock.release()


@single_instance_task(name="without_scripts.draw")
def draw() -> None:
    raise AssertionError("it ran without its lock")


@pytest.mark.proves("N7")
@unscripted
@pytest.mark.parametrize(
    "use",
    [
        draw,
        held.list,
        lambda: held.detail("lottery"),
        lambda: held.force_release("lottery", "1" * 16),
        task_runs.records,
        lambda: task_runs.announce("lottery", "task-id", 10, using="default"),
    ],
    ids=["task", "list", "detail", "force release", "records", "unique_queued"],
)
def test_what_needs_scripts_is_unavailable_and_says_so(use, place):
    with pytest.raises(LockUnavailable, match=r"need EVAL.*allow \+eval and \+evalsha"):
        use()
    assert place.locks.keys() == []


@unscripted
async def test_awaiting_needs_no_thread_of_the_event_loop(place):
    """All may be busy for longer than `wait`, and there are none when the interpreter ends."""
    threads = ThreadPoolExecutor()
    threads.shutdown()
    asyncio.get_running_loop().set_default_executor(threads)
    async with distributed_lock("lottery") as lease:
        assert lease.held


@unscripted
async def test_many_coroutines_start_no_more_threads_than_there_are_connections(place, monkeypatch):
    def start(work, name):
        calls.append(start_in_thread(work, name))
        running.append(sum(not call.done() for call in calls))
        return calls[-1]

    async def take(number):
        async with distributed_lock(f"lottery:{number}", wait=HUNG) as lease:
            assert lease.held

    calls, running, most = [], [], 8
    start_in_thread = drivers.start_in_thread
    place.configure(OPTIONS={**UNHURRIED, "max_connections": most})
    monkeypatch.setattr(drivers, "start_in_thread", start)
    async with asyncio.TaskGroup() as tasks:
        for number in range(100):
            tasks.create_task(take(number))
    assert len(running) >= 200
    assert max(running) <= most


@unscripted
async def test_a_silent_server_lets_no_coroutine_wait_for_its_turn_for_ever(place, make_proxy):
    """Each turn lasts as long as the server is silent, and there are many more coroutines."""
    proxy = make_proxy(place.locks.server)
    place.on(proxy)
    place.configure(OPTIONS={"max_connections": 4, "socket_timeout": 1})
    locks = [distributed_lock(f"lottery:{number}", wait=1) for number in range(40)]
    async with locks[0]:
        pass  # It knows now that scripts are forbidden.
    proxy.blackhole()
    async with asyncio.timeout(HUNG):
        acquires = [lock.aacquire() for lock in locks]
        outcomes = await asyncio.gather(*acquires, return_exceptions=True)
    assert all(isinstance(outcome, LockUnavailable) for outcome in outcomes)
    proxy.heal()
    async with asyncio.timeout(HUNG):
        for lock in locks:
            async with lock as lease:
                assert lease.held


async def test_what_a_thread_does_for_an_event_loop_has_the_context_of_its_task():
    """So its log records tell of the job, and of a project's request."""
    request = ContextVar("request", default="none")
    request.set("a request")
    assert await sessions.in_thread(request.get) == "a request"
