"""System checks of tasks: options that contradict each other or Celery's settings.

Each id has a section in docs/checks.md; these begin with E050 and W050.
"""

from __future__ import annotations

import importlib
import math
import traceback
from datetime import datetime, timedelta
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.app import app_or_default
from celery.backends.base import DisabledBackend
from celery.fixups.django import DjangoFixup
from celery.schedules import crontab
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.timezone import get_default_timezone

from django_redislock.backends.registry import backends
from django_redislock.celery.decorator import SingleInstanceTask
from django_redislock.celery.message import acks_late, shows_results, visibility_timeout
from django_redislock.conf import aliases, conf
from django_redislock.jobs.options import DATABASE
from django_redislock.rules.arguments import PERIODS
from django_redislock.rules.names import signature_of
from django_redislock.rules.options import terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import tzinfo

    from celery import Celery
    from django.db.models import Model

    from django_redislock.rules.options import Terms

GREEN_POOLS = {"gevent", "eventlet"}
BORDER = timedelta(minutes=1)  # A message may be sent so long after its time, or clocks differ.
LONGEST_WAIT = 60.0  # Seconds that a run may keep a worker slot waiting.


def check_tasks(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check every single-instance task of the current Celery application."""
    app = app_or_default()
    messages = list(_import_tasks(app))
    tasks = _tasks(app)
    for task in tasks:
        messages += _check(task)
    if tasks:
        messages += _check_pool(app)
    return messages


def check_tables(
    app_configs: Any, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check that the named databases have the tables for tasks with atomic.

    As Django's own checks, it asks no database that is not named. Not Tags.database: `migrate` runs
    those, and would make no table since the table is missing.
    """
    if not databases:
        return []
    from django_redislock.fences import missing_table

    app = app_or_default()
    list(_import_tasks(app))  # check_tasks() tells which fail.
    tasks = [task for task in _tasks(app) if task.single_instance_options.atomic in databases]
    missing = cache(missing_table)  # Many tasks write to the same tables.
    return [message for task in tasks for message in _check_tables(task, missing)]


def _tasks(app: Celery) -> list[SingleInstanceTask]:
    return [task for task in app.tasks.values() if isinstance(task, SingleInstanceTask)]


checks.register(check_tasks, "django_redislock")
checks.register(check_tables, "django_redislock", deploy=True)


# --- the worker -----------------------------------------------------------------------------------

SCHEDULER = "django_redislock.celery.beat:LeaderScheduler"


def refuse_scheduler_as_file(options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
    """End a worker whose beat would send beside all others.

    Raises:
        SystemExit: What ``-S`` is to beat is ``--scheduler`` to a worker, and its ``-S`` names a
            file. Celery logs any other exception and goes on.
    """
    file = (options or {}).get("statedb") or ""
    if str(file).replace(":", ".").endswith(SCHEDULER.replace(":", ".")):
        raise SystemExit(
            f"-S (--statedb) of a worker names the file of its state, which is {file!r}. Write"
            f" --scheduler {SCHEDULER}: without it, the beat of each worker with -B sends."
        )


signals.celeryd_init.connect(refuse_scheduler_as_file)


# --- the application ------------------------------------------------------------------------------


def _import_tasks(app: Celery) -> Iterator[checks.CheckMessage]:
    """Import the modules of all tasks, as a worker does when it starts; say which fail."""
    # Not by import_default_modules(): that makes Celery run all system checks first, this one among
    # them, and print failures. Only receivers of this signal know the modules for
    # autodiscover_tasks() to import, and Celery has no public way to call some of them.
    for receiver in signals.import_modules._live_receivers(app):
        if not isinstance(getattr(receiver, "__self__", None), DjangoFixup):
            yield from _failure_of(receiver, sender=app, signal=signals.import_modules)
    for module in app.loader.default_modules:
        yield from _failure_of(app.loader.import_task_module, module)
    if apps.ready:
        yield from _failure_of(app.autodiscover_tasks, force=True)


def _failure_of(
    importing: Callable[..., Any], *args: Any, **kwargs: Any
) -> Iterator[checks.CheckMessage]:
    try:
        importing(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever a module raises when it is imported
        frames = traceback.extract_tb(error.__traceback__)
        file, line = [
            (one.filename, one.lineno) for one in frames if not one.filename.startswith("<frozen")
        ][-1]
        # If the module itself is not found, the last line is one of importlib.
        place = "" if file == importlib.__file__ else f" ({file}, line {line})"
        says = f"{type(error).__name__}: {error}".removesuffix(".")
        yield _message(
            "W057",
            f"Celery cannot import all tasks: {says}{place}.",
            "A worker does not start like this. Tasks that are not imported are not checked.",
        )


def _check_pool(app: Celery) -> Iterator[checks.CheckMessage]:
    pool = str(app.conf.worker_pool)
    if pool in GREEN_POOLS:
        yield _message(
            "W058",
            f"worker_pool is {pool!r}, and there are single-instance tasks: a greenlet that"
            " computes for long without yielding keeps the watchdog from renewing the leases"
            " of its process, and another worker may start the same task.",
            "Give tasks that compute a ttl above the longest such stretch, or run them in"
            " a prefork worker.",
        )


# --- a task ---------------------------------------------------------------------------------------


def _check(task: SingleInstanceTask) -> Iterator[checks.CheckMessage]:
    options = task.single_instance_options
    try:
        known = aliases()
        if options.using not in known:
            yield _message(
                "E050",
                f"Task {task.name} uses the alias {options.using!r}, which is not in REDISLOCK.",
                f"Its aliases are: {', '.join(map(repr, known)) or 'none'}.",
            )
            return
        terms = terms_of(options.lock, conf(options.using))
        yield from _check_records(task)
    except ImproperlyConfigured:
        return  # The checks of the settings say so.
    for check in (
        _check_key,
        _check_visibility,
        _check_time_limit,
        _check_wait,
        _check_results,
        _check_acknowledgement,
        _check_spacing,
        _check_redelivery,
        _check_calls_during_a_run,
        _check_border,
    ):
        yield from check(task, terms)


def _check_records(task: SingleInstanceTask) -> Iterator[checks.CheckMessage]:
    """Whether its alias keeps the records of runs that it needs."""
    options = task.single_instance_options
    backend = backends[options.using]
    queued = "unique_queued" if options.debounce is None else "debounce"
    for name in ("once", queued, "give_up_after"):
        if (value := getattr(options, name)) and value != DATABASE:
            said = f"{name}={value!r}"
            if name == "once" and options.once_per:
                said = "once_per"
            try:
                backend.check_records(f"{said} of task {task.name}")
            except ImproperlyConfigured as error:
                yield _message("E051", str(error), "Until then, each of its runs or calls fails.")
    if options.lock.replace:
        try:
            backend.check_records(f'on_conflict="replace" of task {task.name}')
        except ImproperlyConfigured as error:
            yield _message("E051", str(error), "Until then, each of its runs fails.")
    if acks_late(task) and options.once != DATABASE and not backend.supports_records:
        yield _message(
            "W061",
            f"Task {task.name} has acks_late, and REDISLOCK[{options.using!r}] is a quorum, which"
            " keeps no records of runs: a message that is delivered again after its run has"
            " succeeded runs again.",
            'Name an alias with one server by using=. Or say once="database". Silence this if a'
            " second run does no harm.",
        )


def _check_key(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    # Of the class: autoretry lays a function of its own over the task's run.
    _, *names = signature_of(type(task).run).parameters
    options = task.single_instance_options
    if options.key is None and options.limits is None and names:
        yield _message(
            "W050",
            f"Task {task.name} takes arguments ({', '.join(names)}) but names no key, so one run"
            " with any arguments keeps out all others.",
            f'Put the arguments that tell runs apart into the key: key="{task.name}:{{{names[0]}}}"'
            f'; or say that one lock for all is meant: key="{task.name}".',
        )


def _check_visibility(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    limits = (_time_limit(task), terms.max_hold)  # Celery ends the run at the first of them.
    longest = next((limit for limit in limits if math.isfinite(limit)), 0.0)
    redelivered_after = visibility_timeout(task.app)
    if acks_late(task) and longest > redelivered_after:
        yield _message(
            "W051",
            f"Task {task.name} may run for {longest:g} s and has acks_late, but the broker may"
            f" deliver it again after {redelivered_after:g} s (visibility_timeout).",
            "It would not run twice, but go back and forth meanwhile. Raise visibility_timeout in"
            " broker_transport_options above its longest run; with RabbitMQ also consumer_timeout,"
            " on the server.",
        )


def _check_time_limit(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    time_limit = _time_limit(task)
    if math.isfinite(time_limit) and time_limit > terms.max_hold:
        yield _message(
            "W052",
            f"Task {task.name} has a hard time limit of {time_limit:g} s, but its lease ends after"
            f" {terms.max_hold:g} s (max_hold), while it still may run.",
            "Let max_hold be above the time limit.",
        )


def _check_wait(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    if terms.wait > LONGEST_WAIT:
        yield _message(
            "W053",
            f"Task {task.name} may keep a worker slot waiting for {terms.wait:g} s.",
            'on_conflict="retry" comes back later and leaves the slot to others meanwhile.',
        )


def _check_results(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    if acks_late(task) and not task.ignore_result and not shows_results(task):
        there_is_none = isinstance(task.backend, DisabledBackend)
        why = "there is no result backend that tells" if there_is_none else "rpc:// does not tell"
        yield _message(
            "W054",
            f"Task {task.name} has acks_late, but {why} a duplicate delivery whether the first one"
            " has reported.",
            "Set a result_backend that keeps results. Or set ignore_result=True on the task: then"
            " what follows it in a chain may start twice.",
        )


def _check_acknowledgement(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    options = task.single_instance_options
    after_success = [name for name in ("min_hold", "once") if getattr(options, name)]
    # With "retry" the others come back, and one of them does the work.
    if after_success and options.on_conflict != "retry" and not acks_late(task):
        yield _message(
            "W055",
            f"Task {task.name} has {' and '.join(after_success)}, but its message is acknowledged"
            " before it runs: if its worker is killed, the work is done by nobody, since the"
            " others have skipped.",
            "Set acks_late=True on the task, or task_acks_late: then the broker delivers it again."
            " reject_on_worker_lost=True does so when the process of the task alone is killed."
            ' Or set on_conflict="retry": then another run takes over, also if this one fails.'
            " Silence this if a lost run is better than a second start.",
        )


def _check_spacing(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    options = task.single_instance_options
    comes_later = options.on_conflict in ("retry", "wait") and not options.unique_queued
    if comes_later and options.min_hold and not (options.once or options.limit or options.limits):
        yield _message(
            "W060",
            f'Task {task.name} has min_hold={options.min_hold:g} and on_conflict="'
            f'{options.on_conflict}": a run that finds the lock cooling down comes when that is'
            " over, and does the work again.",
            'If the work is to be done once, say once=..., or on_conflict="skip". If runs are to be'
            " spaced out, say so by limit=1.",
        )


def _check_redelivery(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    if task.single_instance_options.give_up_after is None:
        return
    if not acks_late(task):
        yield _message(
            "E052",
            f"Task {task.name} has give_up_after, but its message is acknowledged before it runs:"
            " a call that kills its worker is not delivered again, so the option has no effect.",
            "Set acks_late=True on the task, or task_acks_late. Or leave give_up_after out.",
        )
    # Celery 5.5 and 5.6 have no retry_on_worker_lost.
    elif not (task.reject_on_worker_lost or getattr(task, "retry_on_worker_lost", False)):
        yield _message(
            "W059",
            f"Task {task.name} has give_up_after, but not reject_on_worker_lost: if the process of"
            " the task alone is killed, Celery ends the call with WorkerLostError the first time.",
            "Set reject_on_worker_lost=True on the task, or task_reject_on_worker_lost; with"
            " give_up_after it cannot go round for ever. Silence this if only calls that kill a"
            " whole worker are to be counted.",
        )


def _check_calls_during_a_run(
    task: SingleInstanceTask, terms: Terms
) -> Iterator[checks.CheckMessage]:
    options = task.single_instance_options
    retry = 'on_conflict="retry" makes one more run of all the calls that are made during a run'
    if options.unique_queued and options.on_conflict == "wait":
        yield _message(
            "W056",
            f"Task {task.name} has unique_queued, but a call that is made while it runs keeps a"
            " worker slot waiting, and goes back to the queue only when the wait is over.",
            f"{retry}, and leaves the slot to others meanwhile.",
        )
    if options.unique_queued and options.on_conflict == "skip":
        yield _message(
            "W056",
            f"Task {task.name} has unique_queued, but a call that is made while it runs is skipped,"
            " and with it what changed since that run began.",
            f"{retry}.",
        )


def _check_border(task: SingleInstanceTask, terms: Terms) -> Iterator[checks.CheckMessage]:
    every = task.single_instance_options.once_per
    if every is None:
        return
    for name, entry in (task.app.conf.beat_schedule or {}).items():
        schedule = entry.get("schedule")
        if entry.get("task") != task.name or not isinstance(schedule, crontab):
            continue
        for hour, minute in product(schedule.hour, schedule.minute):
            if not _is_near_border(task.app.timezone, hour, minute, min(every, PERIODS["day"])):
                continue
            yield _message(
                "W062",
                f"beat_schedule[{name!r}] sends task {task.name} at {hour:02}:{minute:02}, where a"
                " period of its once_per begins. Servers whose clocks differ would count it in two"
                " periods, and do its work twice.",
                "Send it some minutes after the border, such as crontab(hour=0, minute=5).",
            )
            break


def _is_near_border(zone: tzinfo, hour: int, minute: int, every: timedelta) -> bool:
    """Whether this time of day is at the border of two periods, in winter or in summer."""
    now = datetime.now(zone).replace(day=1, hour=hour, minute=minute)
    for month in (1, 7):
        local = now.replace(month=month).astimezone(get_default_timezone())
        since = timedelta(hours=local.hour, minutes=local.minute) % every
        if not timedelta() < since < every - BORDER:
            return True
    return False


def _check_tables(
    task: SingleInstanceTask, missing: Callable[[type[Model], str], str]
) -> Iterator[checks.CheckMessage]:
    from django_redislock.completed_runs import CompletedRun
    from django_redislock.fences import Fence

    options = task.single_instance_options
    assert options.atomic is not None  # See check_tables().
    for model in [Fence, CompletedRun] if options.once == DATABASE else [Fence]:
        if problem := missing(model, options.atomic):
            yield _message(
                "E053",
                f"Task {task.name} has atomic, but {problem}",
                "Until then each of its runs fails, before its body begins.",
            )


def _time_limit(task: SingleInstanceTask) -> float:
    """Seconds after which Celery kills a run; infinite if it does not."""
    limit = task.app.conf.task_time_limit if task.time_limit is None else task.time_limit
    return math.inf if limit is None else limit


def _message(id: str, says: str, hint: str) -> checks.CheckMessage:  # noqa: A002
    """The message of a system check of this package."""
    kind = checks.Error if id[0] == "E" else checks.Warning
    return kind(says, hint=hint, id=f"django_redislock.{id}")
