"""How long, and how many, records of runs and earlier leases are kept: RECORDS and TIMELINE."""

import re
import time
from itertools import count, islice

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_redislock import LockLost, distributed_lock, held, task_runs
from django_redislock.backends.base import FEWEST_IN_A_BUCKET
from django_redislock.backends.registry import backends
from django_redislock.humanize import duration
from django_redislock.lock import Lock
from django_redislock.rules.flows import Finished, RunMarker
from django_redislock.rules.keys import bucket_of, lock_keys, ran_index_key
from django_redislock.rules.options import Options
from tests.operations.commands import DAY, locks_command, ran, running
from tests.support.matrix import everywhere, needs_records
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = needs_records

RUNS = count()


def run_all(names):
    for name in names:
        ran(name, f"run {next(RUNS)}")


def orders(number):
    """Names of one bucket, since each has a limit of its own."""
    names = (name for pk in count() if bucket_of(name := f"order:{pk}") == 0)
    return list(islice(names, number))


@everywhere
def test_records_of_more_locks_than_are_kept_go_with_all_their_keys(place):
    place.configure(RECORDS=FEWEST_IN_A_BUCKET)
    names = orders(FEWEST_IN_A_BUCKET + 4)
    run_all(names)
    kept = {one.name for one in held.records()}
    assert FEWEST_IN_A_BUCKET <= len(kept) < len(names)
    assert kept.isdisjoint(names[:1])
    assert kept.issuperset(names[-1:])
    for name in names:
        assert (held.record(name) is not None) == (name in kept)
        assert bool(held.detail(name).past) == (name in kept)


def test_what_is_promised_outlives_the_record(locks):
    locks.configure(RECORDS=2)
    names = [f"order:{pk}" for pk in range(5)]
    of = {"task": "ship", "using": "default"}
    assert task_runs.announce("order:0", "waiting", 3600, **of) == ""
    assert task_runs.announce("order:0", "other", 3600, arguments=b"x", **of) == "waiting"
    with running("order:0", "first", once=60) as lease:
        before = lease.fence
    run_all(names[1:])
    keys = lock_keys(locks.prefix, "order:0")
    assert locks.redis.exists(keys.done)
    assert locks.redis.exists(keys.past) == 0
    of_the_call = {b"queued", b"asked", b"terms", b"task", b"last", b"last:waiting"}
    assert set(locks.redis.hkeys(keys.runs)) == of_the_call
    assert DAY + 3500 < locks.redis.ttl(keys.runs) <= DAY + 3600
    assert task_runs.requeue("order:0", "waiting", 3600, using="default") is not None
    assert task_runs.retract("order:0", "waiting", using="default") == b"x"
    again = Lock("order:0", Options(wait=0), RunMarker("first", DAY)).attempt()
    assert isinstance(again, Finished), "its run is still recognised"
    with distributed_lock("order:0") as lease:
        assert lease.fence > before


def test_a_call_whose_record_goes_still_stands_for_none_that_runs_earlier(locks):
    locks.configure(RECORDS=2)
    assert task_runs.announce("order:0", "later", 3600, delay=300, using="default") == ""
    run_all(f"order:{pk}" for pk in range(5))
    assert task_runs.announce("order:0", "now", 3600, using="default") == ""


def test_if_fewer_are_to_be_kept_each_new_one_drops_some(locks):
    index = ran_index_key(locks.prefix)
    run_all(f"order:{pk}" for pk in range(30))
    locks.configure(RECORDS=5)
    run_all(["order:30"])
    assert 5 < locks.redis.zcard(index) < 30, "a bounded number at once"
    run_all(f"order:{pk}" for pk in range(31, 35))
    assert locks.redis.zcard(index) == 5
    assert sum(key.endswith(b":runs") for key in locks.keys()) == 5  # noqa: SIM118


def test_a_lock_that_runs_again_drops_no_other(locks):
    locks.configure(RECORDS=2)
    run_all(["nightly", "hourly"] * 3)
    assert {one.name for one in held.records()} == {"nightly", "hourly"}


def test_records_end_after_the_time_that_is_set_and_leave_the_index(locks):
    locks.configure(RECORDS_FOR=3600)
    run_all(["order:0"])
    assert 3500 < locks.redis.ttl(lock_keys(locks.prefix, "order:0").runs) <= 3600
    index = ran_index_key(locks.prefix)
    locks.redis.zincrby(index, -3_700_000, lock_keys(locks.prefix, "order:0").lock)
    run_all(["order:1"])
    assert locks.redis.zcard(index) == 1


def test_a_call_that_waits_longer_than_records_last_goes_on_waiting(locks):
    locks.configure(RECORDS_FOR=60)
    assert task_runs.announce("lottery", "waiting", 3600, using="default") == ""
    assert locks.redis.ttl(lock_keys(locks.prefix, "lottery").runs) <= 3600
    task_runs.note_skip("lottery", "busy", using="default")
    assert 3500 < locks.redis.ttl(lock_keys(locks.prefix, "lottery").runs) <= 3600


def test_what_is_not_ours_in_the_index_spoils_no_run(locks):
    locks.configure(RECORDS=1)
    index = ran_index_key(locks.prefix)
    locks.redis.zadd(index, {b"\xff": 0, f"{locks.prefix}:fence": 1, "other:{x}:lock": 2})
    run_all(["nightly", "hourly"])
    assert locks.redis.zcard(index) == 1
    assert locks.redis.exists(f"{locks.prefix}:fence")


@pytest.mark.parametrize(
    "setting",
    [{"RECORDS": value} for value in (0, -1, True, 2.5, "10", 10**9)]
    + [{"RECORDS_FOR": value} for value in (0, 59, None, "30d", True)],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(setting, locks):
    locks.configure(**setting)
    (name,) = setting
    with pytest.raises(ImproperlyConfigured, match=rf"REDISLOCK\['default'\]\['{name}'\] must be"):
        backends["default"]


def test_the_timeline_is_as_long_as_the_settings_say(locks):
    locks.configure(TIMELINE=12)
    for _ in range(15):
        with distributed_lock("lottery") as lease:
            lease.renew()
    fences = [past.fence for past in held.detail("lottery").past]
    assert len(fences) == 12
    locks.configure(TIMELINE=10)
    assert [past.fence for past in held.detail("lottery").past] == fences[2:]
    with pytest.raises(LockLost), distributed_lock("lottery") as lease:
        held.force_release("lottery", lease.id)
    assert locks.redis.llen(lock_keys(locks.prefix, "lottery").past) == 10


@pytest.mark.waits
def test_a_lease_knows_for_how_long_it_was_queued(locks):
    def take_and_look():
        with distributed_lock("lottery", wait=HUNG) as lease:
            lease.renew()  # So that it is noted.
            return held.get("lottery")

    with distributed_lock("lottery"):
        waiting = in_thread(take_and_look)
        wait_until(lambda: len(held.detail("lottery").waiters) == 1)
        time.sleep(1.1)  # What is measured.
    lock = waiting.result(HUNG)
    assert 1.0 <= lock.owner.waited < HUNG
    assert lock.as_dict()["owner"]["waited"] == lock.owner.waited
    (past,) = [one for one in held.detail("lottery").past if one.id == lock.id]
    assert past.owner.waited == past.as_dict()["owner"]["waited"] == lock.owner.waited
    shown, waited = locks_command("show", "lottery").out, re.escape(duration(lock.owner.waited))
    assert re.search(r"(?m)^  TAKEN +WAITED +HELD FOR ", shown)
    assert re.search(rf"(?m)^  .* ago +{waited} .*{lock.id}", shown)


@everywhere
def test_announced_calls_are_listed_until_they_are_forgotten(place):
    names = {f"order:{pk}" for pk in range(9)}
    for name in names:
        task_runs.announce(name, f"id of {name}", 60, task="shop.sync", using="default")
    task_runs.retract("order:0", "id of order:0", using="default")
    found = task_runs.announced(using="default")
    assert not found.partial
    assert not found.silent
    assert {(name, calls.queued, calls.queued_task) for name, calls in found.locks} == {
        (name, f"id of {name}", "shop.sync") for name in names - {"order:0"}
    }
    for name, calls in found.locks:
        task_runs.forget_announced(name, calls, using="default")
    assert task_runs.announced(using="default").locks == []
