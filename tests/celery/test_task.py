"""@single_instance_task without a worker: eager mode, direct calls, and what is refused."""

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
from typing import NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import markcoroutinefunction
from celery import Celery, Task, chain, chord, group, shared_task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
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
from tests.support.calls import counted_calls
from tests.support.celery_app import EAGER, celery_app, current
from tests.support.hearing import heard
from tests.support.processes import say

_names = count(1)

# Of the package, in an eager run under a free lock; apply() is one of them, not in a worker.
MOST_CALLS = 90
IN_PARIS = datetime(2030, 1, 2, 3, tzinfo=ZoneInfo("Europe/Paris"))


class Colour(str, Enum):  # noqa: UP042 - a StrEnum shows its value
    """JSON makes a string of it."""

    RED = "red"


class Point(NamedTuple):
    """JSON makes a list of it."""

    x: int
    y: int


@pytest.fixture(autouse=True)
def app():
    """An application in eager mode. The shared tasks of a test end with it."""
    with celery_app(**EAGER) as app:
        yield app


def lock_of(*args, **kwargs):
    """The body of most tasks: the name of the lock that it holds."""
    lease = current_lease()
    return lease.name if lease else "not locked"


def make(function=lock_of, /, *args, **options):
    """A single-instance task with a name of its own."""

    if function.__name__ in {"lock_of", "<lambda>"}:  # Celery can make no task of "<lambda>".
        function.__name__ = "body"
    options.setdefault("name", f"task-{next(_names)}")
    return single_instance_task(*args, **options)(function)


def ways(task):
    """Each way to run a task and have its result: a direct call, an eager one, and apply()."""
    return [
        task,
        lambda *args, **kwargs: task.delay(*args, **kwargs).get(),
        lambda *args, **kwargs: task.apply(args, kwargs).get(),
    ]


def of(task, *args, **kwargs):
    """The one result that a task has by each way."""
    first, *others = (run(*args, **kwargs) for run in ways(task))
    assert others == [first] * 2
    return first


def call(*args, **kwargs):
    return args, kwargs


def draw(draw_id):
    """A function to decorate."""


def of_number(number, country="nl", limit=5):
    return lock_of()


def of_user(user, number=7, **others):
    return lock_of()


def of_place(place, **extra):
    return lock_of()


def of_itself(self, number):
    return lock_of()


class TestKey:
    def test_by_default_it_is_the_full_name_of_the_task(self, redislock):
        assert of(make(name="lottery.tasks.draw")) == "lottery.tasks.draw"

    @pytest.mark.parametrize(
        "key",
        [
            "{country}:{number}",
            lambda number, country: f"{country}:{number}",
            lambda country, number: f"{country}:{number}",
            lambda number, country, prefix="": f"{prefix}{country}:{number}",
            lambda draw_id, place, limit: f"{place}:{draw_id}",
            lambda number, **rest: f"{rest['country']}:{number}",
            lambda *args, **rest: f"{args[1]}:{args[0]}",
        ],
        ids=["format", "names", "another order", "a default", "places", "the rest", "all"],
    )
    def test_it_is_made_of_the_arguments_with_their_defaults_however_they_are_passed(
        self, redislock, key
    ):
        task = make(of_number, key=key)
        assert of(task, 7) == of(task, number=7) == "nl:7"
        assert of(task, 7, "be") == of(task, country="be", number=7) == "be:7"

    @pytest.mark.parametrize(
        ("key", "name"),
        [
            (lambda number, **rest: f"{number}:{rest['user']}:{rest.get('year')}", "7:ann:2030"),
            (lambda **every: f"{sorted(every)}", "['number', 'user', 'year']"),
            (lambda number, user, *, year: f"{number}:{user}:{year}", "7:ann:2030"),
            (lambda number, year: f"{number}:{year}", "7:2030"),
            (lambda who, draw_id, **rest: f"{draw_id}:{who}:{rest['year']}", "7:ann:2030"),
            (lambda *args, **rest: f"{args}:{rest}", "('ann', 7):{'year': '2030'}"),
        ],
    )
    def test_a_function_is_given_the_rest_too_of_a_task_that_takes_any(self, redislock, key, name):
        task = make(of_user, key=key)
        assert task("ann", year="2030") == task.delay(user="ann", year="2030").get() == name

    @pytest.mark.parametrize(
        ("function", "key", "called", "name"),
        [
            (of_place, "{place[of]}:{year}", call({"of": "Lyon"}, year=2030), "Lyon:2030"),
            (of_place, lambda place, year="2029": place + year, call("Lyon"), "Lyon2029"),
            (of_place, lambda place, year="2029": place + year, call("Lyon", year="1"), "Lyon1"),
            (lock_of, lambda number, **rest: f"{number % 10}", call(127, other=1), "7"),
            (of_itself, "lottery:{number}", call(7), "lottery:7"),
            (of_itself, lambda number: f"lottery:{number}", call(7), "lottery:7"),
        ],
        ids=["parts", "default", "given", "modulo", "bound format", "bound function"],
    )
    def test_it_may_be_any_part_of_what_arrives(self, redislock, function, key, called, name):
        args, kwargs = called
        assert of(make(function, key=key, bind=function is of_itself), *args, **kwargs) == name

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

    @pytest.mark.parametrize(
        "key",
        ["{self.name}:{number}", lambda self, number: "", lambda self: f"{self.name}"],
        ids=["format", "function of both", "function"],
    )
    def test_the_task_in_it_is_refused_at_import(self, key):
        with pytest.raises(InvalidLockName, match="'self', which is the task itself"):
            make(of_itself, key=key, bind=True)

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
            *(date(2030, 1, 2), IN_PARIS, b"\xff", [IN_PARIS], [UUID(int=7)], True, None),
        ],
        ids=str,
    )
    def test_it_is_the_same_however_an_argument_has_come(self, redislock, value):
        content_type, encoding, data = dumps([value], "json")
        (delivered,) = loads(data, content_type, encoding, accept=["application/json"])
        for key in ("lottery:{what}", lambda what: f"lottery:{what}"):
            if callable(key) and value == [IN_PARIS]:
                continue  # A function sees the zone itself.
            task = make(lambda what: None, key=key)
            assert task.lock_name((value,), {}) == task.lock_name((delivered,), {})

    @pytest.mark.parametrize("optional", [False, True])
    def test_a_model_of_pydantic_is_one_in_the_key_too(self, redislock, optional):
        pydantic = pytest.importorskip("pydantic")
        Order = pydantic.create_model("Order", pk=int)  # noqa: N806

        def pay(order):
            assert order.pk == 7
            return lock_of()

        pay.__annotations__["order"] = Order | None if optional else Order
        for key in ("order:{order.pk}", lambda order: f"order:{order.pk}"):
            task = make(pay, key=key, pydantic=True)
            assert task(Order(pk=7)) == of(task, {"pk": 7}) == "order:7"

    def test_a_validator_is_told_what_celery_tells_it(self, redislock):
        pydantic = pytest.importorskip("pydantic")

        class Order(pydantic.BaseModel):
            pk: int

            @pydantic.field_validator("pk", mode="before")
            @classmethod
            def of_shop(cls, pk, info):
                assert info.context["celery_app"].tasks[info.context["celery_task_name"]]
                return info.context["first"] + pk

        def pay(order: Order):
            return lock_of()

        how = {"pydantic": True, "pydantic_context": {"first": 1000}}
        for strict, refused in (
            (False, nullcontext()),
            (True, pytest.raises(InvalidLockName, match="valid integer")),
        ):
            task = make(pay, key="order:{order.pk}", pydantic_strict=strict, **how)
            assert task({"pk": 7}) == "order:1007"
            with refused:
                assert task({"pk": 7.0}) == "order:1007"


class TestLease:
    @pytest.mark.parametrize("ttl", [7, 7.0, timedelta(seconds=7)])
    def test_it_is_there_within_the_body_and_nowhere_else_and_its_owner_is_the_run(
        self, redislock, ttl
    ):
        def body(self):
            lease = current_lease()
            return lease is self.lease, lease.held, lease.ttl, lease.owner

        task = make(body, ttl, bind=True)  # The ttl may stand first.
        *held_as, owner = task.apply(task_id="the-id").get()
        assert held_as == [True, True, 7.0]
        assert (owner.task, owner.task_id) == (task.name, "the-id")
        assert task()[-1].task_id == ""
        assert (current_lease(), task.lease) == (None, None)

    def test_if_it_is_lost_the_task_fails_at_the_end_of_its_body(self, redislock):
        ended = []

        def body():
            redislock.simulate_lost("lottery")
            ended.append(current_lease() is not None)

        with pytest.raises(LockLost):
            make(body, key="lottery").delay().get()
        assert ended == [True]

    @pytest.mark.parametrize("look", ["current_lease", "self.lease", "ensure_held"])
    def test_with_abort_on_lost_the_body_ends_at_its_next_look(self, redislock, look):
        ended = []

        def body(self):
            lease = self.lease
            redislock.simulate_lost("lottery", "taken")
            {
                "current_lease": current_lease,
                "self.lease": lambda: self.lease,
                "ensure_held": lease.ensure_held,
            }[look]()
            ended.append(True)

        with pytest.raises(LockLost, match="another owner"):
            make(body, key="lottery", bind=True, abort_on_lost=True).delay().get()
        assert ended == []


class TestConflict:
    @pytest.mark.proves("P7")
    def test_a_skipped_run_returns_a_marked_value_and_is_logged_and_signalled(
        self, redislock, caplog
    ):
        task = make(key="lottery")
        with redislock.simulate_held_by_other("lottery"), heard(signals.task_skipped) as told:
            result = of(task)
            task.apply(task_id="the-id").get()
        assert result == {
            "skipped": "busy",
            "lock": "lottery",
            "holder": "another-host:1 simulated",
        }
        assert {(one["sender"].name, one["result"]["skipped"]) for one in told} == {
            (task.name, "busy")
        }
        assert told[-1]["task_id"] == "the-id"
        logged = [one for one in caplog.records if one.name == "django_redislock.celery"]
        assert {one.levelno for one in logged} == {logging.WARNING}
        says = "lock 'lottery' is busy, held by another-host:1"
        # A direct call has no id.
        assert logged[0].message.startswith(f"Skipped {task.name}: {says}")
        assert logged[-1].message.startswith(f"Skipped {task.name}[the-id]: {says}")

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

        task = make(body, key="lottery:{number}")
        with (
            heard(signals.run_ended) as told,
            suppress(type(raising) if raising else ZeroDivisionError),
        ):
            task.apply((7,), task_id="the-id").get()
        (news,) = told
        assert (news["sender"].name, news["job"]) == (task.name, task.name)
        assert (news["name"], news["template"]) == ("lottery:7", "lottery:{number}")
        assert (news["task_id"], news["outcome"]) == ("the-id", outcome)

    @pytest.mark.parametrize("key", [None, lambda number: f"of {number}"])
    def test_the_template_of_a_lock_that_no_format_names_is_the_task(self, redislock, key):
        task = make(lambda number: current_lease().template, key=key)
        assert task(7) == task.name

    def test_autoretry_may_act_on_it(self, redislock):
        task = make(
            key="lottery",
            on_conflict="raise",
            autoretry_for=(LockTimeout,),
            retry_kwargs={"max_retries": 2, "countdown": 0},
        )
        with (
            heard(signals.lock_timed_out) as tries,
            redislock.simulate_held_by_other("lottery"),
            pytest.raises(LockTimeout),
        ):
            task.delay().get()
        assert len(tries) == 3

    def test_an_item_whose_wait_has_run_out_says_why_it_did_not_come_back(self, redislock):
        task = make(key="lottery", on_conflict="retry", conflict_deadline=0.05)
        with redislock.simulate_held_by_other("lottery"):
            (skipped,) = task.map([1]).apply().get()
            directly = task()
        assert skipped["skipped"] == "busy"
        assert skipped["reason"] == "an item of celery.map cannot go back to the broker"
        assert "reason" not in directly

    @pytest.mark.parametrize("autoretry_for", [(), (Exception,)])
    def test_a_run_that_the_broker_does_not_take_back_stays_where_it_is(
        self, redislock, app, autoretry_for
    ):
        nowhere = {"broker_url": "redis://127.0.0.1:1/0", "task_publish_retry": False}
        app.conf.update(task_always_eager=False, **nowhere)
        task = make(key="lottery", on_conflict="retry", acks_late=True, autoretry_for=autoretry_for)
        task.push_request(id="the-id", called_directly=False, args=(), kwargs={})
        try:
            with redislock.simulate_held_by_other("lottery"), pytest.raises(Reject) as rejected:
                task.run()
        finally:
            task.pop_request()
        assert rejected.value.requeue


async def draw_nothing(): ...


async def draw_one_by_one():
    yield 1


def draw_in_turn():
    yield 1


class TestAfterARun:
    @pytest.mark.django_db(transaction=True)
    def test_what_a_body_has_written_that_returns_work_still_to_do_is_rolled_back(self, redislock):
        def body():
            Group.objects.create(name="drawn")
            return draw_nothing()

        with pytest.raises(TypeError, match="its coroutine would run"):
            make(body, key="lottery", atomic=True).delay().get()
        assert not Group.objects.exists()

    @pytest.mark.parametrize("options", [{"min_hold": 60}, {"once": 60}])
    def test_a_failure_and_a_run_that_published_its_retry_leave_it_free(self, redislock, options):
        def body(self, end):
            if end == "fail":
                raise ValueError(end)
            if end == "ask again":
                self.retry(throw=False)
            return end

        task = make(body, key="lottery", bind=True, **options)
        with pytest.raises(ValueError, match="fail"):
            task.delay("fail").get()
        assert task.delay("ask again").get() == "ask again"
        redislock.assert_not_locked("lottery")
        assert task.delay("draw").get() == "draw"
        assert task.delay("draw").get()["skipped"]

    def test_a_retry_that_cannot_be_published_changes_nothing(self, redislock):
        def body(self):
            with suppress(Retry):
                self.retry()

        make(body, key="lottery", bind=True, min_hold=60)()  # There is no message to publish again.
        redislock.assert_locked("lottery")

    def test_a_retry_is_no_success(self, redislock):
        def body(self):
            if self.request.retries < 2:
                raise self.retry(countdown=0)
            return self.request.retries

        task = make(body, key="lottery", min_hold=60, bind=True)
        assert task.delay().get() == 2
        redislock.assert_locked("lottery")


class TestComposition:
    def test_options_of_celery_pass_through(self, redislock):
        task = make(rate_limit="3/m", acks_late=True, max_retries=7, time_limit=60)
        assert (task.rate_limit, task.acks_late, task.max_retries) == ("3/m", True, 7)

    def test_arguments_are_checked_before_a_task_is_published(self, app):
        app.conf.task_always_eager = False
        with pytest.raises(TypeError, match="number"):
            make(of_itself, bind=True).delay()

    def test_a_decorator_below_may_run_a_coroutine_function(self, redislock):
        def synchronous(function):
            @functools.wraps(function)
            def run(*args, **kwargs):
                return asyncio.run(function(*args, **kwargs))

            return run

        @synchronous
        async def body(country):
            lease = held.get(f"lottery:{country}")
            return lease.name if lease else ""

        assert make(body, key="lottery:{country}").delay("nl").get() == "lottery:nl"

    @pytest.mark.parametrize("key", ["lottery:{country}", lambda country: f"lottery:{country}"])
    def test_a_decorator_below_may_give_the_function_more_arguments(self, redislock, key):
        def with_database(function):
            @functools.wraps(function)
            def run(*args, **kwargs):
                return function("database", *args, **kwargs)

            signature = inspect.signature(function)
            passed = list(signature.parameters.values())[1:]
            run.__signature__ = signature.replace(parameters=passed)
            return run

        @with_database
        def body(database, country):
            return [database, country]

        task = make(body, key=key)
        assert of(task, "nl") == ["database", "nl"]
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
                seen.append(self.greeting)

            def apply_async(self, args=None, kwargs=None, **options):  # Options by name only.
                seen.append(options["task_id"])
                return super().apply_async(args, kwargs, **options)

        seen = []
        task = make(base=Greeting, key="lottery", greeting="hi")
        assert task.apply_async(task_id="id-1").get() == "lottery"
        assert seen == ["id-1", "hi"]
        assert isinstance(task, Greeting)
        assert isinstance(task, SingleInstanceTask)

    def test_a_call_of_the_class_given_as_base_is_around_the_lock_of_a_skipped_run_too(
        self, redislock
    ):
        class Counting(Task):
            abstract = True

            def __call__(self, *args, **kwargs):
                calls.append(current_lease())
                return super().__call__(*args, **kwargs)

        calls = []
        task = make(lambda: "did", key="order:7", base=Counting)
        assert of(task) == "did"
        with redislock.simulate_held_by_other("order:7"):
            assert of(task)["skipped"] == "busy"
        assert calls == [None] * 6

    def test_the_class_that_an_app_has_for_its_tasks_is_combined_with_ours_too(self, redislock):
        class Tenant(Task):
            tenant = "first"

        task = make(key="lottery")
        with Celery("other", task_cls=Tenant, set_as_current=False) as other:
            assert other.tasks[task.name].tenant == "first"
            assert not hasattr(task, "tenant")

    def test_an_app_may_have_our_class_for_all_its_tasks_but_those_of_celery(self, redislock):
        # Without a key: shared tasks of other tests become tasks of this app, too.
        class OfApp(SingleInstanceTask):
            single_instance = {"unique_queued": True}

        with Celery("other", task_cls=OfApp, set_as_current=False) as other, current(other):
            other.conf.update(EAGER)
            bill = other.task(name="bill")(of_number)
            with distributed_lock("celery.map"), distributed_lock("celery.chunks"):
                assert bill.map([1, 2]).delay().get() == ["bill", "bill"]
            own = [task for name, task in other.tasks.items() if name.startswith("celery.")]
            assert own
            assert {one.single_instance_options for one in own} == {SingleInstance()}

    def test_a_task_may_be_a_class_and_a_subclass_may_change_its_body_or_its_options_alone(
        self, redislock, app
    ):
        class Body:
            def run(self, draw_id):
                return lock_of()

        class Inheriting(Body, SingleInstanceTask):
            name = "inheriting"
            single_instance = {"key": "lottery:{draw_id}"}

        class Draw(SingleInstanceTask):
            name = "draw"
            single_instance = {"key": "lottery:{draw_id}"}

            def run(self, draw_id):
                return self.lease.name

        class Redraw(Draw):
            name = "redraw"

            def run(self, draw_id):
                return super().run(draw_id) + ", again"

        class Bingo(Draw):
            name = "bingo"
            single_instance = {"key": "bingo:{draw_id}"}

        class Again(Bingo):
            name = "again"

        for task, lock in (
            (Inheriting, "lottery:3"),
            (Draw, "lottery:3"),
            (Redraw, "lottery:3, again"),
            (Bingo, "bingo:3"),
            (Again, "bingo:3"),
        ):
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
            return lock_of()

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
        def body(self, draw_id):
            return [lock_of(), *(self.run(2) if draw_id == 1 else [])]

        task = make(body, key="lottery:{draw_id}", bind=True)
        assert task.delay(1).get() == ["lottery:1", "lottery:2"]

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

    def test_the_id_of_a_call_may_be_a_uuid(self, locks):
        id_ = UUID(int=7)
        task = make(lambda: current_activity.get().task_id)
        assert task.apply_async(task_id=id_).get() == task.apply(task_id=id_).get() == str(id_)

    def test_in_a_request_an_eager_task_and_a_job_in_it_keep_the_path_and_their_ids(
        self, redislock, app
    ):
        def owner(name):
            with distributed_lock(name) as lease:
                return lease.owner.path, lease.owner.task, lease.owner.task_id

        @app.task(name="outer")
        def outer():
            return [owner("before"), inner.apply(task_id="2").get(), job(), owner("after")]

        @app.task(name="inner")
        def inner():
            return owner("inner")

        @single_instance("job")
        def job():
            return owner("in the job")

        with busy_with(Activity(path="/draw/")):
            before, of_inner, of_job, after = outer.apply(task_id="1").get()
            assert owner("request") == ("/draw/", "", "")
        assert before == after == ("/draw/", "outer", "1")
        assert of_inner == ("/draw/", "inner", "2")
        assert of_job[::2] == ("/draw/", "1")
        assert of_job[1].endswith("job")


async def draw_async():
    """Celery cannot run this one."""


class AsyncDraw:
    """Nor its objects."""

    async def __call__(self):
        """Draw."""


NOT_TO_BE_CALLED = [SingleInstance, staticmethod(draw), classmethod(draw), property(draw)]


class TestRefusedAtImport:
    """A mistake shows at the line that has it, not when the task first runs.

    tests/jobs/test_single_instance.py has those that are refused to a function too.
    """

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
            ({"key": lambda draw_id, of: ""}, InvalidLockName, "nor all.* which are draw_id"),
            ({"key": draw_async}, InvalidLockName, "draw_async.*returns a str"),
            ({"conflict_deadline": 5}, ValueError, "conflict_deadline needs on_conflict"),
            ({"conflict_deadline": -1}, ValueError, "conflict_deadline must be"),
            ({"queued_ttl": 60}, ValueError, "queued_ttl needs unique_queued=True"),
            ({"queued_ttl": 0}, ValueError, "queued_ttl must be"),
            ({"queued_headers": []}, ValueError, "queued_headers needs unique_queued=True"),
            ({"queued_headers": "_schema"}, ValueError, "queued_headers must be a list"),
            ({"queued_headers": [1]}, ValueError, "queued_headers must be a list"),
            ({"unique_queued": "latest"}, ValueError, 'must be True, "newest" or False'),
            ({"unique_queued": []}, ValueError, 'must be True, "newest" or False'),
            ({"give_up_after": 0}, ValueError, "give_up_after must be an integer, at least 1"),
            ({"give_up_after": True}, ValueError, "give_up_after must be an integer"),
            ({"give_up_after": 3, "acks_late": False}, ValueError, "needs acks_late=True"),
            ({"abort_on_lost": "yes"}, ValueError, "abort_on_lost must be"),
            ({"release_on_commit": True}, TypeError, "the body runs under the lock"),
            ({"on_unavailable": "skip"}, ValueError, "on_unavailable must be one of 'raise'"),
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
        def draw(draw_id): ...

        with pytest.raises(TypeError, match=r"test_task\.py:\d+ would have no effect") as raised:
            draw.delay(1)
        line = 'Write single_instance={"key": \'lottery:{draw_id}\', "once": 60}.'
        assert line in str(raised.value)

    def test_what_a_class_says(self):
        def limit(self):
            """A method of its own is no option."""

        async def run(self): ...

        for said, message in (
            ({"abstract": True, "ttl": 60, "limit": limit}, "'ttl' of the task Base would have no"),
            ({"single_instance": "lottery:{draw_id}", "run": draw}, "of Base must be a dictionary"),
            ({"run": run}, r"run\(\) cannot be a task"),
        ):
            with pytest.raises(TypeError, match=message):
                type("Base", (SingleInstanceTask,), {"__module__": __name__, **said})

    def test_none_is_as_if_an_option_was_not_given(self):
        assert SingleInstance(**dict.fromkeys(OPTIONS)) == SingleInstance()

    def test_the_ttl_given_twice_or_a_name_by_position(self):
        with pytest.raises(TypeError, match="ttl twice"):
            single_instance_task(30, ttl=30)
        with pytest.raises(TypeError, match="Write key='lottery' if that is the name of the lock"):
            single_instance_task("lottery")

    @pytest.mark.parametrize("made", NOT_TO_BE_CALLED, ids=lambda made: type(made).__name__)
    def test_what_a_worker_cannot_call(self, made):
        for decorator in (single_instance_task, single_instance_task(ttl=30)):
            with pytest.raises(TypeError, match="makes a task of a function, not of"):
                decorator(made)

    @pytest.mark.parametrize("options", [{}, {"ttl": 30, "acks_late": True}])
    def test_the_wrong_order_of_decorators(self, app, options):
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        for task in (shared_task(draw), app.task(draw), make()):
            with pytest.raises(TypeError, match="in the place of @shared_task") as raised:
                single_instance_task(**options)(task)
            assert f"\n    @single_instance_task({given})\n    def " in str(raised.value)

    @pytest.mark.parametrize(
        "function",
        [
            draw_async,
            draw_one_by_one,
            contextmanager(draw_in_turn),
            markcoroutinefunction(lambda: None),
            functools.partial(draw_async),
            AsyncDraw(),
        ],
        ids=["coroutine", "async generator", "context manager", "marked", "partial", "object"],
    )
    def test_a_function_of_which_nothing_would_run(self, function):
        with pytest.raises(TypeError, match=r"\(\) cannot be a task"):
            single_instance_task(function)


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


class TestBaton:
    """A lease that the caller hands over."""

    @pytest.fixture
    def baton(self, locks):
        """Of the lease of ``order:7``, which has ended otherwise."""
        with distributed_lock("order:7", wait=0) as lease:
            return lease.hand_over(within=600)

    def test_a_run_goes_on_with_it(self, locks):
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
    def test_a_signature_takes_it_in_eager_mode_too(self, baton, how):
        task = make(lambda order: order, key="order:{order}", on_conflict="raise")
        after = make(lambda found: found, key="after")
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
    def test_if_it_is_handed_to_a_run_which_is_done_it_ends_at_once(self, locks):
        task = make(lambda order: "did", key="order:{order}", atomic=True, once="database")
        assert task.delay(7).get() == "did"
        with distributed_lock("order:7", wait=0) as lease:
            baton = lease.hand_over(within=600)
        assert task.delay(7, baton=baton).get()["skipped"] == "done"
        assert not distributed_lock("order:7").locked()

    def test_a_run_goes_on_with_a_permit_if_both_have_the_same_limit(self, locks):
        def permit():
            lease = current_lease()
            return lease and lease.permit

        with distributed_lock("gpu", limit=2), distributed_lock("gpu", limit=2) as lease:
            baton = lease.hand_over()
            with pytest.raises(LockMisuse, match="by the same limit"):
                make(permit, key="gpu", limit=3).delay(baton=baton)
            assert make(permit, key="gpu", limit=2).delay(baton=baton).get() == 2

    def test_that_of_another_lock_is_refused_where_it_is_passed(self, baton):
        with pytest.raises(LockMisuse, match="the baton is of lock 'order:7'"):
            make(lambda order: order, key="order:{order}").delay(8, baton=baton)
        with pytest.raises(ValueError, match="baton must be what"):
            make(lambda: None).delay(baton=f"{baton}x")
        with take_up(baton) as lease:
            assert lease.held

    @pytest.mark.parametrize("how", ["delay", "apply"])
    def test_a_task_may_have_an_argument_of_that_name(self, locks, how):
        takes_any = make(lambda **any_: any_, key="race:{baton}")
        for task, expected in ((make(lambda baton: baton), "tin"), (takes_any, {"baton": "tin"})):
            sent = task.delay(baton="tin") if how == "delay" else task.apply((), {"baton": "tin"})
            assert sent.get() == expected
        assert make(lambda **any_: any_).delay(baton=7, of=8).get() == {"baton": 7, "of": 8}

    def test_a_task_that_takes_any_argument_takes_a_baton_too(self, baton):
        task = make(lambda order, **any_: any_, key="order:{order}", on_conflict="raise")
        assert task.delay(7, baton=baton, of=8).get() == {"of": 8}
        assert not distributed_lock("order:7").locked()
