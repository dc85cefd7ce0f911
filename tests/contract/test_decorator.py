"""The lock as a decorator: any function or coroutine function, named from its arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import markcoroutinefunction, sync_to_async

from django_redislock import InvalidLockName, LockMisuse, LockTimeout, distributed_lock
from tests.support.matrix import needs_scripts
from tests.support.others import held_by_other
from tests.support.processes import python
from tests.support.ways import both_ways

pytestmark = needs_scripts


def held_names():
    """The locks that are held at this moment."""
    from django_redislock import held

    return [one.name for one in held.list()]


@both_ways
async def test_each_call_is_made_under_the_lock(way, place):
    draw = distributed_lock("lottery")(way.function(held_names))
    assert await way.call(draw) == ["lottery"]
    assert await way.call(draw) == ["lottery"]
    assert held_names() == []


@both_ways
async def test_a_call_that_cannot_have_the_lock_raises_lock_timeout(way, place):
    draw = distributed_lock("lottery", wait=0)(way.function(held_names))
    with held_by_other("lottery"), pytest.raises(LockTimeout, match="'lottery' is busy"):
        await way.call(draw)


@both_ways
async def test_what_the_function_raises_goes_through(way, place):
    def fail():
        raise ZeroDivisionError("of the body")

    with pytest.raises(ZeroDivisionError, match="of the body"):
        await way.call(distributed_lock("lottery")(way.function(fail)))
    assert held_names() == []


class Report:
    """Something with an attribute and items, to name locks by."""

    id = 7
    parts = ("head", "body")


def by_position(report_id):
    return held_names()


def by_default(report_id=7):
    return held_names()


def by_keyword(*, report_id):
    return held_names()


def by_rest(**options):
    return held_names()


def by_two(kind, report_id=7):
    return held_names()


def by_object(report):
    return held_names()


@both_ways
@pytest.mark.parametrize(
    ("template", "function", "args", "kwargs", "name"),
    [
        ("report:{report_id}", by_position, (7,), {}, "report:7"),
        ("report:{report_id}", by_position, (), {"report_id": 7}, "report:7"),
        ("report:{report_id}", by_default, (), {}, "report:7"),
        ("report:{report_id}", by_default, (8,), {}, "report:8"),
        ("report:{report_id}", by_keyword, (), {"report_id": 7}, "report:7"),
        ("report:{report_id}", by_rest, (), {"report_id": 7, "more": 1}, "report:7"),
        ("{kind}:{report_id:04}", by_two, ("pdf",), {}, "pdf:0007"),
        ("{report.id}:{report.parts[1]}", by_object, (Report(),), {}, "7:body"),
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
async def test_a_wrong_call_raises_type_error_as_without_the_decorator(way, place):
    decorated = distributed_lock("report:{report_id}")(way.function(by_position))
    with pytest.raises(TypeError, match="report_id"):
        await way.call(decorated)
    assert held_names() == []


@both_ways
async def test_the_name_is_checked_after_formatting(way, place):
    decorated = distributed_lock("report:{report_id}")(way.function(by_position))
    with pytest.raises(InvalidLockName, match="control characters"):
        await way.call(decorated, "7\nFAKE LOG LINE")
    with pytest.raises(InvalidLockName, match="at most 200"):
        await way.call(decorated, "7" * 200)
    long = distributed_lock("{a}" + "{b}" * 100)(way.function(lambda a, b: held_names()))
    assert await way.call(long, "x", "") == ["x"]


def test_a_field_that_is_no_argument_is_an_error_where_it_is_written():
    with pytest.raises(InvalidLockName, match=r"'reportid'.*by_position\(\).*: report_id"):
        distributed_lock("report:{reportid}")(by_position)


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


@pytest.mark.parametrize("template", ["report:{", "report:{}", "report:{0}", "a}b"])
def test_a_template_that_is_no_format_string_is_an_error_where_it_is_written(template):
    with pytest.raises(InvalidLockName):
        distributed_lock(template)(by_position)


@both_ways
async def test_braces_are_fields_only_in_the_decorator(way, place):
    async with way.entered(distributed_lock("report:{report_id}")) as lease:
        assert lease.name == "report:{report_id}"
        assert held_names() == ["report:{report_id}"]


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_generator_function_is_refused_because_its_body_runs_later(kind):
    def numbers():
        yield 1

    async def anumbers():
        yield 1

    with pytest.raises(TypeError, match=r"generator function.*numbers\(\)"):
        distributed_lock("lottery")(numbers if kind == "generator" else anumbers)


def test_the_decorated_function_looks_like_itself():
    def draw(count, *, seed=1):
        """Draw the winners."""
        return [count, seed]

    decorated = distributed_lock("lottery:{count}")(draw)
    assert (decorated.__name__, decorated.__doc__) == ("draw", "Draw the winners.")
    assert inspect.signature(decorated) == inspect.signature(draw)
    assert not inspect.iscoroutinefunction(decorated)


def test_a_decorated_coroutine_function_is_one():
    async def draw():
        """Draw the winners."""

    assert inspect.iscoroutinefunction(distributed_lock("lottery")(draw))


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


def test_a_plain_function_whose_answer_is_awaited_is_refused(place):
    def later():
        return _in_the_body()

    with pytest.raises(TypeError, match=r"later\(\)"):
        distributed_lock("lottery")(later)()
    assert held_names() == []


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


@pytest.mark.parametrize("work", [_yields, _ayields])
def test_an_object_that_is_called_like_a_generator_function_is_refused(work):
    streaming = type("Streaming", (), {"__call__": staticmethod(work)})()
    with pytest.raises(TypeError, match=r"the generator function <.*Streaming"):
        distributed_lock("lottery")(streaming)


def test_a_name_with_an_objects_address_would_be_a_lock_of_its_own(place):
    class Job:
        @distributed_lock("job:{self}")
        def run(self) -> None:
            pytest.fail("it ran")

    with pytest.raises(InvalidLockName):
        Job().run()


# --- what cannot work is refused where it is written ----------------------------------------------


def refused(decorate):
    with pytest.raises(TypeError) as raised:
        decorate()
    return str(raised.value)


def test_without_its_name_the_line_with_one_is_shown():
    says = refused(lambda: distributed_lock(by_position))
    assert "write @distributed_lock('by_position') above def by_position(...)" in says
    says = refused(lambda: distributed_lock(_in_the_body))
    assert "write @distributed_lock('_in_the_body')" in says


@pytest.mark.parametrize("name", [None, "report"])
def test_a_class_is_refused_with_or_without_a_name(name):
    says = refused(lambda: distributed_lock(name)(Report) if name else distributed_lock(Report))
    assert "the class Report" in says
    assert f"@method_decorator(distributed_lock({name or 'Report'!r}), name=" in says


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property, functools.cached_property])
@pytest.mark.parametrize("named", [True, False])
def test_below_a_decorator_that_makes_no_function_is_where_it_stands(kind, named):
    """Above @staticmethod it would make a method of it, which is given self."""
    made = kind(by_position)
    if named:
        says = refused(lambda: distributed_lock("report")(made))
        assert f"write @{kind.__name__} above @distributed_lock('report')" in says
    elif kind is not functools.cached_property:
        says = refused(lambda: distributed_lock(made))
        assert f"write @{kind.__name__} above @distributed_lock('" in says


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


@pytest.mark.parametrize("manager", [contextlib.contextmanager, contextlib.asynccontextmanager])
def test_a_context_manager_is_refused_as_its_body_runs_later(manager):
    def numbers():
        yield 1

    async def anumbers():
        yield 1

    made = manager(numbers if manager is contextlib.contextmanager else anumbers)
    assert "its body runs after the call" in refused(lambda: distributed_lock("report")(made))


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


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ({"timeout": 30}, "ttl=, how long the lease lasts unless renewed, or wait=, how long"),
        ({"expire": 30}, "ttl="),
        ({"blocking": False}, "wait=, how long to wait for it; 0 tries once"),
        ({"blocking_timeout": 3}, "wait="),
        ({"tll": 3}, "one of ttl, renew,"),
    ],
)
def test_an_argument_of_another_library_is_refused_with_what_it_is_called_here(arguments, cure):
    for names in (["report"], ["report", "archive"]):
        says = refused(lambda names=names: distributed_lock(*names, **arguments))
        assert f"takes no argument {next(iter(arguments))!r}; pass {cure}" in says


def test_a_number_by_position_is_refused_as_it_could_be_either():
    says = refused(lambda: distributed_lock("report", 30))
    assert "distributed_lock('report', ttl=30, wait=5)" in says
