"""The options of single_instance_task, and which of them are refused at import.

Also Conflict, the argument of a function given as on_conflict.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from inspect import getclosurevars, isfunction
from string import Formatter
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypedDict,
    get_args,
    get_type_hints,
)

from celery import Task

from django_redislock.exceptions import InvalidLockName
from django_redislock.jobs.options import DATABASE, JobOptions, RunArguments, one_of
from django_redislock.jobs.options import Conflict as JobConflict
from django_redislock.options import Option, Seconds, options_in
from django_redislock.rules.arguments import flag, seconds
from django_redislock.rules.names import (
    check_name,
    check_shared,
    delivered,
    formatter,
    signature_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    Naming = Callable[[tuple[Any, ...], Mapping[str, Any]], str]


NEWEST: Literal["newest"] = "newest"  # The call that waits runs with the newest's arguments.

HOUR = 3600.0

# What debounce stands for. Its message says soon whether it is still there.
_OF_DEBOUNCE = {"unique_queued": NEWEST, "on_conflict": "retry", "queued_ttl": 60.0}


@dataclass(frozen=True)
class Conflict(JobConflict):
    """The argument of a function given as on_conflict. The task has the function's result."""

    task: Task


def _key(value: object, argument: str) -> Any:
    if isinstance(value, str) or callable(value):
        return value
    raise ValueError(
        f"{argument} must be a format string over the task's arguments, or a function of them,"
        f" not {value!r}."
    )


def _newest_or_flag(value: object, argument: str) -> Any:
    if value == NEWEST or isinstance(value, bool):
        return value
    raise ValueError(
        f'{argument} must be True, "newest" or False, not {value!r}: the call that waits runs with'
        " its own arguments, or with those of the last call."
    )


def _headers(value: object, argument: str) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ValueError(
        f"{argument} must be a list of the names of headers that belong to a call's identity,"
        f' such as ["_schema_name"], not {value!r}.'
    )


def _starts(value: object, argument: str) -> int:
    if type(value) is int and value >= 1:
        return value
    raise ValueError(
        f"{argument} must be an integer, at least 1, not {value!r}: how many starts of a call may"
        " kill their worker."
    )


class TaskArguments(RunArguments, total=False):
    """What @single_instance_task takes, besides the options of Celery."""

    key: Annotated[
        str | Callable[..., str] | None,
        Option(
            "The lock's name: a format string over the task's arguments, defaults applied, or a"
            " function of them. Default: the task's full name.",
            _key,
        ),
    ]
    on_conflict: Annotated[
        Literal["skip", "raise", "retry", "wait", "replace"] | Callable[[Conflict], Any],
        Option(
            'What a run does if the lock is not free: ``"skip"``, ``"raise"``, ``"retry"``,'
            ' ``"wait"``, ``"replace"``, or a function. "skip" returns a marked value,'
            ' ``{"skipped": "busy", "lock": name, "holder": "host:pid task-id"}``. "raise" raises'
            ' LockTimeout. "retry" comes back later, until conflict_deadline, then skips. "wait"'
            ' queues for the lock in its worker slot, then skips. "replace" lets the newest'
            " call win: the run that has the lock is told to end, and this one follows it. A"
            " function gets a Conflict, and its return value is the result.",
            one_of,
            "skip",
            choices=("skip", "raise", "retry", "wait", "replace"),
            functions=True,
        ),
    ]
    conflict_deadline: Annotated[
        Seconds,
        Option(
            'How long ``"retry"`` keeps coming back, or ``"wait"`` with unique_queued. The time of'
            " an operator's pause does not count.",
            seconds,
            HOUR,
        ),
    ]
    on_unavailable: Annotated[
        Literal["raise", "retry", "run"],
        Option(
            'What a run does if Redis cannot answer: ``"raise"``, ``"retry"`` or ``"run"``.'
            ' "raise" raises LockUnavailable. "retry" comes back until conflict_deadline, then'
            ' raises. "run" runs without the lock, logged at ERROR.',
            one_of,
            "raise",
            choices=("raise", "retry", "run"),
        ),
    ]
    abort_on_lost: Annotated[
        bool,
        Option(
            "Whether, after a loss, the next current_lease(), self.lease or ensure_held() raises"
            " LockLost in the body.",
            flag,
            False,
        ),
    ]
    unique_queued: Annotated[
        bool | Literal["newest"],
        Option(
            "Whether at most one call per key waits in the queue. Another call is not published"
            " then; it returns the AsyncResult of the waiting one. That one runs with its own"
            ' arguments, or with "newest" with those of the last call that it stands for. It'
            " counts as waiting until its body starts, also if it finds the lock busy and goes back"
            " to the queue. It stands for no call that would run earlier or expire later, or that"
            " goes to another queue, with another priority or with other headers. The result's"
            " ``published`` says whether its call was published.",
            _newest_or_flag,
            False,
        ),
    ]
    queued_ttl: Annotated[
        Seconds,
        Option(
            "How long a call counts as waiting in the queue without news, from when it is due."
            " With debounce it is a minute by default.",
            seconds,
            HOUR,
            least=1.0,
        ),
    ]
    debounce: Annotated[
        Seconds | None,
        Option(
            "How long after the last of many calls with one key they become one run. It has the"
            ' last call\'s arguments. It stands for ``unique_queued="newest"`` and'
            ' ``on_conflict="retry"``; a run that finds the lock busy must not be skipped.',
            seconds,
            least=0.001,
        ),
    ]
    debounce_max: Annotated[
        Seconds | None,
        Option(
            "How long after the first of these calls the run comes at the latest. None lets later"
            " calls put it off for ever.",
            seconds,
            least=0.001,
        ),
    ]
    queued_headers: Annotated[
        Sequence[str] | None,
        Option(
            "Which headers of a message must be equal for one call to replace another, such as"
            " a tenant's. Default: all headers but Celery's and those of traces.",
            _headers,
        ),
    ]
    give_up_after: Annotated[
        int | None,
        Option(
            "How many starts of a call may kill their worker before it is given up. Then it fails"
            " with RunAbandoned, and is not started again. It needs acks_late. None starts the call"
            " at each delivery.",
            _starts,
        ),
    ]


OPTIONS = frozenset(options_in(TaskArguments))


class CeleryOptions(TypedDict, total=False):
    """What Celery's decorators take: attributes of a task, and some that are none."""

    Request: type[Any] | str
    Strategy: str
    acks_late: bool
    acks_on_failure: bool | None
    acks_on_failure_or_timeout: bool
    acks_on_timeout: bool | None
    autoretry_for: Sequence[type[BaseException]]
    base: type[Any]
    compression: str | None
    default_retry_delay: float
    delivery_mode: int | str
    dont_autoretry_for: Sequence[type[BaseException]]
    exchange: str
    expires: float | datetime | None
    ignore_result: bool
    immediate: bool
    mandatory: bool
    max_retries: int | None
    name: str
    priority: int | None
    pydantic: bool
    pydantic_context: dict[str, Any] | None
    pydantic_dump_kwargs: dict[str, Any] | None
    pydantic_strict: bool
    queue: str
    rate_limit: str | float | None
    reject_on_worker_lost: bool | None
    resultrepr_maxsize: int
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    retry_kwargs: dict[str, Any]
    retry_on_worker_lost: bool | None
    routing_key: str
    send_events: bool
    serializer: str
    soft_time_limit: float | None
    store_eager_result: bool
    store_errors_even_if_ignored: bool
    throws: Sequence[type[BaseException]]
    time_limit: float | None
    track_started: bool
    trail: bool
    typing: bool


class TaskOptions(TaskArguments, CeleryOptions, total=False):
    """All that @single_instance_task takes."""


@dataclass(frozen=True, init=False)
class SingleInstance(JobOptions):
    """The options of single_instance_task, checked; see JobOptions."""

    key: str | Callable[..., str] | None
    conflict_deadline: float
    abort_on_lost: bool
    unique_queued: bool | Literal["newest"]
    queued_ttl: float
    queued_headers: tuple[str, ...] | None
    debounce: float | None
    debounce_max: float | None
    give_up_after: int | None

    arguments: ClassVar[type] = TaskArguments
    taken_by: ClassVar[str] = "single_instance_task"
    # Beside these, options of Celery: see SingleInstanceTask.
    of_durable: ClassVar[Mapping[str, Any]] = {
        "atomic": True,
        "once": DATABASE,
        "on_conflict": "retry",
        "on_unavailable": "retry",
    }

    def __init__(self, **given: Any) -> None:
        """See JobOptions."""
        if unknown := [name for name in given if name not in OPTIONS]:
            raise TypeError(_unknown(unknown, OPTIONS))
        super().__init__(**_with_implied(given))
        self.check_answered()
        if not callable(self.key):
            self.check_named(self.key or "the task")

    def check_redelivered(self, task: Mapping[str, Any]) -> None:
        """Refuse attributes of a *task* with which give_up_after or debounce cannot do its work.

        Raises:
            ValueError: Its message is acknowledged before its run, or expires.
        """
        if self.debounce and task.get("expires") is not None:
            raise ValueError(
                "debounce and expires exclude each other: the one message of many calls would"
                " expire with the first of them. Leave expires out; debounce_max says when the run"
                " comes at the latest."
            )
        if self.give_up_after and task.get("acks_late") is False:
            raise ValueError(
                "give_up_after needs acks_late=True: by acks_late=False the message is acknowledged"
                " before its run, so a call that kills its worker is not delivered again. Write"
                " acks_late=True, or leave give_up_after out."
            )

    def check_together(self, given: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other, and those *given* that have no effect."""
        if self.debounce is None and "debounce_max" in given:
            raise ValueError("debounce_max needs debounce: no other run is put off by later calls.")
        if self.debounce is not None:
            self._check_debounced(self.debounce)
        policies = {self.on_conflict, self.on_unavailable}
        comes_back = "retry" in policies or (self.on_conflict == "wait" and self.unique_queued)
        if "conflict_deadline" in given and not comes_back:
            raise ValueError(
                'conflict_deadline needs on_conflict="retry" or on_unavailable="retry", or'
                ' on_conflict="wait" with unique_queued: no other run comes back.'
            )
        for name in ("queued_ttl", "queued_headers"):
            if name in given and not self.unique_queued:
                raise ValueError(
                    f"{name} needs unique_queued=True: without it each call is published."
                )
        if self.key is not None and self.limits:
            raise ValueError("limits say the names of the locks themselves: leave key out.")
        if self.on_conflict == "replace" and self.unique_queued:
            which = "unique_queued" if self.debounce is None else "debounce"
            raise ValueError(
                f'{which} and on_conflict="replace" exclude each other: a newer call would not be'
                f" published while one waits. Leave {which} out."
            )
        super().check_together(given)

    def _check_debounced(self, debounce: float) -> None:
        if self.debounce_max is not None and self.debounce_max < debounce:
            raise ValueError(
                f"debounce_max={self.debounce_max:g} is less than debounce={debounce:g}: no run"
                " could come so soon after the first call. Make it longer, or leave it out."
            )
        if self.unique_queued != NEWEST:
            raise ValueError(
                f"debounce needs unique_queued={NEWEST!r}, not {self.unique_queued!r}: one call"
                " waits, and takes the last one's arguments. Leave unique_queued out."
            )
        if self.on_conflict == "skip":
            raise ValueError(
                'debounce and on_conflict="skip" exclude each other: calls made during a run would'
                ' be lost. Leave on_conflict out: debounce stands for "retry".'
            )
        if self.once:
            raise ValueError(
                "debounce excludes once, and so once_per and durable: after the first run, later"
                " calls would be skipped, whatever they say. Leave one of them out."
            )


def _with_implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options *given*, and those that debounce stands for."""
    given = {name: value for name, value in given.items() if value is not None}
    return {**_OF_DEBOUNCE, **given} if given.get("debounce") is not None else given


# Options that serve others, or go with some only: which, and whether they are of use with these.
# One that others depend on stands before them.
_SERVES: dict[str, tuple[set[str], Callable[[Mapping[str, Any]], bool]]] = {
    "unique_queued": (
        {"debounce", "on_conflict"},
        lambda options: (
            options.get("on_conflict") != "replace"
            and (options.get("debounce") is None or options.get("unique_queued") == NEWEST)
        ),
    ),
    "on_conflict": (
        {"debounce"},
        lambda options: options.get("debounce") is None or options.get("on_conflict") != "skip",
    ),
    "replace_within": ({"on_conflict"}, lambda options: options.get("on_conflict") == "replace"),
    "wait": ({"on_conflict"}, lambda options: options.get("on_conflict") == "wait"),
    "conflict_deadline": (
        {"on_conflict", "on_unavailable", "unique_queued"},
        lambda options: (
            "retry" in (options.get("on_conflict"), options.get("on_unavailable"))
            or (options.get("on_conflict") == "wait" and bool(options.get("unique_queued")))
        ),
    ),
    "queued_ttl": ({"unique_queued"}, lambda options: bool(options.get("unique_queued"))),
    "debounce_max": ({"debounce"}, lambda options: bool(options.get("debounce"))),
    "queued_headers": ({"unique_queued"}, lambda options: bool(options.get("unique_queued"))),
}


def inherited(cls: type) -> dict[str, Any]:
    """The options in ``single_instance`` of a class of tasks, merged with those of its bases.

    Raises:
        TypeError: One of the classes has something else there.
    """
    layers = [(one, vars(one).get("single_instance", {})) for one in reversed(cls.__mro__)]
    for one, layer in layers:
        if not isinstance(layer, Mapping):
            raise TypeError(
                f"single_instance of {one.__name__} must be a dictionary of options, such as"
                f' {{"key": "lottery:{{draw_id}}"}}, not {layer!r}.'
            )
    return merge([layer for _, layer in layers])


def merge(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the options of classes and of a decorator, one by one. The later one wins.

    None means that an option was not given. An option such as wait serves another one. It is
    dropped if a later layer changes that other option so that it has no use, or excludes it.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        given = {name: value for name, value in layer.items() if value is not None}
        merged |= given
        changed = set(given)
        for name, (served, is_of_use) in _SERVES.items():
            if name not in merged or name in given or not served & changed:
                continue
            durable = SingleInstance.of_durable if merged.get("durable") else {}
            if not is_of_use(_with_implied({**durable, **merged})):
                del merged[name]
                changed.add(name)
    return merged


def refuse_attributes(cls: type, body: Callable[..., Any]) -> None:
    """Refuse an attribute of a task class that looks like an option of ours, and has no effect.

    Raises:
        TypeError: The message shows the line to write instead.
    """
    said = vars(cls)
    # Celery makes every option of its decorator an attribute.
    is_decorated = "_decorated" in said
    unheard = {
        name: value
        for name, value in said.items()
        if name in OPTIONS and (is_decorated or not _is_behaviour(value))
    }
    if not unheard:
        return
    body = inspect.unwrap(body)
    code = body.__code__ if is_decorated and inspect.isfunction(body) else None
    where = f", {code.co_filename}:{code.co_firstlineno}" if code else ""
    given = ", ".join(f'"{name}": {value!r}' for name, value in unheard.items())
    instead = f"single_instance={{{given}}}" if is_decorated else f"single_instance = {{{given}}}"
    raise TypeError(
        f"{', '.join(map(repr, unheard))} of the task {said.get('name') or cls.__name__}{where}"
        f" would have no effect: options of the lock are not attributes of a task. Write {instead}."
    )


def _is_behaviour(value: Any) -> bool:
    """Whether an attribute is a method or the like, and no value."""
    return callable(value) or hasattr(value, "__get__")


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return our options and Celery's, and refuse all others.

    Celery makes every option an attribute of the task. So it would accept a misspelt one, and the
    lock would be held for longer, or keep out less, than its author thinks.

    Raises:
        TypeError: An option belongs to nobody.
    """
    base, known = options.get("base") or Task, CeleryOptions.__annotations__
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    theirs = {name: value for name, value in options.items() if name not in OPTIONS}
    unknown = [name for name in theirs if name not in known and not hasattr(base, name)]
    if unknown:
        raise TypeError(_unknown(unknown, OPTIONS | known.keys()))
    return ours, theirs


def _unknown(names: Iterable[str], known: Iterable[str]) -> str:
    found = []
    for name in names:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = _CALLED_ELSEWHERE.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        found.append(f"{name!r}" + (f" ({hint})" if hint else ""))
    ours = ", ".join(sorted(OPTIONS))
    return (
        f"single_instance_task does not know the option {', '.join(found)}. Its own options are"
        f" {ours}; all of @shared_task are taken too. An attribute of your own belongs on the"
        " class given as base=."
    )


# Names of the same things in other libraries.
_CALLED_ELSEWHERE = {
    "timeout": "the lease's length is 'ttl'",
    "lock_timeout": "the lease's length is 'ttl'",
    "lock_expiry": "the lease's length is 'ttl'",
    "expire": "the lease's length is 'ttl'",
    "lock_key": "the lock's name is 'key'",
    "unique_on": "name the arguments in 'key'",
    "keys": "name the arguments in 'key'",
    "raise_on_duplicate": "say on_conflict='raise'",
    "graceful": "on_conflict='skip' is the default",
    "release_on_commit": "the body runs under the lock, so a transaction in it ends in time",
}


# --- the option *key*: how the lock of a run is named after the task's arguments ------------------

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY_PLACE = inspect.Parameter.VAR_POSITIONAL
_VARIADIC = (_ANY_PLACE, inspect.Parameter.VAR_KEYWORD)


def naming(
    key: str | Callable[..., str] | None,
    run: Any,
    *,
    bound: bool = False,
    validation: Mapping[str, Any] | None = None,
) -> Naming | None:
    """Return the function that makes the name of the lock from the arguments of a run.

    It is None for a task without a key: its lock has the name of the task. However a task is
    called, the name is the same, though a worker gets lists for tuples, and dictionaries for
    models.

    Args:
        key: The option of that name.
        run: The function of the task.
        bound: Whether it gets the task first, which is no argument of a run.
        validation: How Celery makes the models of pydantic that it is annotated with, see
            validation_of(); None if it makes none.

    Raises:
        InvalidLockName: The key wants arguments that the task does not take.
    """
    if key is None:
        return None
    signature = signature_of(run)
    itself = (None,) if bound else ()
    own = next(iter(signature.parameters), "") if bound else ""
    models = {} if validation is None else _models(run)

    def see(name: str, value: Any) -> Any:
        model = models.get(name)
        if model is None or value is None:
            return value
        return model.model_validate(value, **(validation or {}))

    if isinstance(key, str):
        formatted = formatter(key, run, see=see if models else None)
        if own and any(_first_name(field) == own for _, field, _, _ in Formatter().parse(key)):
            raise _names_the_task(repr(key), own)
        return lambda args, kwargs: formatted((*itself, *args), kwargs)
    parameters = list(signature.parameters.values())[len(itself) :]
    chosen = _passed_by_name(key, parameters, own)

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        passed = signature.bind(*itself, *args, **kwargs)
        passed.apply_defaults()
        given: dict[str, Any] = {}
        for one in parameters:
            value = passed.arguments[one.name]
            if one.kind is one.VAR_POSITIONAL:
                passed.arguments[one.name] = tuple(map(delivered, value))
                continue
            value = passed.arguments[one.name] = delivered(see(one.name, value))
            given |= value if one.kind is one.VAR_KEYWORD else {one.name: value}
        if chosen is None:
            name = key(*passed.args[len(itself) :], **passed.kwargs)
        else:
            name = key(**chosen(given))
        return check_shared(check_name(name))

    return name_of


def validation_of(run: Any) -> dict[str, Any] | None:
    """The options with which Celery makes the pydantic models in the annotations of ``run``.

    Returns:
        The options of model_validate(); None if it makes none: the task has no pydantic=True.
    """
    wrapper = getattr(run, "__func__", run)
    own = getattr(wrapper, "__globals__", {})
    if not hasattr(wrapper, "__wrapped__") or own.get("__name__") != "celery.app.base":
        return None
    # They stand nowhere else. The wrapper validates itself, or by a function from Celery 5.6 on.
    known = getclosurevars(wrapper).nonlocals
    for one in tuple(known.values()):
        if isfunction(one) and one.__module__ == "celery.app.base":
            known = {**getclosurevars(one).nonlocals, **known}
    tells = {"celery_app": known.get("app"), "celery_task_name": known.get("task_name")}
    return {"strict": known.get("strict"), "context": {**known.get("context", {}), **tells}}


def _first_name(field: str | None) -> str:
    """The argument that a field of a format string names: order of {order.pk}."""
    return re.split(r"[.\[]", field or "", maxsplit=1)[0]


def _names_the_task(key: str, own: str) -> InvalidLockName:
    return InvalidLockName(
        key,
        f"it uses {own!r}, which is the task itself and no argument of a run: write the name of the"
        " task into the key",
    )


def _models(run: Any) -> dict[str, Any]:
    """The models of pydantic that arguments are annotated with, as Celery finds them."""
    try:
        hints = get_type_hints(run)
    except (NameError, AttributeError, TypeError):
        hints = {one.name: one.annotation for one in signature_of(run).parameters.values()}
    found = {}
    for name, hint in hints.items():
        models = [one for one in (hint, *get_args(hint)) if hasattr(one, "model_validate")]
        # Or a model or None. Celery leaves other annotations alone.
        if models and (models == [hint] or set(get_args(hint)) == {models[0], NoneType}):
            found[name] = models[0]
    return found


def _passed_by_name(
    key: Callable[..., str], parameters: list[inspect.Parameter], own: str
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return how to choose, of all arguments of a run, those that its key function gets by name.

    None means that the function is called like the task: with all arguments, by position where
    possible.

    Args:
        key: The function.
        parameters: Those of the task.
        own: The parameter for the task itself, which is no argument; "" if there is none.
    """
    shown = f"{getattr(key, '__qualname__', repr(key))}()"
    if inspect.iscoroutinefunction(key) or inspect.isgeneratorfunction(key):
        raise InvalidLockName(shown, "a key function returns a str, this one would not")
    try:
        signature = signature_of(key)
    except ValueError:  # Some builtins have none.
        return None
    if own and own in signature.parameters:
        raise _names_the_task(shown, own)
    takes = {one.kind for one in signature.parameters.values()}
    passes = {one.kind for one in parameters}
    kinds = {one.name: one.kind for one in parameters if one.kind not in _VARIADIC}
    keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
    places = [name for name in kinds if name not in keywords]
    named = [one.name for one in signature.parameters.values() if one.kind in _BY_NAME]
    shared = [name for name in signature.parameters if name in kinds]
    # What the function lacks may arrive in *args or **kwargs of the task.
    is_open = not passes.isdisjoint(_VARIADIC)
    for bind in (signature.bind, signature.bind_partial) if is_open else (signature.bind,):
        # 1. The arguments of the task that the function names, if these are all that it needs.
        if takes.isdisjoint(_VARIADIC):
            can_arrive = bind == signature.bind or _ANY_PLACE not in passes
            if (shared or not takes) and can_arrive and _fits(bind, (), shared):
                return lambda given: {name: given[name] for name in named if name in given}
        # 2. All of them by name: the function names some, and has **kwargs for the others.
        elif _ANY_PLACE not in takes | passes and _fits(bind, (), kinds):
            return dict
        # 3. All of them, as they are passed to the task.
        if _fits(bind, places, keywords):
            return None
    raise InvalidLockName(
        shown,
        "it can be given neither the arguments that it names nor all of the task's, which are"
        f" {', '.join(kinds) or 'none'}",
    )


def _fits(bind: Callable[..., Any], places: Iterable[str], keywords: Iterable[str]) -> bool:
    """Whether a function can be called so, with no argument for another one of its names."""
    passed = [*places, *keywords]
    try:
        got = bind(*places, **{name: name for name in keywords}).arguments
    except TypeError:
        return False
    return all(got[name] == name for name in passed if isinstance(got.get(name), str))
