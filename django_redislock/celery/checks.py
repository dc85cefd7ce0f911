"""System checks of tasks: what their options promise and Celery's settings do not keep.

E050, E051 and W050 to W058; see docs/celery.md.
"""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.app import app_or_default
from celery.backends.base import DisabledBackend
from celery.fixups.django import DjangoFixup
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_redislock.celery.decorator import SingleInstanceTask
from django_redislock.celery.message import acks_late, shows_results, visibility_timeout
from django_redislock.celery.options import NEWEST
from django_redislock.celery.queued import on_quorum
from django_redislock.conf import aliases, conf
from django_redislock.rules.options import terms_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery import Celery

GREEN_POOLS = {"gevent", "eventlet"}
LONGEST_WAIT = 60.0  # Seconds that a run may keep a worker slot waiting.


def check_tasks(app_configs: Any, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check every single-instance task of the current Celery application."""
    app = app_or_default()
    messages = list(_import_tasks(app))
    tasks = [task for task in app.tasks.values() if isinstance(task, SingleInstanceTask)]
    for task in tasks:
        messages += _check(task)
    if tasks and (pool := str(app.conf.worker_pool)) in GREEN_POOLS:
        messages.append(
            checks.Warning(
                f"worker_pool is {pool!r}, and there are single-instance tasks: a greenlet that"
                " computes for long without yielding keeps the watchdog from renewing the leases"
                " of its process, and another worker may start the same task.",
                hint="Give tasks that compute a ttl above the longest such stretch, or run them in"
                " a prefork worker.",
                id="django_redislock.W058",
            )
        )
    return messages


def _import_tasks(app: Celery) -> Iterator[checks.CheckMessage]:
    """Import the modules of all tasks, as a worker does when it starts; say which fail."""
    # Not by import_default_modules(): that makes Celery run all system checks first, this one
    # among them, and print what fails. What autodiscover_tasks() was told to import is known only
    # to receivers of this signal, and Celery has no public way to call some of them.
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
        yield checks.Warning(
            f"Celery cannot import all tasks: {type(error).__name__}: {error}{place}.",
            hint="A worker does not start like this. Tasks that are not imported are not checked.",
            id="django_redislock.W057",
        )


def _check(task: SingleInstanceTask) -> Iterator[checks.CheckMessage]:
    options = task.single_instance_options
    try:
        known = aliases()
        if options.using not in known:
            yield checks.Error(
                f"Task {task.name} uses the alias {options.using!r}, which is not in REDISLOCK.",
                hint=f"Its aliases are: {', '.join(map(repr, known)) or 'none'}.",
                id="django_redislock.E050",
            )
            return
        terms = terms_of(options.lock_options(), conf(options.using))
        cannot_tell_newest = options.unique_queued == NEWEST and on_quorum(task)
    except ImproperlyConfigured:
        return  # The checks of the settings say so.
    if cannot_tell_newest:
        yield checks.Error(
            f'Task {task.name} has unique_queued="newest", but REDISLOCK[{options.using!r}] is a'
            " quorum, whose servers may each know another call as the last.",
            hint="Say unique_queued=True, or name an alias with one server by using=.",
            id="django_redislock.E051",
        )
    max_hold = None if math.isinf(terms.max_hold) else terms.max_hold
    time_limit = task.app.conf.task_time_limit if task.time_limit is None else task.time_limit
    redelivered_after = visibility_timeout(task.app)

    # Of the class: autoretry lays a function of its own over the task's run.
    _, *names = inspect.signature(type(task).run).parameters
    if options.key is None and names:
        yield _warning(
            task,
            "W050",
            f"takes arguments ({', '.join(names)}) but names no key, so one run with any"
            " arguments keeps out all others",
            f'Put what tells runs apart into the key: key="{task.name}:{{{names[0]}}}"; or say'
            f' that one lock for all is meant: key="{task.name}".',
        )
    longest = max(max_hold or 0.0, time_limit or 0.0)
    if acks_late(task) and longest > redelivered_after:
        yield _warning(
            task,
            "W051",
            f"may run for {longest:g} s and has acks_late, but the broker may deliver it again"
            f" after {redelivered_after:g} s (visibility_timeout)",
            "It would not run twice, but go back and forth meanwhile. Raise visibility_timeout in"
            " broker_transport_options above its longest run.",
        )
    if max_hold is not None and time_limit is not None and time_limit > max_hold:
        yield _warning(
            task,
            "W052",
            f"has a hard time limit of {time_limit:g} s, but its lease ends after {max_hold:g} s"
            " (max_hold), while it still may run",
            "Let max_hold be above the time limit.",
        )
    if terms.wait > LONGEST_WAIT:
        yield _warning(
            task,
            "W053",
            f"may keep a worker slot waiting for {terms.wait:g} s",
            'on_conflict="retry" comes back later and leaves the slot to others meanwhile.',
        )
    if acks_late(task) and not task.ignore_result and not shows_results(task):
        there_is_none = isinstance(task.backend, DisabledBackend)
        why = "there is no result backend that tells" if there_is_none else "rpc:// does not tell"
        yield _warning(
            task,
            "W054",
            f"has acks_late, but {why} a duplicate delivery whether the first one has reported",
            "Set a result_backend that keeps results. Or set ignore_result=True on the task: then"
            " what follows it in a chain may start twice.",
        )
    after_success = [name for name in ("min_hold", "once") if getattr(options, name)]
    # With "retry" the others come back, and one of them does the work.
    if after_success and options.on_conflict != "retry" and not acks_late(task):
        yield _warning(
            task,
            "W055",
            f"has {' and '.join(after_success)}, but its message is acknowledged before it"
            " runs: if its worker is killed, the work is done by nobody, since the others have"
            " skipped",
            "Set acks_late=True on the task, or task_acks_late: then the broker delivers it again."
            " reject_on_worker_lost=True does so when the process of the task alone is killed."
            " Silence this if it must rather not be done than be started twice.",
        )
    if options.unique_queued and options.on_conflict == "wait":
        yield _warning(
            task,
            "W056",
            "has unique_queued, but a call that is made while it runs keeps a worker slot waiting,"
            " and goes back to the queue only when the wait is over",
            'on_conflict="retry" makes one more run of all the calls that are made during a run,'
            " and leaves the slot to others meanwhile.",
        )
    if options.unique_queued and options.on_conflict == "skip":
        yield _warning(
            task,
            "W056",
            "has unique_queued, but a call that is made while it runs is skipped, and with it what"
            " changed since that run began",
            'on_conflict="retry" makes one more run of all the calls that are made during a run.',
        )


def _warning(task: SingleInstanceTask, id: str, what: str, hint: str) -> checks.Warning:  # noqa: A002
    return checks.Warning(f"Task {task.name} {what}.", hint=hint, id=f"django_redislock.{id}")


checks.register(check_tasks, "django_redislock")
