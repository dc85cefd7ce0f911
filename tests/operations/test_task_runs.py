"""What became of task runs: those that ended, those under way, and those that never ended."""

import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock, held, task_runs
from django_redislock.backends.registry import backends
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.options import Options
from tests.support.matrix import everywhere, in_turn, needs_records, on_servers
from tests.support.processes import hear, say
from tests.support.waiting import HUNG, wait_until

pytestmark = needs_records


NAME = "lottery"


@contextmanager
def running(id, ttl=10, wait=0):  # noqa: A002
    """Run a task, as far as locks see one."""
    with (
        busy_with(Activity(task="lottery.tasks.draw", task_id=id)),
        Lock(NAME, Options(ttl=ttl, wait=wait), RunMarker(id, 60)) as lease,
    ):
        yield lease


def run_until_told(id, ttl):  # noqa: A002
    """In a child."""
    with running(id, ttl=ttl):
        say("running")
        hear()


def record(name=NAME):
    """The record, which must be there."""
    found = held.record(name)
    assert found is not None
    return found


def ids(*runs):
    return [run.owner.task_id for run in runs if run]


@everywhere
def test_a_run_is_under_way_until_it_ends(place):
    with running("first"):
        assert ids(*record().under_way) == ["first"]
        (run,) = record().under_way
        assert (run.lasted, run.why) == (None, "")
        assert 0 <= run.ago < 5
        assert [one.name for one in held.records()] == [NAME]
        assert record().last_success is record().last_unended is None
    assert record().under_way == ()
    assert record().last_unended is None
    assert ids(record().last_success) == ["first"]


def test_a_run_that_fails_has_ended(place):
    with pytest.raises(ZeroDivisionError), running("first"):
        raise ZeroDivisionError
    assert (record().under_way, record().last_unended) == ((), None)
    assert ids(record().last_failure) == ["first"]


@pytest.mark.parametrize("by", ["the end of its lease", "an operator"])
def test_a_run_that_loses_its_lease_never_ended(place, by):
    with pytest.raises(LockLost), running("first") as lease:  # noqa: PT012 - at its end
        if by == "an operator":
            held.force_release(NAME, lease.id)
        else:
            place.lapse(NAME)
        assert record().under_way == ()
        assert ids(record().last_unended) == ["first"]
    with running("second"):
        assert ids(*record().under_way) == ["second"]
        assert ids(record().last_unended) == ["first"]
    assert ids(record().last_success, record().last_unended) == ["second", "first"]


@pytest.mark.parametrize("renewed", [False, True])
def test_a_grant_that_is_given_back_was_a_run_only_if_it_lasted(place, renewed):
    backend = backends["default"]
    with suppress(LockLost), running("first") as lease:
        if renewed:
            lease.renew()
        backend.run(flows.undo(NAME, lease._token, 1))
        found = held.record(NAME)
        assert ids(found and found.last_unended) == (["first"] if renewed else [])


@in_turn
def test_a_run_that_waited_for_its_turn_is_under_way(place):
    told = threading.Event()

    def wait():
        with running("second", wait=HUNG):
            told.wait(HUNG)

    with running("first"):
        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: (lock := held.get(NAME)) and lock.waiters)
    wait_until(lambda: ids(*record().under_way) == ["second"])
    assert record().last_unended is None
    told.set()
    waiter.join()
    assert ids(record().last_success) == ["second"]
    assert (record().under_way, record().last_unended) == ((), None)


def test_a_lock_of_no_task_has_no_runs_under_way(place):
    with Lock(NAME, Options()):
        assert held.record(NAME) is None
    assert held.records() == []


def test_looking_while_runs_begin_and_end_sees_none_that_never_ended(place):
    over = threading.Event()

    def draw():
        number = 0
        while not over.is_set():
            number += 1
            with running(f"run {number}"):
                pass

    worker = threading.Thread(target=draw)
    worker.start()
    try:
        for _ in range(100):
            found = held.record(NAME)
            assert found is None or found.last_unended is None
    finally:
        over.set()
        worker.join()


def test_a_killed_run_is_under_way_until_its_lease_ends_and_never_ended_after_it(locks, spawn):
    child = spawn(run_until_told, "first", 6)
    child.read()
    child.kill()
    assert ids(*record().under_way) == ["first"]
    wait_until(lambda: not record().under_way)
    unended = record().last_unended
    assert (unended.owner.pid, unended.lasted, unended.why) == (child.pid, None, "")


def test_a_run_whose_grant_was_told_twice_began_once(locks, proxy):
    locks.on(proxy, TTL=10)
    lost = proxy.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
    with running("first"):
        assert lost.hits == 1
        assert ids(*record().under_way) == ["first"]
    assert (record().under_way, record().last_unended) == ((), None)


def test_a_run_that_was_given_up_before_it_began_never_was(locks, proxy):
    locks.on(proxy, TTL=10, OPTIONS={"socket_timeout": 2.0})
    proxy.rule_for_script(scripts.ACQUIRE.sha, "hang_after", times=2)
    with pytest.raises(LockUnavailable), running("first"):
        pass
    wait_until(lambda: held.record(NAME) is None)  # What undoes it may be on its way.


@on_servers
def test_the_record_is_kept_for_thirty_days_whatever_somebody_else_wrote_to_it(place):
    key = lock_keys(place.locks.prefix, NAME).runs
    with running("first"):
        assert 29 < place.locks.redis.ttl(key) / 86_400 <= 30
        for field in ("started#2", "unended", "success", "started\xff"):
            place.locks.redis.hset(key, field, b"\xff|x")
        assert ids(*record().under_way) == ["first"]
        assert (record().last_unended, record().last_success) == (None, None)


@everywhere
def test_a_call_that_came_again_and_ended_has_not_never_ended(place):
    """The broker delivers the call of a killed process again; others run after it."""
    for limit in (0, 2):
        name = f"nightly {limit}"
        gone = Lock(name, Options(ttl=0.3, renew=False, limit=limit), RunMarker("killed", 60))
        with busy_with(Activity(task="lottery.tasks.draw", task_id="killed")):
            assert gone.acquire()
        wait_until(lambda name=name: ids(record(name).last_unended) == ["killed"])
        with ExitStack() as first_permit:
            if limit:  # So the call comes back to the second one.
                first_permit.enter_context(distributed_lock(name, limit=2, ttl=60))
            for id_ in ("killed", "next"):
                with (
                    busy_with(Activity(task="lottery.tasks.draw", task_id=id_)),
                    Lock(name, Options(ttl=10, wait=5, limit=limit), RunMarker(id_, 60)),
                ):
                    pass
        assert record(name).last_unended is None
        assert ids(record(name).last_success) == ["next"]


@everywhere
def test_a_job_has_its_own_skips_although_another_shares_its_lock(place):
    def run(job):
        with busy_with(Activity(task=job)), Lock(NAME, Options(ttl=10), RunMarker("", 60)):
            pass

    def skip(job):
        with busy_with(Activity(task=job)):
            task_runs.note_skip(NAME, "busy", using="default")

    def skips(job):
        found = held.job(job)
        return found and (found.skips, len(found.skipped_at))

    odd = 'jobs."nüll|b\\'
    for job in ("jobs.a", "jobs.b", "jobs.b", odd):
        skip(job)
    assert [skips(job) for job in ("jobs.a", "jobs.b", odd)] == [(1, 1), (2, 2), (1, 1)]
    run("jobs.a")
    assert [skips(job) for job in ("jobs.a", "jobs.b", odd)] == [(0, 0), (2, 2), (1, 1)]
    assert record().skips == 0  # Of the lock.


@everywhere
def test_json_of_a_record_has_the_documented_keys(place):
    with running("first"):
        pass
    with running("second"):
        found = record().as_dict()
    assert " ".join(found) == (
        "name alias last_success last_failure last_skip last_abandoned last_unended skips"
        " under_way skipped_at by_job"
    )
    assert found["last_failure"] is found["last_skip"] is found["last_unended"] is None
    (run,) = found["under_way"]
    for one in (run, found["last_success"]):
        assert list(one)[:4] == ["at", "ago", "lasted", "why"]
        assert one["task"] == "lottery.tasks.draw"
    assert run["lasted"] is None
    assert found["last_success"]["lasted"] >= 0


@everywhere
def test_so_has_one_that_came_again_and_was_skipped_after_another_run(place):
    gone = Lock(NAME, Options(ttl=0.3, renew=False), RunMarker("killed", 60))
    with busy_with(Activity(task="tasks.draw", task_id="killed")):
        assert gone.acquire()
    wait_until(lambda: ids(record().last_unended) == ["killed"])
    with running("next"):
        for id_, unended in (("other", ["killed"]), ("next", ["killed"]), ("killed", [])):
            with busy_with(Activity(task="tasks.draw", task_id=id_)):
                task_runs.note_skip(NAME, why="done", by="another", using="default")
            assert ids(record().last_unended) == unended
            assert ids(*record().under_way) == ["next"]
