"""The lock as a decorator: any function or coroutine function, named from its arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import markcoroutinefunction, sync_to_async

from django_redislock import InvalidLockName, LockMisuse, LockTimeout, distributed_lock, held
from tests.support.matrix import MEMORY, places
from tests.support.others import held_by_other
from tests.support.processes import python
from tests.support.servers import KIND
from tests.support.ways import both_ways

pytestmark = places(KIND, MEMORY)  # No other place runs other code of the decorator.


def held_names():
    """The locks that are held at this moment."""
    return [one.name for one in held.list()]


@both_ways
async def test_each_call_is_made_under_the_lock(way, place):
    def fail():
        raise ZeroDivisionError("of the body")

    draw = distributed_lock("lottery", wait=0)(way.function(held_names))
    for _ in range(2):
        assert await way.call(draw) == ["lottery"]
    with held_by_other("lottery"), pytest.raises(LockTimeout, match="'lottery' is busy"):
        await way.call(draw)
    with pytest.raises(ZeroDivisionError, match="of the body"):
        await way.call(distributed_lock("lottery")(way.function(fail)))
    assert held_names() == []


class Report:
    """Something with an attribute and items, to name locks by."""

    id = 7
    parts = ("head", "body")


def by_position(report_id):
    return held_names()


def by_keyword(*, report_id):
    return held_names()


def by_rest(**options):
    return held_names()


@both_ways
@pytest.mark.parametrize(
    ("template", "function", "args", "kwargs", "name"),
    [
        ("report:{report_id}", by_position, (7,), {}, "report:7"),
        ("report:{report_id}", by_position, (), {"report_id": 7}, "report:7"),
        ("report:{report_id}", lambda report_id=7: held_names(), (), {}, "report:7"),
        ("report:{report_id}", lambda report_id=7: held_names(), (8,), {}, "report:8"),
        ("r:{report_id}", by_keyword, (), {"report_id": 7}, "r:7"),
        ("r:{report_id}", by_rest, (), {"report_id": 7, "more": 1}, "r:7"),
        ("{kind}:{report_id:04}", lambda kind, report_id=7: held_names(), ("pdf",), {}, "pdf:0007"),
        ("{report.id}:{report.parts[1]}", lambda report: held_names(), (Report(),), {}, "7:body"),
        ("a{{b}}", by_position, (7,), {}, "a{b}"),
        ("constant", by_position, (7,), {}, "constant"),
    ],
)
async def test_the_name_is_made_of_the_arguments(
    way, place, template, function, args, kwargs, name
):
    decorated = distributed_lock(template)(way.function(function))
    assert await way.call(decorated, *args, **kwargs) == [name]


@both_ways
async def test_a_method_is_locked_by_its_object(way, place):
    class Shelf:
        def __init__(self, number):
            self.number = number

        sort = distributed_lock("shelf:{self.number}")(way.function(lambda self: held_names()))

    assert await way.call(Shelf(3).sort) == ["shelf:3"]


@both_ways
async def test_the_name_is_checked_after_formatting(way, place):
    decorated = distributed_lock("report:{report_id}")(way.function(by_position))
    with pytest.raises(TypeError, match="report_id"):  # As without the decorator.
        await way.call(decorated)
    with pytest.raises(InvalidLockName, match="control characters"):
        await way.call(decorated, "7\nFAKE LOG LINE")
    with pytest.raises(InvalidLockName, match="at most 200"):
        await way.call(decorated, "7" * 200)
    assert held_names() == []
    long = distributed_lock("{a}" + "{b}" * 100)(way.function(lambda a, b: held_names()))
    assert await way.call(long, "x", "") == ["x"]


@both_ways
@pytest.mark.parametrize(("template", "absent"), [("v:{zk}", "zk"), ("v:{rest[pk]}", "rest")])
async def test_a_field_that_the_call_has_not_is_named_with_those_that_it_has(
    way, place, template, absent
):
    def view(request, **rest):
        raise AssertionError("It must not be called.")

    decorated = distributed_lock(template)(way.function(view))
    with pytest.raises(InvalidLockName, match=f"'{absent}', which this call.* has: pk, request"):
        await way.call(decorated, "GET", pk=3)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("report:{reportid}", r"'reportid'.*by_position\(\).*: report_id"),
        *[(template, "^") for template in ("report:{", "report:{}", "report:{0}", "a}b")],
    ],
)
def test_a_template_that_is_wrong_for_each_call_is_an_error_where_it_is_written(template, says):
    with pytest.raises(InvalidLockName, match=says):
        distributed_lock(template)(by_position)


@both_ways
async def test_braces_are_fields_only_in_the_decorator(way, place):
    async with way.entered(distributed_lock("report:{report_id}")) as lease:
        assert lease.name == "report:{report_id}"
        assert held_names() == ["report:{report_id}"]


@both_ways
async def test_the_decorated_function_looks_like_itself(way, place):
    def draw(count, *, seed=1):
        """Draw the winners."""

    function = way.function(draw)
    decorated = distributed_lock("lottery:{count}")(function)
    assert (decorated.__name__, decorated.__doc__) == ("draw", "Draw the winners.")
    assert inspect.signature(decorated) == inspect.signature(draw)
    assert inspect.iscoroutinefunction(decorated) is inspect.iscoroutinefunction(function)


@both_ways
async def test_a_function_that_calls_itself_needs_reentrant(way, place):
    if way.name == "sync":

        def deep(levels):
            return 1 + (nested(levels - 1) if levels else 0)
    else:

        async def deep(levels):
            return 1 + (await nested(levels - 1) if levels else 0)

    nested = distributed_lock("lottery", reentrant=True)(deep)
    assert await way.call(nested, 2) == 3
    nested = distributed_lock("lottery")(deep)
    with pytest.raises(LockMisuse, match="reentrant=True"):
        await way.call(nested, 1)
    assert held_names() == []


async def _in_the_body():
    return held_names()


class Awaited:
    """An object that is called like a coroutine function."""

    async def __call__(self):
        return held_names()


@functools.wraps(_in_the_body)
def _returns_a_coroutine() -> Any:
    return _in_the_body()


@pytest.mark.parametrize(
    "function",
    [Awaited(), sync_to_async(held_names), markcoroutinefunction(_returns_a_coroutine)],
    ids=["object", "sync_to_async", "marked"],
)
async def test_whatever_is_awaited_is_locked_until_it_is_done(place, function):
    assert await distributed_lock("lottery")(function)() == ["lottery"]


def _yields():
    yield 1


async def _ayields():
    yield 1


WORK_TO_DO = [_in_the_body, _yields, _ayields]


@both_ways
@pytest.mark.parametrize("work", WORK_TO_DO)
async def test_a_result_with_work_still_to_do_is_refused(way, place, work):
    def later():
        return work()

    async def alater():
        return work()

    function = distributed_lock("lottery")(later if way.name == "sync" else alater)
    with pytest.raises(TypeError, match=r"later\(\): its body runs after the call"):
        await way.call(function)
    assert held_names() == []


class Streaming:
    """An object that is called like a generator function."""

    __call__ = staticmethod(_yields)


class AsyncStreaming:
    """An object that is called like an asynchronous generator function."""

    __call__ = staticmethod(_ayields)


def test_a_name_with_an_objects_address_would_be_a_lock_of_its_own(place):
    class Job:
        @distributed_lock("job:{self}")
        def run(self) -> None:
            pytest.fail("it ran")

    with pytest.raises(InvalidLockName):
        Job().run()


# --- what cannot work is refused where it is written ----------------------------------------------


METHOD_DECORATOR = "@method_decorator(distributed_lock({!r}), name="


@pytest.mark.parametrize(
    ("decorated", "says"),
    [
        (by_position, "write @distributed_lock('by_position') above def by_position(...)"),
        (_in_the_body, "write @distributed_lock('_in_the_body')"),
        (Report, METHOD_DECORATOR.format("Report")),
        (staticmethod(by_position), "write @staticmethod above @distributed_lock('"),
        (classmethod(by_position), "write @classmethod above @distributed_lock('"),
        (property(by_position), "write @property above @distributed_lock('"),
    ],
)
def test_without_a_name_the_line_with_one_is_shown(decorated, says):
    with pytest.raises(TypeError) as raised:
        distributed_lock(decorated)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("decorated", "says"),
    [
        (Report, METHOD_DECORATOR.format("report")),
        # Above @staticmethod it would make a method of it, which is given self.
        (staticmethod(by_position), "write @staticmethod above @distributed_lock('report')"),
        (classmethod(by_position), "write @classmethod above @distributed_lock('report')"),
        (property(by_position), "write @property above @distributed_lock('report')"),
        (functools.cached_property(by_position), "write @cached_property above @distributed_lock("),
        (_yields, "the generator function _yields()"),
        (_ayields, "the generator function _ayields()"),
        (Streaming(), "the generator function <tests.contract.test_decorator.Streaming"),
        (AsyncStreaming(), "the generator function <tests.contract.test_decorator.AsyncStreaming"),
        (contextlib.contextmanager(_yields), "its body runs after the call"),
        (contextlib.asynccontextmanager(_ayields), "its body runs after the call"),
    ],
)
def test_what_would_run_without_the_lock_is_refused_where_it_is_written(decorated, says):
    with pytest.raises(TypeError) as raised:
        distributed_lock("report")(decorated)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("names", "arguments", "says"),
    [
        (["report"], {"timeout": 30}, "'timeout'; pass ttl=, how long the lease lasts unless"),
        (["report"], {"expire": 30}, "'expire'; pass ttl="),
        (["report"], {"blocking": False}, "'blocking'; pass wait=, how long to wait for it; 0 "),
        (["report"], {"blocking_timeout": 3}, "'blocking_timeout'; pass wait="),
        (["report"], {"tll": 3}, "'tll'; pass one of ttl, renew,"),
        (["report", "archive"], {"timeout": 30}, "'timeout'; pass ttl=, how long the lease lasts"),
        (["report", "archive"], {"tll": 3}, "'tll'; pass one of ttl, renew,"),
        (["report", 30], {}, "distributed_lock('report', ttl=30, wait=5)"),
    ],
)
def test_an_argument_of_another_library_is_refused_with_what_it_is_called_here(
    names, arguments, says
):
    with pytest.raises(TypeError) as raised:
        distributed_lock(*names, **arguments)
    assert says in str(raised.value)


def test_below_staticmethod_and_classmethod_it_works(place):
    class Shelf:
        @staticmethod
        @distributed_lock("shelf:{number}")
        def sort(number: int) -> list[str]:
            return held_names()

        @classmethod
        @distributed_lock("shelf:{cls.__name__}")
        def sweep(cls) -> list[str]:
            return held_names()

    assert Shelf().sort(3) == Shelf.sort(3) == ["shelf:3"]
    assert Shelf.sweep() == ["shelf:Shelf"]


OVER_TASKS = """
from celery import Celery, shared_task
from django_redislock import distributed_lock, single_instance_task

app = Celery()

def body():
    pass

for task in (
    shared_task(name="shared")(body),
    app.task(name="lazy")(body),
    single_instance_task(name="ours")(body),
    Celery(set_as_current=False).task(name="made", lazy=False)(body),
):
    for decorate in (distributed_lock("report"), distributed_lock):
        try:
            decorate(task)
        except TypeError as error:
            print(error)
    print(app.finalized)
"""


def test_a_celery_task_is_refused_as_workers_would_run_it_without_the_lock():
    lines = python("-c", OVER_TASKS, env={}).stdout.splitlines()
    assert len(lines) == 4 * 3
    for line in lines:
        assert line in {"True", "False"} or (
            "Write @shared_task above @distributed_lock('" in line
            and "@single_instance_task in their place" in line
        )


def test_a_function_that_ends_a_generator_itself_may_stand_under_a_context_manager(place):
    @contextlib.contextmanager
    def block():  # Its objects decorate functions, as transaction.atomic does.
        yield

    def listed(generate):
        return functools.wraps(generate)(lambda: list(generate()))

    @block()
    @listed
    def names() -> Iterator[str]:
        yield from held_names()

    assert distributed_lock("report")(names)() == ["report"]
