"""unique_queued: of a task's calls with one key, only one waits in the broker's queue at a time.

A call is announced before it is published. It is retracted when the body of its run starts, or when
it is known that none will. Until then it stands for every other call of its task with the same key;
those are not published. Of two tasks with one key, only one has a call announced at a time. This
saves work, and guarantees nothing: ``send_task`` and other applications publish without asking. The
lock around the body still keeps the runs apart.
"""

from __future__ import annotations

import time
from functools import partial
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.signals import task_postrun, task_revoked
from celery.states import READY_STATES, RETRY, SUCCESS
from celery.utils import uuid
from celery.utils.saferepr import saferepr
from kombu.serialization import dumps, loads, prepare_accept_content

from django_redislock import logs, task_runs
from django_redislock.backends.registry import backends
from django_redislock.celery.defer import LONGEST_PAUSE, Deferred, hop
from django_redislock.celery.message import (
    HEADER,
    acks_late,
    carried,
    carried_by,
    carrying,
    delay_of,
    seconds_left,
    shows_results,
)
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from celery import Celery, Task

    from django_redislock.celery.options import SingleInstance


# --- the arguments of a call, as the server of the locks keeps them for the announced call --------

# They are serialized as the message of the call would be, and read with the same care: a worker
# takes only content that accept_content allows.

MOST_BYTES = 65_536
TOO_LONG = b"-"  # As announce.lua takes it.


class Arguments(NamedTuple):
    """The arguments of the body of a run."""

    args: list[Any]
    kwargs: dict[str, Any]
    shown: dict[str, str]  # argsrepr and kwargsrepr: their form in logs and events.


def packed(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bytes:
    """The arguments of a call that is made with these options of apply_async().

    Returns:
        TOO_LONG if they are too long for the server to keep.

    Raises:
        TypeError: The task does not take them.
        EncodeError: They cannot be serialized.
    """
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    # From here on: as Celery does with a call that it publishes.
    if task.typing and (check := getattr(task, "__header__", None)):
        check(*args, **kwargs)
    serializer = options.get("serializer") or task.serializer
    dump = getattr(task, "_dump_pydantic_arguments", None)  # Celery 5.5 has none.
    if dump is not None and serializer != "pickle":
        args, kwargs = dump(args, kwargs)
    longest = task.app.amqp.argsrepr_maxsize, task.app.amqp.kwargsrepr_maxsize
    shown = {
        name: saferepr(value, most) if options.get(name) is None else options[name]
        for name, value, most in zip(
            ("argsrepr", "kwargsrepr"), (args, kwargs), longest, strict=True
        )
    }
    content_type, encoding, body = dumps((args, kwargs, shown), serializer)  # type: ignore[no-untyped-call]
    if isinstance(body, str):
        body = body.encode(encoding)
    whole = b"\n".join([content_type.encode(), encoding.encode(), body])
    return whole if len(whole) <= MOST_BYTES else TOO_LONG


def unpacked(app: Celery, whole: bytes) -> Arguments:
    """Read the result of packed().

    Raises:
        ContentDisallowed: They are serialized in a way that accept_content does not name.
        DecodeError: They cannot be read.
    """
    content_type, encoding, body = whole.split(b"\n", 2)
    kind = content_type.decode(), encoding.decode()
    accept = prepare_accept_content(app.conf.accept_content)  # type: ignore[no-untyped-call]
    args, kwargs, shown = loads(body, *kind, accept=accept)  # type: ignore[no-untyped-call]
    return Arguments(list(args), kwargs, shown)


logger = logs.logger("django_redislock.celery")

# Options of a call that needs a result of its own, and so is published: something depends on it, or
# its caller looks for it under a task id of its own choice.
_DEPENDENTS = ("link", "link_error", "chain", "chord", "group_id", "task_id")

# Headers that differ in each call, since they say which trace it belongs to: those of W3C, New
# Relic and Sentry, whose "headers" has them once more; beside our own.
_OF_NO_CALL = {HEADER, "traceparent", "tracestate", "baggage", "newrelic", "headers"}
_OF_SENTRY = "sentry-"


def is_exempt(task: Task, options: Mapping[str, Any]) -> bool:
    """Whether a call is published in any case."""
    return bool(
        task.app.conf.task_always_eager
        or options.get("retries")
        or "tries" in carried(options.get("headers"))  # A deferred run.
        # Else the caller of a plain delay() might wait for a result that is not kept.
        or options.get("ignore_result") not in {None, bool(task.ignore_result)}
        or any(options.get(name) for name in _DEPENDENTS)
    )


def debounced(task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of apply_async() for a call of a task with debounce.

    The message carries when the call is due. If that is late, it comes up before, and goes back.

    Raises:
        ValueError: The call says itself when it is to run, or when it expires.
        ImproperlyConfigured: A quorum keeps its lock.
    """
    backends[task.single_instance_options.using].check_records("debounce")
    for name in ("countdown", "eta", "expires"):
        if options.get(name, task.expires if name == "expires" else None) is not None:
            raise ValueError(
                f"A call of {task.name} cannot say {name}: debounce says when it runs, together"
                f" with others. Leave {name} out, or call a task without debounce."
            )
    delay: float = task.single_instance_options.debounce
    options = carrying(options, at=time.time() + delay)
    return {**options, "countdown": hop(task, delay)}


class QueuedResult(AsyncResult):  # type: ignore[misc] # Celery has no types
    """The result of a call of a task with unique_queued.

    Attributes:
        published: Whether the call was published. Else this is the result of the call that stands
            for it.
    """

    published = True
    retract: Callable[[], object] | None = None  # Of the call, if delay() has returned this.

    def revoke(self, *args: Any, **options: Any) -> None:
        """As Celery's. From now on the call stands for no others."""
        super().revoke(*args, **options)
        if self.retract:
            self.retract()


class _Waits(BaseException):
    """Ends the publication of a call, since *task_id* waits in the queue and stands for it.

    It is no Exception: for code around Celery's, nothing has failed.
    """

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id


def publish_once(
    task: Task,
    name: str,
    publish: Callable[[str, Mapping[str, Any]], AsyncResult],
    options: Mapping[str, Any],
    arguments: bytes = b"",
    *,
    of: str,
) -> AsyncResult:
    """Publish a call, unless another one that waits in the queue stands for it.

    The waiting call is of the same task, has the same key, goes the same way, runs no later and
    expires no earlier. It runs with its own arguments, or with *arguments* if there are any. A
    published call stands for later ones, unless a call of another task with the same key is
    announced.

    Args:
        task: The task.
        name: The lock of the run.
        publish: Publishes the call. It gets the task id, and the options of apply_async().
        options: These options.
        arguments: Those of the call, packed; b"" if the one that waits keeps its own.
        of: The name of the task, with more if not all of its calls may stand for this one.

    Returns:
        Its result, or that of the call that stands for it. Its `published` tells which.
    """
    task_id = uuid()
    router = options.get("router") or task.app.amqp.router
    ends = False

    def route(*args: Any, **how: Any) -> dict[str, Any]:
        # Only here the way of the message is known, and the headers that an app's send_task() adds,
        # as for a tenant. Nothing has been made or sent so far.
        routed: dict[str, Any] = router.route(*args, **how)
        # A class of the project's may publish later, at a commit: then nobody would hear of it.
        if not ends and (waiting := _announce(task, name, task_id, arguments, options, routed, of)):
            raise _Waits(waiting)
        return routed

    how = carrying(options, queued=name) | {"router": SimpleNamespace(route=route)}
    try:
        result = publish(task_id, how)
    except _Waits as waits:
        result = task.AsyncResult(waits.task_id)
        result.published = False
    except BaseException:
        # Also after an interrupt: the announcement may have been carried out.
        retract(task, name, task_id)
        raise
    finally:
        ends = True
    if isinstance(result, QueuedResult):  # A class of the project's may return something else.
        # If no worker hears that it is revoked, it runs, with the last call's arguments.
        keep = task_runs.KEPT_FOR_LATE
        result.retract = partial(retract, task, name, result.id, keep=keep)
        if not result.published:
            extra = _said(task, name, result.id)
            says = "Did not publish %s: %s waits in the queue, with the same key %r"
            logger.info(says, task.name, result.id, name, extra=extra)
    return result


def _announce(
    task: Task,
    name: str,
    task_id: str,
    arguments: bytes,
    options: Mapping[str, Any],
    routed: Mapping[str, Any],
    of: str,
) -> str:
    """Announce a call with these *options*, which is going to be published as they are *routed*.

    Returns:
        "" if it is to be published, else the id of the one that waits.
    """
    ours: SingleInstance = task.single_instance_options
    delay = ours.debounce or delay_of(options)
    lives = seconds_left(options.get("expires", task.expires))
    what: dict[str, Any] = {
        "delay": delay,
        "lives": lives,
        "arguments": arguments,
        "task": of + _marks_of(routed.get("headers") or {}, ours.queued_headers),
        "way": _way_of(routed, task.app),
    }
    # RabbitMQ drops a message that has expired without telling a worker.
    ttl = min(delay + ours.queued_ttl, lives)
    try:
        while waiting := task_runs.announce(name, task_id, ttl, **what, using=ours.using):
            if not _has_ended(task, waiting):
                return waiting
            task_runs.retract(name, waiting, keep=_kept_for(task), using=ours.using)
    except LockUnavailable as error:
        # It may be announced nevertheless: only the answer may have been lost.
        extra = _said(task, name, task_id, error)
        says = "Publishing %s[%s] without asking: %s"
        logger.warning(says, task.name, task_id, error, extra=extra)
    return ""


def _way_of(routed: Mapping[str, Any], app: Celery) -> str:
    """Where a message goes, and how soon it is taken from there."""
    places = (routed.get(one) for one in ("queue", "exchange"))
    names = [getattr(place, "name", place) for place in places]
    parent = app.current_worker_task if app.conf.task_inherit_parent_priority else None
    inherited = parent and (parent.request.delivery_info or {}).get("priority")
    priority = routed.get("priority", inherited)
    return "/".join(str(one) for one in (*names, routed.get("routing_key"), priority))


def _marks_of(headers: Mapping[str, Any], names: Sequence[str] | None) -> str:
    """What tells a call with these *headers* from others; "" if nothing does."""
    if names is None:
        names = [one for one in {*headers} - _OF_NO_CALL if not one.startswith(_OF_SENTRY)]
    marks = {name: headers[name] for name in sorted(names) if name in headers}
    # A digest, since they may be long or secret.
    return f"|{sha256(repr(marks).encode()).hexdigest()[:32]}" if marks else ""


def _has_ended(task: Task, task_id: str) -> bool:
    """Whether an announced call has a result: it was revoked, or its end could not be told."""
    try:
        return shows_results(task) and task.backend.get_state(task_id) in READY_STATES
    except Exception as error:  # noqa: BLE001 # Each backend has its own.
        says = "Whether %s[%s] still waits in the queue is not known: %s"
        extra = logs.of(job=task.name, task_id=task_id)
        logger.warning(says, task.name, task_id, error, extra=extra)
        return False


def _kept_for(task: Task) -> float:
    """How long to keep the last call's arguments for a call that has failed.

    A second delivery of its message is executed.
    """
    return float(task.recognised_for) if acks_late(task) else 0.0


def retract(task: Task, name: str, task_id: str, *, keep: float = 0.0) -> bytes | None:
    """Let the call *task_id* stand for others no longer.

    Returns:
        The packed arguments of the last call that it stands for, which the server keeps for *keep*
        more seconds; b"" if it is to run with its own; None if the server does not answer.
    """
    options: SingleInstance = task.single_instance_options
    try:
        return task_runs.retract(name, task_id, keep=keep, using=options.using)
    except LockUnavailable as error:
        logger.warning(
            "Until queued_ttl is over, %s is not published with the key %r: %s",
            task.name,
            name,
            error,
            extra=_said(task, name, task_id, error),
        )
        return None


def requeue(task: Task, name: str, task_id: str, *, expires: Any) -> float | None:
    """Let the call *task_id*, which goes back into the queue, stand for others as before.

    Args:
        task: The task.
        name: The lock of the run.
        task_id: The id of the call.
        expires: When its message expires, as the message says it.

    Returns:
        Seconds since another call was last merged into it; None if none was.
    """
    options: SingleInstance = task.single_instance_options
    # It is heard of again when it comes back, after the longest pause at the latest; queued_ttl
    # counts from then.
    ttl = min(LONGEST_PAUSE + options.queued_ttl, seconds_left(expires))
    try:
        return task_runs.requeue(name, task_id, ttl, using=options.using)
    except LockUnavailable as error:
        logger.warning(
            "%s[%s] goes back to the queue, where it may no longer stand for others: %s",
            task.name,
            task_id,
            error,
            extra=_said(task, name, task_id, error),
        )
        return None


def _said(
    task: Task, name: str, task_id: str, error: LockUnavailable | None = None
) -> Mapping[str, Any]:
    """The fields of a log record about a call."""
    reason = error.reason if error else None
    known = {"lock": name, "alias": task.single_instance_options.using, "reason": reason}
    return logs.of(job=task.name, task_id=task_id, **known)


def _retract_ended(sender: Any = None, state: Any = None, retval: Any = None, **other: Any) -> None:
    """In a worker: a message was processed, perhaps without a run, as when before_start() fails."""
    if not sender.request.headers:
        return
    # Without a state, the worker is shutting down.
    is_given_back = state is None or (isinstance(retval, Reject) and retval.requeue)
    # Without acks_late the message is acknowledged already, so the broker has none to deliver.
    comes_back = is_given_back and acks_late(sender)
    if state != RETRY and not comes_back and not isinstance(retval, Deferred):
        _retract_unstarted(sender, sender.request, fails=state != SUCCESS)


def _retract_unstarted(
    sender: Any = None, request: Any = None, fails: bool = False, **kwargs: Any
) -> None:
    """In a worker: a message has expired, or was revoked, before it started; or else it *fails*."""
    ours = hasattr(sender, "single_instance_options")
    if ours and (name := carried_by(request).get("queued")):
        retract(sender, name, request.id, keep=_kept_for(sender) if fails else 0.0)


def hear_ends() -> None:
    """Hear of the end of each message: not before a task has the option, since it takes time."""
    task_postrun.connect(_retract_ended, dispatch_uid="django_redislock.unique_queued")


task_revoked.connect(_retract_unstarted, dispatch_uid="django_redislock.unique_queued")
