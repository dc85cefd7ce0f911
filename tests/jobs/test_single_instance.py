"""@single_instance: one run at a time of a function, a coroutine function or a method."""

import asyncio
import contextvars
import functools
import io
import json
import logging
import math
import os
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from celery import shared_task
from django.core.management import CommandError, call_command
from django.core.serializers.json import DjangoJSONEncoder

from django_redislock import (
    InvalidLockName,
    Limit,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    Rate,
    Skipped,
    distributed_lock,
    held,
    signals,
    single_instance,
    single_instance_task,
)
from django_redislock.celery.options import SingleInstance
from django_redislock.humanize import duration
from django_redislock.jobs import JobOptions, current_lease, run_job
from django_redislock.models import CompletedRun
from django_redislock.monitors import Monitor
from tests import ROOT
from tests.support.celery_app import EAGER, celery_app
from tests.support.faults import in_fork
from tests.support.hearing import heard
from tests.support.processes import python
from tests.support.waiting import HUNG
from tests.support.ways import blocking_or_not

OTHER = "another-host:1 simulated"

each_kind = pytest.mark.parametrize("kind", ["function", "coroutine function", "task"])


@pytest.fixture(autouse=True)
def app():
    """Tasks run at once, and end with their test."""
    with celery_app(**EAGER) as app:
        yield app


def lock():
    """The name of the lock that the body holds."""
    lease = current_lease()
    return lease.name if lease else "no lock"


def decorated(work, lock=None, *, kind="function", **options):
    """A job of this kind with this body; called by blocking code."""
    if kind == "task":
        task = single_instance_task(key=lock, **options)(work)
        return lambda *given: task.apply(given).get()
    if kind == "function":
        return single_instance(lock, **options)(work)

    @functools.wraps(work)
    async def awork(*given):
        await asyncio.sleep(0)
        return work(*given)

    made = single_instance(lock, **options)(awork)
    return lambda *given: asyncio.run(made(*given))


def work(source, raising=None):
    """The body of most jobs."""
    if raising:
        raise raising
    return lock()


NAME = f"{__name__}.work"


def job(lock=None, *, is_async=False, **options):
    kind = "coroutine function" if is_async else options.pop("kind", "function")
    return decorated(work, lock, kind=kind, **options)


def fail(run, *args):
    with pytest.raises(ZeroDivisionError):
        run(*args, ZeroDivisionError())


# --- names ----------------------------------------------------------------------------------------


@single_instance
def tidy():
    """Without arguments and options."""
    return lock()


class Importer:
    """Has jobs as methods."""

    country = "eu"

    @single_instance
    def clear(self):
        return lock()

    @single_instance("import:{self.country}:{sources}")
    async def load(self, *sources):
        return lock()


async def test_the_lock_is_named_after_the_function_or_its_arguments(redislock):
    assert await asyncio.to_thread(tidy) == f"{__name__}.tidy"
    assert tidy.lock_name() == f"{__name__}.tidy"
    assert tidy.__doc__ == "Without arguments and options."
    assert tidy.__wrapped__.__name__ == "tidy"
    importer = Importer()
    assert await asyncio.to_thread(importer.clear) == f"{__name__}.Importer.clear"
    # A list and a tuple are one name: that is how arguments come back from a queue.
    assert await importer.load("a", "b") == "import:eu:['a', 'b']"
    assert Importer.load.lock_name(importer, "a") == "import:eu:['a']"
    # Coroutine functions for blocking code have names of their own too.
    names = [single_instance(async_to_sync(one)).lock_name() for one in (asend, aload)]
    assert names == [f"{__name__}.asend", f"{__name__}.aload"]


class Export:
    """An object that is called like a function."""

    def __call__(self):
        return "exported"


async def asend():
    """A coroutine function for blocking code."""


@pytest.mark.parametrize(
    ("made", "shared"),
    [
        (Export(), "Named after the class Export, all its objects would share one lock."),
        (functools.partial(Export()), "Named after the class Export, all its objects"),
        (lambda: "exported", "All lambdas of its module would share one lock."),
    ],
    ids=["object", "partial", "lambda"],
)
def test_an_object_without_a_name_of_its_own_needs_one_given(made, shared):
    for decorator in (single_instance, single_instance(ttl=60)):
        with pytest.raises(TypeError, match=re.escape(shared)):
            decorator(made)
    assert single_instance("export")(made).lock_name() == "export"
    assert single_instance(limits=[Limit("export", 2)])(made).lock_name() == "export"
    # Of one permit, nobody sees the number.
    assert single_instance(limits=[Limit("export#2", 1)])(made).lock_name() == "export#2"


SCRIPT = """
import multiprocessing, sys
from django.conf import settings
settings.configure()
from django_redislock import single_instance
from django_redislock.jobs.decorator import full_name

@single_instance
def main(): ...

class Export:
    def __call__(self): ...

def tell():
    print(main.lock_name(), flush=True)

if __name__ == "__main__":
    tell()
    if "object" in sys.argv:
        print(full_name(Export()))
    if "spawn" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=tell)
        child.start()
        child.join()
"""
# Without "--ignore-dir", it traces the import of Django, which takes a minute.
TRACED = "-m", "trace", "--count", "--no-report", "--ignore-dir=/"


def test_scripts_with_functions_of_one_name_have_locks_of_their_own(tmp_path):
    """All of them are called __main__."""
    (tmp_path / "shop").mkdir()
    for name in ("nightly", "weekly"):
        (tmp_path / "shop" / f"{name}.py").write_text(SCRIPT)

    def said(*command):
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        return python(*command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}).stdout.split()

    assert said("shop/nightly.py", "spawn") == 2 * ["nightly.main"]
    assert said("shop/weekly.py", "object") == ["weekly.main", "weekly.Export"]
    assert said("-m", "shop.nightly", "spawn") == 2 * ["shop.nightly.main"]
    assert said("-c", "from shop import nightly; nightly.tell()") == ["shop.nightly.main"]
    assert said("-c", SCRIPT) == ["__main__.main"]
    assert said("-m", "cProfile", "shop/nightly.py")[0] == "nightly.main"
    assert said(*TRACED, "shop/nightly.py") == ["nightly.main"]
    (tmp_path / "shop" / "__main__.py").write_text(SCRIPT)
    assert said("shop") == ["shop.main"]


# --- a run that is skipped ------------------------------------------------------------------------


@blocking_or_not
def test_what_comes_during_a_run_is_skipped_and_everybody_is_told(redislock, caplog, is_async):
    run = job("import:{source}", is_async=is_async)
    with redislock.simulate_held_by_other("import:eu"), heard(signals.task_skipped) as skips:
        skipped = run("eu")
        assert run("us") == "import:us"
    assert isinstance(skipped, Skipped)
    assert not skipped
    assert skipped == {"skipped": "busy", "lock": "import:eu", "holder": OTHER}
    ((news,), (record,)) = skips, held.records(prefix="import:eu")
    assert news["result"] == skipped
    assert (news["job"], news["name"]) == (NAME, "import:eu")
    assert (news["template"], news["using"]) == ("import:{source}", "default")
    assert news["task_id"] is None
    assert news["sender"].lock_name("eu") == "import:eu"
    assert (record.skips, record.last_skip and record.last_skip.why) == (1, "busy")
    assert record.last_skip.owner.task == NAME
    (line,) = [one for one in caplog.records if one.name == "django_redislock.jobs"]
    assert line.levelno == logging.WARNING
    said = vars(line)
    assert (said["lock"], said["reason"]) == ("import:eu", "busy")
    assert (said["job"], said["alias"]) == (NAME, "default")
    assert 0 <= said["waited"] < HUNG
    assert line.data == skipped
    assert line.getMessage().startswith(f"Skipped {NAME}: lock 'import:eu' is busy")


@pytest.fixture
def told():
    """What signals tell of runs: each beginning and each end, and whether the lock is held then."""
    heard = []

    def hear(signal, lease, **news):
        what = "started" if signal is signals.run_started else "ended"
        is_held = lease is not None and lease.held
        heard.append({"what": what, "lease": lease, "is_held": is_held, **news})

    for signal in (signals.run_started, signals.run_ended):
        signal.connect(hear)
    yield heard
    for signal in (signals.run_started, signals.run_ended):
        signal.disconnect(hear)


@blocking_or_not
def test_the_beginning_and_the_end_of_each_run_are_told(redislock, told, is_async):
    run = job("import:{source}", is_async=is_async)
    assert run("eu") == "import:eu"
    assert current_lease() is None
    started, ended = told
    assert (started["is_held"], ended["is_held"]) == (True, False)
    assert started["lease"] is ended["lease"]
    assert ended.pop("outcome") == "success"
    assert 0 < ended.pop("took") < HUNG
    for news in told:
        assert news.pop("sender").lock_name("eu") == "import:eu"
        assert {key: news[key] for key in news.keys() - {"what", "lease", "is_held"}} == {
            "job": NAME,
            "name": "import:eu",
            "template": "import:{source}",
            "using": "default",
            "task_id": None,
        }


@blocking_or_not
def test_the_outcome_of_a_run_is_one_word(redislock, told, caplog, is_async):
    run = job("import:{source}", is_async=is_async, on_unavailable="run")
    fail(run, "eu")
    with pytest.raises(asyncio.CancelledError):
        run("eu", asyncio.CancelledError())
    with redislock.simulate_held_by_other("import:eu"):
        assert run("eu")["skipped"] == "busy"
    with redislock.simulate_unavailable():
        with pytest.raises(LockUnavailable):
            job("import", is_async=is_async)("eu")
        assert run("eu") == "no lock"
    assert "runs WITHOUT its lock" in caplog.text

    @single_instance("import")
    def loses():
        assert held.force_release("import", current_lease().id)

    with pytest.raises(LockLost):
        loses()
    ends = [one for one in told if one["what"] == "ended"]
    assert [(one["outcome"], one["lease"] is None) for one in ends] == [
        ("failure", False),
        ("interrupted", False),
        ("success", True),
        ("lost", False),
    ]
    assert len(told) == 2 * len(ends)


def test_a_coroutine_that_is_closed_outside_of_its_task_raises_nothing_else(redislock):
    seen = []

    @single_instance("import")
    async def load():
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            seen.append(error)
            raise

    async def begin():
        """Let it go as far as it needs nothing from outside."""
        loading.send(None)

    loading = load()
    contextvars.Context().run(asyncio.run, begin())
    with heard(signals.run_ended) as ends:
        loading.close()  # An error of ours would be raised here.
    assert [type(error) for error in seen] == [GeneratorExit]
    assert not ends  # No receiver can be awaited any more.


@blocking_or_not
def test_a_child_that_is_forked_in_the_body_tells_of_no_end(redislock, is_async):
    ends = []

    def hear(signal, outcome, **news):
        ends.append(outcome)

    async def ahear(signal, outcome, **news):
        ends.append(outcome)  # A receiver that blocks would need a thread.

    class Told(Monitor):
        """The child has no thread that tells it, so it would wait in vain."""

        timeout = 2 * HUNG

    def body():
        if os.fork():
            return os.wait()[1]
        raise InterruptedError  # In the child.

    async def abody():
        return body()

    run = single_instance("import", monitor=Told())(abody if is_async else body)

    async def call():
        try:
            return await run() if is_async else run()
        except InterruptedError:
            os._exit(len(ends))

    def call_in_loop():
        if is_async:
            return [asyncio.run(call()), *ends]
        with pytest.raises(StopIteration) as stopped:  # Without a loop.
            call().send(None)
        return [stopped.value.value, *ends]

    receiver = ahear if is_async else hear
    signals.run_ended.connect(receiver)
    try:
        assert in_fork(call_in_loop) == [0, "success"]
    finally:
        signals.run_ended.disconnect(receiver)


@each_kind
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"min_hold": 60}, "cooling"),
        ({"min_hold": 60, "on_conflict": "wait", "wait": 0.1}, "cooling"),
        ({"min_hold": 60, "limit": 2}, "cooling"),
        ({"once": timedelta(seconds=60)}, "done"),
    ],
    ids=["cooling", "wait", "limit", "done"],
)
def test_a_skip_after_a_success_says_whose_it_was_and_when_and_alarms_nobody(
    redislock, caplog, kind, options, why
):
    caplog.set_level(logging.INFO, "django_redislock")
    run = job("import", kind=kind, **options)
    fail(run, "eu")  # No success.
    owners = set()
    for _ in range(options.get("limit", 1)):
        assert run("eu") == "import"
        owners.add(str(held.record("import").last_success.owner))
    redislock.advance(4)
    result = run("eu")
    by, ago = result["by"], result["ago"]
    left = {"expires_in": pytest.approx(60 - ago, abs=0.1)} if why == "cooling" else {}
    assert result == {"skipped": why, "lock": "import", "by": by, "ago": ago, **left}
    record = held.record("import")
    assert by in owners
    assert 4 <= ago < 30
    (logged,) = [one for one in caplog.records if one.message.startswith("Skipped")]
    assert logged.levelno == logging.INFO
    says = {"cooling": "cooling, taken by", "done": "done, by"}[why]
    assert f"lock 'import' is {says} {by}, {duration(ago)} ago" in logged.message
    assert (record.last_skip.why, record.skips) == (why, 1)
    assert distributed_lock("import").locked() == (why == "cooling")


@each_kind
def test_a_conflict_raises_waits_or_is_given_to_a_function(redislock, kind):
    def answer(conflict):
        seen.append(conflict)
        return later() if kind == "coroutine function" else "sorry"

    async def later():
        return "sorry"

    def made(number, **options):
        if kind == "task":
            options["name"] = f"{NAME} {number}"
        return decorated(work, "import", kind=kind, **options)

    seen = []
    with redislock.simulate_held_by_other("import"):
        with pytest.raises(LockTimeout, match=OTHER):
            made(1, on_conflict="raise")("eu")
        assert made(2, on_conflict="wait", wait=0.01)("eu")["skipped"] == "busy"
        cools = made(3, on_conflict=answer, min_hold=60)
        assert cools("eu") == "sorry"
    assert [cools("eu"), cools("eu")] == ["import", "sorry"]
    first, second = seen
    assert (first.job.partition(" ")[0], first.args, first.lock) == (NAME, ("eu",), "import")
    assert [one.cooling for one in seen] == [False, True]
    assert (first.holder, second.holder.rpartition(" ")[0] != OTHER) == (OTHER, True)


async def test_a_skip_needs_no_thread_of_the_event_loop(redislock):
    """All of them may wait for that run; and when the interpreter ends, there are none."""
    threads = ThreadPoolExecutor()
    threads.shutdown()
    asyncio.get_running_loop().set_default_executor(threads)

    @single_instance("import")
    async def load():
        return "loaded"

    with redislock.simulate_held_by_other("import"):
        assert await load() == {"skipped": "busy", "lock": "import", "holder": OTHER}


@each_kind
def test_the_body_of_a_run_without_redis_handles_no_error_of_ours(redislock, kind):
    def body():
        return sys.exc_info()[1]

    run = decorated(body, "import", kind=kind, on_unavailable="run")
    with redislock.simulate_unavailable():
        assert run() is None


async def test_limit_lets_so_many_run_at_a_time_and_notes_them_under_one_name(locks):
    def permit():
        lease = current_lease()
        return lease and lease.permit

    @single_instance("import", limit=2)
    async def load(fail=False):
        permits.append(permit())
        both_run.set() if len(permits) == 2 else None
        await both_run.wait()
        if fail:
            raise ZeroDivisionError
        return permit()

    permits = []
    both_run = asyncio.Event()
    first, second = asyncio.ensure_future(load()), asyncio.ensure_future(load(fail=True))
    await both_run.wait()
    assert permits == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await second
    assert await first == 1
    assert await asyncio.to_thread(single_instance("import", limit=2)(permit)) == 1
    record = held.record("import")
    assert (record.last_success is None, record.last_failure is None) == (False, False)
    assert record.under_way == ()


@blocking_or_not
def test_limits_are_taken_all_or_none_and_the_first_one_has_the_records(redislock, is_async):
    limits = [Limit("import:{source}", lambda source: {"eu": 1, "us": 2}[source]), Limit("all", 1)]
    run = job(limits=limits, is_async=is_async)
    assert run("us") == "import:us, all"
    assert held.record("import:us").last_success is not None
    assert held.record("all") is None
    with redislock.simulate_held_by_other("import:eu"):
        skipped = run("eu")
        assert [lock.name for lock in held.list()] == ["import:eu"]
    assert (skipped["skipped"], skipped["lock"]) == ("busy", "import:eu")
    assert run("eu") == "import:eu, all"
    # A skip says which limit was taken, and its record by whom.
    with redislock.simulate_held_by_other("all"):
        skipped = run("us")
    assert (skipped["lock"], skipped["reason"]) == ("import:us", "of its limits, 'all' is taken")
    record = held.record("import:us")
    assert (record.last_skip.why, record.last_skip.by) == ("busy", skipped["holder"])
    assert f"because it was busy ({skipped['holder']})" in str(record.last_skip)


@pytest.mark.django_db(transaction=True)
def test_once_in_the_database_and_a_transaction_around_the_body(redislock):
    run = job("import:{source}", atomic=True, once="database")
    fail(run, "eu")
    assert run("eu") == "import:eu"
    skipped = run("eu")
    assert (skipped["skipped"], skipped["lock"]) == ("done", "import:eu")
    assert CompletedRun.objects.get().task == NAME


@each_kind
def test_a_run_within_itself_is_skipped_as_any_other_or_refused_if_it_would_wait(redislock, kind):
    def within_itself(name, **options):
        decorator = single_instance_task if kind == "task" else single_instance

        @decorator(name=name, **options)
        def again():
            return again()

        @single_instance(name, **options)
        async def again_later():
            return await again_later()

        return asyncio.run(again_later()) if kind == "coroutine function" else again()

    found = within_itself("skips")
    assert found["skipped"] == "busy"
    assert str(os.getpid()) in found["holder"]
    says = "holds it already" if kind == "task" else r"never end.*`__wrapped__`"
    with pytest.raises(LockMisuse, match=says):
        within_itself("waits", on_conflict="wait")


# --- records of a job -----------------------------------------------------------------------------


@each_kind
def test_the_record_of_a_job_is_that_of_all_its_names(redislock, capsys, kind):
    run = job("import:{source}", kind=kind)
    assert held.job(NAME) is None
    run("eu")
    fail(run, "us")
    with redislock.simulate_held_by_other("import:be"):
        run("be")
        run("be")
    run_job("backup.sh", "import:nl", lambda: None)  # Another job under such a name.
    with distributed_lock("of no job"):
        pass
    record = held.job(NAME)
    assert None not in {record.last_success, record.last_failure, record.last_skip}
    assert (record.skips, record.last_skip.why, record.last_skip.lasted) == (2, "busy", None)
    assert {one.name for one in held.records()} == {
        f"import:{source}" for source in ("eu", "us", "be", "nl")
    }
    probe = ["locks", "runs", "--no-success-for", "1h", "--fail", "--job"]
    call_command(*probe, NAME)
    assert capsys.readouterr().out.endswith(" s ago.\n")  # It is of no lock in particular.
    with pytest.raises(ZeroDivisionError):
        run_job("failing.sh", "import:nl", lambda: 1 // 0)
    with pytest.raises(CommandError, match=r"--job failing\.sh in the last 1 h 00 min\.$"):
        call_command(*probe, "failing.sh")
    capsys.readouterr()
    call_command("locks", "runs", "--json", "--job", NAME)
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["name"], shown["skips"]) == (NAME, 2)
    with pytest.raises(CommandError, match="No success of --job shop"):
        call_command(*probe, "shop.other")
    with pytest.raises(CommandError, match="--job goes with neither"):
        call_command(*probe, "shop.other", "import:eu")
    assert held.job("backup.sh").last_success.owner.task == "backup.sh"
    run("be")
    assert held.record("import:be").skips == 0, "a success ends the count"


def test_what_is_no_function_runs_as_a_job_too(redislock):
    assert run_job("backup.sh", "backup", current_lease).name == "backup"
    with redislock.simulate_held_by_other("backup"):
        skipped = run_job("backup.sh", "backup", lambda: 1, JobOptions())
    assert skipped == {"skipped": "busy", "lock": "backup", "holder": OTHER}
    hour = timedelta(hours=1)
    assert run_job("backup.sh", "backup", lambda: 1, JobOptions(ttl=hour, min_hold=hour)) == 1
    assert run_job("backup.sh", "backup", pytest.fail)["skipped"] == "cooling"
    with pytest.raises(TypeError, match=r"such as JobOptions\(ttl=60\), not {"):
        run_job("backup.sh", "backup", pytest.fail, {"ttl": 60})
    with pytest.raises(ValueError, match="job must be a non-empty string"):
        run_job("", "backup", pytest.fail)
    with pytest.raises(ValueError, match=r"takes one lock, by its name: leave limits out"):
        run_job("backup.sh", "backup", pytest.fail, JobOptions(limits=[Limit("disk", 1)]))


# --- Skipped --------------------------------------------------------------------------------------


def test_a_skip_is_a_dictionary_that_is_false_and_goes_anywhere():
    skipped = Skipped(skipped="busy", lock="import:eu")
    assert not skipped
    assert repr(skipped) == "Skipped({'skipped': 'busy', 'lock': 'import:eu'})"
    again = pickle.loads(pickle.dumps(skipped))
    assert (type(again), again) == (Skipped, skipped)
    assert json.loads(json.dumps(skipped)) == skipped == dict(skipped)
    # Encoders in Python take what is false for empty.
    assert json.loads(json.dumps([skipped], indent=2)) == [skipped]
    written = io.StringIO()
    json.dump(skipped, written)
    assert json.loads(written.getvalue()) == skipped
    assert json.loads(json.dumps(skipped, cls=DjangoJSONEncoder, indent=4)) == skipped


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_celery_has_the_same_skips(redislock, serializer):
    task = single_instance_task(key="import", serializer=serializer)(tell)
    with redislock.simulate_held_by_other("import"):
        result = task.delay().get()
    skipped = {"skipped": "busy", "lock": "import", "holder": OTHER}
    assert (type(result), dict(result)) == (Skipped, skipped)


# --- refused at import ----------------------------------------------------------------------------


def tell():
    """A function to decorate."""


def load(source):
    """A function with an argument."""


async def aload(source):
    """A coroutine function to decorate."""


def generate():
    """Runs too late."""
    yield 1


async def agenerate():
    """Runs too late."""
    yield 1


def run_as_job(**options):
    """As a decorator: refuse these options."""
    return lambda function: run_job("backup.sh", "backup", pytest.fail, JobOptions(**options))


@pytest.mark.parametrize("make", [single_instance, single_instance_task, run_as_job])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ttl": 0.049}, "ttl must be at least 0.05 seconds"),
        ({"ttl": "30"}, "ttl must be"),
        ({"max_hold": -1}, "max_hold must be"),
        ({"min_hold": math.nan}, "min_hold must be"),
        ({"once": True}, "once must be"),
        ({"once": "database"}, "needs atomic"),
        ({"renew": 1}, "renew must be"),
        ({"wait": 5}, 'wait needs on_conflict="wait"'),
        ({"on_conflict": "skp"}, "on_conflict must be one of"),
        ({"on_unavailable": "rum"}, "on_unavailable must be one of"),
        ({"limit": 0}, "limit must be an integer, 1 to 100"),
        ({"limit": 2, "once": 60}, "once and limit exclude each other"),
        ({"using": ""}, "using must be a non-empty string"),
        ({"monitor": "nightly"}, "monitor must be a monitor"),
        ({"limit": 2, "limits": [Limit("import", 2)]}, "limits"),
        ({"once": 60, "limits": [Limit("import", 2)]}, "limits"),
        ({"limits": []}, "at least one Limit"),
        ({"limits": [Rate("mail", "10/s")], "ttl": 5}, "ttl has no effect"),
        ({"atomic": True, "on_unavailable": "run"}, "exclude each other"),
    ],
)
def test_an_option_is_checked_wherever_it_is_written(redislock, make, options, says):
    with pytest.raises(ValueError, match=says):
        make(**options)(tell)
    assert not held.list()


@pytest.mark.parametrize(
    ("options", "function", "error", "message"),
    [
        ({"on_conflict": "retry"}, load, ValueError, 'Write on_conflict="wait".*_task'),
        ({"on_unavailable": "retry"}, load, ValueError, "only a broker brings a call back"),
        ({"on_conflict": "explode"}, load, ValueError, "must be one of 'skip', 'raise', 'wait'"),
        ({"timeout": 5}, load, TypeError, "no argument 'timeout'; pass ttl="),
        ({"on_conflict": aload}, load, TypeError, r"on_conflict cannot be aload\(\)"),
        ({"on_conflict": generate}, aload, TypeError, r"on_conflict cannot be generate\(\)"),
        ({"name": "gpu#2", "limit": 2}, load, InvalidLockName, "ends in # and a number"),
        ({"limits": [Limit("gpu#2", 2)]}, load, InvalidLockName, "ends in # and a number"),
        ({"name": "x", "limits": [Limit("y", 2)]}, load, ValueError, "leave the name out"),
        ({"name": "x", "key": "y"}, load, TypeError, "no argument 'key'; pass one of ttl"),
        ({"name": 7}, load, InvalidLockName, "it is int, not str"),
        ({"name": "import:{country}"}, load, InvalidLockName, "'country', which load"),
        ({"atomic": True}, aload, TypeError, r"single_instance with atomic cannot.*aload\(\)"),
        ({}, generate, TypeError, "single_instance cannot decorate the generator function"),
        ({}, Importer, TypeError, "single_instance was given the class Importer"),
        ({}, staticmethod(load), TypeError, "write @staticmethod above @single_instance"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_write(options, function, error, message):
    with pytest.raises(error, match=message):
        single_instance(**options)(function)
    if not options:
        with pytest.raises(error, match=message):
            single_instance(function)


def test_a_celery_task_belongs_above_and_takes_no_key_beside_limits():
    with pytest.raises(TypeError, match="Write @shared_task above"):
        single_instance("import")(shared_task(load))
    with pytest.raises(ValueError, match="leave key out"):
        SingleInstance(key="import", limits=[Limit("import", 2)])


@each_kind
@pytest.mark.parametrize("make", [aload, generate, agenerate], ids=lambda make: make.__name__)
def test_a_function_that_returns_work_still_to_do_has_failed(redislock, kind, make):
    def body():
        return make(*["eu"] if make is aload else [])

    run = decorated(body, "import", kind=kind, once=60)
    for _ in range(2):  # `once` has not marked it as done.
        with pytest.raises(TypeError, match=r"body.* has returned"):
            run()
    record = held.record("import")
    assert (record.last_success, record.last_failure is None) == (None, False)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda: aload("eu"), r"<lambda>\(\): its body runs after the call"),
        (aload, r"run_job cannot run aload\(\): .* Decorate a coroutine function with @single"),
        (generate, r"the generator function generate\(\)"),
        (agenerate, r"the generator function agenerate\(\)"),
        (None, r"run_job\(\) calls a function, not None"),
    ],
)
def test_run_job_refuses_work_that_would_run_after_its_call(redislock, body, says):
    with pytest.raises(TypeError, match=says):
        run_job("backup.sh", "backup", body)
    with pytest.raises(TypeError, match=r"on_conflict cannot be generate\(\)"):
        run_job("backup.sh", "backup", pytest.fail, JobOptions(on_conflict=generate))
    record = held.record("backup")
    assert record is None or record.last_success is None
