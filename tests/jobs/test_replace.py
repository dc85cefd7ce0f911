"""on_conflict="replace": the newest call wins, and each older one hears of it at once."""

import asyncio
import threading
import time
from contextlib import suppress

import pytest
from django.contrib.auth.models import Group

from django_redislock import (
    LockLost,
    LockUnavailable,
    Skipped,
    distributed_lock,
    held,
    signals,
    single_instance,
)
from django_redislock.jobs import current_lease
from django_redislock.jobs.replaced import _stand_by
from django_redislock.rules.lease_state import drift
from django_redislock.rules.steps import Answer
from tests.support.hearing import heard
from tests.support.stored import keys_of
from tests.support.waiting import wait_until
from tests.support.ways import blocking_or_not

pytestmark = pytest.mark.usefixtures("locks")


class Calls:
    """Calls of one job in threads, whose bodies say what they meet."""

    def __init__(self, body, *, is_async=False, **options):
        self.told, self.begun, self.results = {}, {}, {}
        self.ended_as, self.threads = [], []

        def search(number):
            lease = current_lease()
            self.begun[number] = lease.fence
            lease.on_lost(lambda lost: self.told.setdefault(number, (time.monotonic(), lost)))
            return body(number, lease)

        async def asearch(number):
            return await asyncio.to_thread(search, number)

        decorated = single_instance("search", on_conflict="replace", **{"ttl": 2, **options})
        job = decorated(asearch if is_async else search)
        self.search = (lambda number: asyncio.run(job(number))) if is_async else job

    def call(self, number):
        def run():
            try:
                self.results[number] = self.search(number)
            except Exception as error:
                self.results[number] = error

        thread = threading.Thread(target=run)
        thread.start()
        self.threads.append(thread)

    def begin(self, number):
        self.call(number)
        wait_until(lambda: number in self.begun)

    def join(self):
        for thread in self.threads:
            thread.join(20)
        return self.results


def await_listening(locks):
    """Return once the run is rung. Before, it would see a newer call when it begins to listen."""
    wait_until(lambda: locks.redis.exists(keys_of(locks, "search").replaced))


def until_lost(lease, longest=10.0):
    until = time.monotonic() + longest
    while time.monotonic() < until:
        lease.ensure_held()
        time.sleep(0.005)


def looks(number, lease):
    if number == 1:
        until_lost(lease)
    return number


def first_under_way(replace_within=10, **options):
    """Calls of which the first has begun, and looks at nothing until the event."""
    ends = threading.Event()

    def body(number, lease):
        if number == 1:
            ends.wait(20)
            calls.ended_as.append(lease.held)
        return number

    calls = Calls(body, replace_within=replace_within, **options)
    calls.begin(1)
    return calls, ends


@blocking_or_not
def test_a_body_that_looks_is_told_at_once_and_the_newest_call_follows_it(locks, is_async):
    calls = Calls(looks, is_async=is_async, replace_within=8)
    calls.begin(1)
    await_listening(locks)
    asked = time.monotonic()
    calls.call(2)
    results = calls.join()
    wait_until(lambda: 1 in calls.told)  # By a thread of its own.
    assert calls.told[1][0] - asked < 1
    assert time.monotonic() - asked < 2
    assert isinstance(results[1], Skipped)
    assert (results[1]["skipped"], results[1]["lock"]) == ("replaced", "search")
    assert calls.told[1][1].lost_reason == "replaced"
    assert results[2] == 2
    assert calls.begun[2] > calls.begun[1]
    record = held.record("search")
    assert record.last_skip.why == "replaced"
    assert record.last_skip.by == str(record.last_success.owner)
    assert (record.last_failure, record.last_unended) == (None, None)
    assert [one.ended for one in held.detail("search").past] == ["replaced", "done"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_parts_is_replaced_unless_one_of_them_has_failed_otherwise(fails):
    def body(number, lease):
        try:
            return looks(number, lease)
        except LockLost as lost:
            raise ExceptionGroup("parts", [lost, ValueError()] if fails else [lost, lost]) from None

    calls = Calls(body, is_async=True, replace_within=8)
    calls.begin(1)
    calls.call(2)
    results = calls.join()
    assert isinstance(results[1], ExceptionGroup if fails else Skipped)
    assert (held.record("search").last_skip is None) == fails


@blocking_or_not
def test_a_replaced_run_that_fails_by_itself_in_its_time_is_a_failure(is_async):
    def body(number, lease):
        with suppress(LockLost):
            return looks(number, lease)
        raise ValueError("its own")

    calls = Calls(body, is_async=is_async, replace_within=8)
    calls.begin(1)
    with heard(signals.run_ended) as told:
        calls.call(2)
        assert isinstance(calls.join()[1], ValueError)
    # Each is told after its release, so by any of the two first.
    assert {one["outcome"] for one in told} == {"failure", "success"}
    record = held.record("search")
    assert record.last_failure.at <= record.last_success.at
    assert (record.last_skip, record.last_unended) == (None, None)
    assert [one.ended for one in held.detail("search").past] == ["failed", "done"]


@blocking_or_not
def test_a_body_that_does_not_look_loses_its_lease_after_its_time_and_not_before(locks, is_async):
    calls, ends = first_under_way(replace_within=1, is_async=is_async)
    await_listening(locks)
    asked = time.monotonic()
    calls.begin(2)
    assert 0.9 < time.monotonic() - asked < 2
    with heard(signals.run_ended) as told:
        wait_until(lambda: 2 in calls.results)
        ends.set()
        results = calls.join()
    assert results[1]["skipped"] == "replaced"
    assert calls.ended_as == [False]
    assert results[2] == 2
    assert [one["outcome"] for one in told][-1] == "lost"
    record = held.record("search")
    assert (record.last_failure, record.last_unended) == (None, None)


def test_a_holder_that_hears_nothing_and_renews_all_the_same_loses_its_lease_too(monkeypatch):
    """Such as one whose thread is missing, or whose connection hangs."""
    monkeypatch.setattr("django_redislock.jobs.replaced._listen", lambda lease, over: None)
    calls = Calls(looks, replace_within=1)
    calls.begin(1)
    calls.begin(2)
    results = calls.join()
    wait_until(lambda: 1 in calls.told)  # By a thread of its own.
    assert calls.told[1][1].lost_reason == "replaced"
    assert results[1]["skipped"] == "replaced"
    assert results[2] == 2


def test_a_body_that_ends_well_within_its_time_is_a_success():
    calls, ends = first_under_way()
    calls.call(2)
    wait_until(lambda: 1 in calls.told)
    assert 2 not in calls.begun  # The lease stays until the body has ended.
    ends.set()
    assert calls.join() == {1: 1, 2: 2}
    assert held.record("search").skips == 0


def test_a_third_call_replaces_the_one_that_waits():
    calls, ends = first_under_way()
    calls.call(2)
    wait_until(lambda: held.get("search").waiters == 1)
    calls.call(3)
    wait_until(lambda: 2 in calls.results)
    assert calls.results[2]["skipped"] == "replaced"
    assert held.get("search").waiters == 1
    ends.set()
    results = calls.join()
    assert (results[1], results[3]) == (1, 3)
    assert sorted(calls.begun) == [1, 3]


def test_a_lock_that_no_such_job_holds_is_not_replaced():
    calls = Calls(looks, replace_within=0.5)
    with distributed_lock("search", ttl=2) as lease:
        calls.call(2)
        result = calls.join()[2]
        assert lease.held
    assert result["skipped"] == "busy"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"once": 60}, "once and"),
        ({"once_per": "day"}, "once_per and"),
        ({"min_hold": 60}, "min_hold and"),
        ({"limit": 2}, "limit and"),
        ({"wait": 5}, "wait needs"),
        ({"on_unavailable": "run"}, "on_unavailable"),
        ({"on_conflict": "skip", "replace_within": 5}, "replace_within needs"),
    ],
)
def test_options_that_would_keep_the_newest_call_out_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        single_instance("search", **{"on_conflict": "replace", **options})


@pytest.mark.django_db(transaction=True)
def test_a_guarded_transaction_of_a_replaced_run_is_rolled_back():
    def body(number, lease):
        if number == 1:
            with lease.atomic():
                Group.objects.create(name="late")
                calls.call(2)
                wait_until(lambda: not lease.held)
        return number

    calls = Calls(body, replace_within=8)
    assert calls.search(1)["skipped"] == "replaced"
    assert calls.join() == {2: 2}
    assert not Group.objects.exists()


def test_the_time_that_is_left_counts_from_when_the_run_asked_for_it(locks):
    lock = distributed_lock("search", ttl=30)
    with lock as lease:
        told = _stand_by(lease, threading.Event())
        next(told)
        with pytest.raises(StopIteration) as end:
            told.send(Answer([b"replaced", b"10000", b""], sent=100.0, now=104.0))
        until, _ = end.value.value
        assert until == 110.0 - drift(10)
        lease.replace(lease.granted_at + 5, "a newer call")
        assert lease.deadline < lease.granted_at + 5
        lease.renew()
        assert lease.deadline < lease.granted_at + 5


@pytest.mark.places("memory", "cluster", "sentinel")
def test_a_run_is_told_at_once_that_a_newer_call_replaces_it_wherever_its_lock_is(place):
    calls = Calls(looks, replace_within=60, ttl=5)
    calls.begin(1)
    calls.call(2)
    results = calls.join()
    assert results[1]["skipped"] == "replaced"
    assert results[2] == 2


@pytest.mark.places("unscripted")
def test_where_the_server_runs_no_scripts_it_is_refused_in_words(place):
    search = single_instance("search", on_conflict="replace", ttl=5)(lambda: None)
    with pytest.raises(LockUnavailable, match="need EVAL, which the server forbids"):
        search()
