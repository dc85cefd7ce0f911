"""@single_instance_task without a worker: eager mode, direct calls, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import warnings
from contextlib import contextmanager, nullcontext, suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from itertools import count
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import markcoroutinefunction
from celery import Celery, Task, chain, chord, group, shared_task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.signals import task_prerun
from django.contrib.auth.models import Group
from kombu.serialization import dumps, loads

from django_redislock import (
    InvalidLockName,
    Limit,
    LockLost,
    LockMisuse,
    LockTimeout,
    distributed_lock,
    held,
    signals,
    single_instance,
    take_up,
)
from django_redislock.celery import (
    SingleInstance,
    SingleInstanceTask,
    current_lease,
    single_instance_task,
)
from django_redislock.celery.options import OPTIONS
from django_redislock.holder import Activity, busy_with, current_activity
from django_redislock.humanize import duration
from tests.support.calls import counted_calls
from tests.support.celery_app import EAGER, celery_app, current
from tests.support.processes import say

_names = count(1)


@pytest.fixture(autouse=True)
def app():
    """An application in eager mode. The shared tasks of a test end with it."""
    with celery_app(**EAGER) as app:
        yield app


# Of the package, in an eager run under a free lock; apply() is one of them, not in a worker.
MOST_CALLS = 90


class Colour(str, Enum):  # noqa: UP042 - a StrEnum shows its value
    """JSON makes a string of it."""

    RED = "red"


class Point(NamedTuple):
    """JSON makes a list of it."""

    x: int
    y: int


def make(function=None, /, *args, **options):
    """A single-instance task with a name of its own; its body returns the lock's name."""

    def body(*args, **kwargs):
        lease = current_lease()
        return lease.name

    function = function or body
    function.__name__ = "body"  # Celery cannot make a task of "<lambda>".
    options.setdefault("name", f"task-{next(_names)}")
    return single_instance_task(*args, **options)(function)


def running(task, how):
    """How to run a task and have its result."""
    return {
        "direct": task,
        "eager": lambda *args, **kwargs: task.delay(*args, **kwargs).get(),
        "apply": lambda *args, **kwargs: task.apply(args, kwargs).get(),
    }[how]


class TestKey:
    @pytest.mark.parametrize("how", ["direct", "eager", "apply"])
    def test_by_default_it_is_the_full_name_of_the_task(self, redislock, how):
        task = make(name=f"lottery.tasks.{how}")
        assert running(task, how)() == f"lottery.tasks.{how}"

    @pytest.mark.parametrize("how", ["direct", "eager", "apply"])
    def test_it_is_formatted_from_arguments_with_their_defaults(self, redislock, how):
        def draw(draw_id, country="nl"):
            return current_lease().name

        task = make(draw, key="lottery:{country}:{draw_id}")
        assert running(task, how)(7) == "lottery:nl:7"
        assert running(task, how)(country="be", draw_id=8) == "lottery:be:8"

    def test_it_may_name_what_arrives_in_kwargs_and_parts_of_an_argument(self, redislock):
        def draw(place, **extra):
            return current_lease().name

        task = make(draw, key="{place[city]}:{year}")
        assert task.delay({"city": "Utrecht"}, year=2030).get() == "Utrecht:2030"

    def test_a_function_with_a_default_is_given_what_arrives_in_kwargs(self, redislock):
        def draw(city, **extra):
            return current_lease().name

        task = make(draw, key=lambda city, year="2029", extra="": f"{city}:{year}{extra}")
        assert task.delay("Utrecht", year="2030", month="5").get() == "Utrecht:2030"
        assert task.delay("Utrecht").get() == task(city="Utrecht") == "Utrecht:2029"

    def test_it_may_be_a_function_of_the_arguments(self, redislock):
        task = make(key=lambda draw_id, **rest: f"lottery:{draw_id % 10}")
        assert task.delay(127, other=1).get() == "lottery:7"

    @pytest.mark.parametrize(
        "key",
        [
            lambda draw_id, country: f"{country}:{draw_id}",
            lambda country, draw_id: f"{country}:{draw_id}",
            lambda draw_id, country, prefix="": f"{prefix}{country}:{draw_id}",
            lambda number, place, limit: f"{place}:{number}",
            lambda draw_id, **rest: f"{rest['country']}:{draw_id}",
            lambda *args, **rest: f"{args[1]}:{args[0]}",
        ],
        ids=["by name", "in another order", "with a default", "by place", "the rest", "all"],
    )
    def test_a_function_is_given_them_with_their_defaults_however_the_task_is_called(
        self, redislock, key
    ):
        def draw(draw_id, country="nl", limit=5):
            return current_lease().name

        task = make(draw, key=key)
        assert [task(7), task.delay(draw_id=7).get()] == ["nl:7"] * 2
        assert [task(7, "be"), task.delay(country="be", draw_id=7).get()] == ["be:7"] * 2

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            (lambda draw_id, **rest: f"{draw_id}:{rest['user']}:{rest.get('year')}", "7:ann:2030"),
            (lambda **every: f"{sorted(every)}", "['draw_id', 'user', 'year']"),
            (lambda draw_id, user, *, year: f"{draw_id}:{user}:{year}", "7:ann:2030"),
            (lambda draw_id, year: f"{draw_id}:{year}", "7:2030"),
            (lambda who, number, **rest: f"{number}:{who}:{rest['year']}", "7:ann:2030"),
            (lambda *args, **rest: f"{args}:{rest}", "('ann', 7):{'year': '2030'}"),
        ],
    )
    def test_a_function_is_given_the_rest_too_of_a_task_that_takes_any(self, redislock, key, name):
        def draw(user, draw_id=7, **others):
            return current_lease().name

        task = make(draw, key=key)
        assert task("ann", year="2030") == task.delay(user="ann", year="2030").get() == name

    @pytest.mark.parametrize(
        ("key", "passes"),
        [
            (lambda draw_id, year: "", lambda user, draw_id: None),
            (lambda draw_id, **rest: "", lambda user, draw_id, *more: None),
            (lambda **rest: "", lambda draw_id, *more: None),
            (lambda number: "", lambda user, draw_id, **others: None),
            (lambda number, *, year: "", lambda user, draw_id, *more, **others: None),
        ],
    )
    def test_a_function_that_fails_at_every_call_is_refused_at_import(self, key, passes):
        with pytest.raises(InvalidLockName, match="can be given neither the arguments that"):
            make(passes, key=key)

    @pytest.mark.parametrize("key", ["lottery:{draw_id}", lambda draw_id: f"lottery:{draw_id}"])
    def test_the_task_itself_is_no_argument(self, redislock, key):
        def draw(self, draw_id):
            return current_lease().name

        assert make(draw, key=key, bind=True).delay(7).get() == "lottery:7"

    def test_two_keys_are_two_locks(self, redislock):
        def draw(draw_id):
            return draw_id if draw_id == 2 else task(2)

        task = make(draw, key="lottery:{draw_id}")
        assert task.delay(1).get() == 2

    def test_one_that_looks_like_that_of_a_permit_is_refused_with_a_limit(self, redislock):
        task = make(lambda draw_id: draw_id, key="{draw_id}", limit=10)
        with pytest.raises(InvalidLockName, match="ends in # and a number"):
            task("lottery#1")
        assert task("x" * 200) == "x" * 200

    @pytest.mark.parametrize(
        "value",
        [
            *((1, 2), [1, (2, 3)], Point(1, 2), {1: 3, None: 4, 2.5: 6}, Colour.RED),
            *([Colour.RED], {"of": Colour.RED, "at": [(1,)]}, UUID(int=7), Decimal("1.10"), 1e22),
            *(date(2030, 1, 2), datetime(2030, 1, 2, 3, tzinfo=ZoneInfo("Europe/Paris")), b"\xff"),
            *(
                [datetime(2030, 1, 2, 3, tzinfo=ZoneInfo("Europe/Paris"))],
                [UUID(int=7)],
                True,
                None,
            ),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("key", ["lottery:{what}", lambda what: f"lottery:{what}"])
    def test_it_is_the_same_however_an_argument_has_come(self, redislock, key, value):
        if callable(key) and isinstance(value, list) and isinstance(value[0], datetime):
            pytest.skip("a function sees the zone itself")
        task = make(lambda what: None, key=key)
        content_type, encoding, data = dumps([value], "json")
        (delivered,) = loads(data, content_type, encoding, accept=["application/json"])
        assert task.lock_name((value,), {}) == task.lock_name((delivered,), {})

    def test_what_is_equal_is_one_key(self, redislock):
        task = make(lambda what: None, key="lottery:{what}")
        for one, same in (({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"nl", "be"}, {"be", "nl"})):
            assert task.lock_name((one,), {}) == task.lock_name((same,), {})
        assert task.lock_name(({"nl", "be"},), {}) == "lottery:['be', 'nl']"

    @pytest.mark.parametrize("key", ["order:{order.pk}", lambda order: f"order:{order.pk}"])
    @pytest.mark.parametrize("optional", [False, True])
    def test_a_model_of_pydantic_is_one_in_the_key_too(self, redislock, key, optional):
        pydantic = pytest.importorskip("pydantic")
        Order = pydantic.create_model("Order", pk=int)  # noqa: N806

        def pay(order):
            assert order.pk == 7
            return current_lease().name

        pay.__annotations__["order"] = Order | None if optional else Order
        task = make(pay, key=key, pydantic=True)
        assert task(Order(pk=7)) == task({"pk": 7}) == "order:7"
        assert task.delay({"pk": 7}).get() == "order:7"

    def test_a_validator_is_told_what_celery_tells_it(self, redislock):
        pydantic = pytest.importorskip("pydantic")

        class Order(pydantic.BaseModel):
            pk: int

            @pydantic.field_validator("pk", mode="before")
            @classmethod
            def of_shop(cls, pk: Any, info: Any) -> Any:
                assert info.context["celery_app"].tasks[info.context["celery_task_name"]]
                return info.context["first"] + pk

        def pay(order):
            return current_lease().name

        pay.__annotations__["order"] = Order
        how = {"pydantic": True, "pydantic_context": {"first": 1000}}
        for strict, is_refused in ((False, False), (True, True)):
            task = make(pay, key="order:{order.pk}", pydantic_strict=strict, **how)
            assert task({"pk": 7}) == "order:1007"
            refused = pytest.raises(InvalidLockName, match="valid integer")
            with refused if is_refused else nullcontext():
                assert task({"pk": 7.0}) == "order:1007"

    @pytest.mark.parametrize(
        "key",
        ["{self.name}:{draw_id}", lambda self, draw_id: "", lambda self: f"{self.name}"],
        ids=["format", "function of both", "function"],
    )
    def test_the_task_in_it_is_refused_at_import(self, key):
        def draw(self, draw_id): ...

        with pytest.raises(InvalidLockName, match="'self', which is the task itself"):
            make(draw, key=key, bind=True)

    def test_an_address_in_memory_is_no_key(self, redislock):
        def draw(what): ...

        with pytest.raises(InvalidLockName, match="differs from process to process"):
            make(draw, key="lottery:{what}")(object())


class TestLease:
    def test_it_is_there_within_the_body_and_nowhere_else(self, redislock):
        def draw(self):
            lease = current_lease()
            return lease is self.lease, lease is not None and lease.held

        task = make(draw, bind=True)
        assert task.delay().get() == (True, True)
        assert current_lease() is None
        assert task.lease is None

    def test_its_owner_is_the_run(self, redislock):
        task = make(lambda: current_lease().owner)
        owner = task.apply(task_id="the-id").get()
        assert (owner.task, owner.task_id) == (task.name, "the-id")
        assert task().task_id == ""

    @pytest.mark.parametrize("ttl", [7, 7.0, timedelta(seconds=7)])
    def test_the_ttl_may_stand_first(self, redislock, ttl):
        task = make(lambda: current_lease().ttl, ttl)
        assert task.delay().get() == 7.0

    def test_the_lock_is_free_after_a_success_and_after_a_failure(self, redislock):
        task = make(lambda divisor: 1 / divisor, key="division")
        task.delay(1).get()
        redislock.assert_not_locked("division")
        with pytest.raises(ZeroDivisionError):
            task.delay(0).get()
        redislock.assert_not_locked("division")


class TestConflict:
    @pytest.mark.proves("P7")
    @pytest.mark.parametrize("how", ["direct", "eager", "apply"])
    def test_a_skipped_run_returns_a_marked_value(self, redislock, how):
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"):
            result = running(task, how)()
        assert result == {
            "skipped": "busy",
            "lock": "lottery",
            "holder": "another-host:1 simulated",
        }

    def test_a_skip_is_logged_and_signalled(self, redislock, caplog):
        seen = []

        def receiver(**what):
            seen.append(what)

        signals.task_skipped.connect(receiver)
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"):
            result = task.apply(task_id="the-id").get()
        signals.task_skipped.disconnect(receiver)

        (record,) = [one for one in caplog.records if one.name == "django_redislock.celery"]
        assert record.levelno == logging.WARNING
        assert "lottery" in record.message
        assert "another-host:1" in record.message
        assert [(one["sender"].name, one["result"], one["task_id"]) for one in seen] == [
            (task.name, result, "the-id")
        ]

    @pytest.mark.parametrize(
        ("raising", "outcome"),
        [
            (None, "success"),
            (Retry(), "retry"),
            (Ignore(), "ignored"),
            (Reject(), "rejected"),
            (SoftTimeLimitExceeded(), "failure"),
        ],
    )
    def test_how_a_run_ended_is_told(self, redislock, raising, outcome):
        def body(number):
            if raising:
                raise raising

        told = []

        def hear(**news):
            told.append(news)

        task = make(body, key="lottery:{number}")
        signals.run_ended.connect(hear)
        try:
            with suppress(type(raising) if raising else ZeroDivisionError):
                task.apply((7,), task_id="the-id").get()
        finally:
            signals.run_ended.disconnect(hear)
        (news,) = told
        assert (news["sender"].name, news["job"]) == (task.name, task.name)
        assert (news["name"], news["template"]) == ("lottery:7", "lottery:{number}")
        assert (news["task_id"], news["outcome"]) == ("the-id", outcome)

    @pytest.mark.parametrize("key", [None, lambda number: f"of {number}"])
    def test_the_template_of_a_lock_that_no_format_names_is_the_task(self, redislock, key):
        def body(number):
            lease = current_lease()
            return lease.template

        task = make(body, key=key)
        assert task(7) == task.name

    @pytest.mark.parametrize("how", ["direct", "eager", "apply"])
    def test_raise_raises_lock_timeout(self, redislock, how):
        task = make(key="lottery", on_conflict="raise")
        with (
            redislock.simulate_held_by_other("lottery"),
            pytest.raises(LockTimeout, match="another-host:1") as raised,
        ):
            running(task, how)()
        assert raised.value.name == "lottery"

    def test_autoretry_may_act_on_it(self, redislock):
        task = make(
            key="lottery",
            on_conflict="raise",
            autoretry_for=(LockTimeout,),
            retry_kwargs={"max_retries": 2, "countdown": 0},
        )
        tries = []
        signals.lock_timed_out.connect(receiver := lambda **_: tries.append(1), weak=False)
        with redislock.simulate_held_by_other("lottery"), pytest.raises(LockTimeout):
            task.delay().get()
        signals.lock_timed_out.disconnect(receiver)
        assert len(tries) == 3

    def test_an_item_whose_wait_has_run_out_says_why_it_did_not_come_back(self, redislock):
        task = make(key="lottery", on_conflict="retry", conflict_deadline=0.05)
        with redislock.simulate_held_by_other("lottery"):
            (skipped,) = task.map([1]).apply().get()
            directly = task()
        assert skipped["skipped"] == "busy"
        assert skipped["reason"] == "an item of celery.map cannot go back to the broker"
        assert "reason" not in directly

    def test_a_task_that_calls_itself_is_told_so_if_it_would_wait(self, redislock):
        def draw():
            task()

        task = make(draw, on_conflict="wait", wait=60)
        with pytest.raises(LockMisuse, match="holds it already"):
            task.delay().get()

    def test_a_task_that_calls_itself_is_skipped_as_any_other(self, redislock):
        def draw():
            return task()

        task = make(draw)
        assert task.delay().get()["skipped"] == "busy"

    def test_the_log_shows_no_id_of_a_direct_call_that_is_skipped(self, redislock, caplog):
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"):
            task()
            sent = task.delay()
        logged = [message for message in caplog.messages if message.startswith("Skipped")]
        assert logged[0].startswith(f"Skipped {task.name}: lock 'lottery' is busy")
        assert logged[1].startswith(f"Skipped {task.name}[{sent.id}]: lock 'lottery' is busy")

    def test_a_lock_of_the_same_name_excludes_the_task(self, redislock):
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"):
            assert task.delay().get()["skipped"] == "busy"
        with distributed_lock("something else"):
            assert task.delay().get() == "lottery"


class TestLoss:
    """The lease is lost while the body runs."""

    def test_the_task_fails_at_the_end_of_its_body(self, redislock):
        ended = []

        def draw():
            redislock.simulate_lost("lottery")
            ended.append(current_lease() is not None)

        with pytest.raises(LockLost):
            make(draw, key="lottery").delay().get()
        assert ended == [True]

    @pytest.mark.parametrize("look", ["current_lease", "self.lease", "ensure_held"])
    def test_with_abort_on_lost_the_body_ends_at_its_next_look(self, redislock, look):
        ended = []

        def draw(self):
            lease = self.lease
            redislock.simulate_lost("lottery", "taken")
            {
                "current_lease": current_lease,
                "self.lease": lambda: self.lease,
                "ensure_held": lease.ensure_held,
            }[look]()
            ended.append(True)

        with pytest.raises(LockLost, match="another owner"):
            make(draw, key="lottery", bind=True, abort_on_lost=True).delay().get()
        assert ended == []


class TestRecords:
    """What became of the runs under each lock."""

    def test_the_last_success_failure_and_skip_are_kept(self, redislock):
        task = make(lambda divisor: 1 / divisor, key="division")
        task.apply((1,), task_id="success").get()
        with pytest.raises(ZeroDivisionError):
            task.apply((0,), task_id="failure").get()
        with redislock.simulate_held_by_other("division"):
            task.apply((1,), task_id="skip").get()
            task.apply((1,), task_id="last skip").get()
        (record,) = held.records()
        assert (record.name, record.alias, record.skips) == ("division", "default", 2)
        runs = (record.last_success, record.last_failure, record.last_skip)
        assert [run and run.owner.task_id for run in runs] == ["success", "failure", "last skip"]
        assert (record.last_skip.why, record.last_skip.lasted) == ("busy", None)

    def test_a_success_ends_the_count_of_skips(self, redislock):
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"):
            task.delay()
        task.delay()
        record = held.record("lottery")
        assert record.skips == 0

    def test_a_lock_of_no_task_has_no_record(self, redislock):
        with distributed_lock("lottery"):
            pass
        assert held.record("lottery") is None
        assert held.records() == []


async def draw_nothing(): ...


async def draw_one_by_one():
    yield 1


def draw_in_turn():
    yield 1


class TestUnstarted:
    """A body that returns work which nobody has begun has failed: the lock would be over."""

    @pytest.mark.parametrize(
        ("make_result", "what"),
        [
            (draw_nothing, "coroutine"),
            (lambda: (number for number in [1]), "generator"),
            (draw_one_by_one, "async generator"),
        ],
        ids=["coroutine", "generator", "async generator"],
    )
    @pytest.mark.parametrize("how", ["direct", "eager"])
    def test_it_is_no_success(self, redislock, make_result, what, how):
        def draw():
            return make_result()

        task = make(draw, key="lottery", once=3600, name="draw")
        for _ in "ab":  # The second time too: `once` has not marked it as done.
            with pytest.raises(TypeError, match=f"draw.* has returned, but its {what} would run"):
                running(task, how)()
        record = held.record("lottery")
        assert record.last_success is None
        assert record.last_failure is not None

    @pytest.mark.django_db(transaction=True)
    def test_what_it_has_written_is_rolled_back(self, redislock):
        def draw():
            Group.objects.create(name="drawn")
            return draw_nothing()

        with pytest.raises(TypeError, match="its coroutine would run"):
            make(draw, key="lottery", atomic=True).delay().get()
        assert not Group.objects.exists()


class TestAfterASuccess:
    def test_min_hold_keeps_the_lock(self, redislock):
        task = make(key="lottery", min_hold=60)
        assert task.delay().get() == "lottery"
        assert task.delay().get()["skipped"] == "cooling"
        redislock.assert_locked("lottery")

    def test_once_makes_the_name_done(self, redislock):
        task = make(key="lottery", once=timedelta(days=7))
        assert task.delay().get() == "lottery"
        assert task.delay().get()["skipped"] == "done"
        redislock.assert_not_locked("lottery")

    @pytest.mark.parametrize(
        ("options", "skipped", "says"),
        [
            ({"min_hold": 60}, "cooling", "cooling, taken by"),
            ({"min_hold": 60, "on_conflict": "wait", "wait": 0.1}, "cooling", "cooling, taken by"),
            ({"min_hold": 60, "on_conflict": "retry"}, "cooling", "cooling, taken by"),
            ({"min_hold": 60, "limit": 2}, "cooling", "cooling, taken by"),
            ({"once": 60}, "done", "done, by"),
        ],
        ids=["cooling", "wait", "retry", "limit", "done"],
    )
    def test_a_skip_after_it_says_whose_it_was_and_when_and_alarms_nobody(
        self, redislock, caplog, options, skipped, says
    ):
        caplog.set_level(logging.INFO, "django_redislock.celery")
        task = make(key="lottery", **options)
        first = [task.delay() for _ in range(options.get("limit", 1))]
        redislock.advance(4)
        result = task.delay().get()
        by, ago = result["by"], result["ago"]
        left = {"expires_in": pytest.approx(60 - ago, abs=0.1)} if skipped == "cooling" else {}
        assert result == {"skipped": skipped, "lock": "lottery", "by": by, "ago": ago, **left}
        assert by.rpartition(" ")[2] in {one.id for one in first}
        assert 4 <= ago < 30
        (logged,) = [one for one in caplog.records if one.message.startswith("Skipped")]
        assert logged.levelno == logging.INFO
        assert f"lock 'lottery' is {says} {by}, {duration(ago)} ago" in logged.message
        record = held.record("lottery")
        assert (record.last_skip.why, record.skips) == (skipped, 1)

    def test_a_function_is_told_whether_anybody_holds_it(self, redislock):
        task = make(
            key="lottery", min_hold=60, on_conflict=lambda found: (found.cooling, found.holder)
        )
        with redislock.simulate_held_by_other("lottery"):
            assert task.delay().get() == (False, "another-host:1 simulated")
        task.apply(task_id="first").get()
        cooling, holder = task.delay().get()
        assert (cooling, holder.rpartition(" ")[2]) == (True, "first")

    @pytest.mark.parametrize("options", [{"min_hold": 60}, {"once": 60}])
    def test_a_failure_leaves_it_free(self, redislock, options):
        results = iter([ValueError("first"), "second"])

        def draw():
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

        task = make(draw, **options)
        with pytest.raises(ValueError, match="first"):
            task.delay().get()
        assert task.delay().get() == "second"

    @pytest.mark.parametrize("options", [{"min_hold": 60}, {"once": 60}])
    def test_a_run_that_published_its_retry_is_no_success_although_it_ends_well(
        self, redislock, options
    ):
        def draw(self, *, again):
            if again:
                self.retry(throw=False)
            return "drawn" if not again else "asked again"

        task = make(draw, key="lottery", bind=True, **options)
        assert task.delay(again=True).get() == "asked again"
        redislock.assert_not_locked("lottery")
        assert task.delay(again=False).get() == "drawn"
        assert task.delay(again=False).get()["skipped"]

    def test_a_retry_that_cannot_be_published_changes_nothing(self, redislock):
        def draw(self):
            with suppress(Retry):
                self.retry()

        task = make(draw, key="lottery", bind=True, min_hold=60)
        task()  # Called directly, so there is no message to publish again.
        redislock.assert_locked("lottery")

    def test_a_retry_is_no_success(self, redislock):
        def draw(self):
            if self.request.retries < 2:
                raise self.retry(countdown=0)
            return self.request.retries

        task = make(draw, key="lottery", min_hold=60, bind=True)
        assert task.delay().get() == 2
        redislock.assert_locked("lottery")


class TestComposition:
    def test_options_of_celery_pass_through(self, redislock):
        task = make(rate_limit="3/m", acks_late=True, max_retries=7, time_limit=60)
        assert (task.rate_limit, task.acks_late, task.max_retries) == ("3/m", True, 7)

    def test_arguments_are_checked_before_a_task_is_published(self, app):
        app.conf.task_always_eager = False

        def draw(self, draw_id): ...

        with pytest.raises(TypeError, match="draw_id"):
            make(draw, bind=True).delay()

    def test_retry_within_the_body_runs_again(self, redislock):
        def draw(self):
            if self.request.retries < 2:
                raise self.retry(countdown=0)
            return self.request.retries

        assert make(draw, bind=True).delay().get() == 2

    def test_a_decorator_below_may_run_a_coroutine_function(self, redislock):
        def synchronous(function):
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return asyncio.run(function(*args, **kwargs))

            return run

        @synchronous
        async def draw(country: str) -> str:
            lease = held.get(f"lottery:{country}")
            return lease.name if lease else ""

        assert make(draw, key="lottery:{country}").delay("nl").get() == "lottery:nl"

    @pytest.mark.parametrize("key", ["lottery:{country}", lambda country: f"lottery:{country}"])
    def test_a_decorator_below_may_give_the_function_more_arguments(self, redislock, app, key):
        def with_database(function):
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return function("database", *args, **kwargs)

            signature = inspect.signature(function)
            passed = list(signature.parameters.values())[1:]
            run.__signature__ = signature.replace(parameters=passed)
            return run

        @with_database
        def draw(database: str, country: str) -> tuple[str, str]:
            return database, country

        task = make(draw, key=key)
        for how in ("direct", "eager", "apply"):
            assert tuple(running(task, how)("nl")) == ("database", "nl")
        with redislock.simulate_held_by_other("lottery:nl"):
            assert not task("nl")
        with pytest.raises(TypeError, match="country"):
            task.apply_async(())

    @pytest.mark.parametrize("name", ["task", "self", "args", "kwargs", "body", "function"])
    def test_an_argument_may_have_any_name(self, redislock, name):
        scope = {}
        exec(f"def draw({name}): return {name}", scope)
        task = make(scope["draw"], key=f"lottery:{{{name}}}")
        assert task.apply(kwargs={name: 7}).get() == 7
        assert task.apply_async(kwargs={name: 7}).get() == 7
        assert task.run(**{name: 7}) == 7

    def test_a_base_class_is_combined_with_ours(self, redislock):
        class Greeting(Task):
            greeting = "hello"

            def before_start(self, task_id, args, kwargs):
                greeted.append(self.greeting)

        greeted = []
        task = make(base=Greeting, key="lottery", greeting="hi")
        assert task.delay().get() == "lottery"
        assert greeted == ["hi"]
        assert isinstance(task, Greeting)
        assert isinstance(task, SingleInstanceTask)

    def test_a_base_class_may_take_the_options_of_a_call_by_name_only(self, redislock):
        class Counting(Task):
            def apply_async(self, args=None, kwargs=None, **options):
                counted.append(options["task_id"])
                return super().apply_async(args, kwargs, **options)

        counted = []
        task = make(base=Counting, key="lottery")
        assert task.apply_async(task_id="id-1").get() == "lottery"
        assert counted == ["id-1"]

    def test_so_is_the_class_that_an_app_has_for_its_tasks(self, redislock):
        class Tenant(Task):
            tenant = "first"

        task = make(key="lottery")
        with Celery("other", task_cls=Tenant, set_as_current=False) as other:
            assert other.tasks[task.name].tenant == "first"
            assert not hasattr(task, "tenant")

    def test_delay_on_commit_works_in_a_django_project(
        self, redislock, db, django_capture_on_commit_callbacks
    ):
        ran = []
        task = make(lambda: ran.append(1))
        with django_capture_on_commit_callbacks(execute=True):
            task.delay_on_commit()
            assert ran == []
        assert ran == [1]

    def test_app_task_takes_our_class(self, redislock, app):
        @app.task(base=SingleInstanceTask, single_instance={"key": "lottery:{draw_id}"})
        def draw(draw_id: int) -> str:
            return current_lease().name

        assert draw.delay(3).get() == "lottery:3"

    def test_an_app_may_have_our_class_for_all_its_tasks_but_those_of_celery(self, redislock):
        # Without a key: shared tasks of other tests become tasks of this app, too.
        class OfApp(SingleInstanceTask):
            single_instance = {"unique_queued": True}

        with Celery("other", task_cls=OfApp, set_as_current=False) as other, current(other):
            other.conf.update(EAGER)

            @other.task(name="bill")
            def bill(account: int) -> str:
                return current_lease().name

            with distributed_lock("celery.map"), distributed_lock("celery.chunks"):
                assert bill.map([1, 2]).delay().get() == ["bill", "bill"]
            own = [task for name, task in other.tasks.items() if name.startswith("celery.")]
            assert own
            assert {one.single_instance_options for one in own} == {SingleInstance()}

    def test_a_task_may_be_a_class(self, redislock, app):
        class Draw(SingleInstanceTask):
            name = "draw"
            single_instance = {"key": "lottery:{draw_id}"}

            def run(self, draw_id):
                return self.lease.name

        class Redraw(Draw):
            name = "redraw"

            def run(self, draw_id):
                return super().run(draw_id) + ", again"

        assert app.register_task(Draw()).delay(3).get() == "lottery:3"
        assert app.register_task(Redraw()).delay(3).get() == "lottery:3, again"

    def test_a_body_that_is_inherited_is_locked_too(self, redislock, app):
        class Body:
            def run(self, draw_id):
                lease = current_lease()
                return lease.name if lease else "not locked"

        class Draw(Body, SingleInstanceTask):
            name = "draw"
            single_instance = {"key": "lottery:{draw_id}"}

        assert app.register_task(Draw()).delay(3).get() == "lottery:3"

    def test_a_subclass_may_change_the_options_alone(self, redislock, app):
        class Draw(SingleInstanceTask):
            name = "draw"
            single_instance = {"key": "lottery:{draw_id}"}

            def run(self, draw_id):
                return self.lease.name

        class Bingo(Draw):
            name = "bingo"
            single_instance = {"key": "bingo:{draw_id}"}

        class Again(Bingo):
            name = "again"

        for task, lock in ((Draw, "lottery:3"), (Bingo, "bingo:3"), (Again, "bingo:3")):
            assert app.register_task(task()).delay(3).get() == lock

    @pytest.mark.parametrize("of_ours", [True, False])
    def test_options_of_the_base_count_and_those_of_the_decorator_win_one_by_one(
        self, redislock, app, of_ours
    ):
        class Billing(SingleInstanceTask if of_ours else Task):
            abstract = True
            single_instance = {"key": "account:{account}", "on_conflict": "wait", "wait": 5}

        class Slow(Billing):
            abstract = True
            single_instance = {"ttl": 60}

        def bill(account):
            return current_lease().name

        task = make(bill, base=Slow, min_hold=7)
        assert task.delay(3).get() == "account:3"
        options = task.single_instance_options
        assert (options.ttl, options.min_hold) == (60, 7)
        assert (options.on_conflict, options.wait) == ("wait", 5)
        # What the other policy needed goes with it.
        options = make(bill, base=Slow, on_conflict="skip", ttl=9).single_instance_options
        assert (options.ttl, options.on_conflict, options.wait) == (9, "skip", None)
        assert make(bill, base=Slow, wait=1, ttl=None).single_instance_options.ttl == 60
        with pytest.raises(InvalidLockName, match="'account', which"):
            make(lambda order: None, base=Slow)

    def test_run_called_in_the_body_is_a_run_of_its_own(self, redislock):
        def draw(self, draw_id):
            return [current_lease().name, *(self.run(2) if draw_id == 1 else [])]

        task = make(draw, key="lottery:{draw_id}", bind=True)
        assert task.delay(1).get() == ["lottery:1", "lottery:2"]

    @pytest.mark.parametrize("autoretry_for", [(), (Exception,)])
    def test_a_run_that_the_broker_does_not_take_back_stays_where_it_is(
        self, redislock, app, autoretry_for
    ):
        app.conf.update(
            task_always_eager=False,
            broker_url="redis://127.0.0.1:1/0",
            task_publish_retry=False,
        )
        task = make(key="lottery", on_conflict="retry", acks_late=True, autoretry_for=autoretry_for)
        task.push_request(id="the-id", called_directly=False, args=(), kwargs={})
        try:
            with redislock.simulate_held_by_other("lottery"), pytest.raises(Reject) as rejected:
                task.run()
        finally:
            task.pop_request()
        assert rejected.value.requeue

    @pytest.mark.parametrize("above", ["shared_task", "app.task"])
    def test_a_task_decorator_above_ours_changes_nothing(self, redislock, app, above):
        decorator = shared_task if above == "shared_task" else app.task
        task = make(key="lottery")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Celery 5.7 says that this makes no sense.
            try:
                outer = decorator(name=task.name)(task)
            except TypeError:
                return  # Refused by itself.
        with redislock.simulate_held_by_other("lottery"):
            assert outer.delay().get()["skipped"] == "busy"


def draw(draw_id):
    """A function to decorate."""


async def draw_async():
    """Celery cannot run this one."""


class AsyncDraw:
    """Nor its objects."""

    async def __call__(self):
        """Draw."""


class TestRefusedAtImport:
    """A mistake shows at the line that has it, not when the task first runs."""

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"on_conlict": "skip"}, TypeError, "did you mean 'on_conflict'"),
            ({"timeout": 30}, TypeError, "the lease's length is 'ttl'"),
            ({"unique_on": ["draw_id"]}, TypeError, "name the arguments in 'key'"),
            ({"colour": "red"}, TypeError, "'colour'.*belongs on the class given as base="),
            ({"key": "lottery:{draw}"}, InvalidLockName, "'draw'.*its arguments are: draw_id"),
            ({"key": "lottery:{"}, InvalidLockName, "no format string"),
            ({"limits": [Limit("lottery:{draw}", 2)]}, InvalidLockName, "'draw', which"),
            ({"key": 7}, ValueError, "key must be a format string"),
            (
                {"key": lambda draw_id, country: ""},
                InvalidLockName,
                "nor all of the task's, which are draw_id",
            ),
            ({"key": draw_async}, InvalidLockName, "draw_async.*returns a str"),
            ({"ttl": 0.049}, ValueError, "ttl must be at least 0.05 seconds"),
            ({"ttl": "30"}, ValueError, "ttl must be"),
            ({"max_hold": -1}, ValueError, "max_hold must be"),
            ({"min_hold": float("nan")}, ValueError, "min_hold must be"),
            ({"once": True}, ValueError, "once must be"),
            ({"renew": 1}, ValueError, "renew must be"),
            ({"on_unavailable": "skip"}, ValueError, "on_unavailable must be one of 'raise'"),
            ({"wait": 5}, ValueError, "wait needs on_conflict"),
            ({"conflict_deadline": 5}, ValueError, "conflict_deadline needs on_conflict"),
            ({"queued_ttl": 60}, ValueError, "queued_ttl needs unique_queued=True"),
            ({"limit": 0}, ValueError, "limit must be an integer, 1 to 100"),
            ({"limit": 2, "once": 60}, ValueError, "once and limit exclude each other"),
            ({"queued_ttl": 0}, ValueError, "queued_ttl must be"),
            ({"queued_headers": []}, ValueError, "queued_headers needs unique_queued=True"),
            ({"queued_headers": "_schema"}, ValueError, "queued_headers must be a list"),
            ({"queued_headers": [1]}, ValueError, "queued_headers must be a list"),
            ({"unique_queued": "latest"}, ValueError, 'must be True, "newest" or False'),
            ({"unique_queued": []}, ValueError, 'must be True, "newest" or False'),
            ({"conflict_deadline": -1}, ValueError, "conflict_deadline must be"),
            ({"give_up_after": 0}, ValueError, "give_up_after must be an integer, at least 1"),
            ({"give_up_after": True}, ValueError, "give_up_after must be an integer"),
            (
                {"give_up_after": 3, "acks_late": False},
                ValueError,
                "give_up_after needs acks_late=True",
            ),
            ({"abort_on_lost": "yes"}, ValueError, "abort_on_lost must be"),
            ({"using": ""}, ValueError, "using must be a non-empty string"),
            ({"release_on_commit": True}, TypeError, "the body runs under the lock"),
            ({"on_conflict": "explode"}, ValueError, "on_conflict must be one of 'skip', 'raise'"),
            ({"on_conflict": asyncio.sleep}, TypeError, r"on_conflict cannot be sleep\(\)"),
            ({"key": "gpu#2", "limit": 2}, InvalidLockName, "ends in # and a number"),
        ],
    )
    def test_an_option(self, options, error, message):
        with pytest.raises(error, match=message):
            single_instance_task(**options)(draw)

    def test_but_not_a_deadline_of_runs_that_come_back_as_they_stand_for_others(self):
        waits = {"on_conflict": "wait", "wait": 5, "unique_queued": True, "conflict_deadline": 60}
        assert SingleInstance(**waits).conflict_deadline == 60
        with pytest.raises(ValueError, match="with unique_queued: no other run comes back"):
            SingleInstance(**{**waits, "unique_queued": False})

    def test_an_attribute_that_looks_like_an_option(self, app):
        @app.task(base=SingleInstanceTask, key="lottery:{draw_id}", once=60, lazy=True)
        def draw(draw_id: int) -> None: ...

        with pytest.raises(TypeError, match=r"test_task\.py:\d+ would have no effect") as raised:
            draw.delay(1)
        line = 'Write single_instance={"key": \'lottery:{draw_id}\', "once": 60}.'
        assert line in str(raised.value)

    def test_or_one_of_a_class(self):
        with pytest.raises(TypeError, match="'ttl' of the task Base would have no effect"):

            class Base(SingleInstanceTask):
                abstract = True
                ttl = 60

                def limit(self):
                    """A method of its own is none."""
                    return 3

    def test_single_instance_that_is_no_dictionary(self):
        with pytest.raises(TypeError, match="of Base must be a dictionary of options"):

            class Base(SingleInstanceTask):
                single_instance = "lottery:{draw_id}"

                def run(self, draw_id): ...

    def test_none_is_as_if_an_option_was_not_given(self):
        nothing = dict.fromkeys(OPTIONS)
        assert SingleInstance(**nothing) == SingleInstance()

    def test_the_ttl_given_twice(self):
        with pytest.raises(TypeError, match="ttl twice"):
            single_instance_task(30, ttl=30)

    def test_a_name_by_position(self):
        with pytest.raises(TypeError, match="Write key='lottery' if that is the name of the lock"):
            single_instance_task("lottery")

    @pytest.mark.parametrize("bare", [True, False])
    @pytest.mark.parametrize(
        "made",
        [SingleInstance, staticmethod(draw), classmethod(draw), property(draw)],
        ids=["class", "staticmethod", "classmethod", "property"],
    )
    def test_what_a_worker_cannot_call(self, made, bare):
        with pytest.raises(TypeError, match="makes a task of a function, not of"):
            single_instance_task(made) if bare else single_instance_task(ttl=30)(made)

    @pytest.mark.parametrize("options", [{}, {"ttl": 30, "acks_late": True}])
    def test_the_wrong_order_of_decorators(self, app, options):
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        for task in (shared_task(draw), app.task(draw), make()):
            with pytest.raises(TypeError, match="in the place of @shared_task") as raised:
                single_instance_task(**options)(task)
            assert f"\n    @single_instance_task({given})\n    def " in str(raised.value)

    def test_a_coroutine_function(self):
        with pytest.raises(TypeError, match=r"draw_async\(\) cannot be a task"):
            single_instance_task(draw_async)

    @pytest.mark.parametrize(
        "function",
        [
            draw_one_by_one,
            contextmanager(draw_in_turn),
            markcoroutinefunction(lambda: None),
            functools.partial(draw_async),
            AsyncDraw(),
        ],
        ids=[
            *("async generator", "context manager", "marked as a coroutine function"),
            *("partial of a coroutine function", "object"),
        ],
    )
    def test_a_function_of_which_nothing_would_run(self, function):
        with pytest.raises(TypeError, match=r"\(\) cannot be a task"):
            single_instance_task(function)

    def test_a_class_whose_body_is_one(self):
        with pytest.raises(TypeError, match=r"run\(\) cannot be a task"):

            class Draw(SingleInstanceTask):
                async def run(self): ...


def count_calls_of_a_run():
    task, runs = make(lambda: None), []
    for _ in range(10):
        with counted_calls() as calls:
            task.apply()
        runs.append(calls)
    say(min(runs, key=len))


def test_a_run_is_a_short_one(locks, spawn):
    """In a process of its own: what other tests have left behind makes the way longer."""
    shortest = spawn(count_calls_of_a_run).read()
    assert len(shortest) <= MOST_CALLS, shortest


# --- a lease that the caller hands over -----------------------------------------------------------


def test_a_run_goes_on_with_the_lease_that_its_caller_has_handed_over(locks):
    def body(order):
        lease = current_lease()
        lease.ensure_held(verify=True)
        return lease.fence

    task = make(body, key="order:{order}", on_conflict="raise")
    with distributed_lock("order:7") as lease:
        baton = lease.hand_over()
        with pytest.raises(LockTimeout):
            task.delay(7).get()
        assert task.delay(7, baton=baton).get() > lease.fence
    # Delivered again: it asks as any other run.
    assert task.delay(order=7, baton=baton).get() > lease.fence
    record = held.records()[0]
    assert (record.name, record.last_success is not None) == ("order:7", True)
    assert not distributed_lock("order:7").locked()


@pytest.mark.parametrize("how", ["apply", "group", "chain", "chord"])
def test_a_signature_takes_a_baton_in_eager_mode_too(locks, how):
    task = make(lambda order: order, key="order:{order}", on_conflict="raise")
    after = make(lambda found: found, key="after")
    with distributed_lock("order:7", wait=0) as lease:
        baton = lease.hand_over(within=600)
    ship = task.s(7, baton=baton)
    sent = {
        "apply": ship.apply,
        "group": group(ship).apply_async,
        "chain": chain(ship, after.s()).apply_async,
        "chord": chord([ship], after.s()).apply_async,
    }[how]()
    assert sent.get() == (7 if how in {"apply", "chain"} else [7])
    assert not distributed_lock("order:7").locked()


@pytest.mark.django_db(transaction=True)
def test_a_lease_that_is_handed_to_a_run_which_is_done_ends_at_once(locks):
    task = make(lambda order: "did", key="order:{order}", atomic=True, once="database")
    assert task.delay(7).get() == "did"
    with distributed_lock("order:7", wait=0) as lease:
        baton = lease.hand_over(within=600)
    assert task.delay(7, baton=baton).get()["skipped"] == "done"
    assert not distributed_lock("order:7").locked()


def test_the_id_of_a_call_may_be_a_uuid(locks):
    id_ = UUID(int=7)
    task = make(lambda: current_activity.get().task_id)
    assert task.apply_async(task_id=id_).get() == task.apply(task_id=id_).get() == str(id_)


def test_a_run_goes_on_with_the_permit_of_its_caller_if_both_have_the_same_limit(locks):
    def permit():
        lease = current_lease()
        return lease and lease.permit

    with distributed_lock("gpu", limit=2), distributed_lock("gpu", limit=2) as lease:
        baton = lease.hand_over()
        with pytest.raises(LockMisuse, match="by the same limit"):
            make(permit, key="gpu", limit=3).delay(baton=baton)
        assert make(permit, key="gpu", limit=2).delay(baton=baton).get() == 2


def test_a_baton_of_another_lock_is_refused_where_it_is_passed(locks):
    with distributed_lock("order:8") as lease:
        baton = lease.hand_over()
    with pytest.raises(LockMisuse, match="the baton is of lock 'order:8'"):
        make(lambda order: order, key="order:{order}").delay(7, baton=baton)
    with pytest.raises(ValueError, match="baton must be what"):
        make(lambda: None).delay(baton=f"{baton}x")
    with take_up(baton) as lease:
        assert lease.held


@pytest.mark.parametrize("how", ["direct", "eager", "apply"])
def test_a_call_of_the_class_given_as_base_is_around_the_lock_of_a_skipped_run_too(redislock, how):
    class Counting(Task):
        abstract = True

        def __call__(self, *args, **kwargs):
            calls.append(current_lease())
            return super().__call__(*args, **kwargs)

    calls = []
    task = make(lambda: "did", key="order:7", base=Counting)
    assert running(task, how)() == "did"
    with redislock.simulate_held_by_other("order:7"):
        assert running(task, how)()["skipped"] == "busy"
    assert calls == [None, None]


@pytest.mark.parametrize("how", ["delay", "apply"])
def test_a_task_may_have_an_argument_of_that_name(locks, how):
    takes_any = make(lambda **any_: any_, key="race:{baton}")
    for task, expected in ((make(lambda baton: baton), "tin"), (takes_any, {"baton": "tin"})):
        sent = task.delay(baton="tin") if how == "delay" else task.apply((), {"baton": "tin"})
        assert sent.get() == expected
    assert make(lambda **any_: any_).delay(baton=7, of=8).get() == {"baton": 7, "of": 8}


def test_a_task_that_takes_any_argument_takes_a_baton_too(locks):
    task = make(lambda order, **any_: any_, key="order:{order}", on_conflict="raise")
    with distributed_lock("order:7", wait=0) as lease:
        baton = lease.hand_over(within=600)
    assert task.delay(7, baton=baton, of=8).get() == {"of": 8}
    assert not distributed_lock("order:7").locked()


def test_a_receiver_of_task_prerun_cannot_stop_a_run(caplog):
    """docs/declined.md: so no lock is taken there."""

    def refuse(**_):
        raise LockTimeout("lottery", "web-2:4711", 28.6)

    draws = []

    @shared_task
    def draw(ball: str) -> None:
        draws.append(ball)

    task_prerun.connect(refuse)
    try:
        draw.apply(args=["ball 7"])
    finally:
        task_prerun.disconnect(refuse)
    assert draws == ["ball 7"]
    assert "Lock 'lottery' is busy" in caplog.text


def test_in_a_request_an_eager_task_and_a_job_in_it_keep_the_path_and_their_ids(redislock):
    def owner(name):
        with distributed_lock(name) as lease:
            return lease.owner.path, lease.owner.task, lease.owner.task_id

    with celery_app(**EAGER) as app:

        @app.task(name="outer")
        def outer() -> list[Any]:
            return [owner("before"), inner.apply(task_id="2").get(), job(), owner("after")]

        @app.task(name="inner")
        def inner() -> tuple[str, str, str]:
            return owner("inner")

        @single_instance("job")
        def job() -> tuple[str, str, str]:
            return owner("in the job")

        with busy_with(Activity(path="/draw/")):
            before, of_inner, of_job, after = outer.apply(task_id="1").get()
            assert owner("request") == ("/draw/", "", "")
    assert before == after == ("/draw/", "outer", "1")
    assert of_inner == ("/draw/", "inner", "2")
    assert of_job[::2] == ("/draw/", "1")
    assert of_job[1].endswith("job")
