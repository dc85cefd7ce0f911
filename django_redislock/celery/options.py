"""The options of single_instance_task: what there is, and what is refused at import."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from celery import Task

from django_redislock.conf import DEFAULT_ALIAS, SHORTEST_TTL, flag, seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CONFLICT_POLICIES = ("skip", "raise")


@dataclass(frozen=True, kw_only=True)
class SingleInstance:
    """The options of single_instance_task, checked. Durations are seconds."""

    key: str | Callable[..., str] | None = None
    ttl: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    once: float = 0.0
    on_conflict: str = "skip"
    using: str = DEFAULT_ALIAS

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> SingleInstance:
        """Check the options, as given by hand.

        Raises:
            TypeError: An option is not known.
            ValueError: One is of the wrong type or out of range; the message names it.
        """
        if unknown := sorted(set(raw) - OPTIONS):
            raise TypeError(_unknown(unknown, OPTIONS))
        options = dict(raw)
        for name in ("ttl", "max_hold"):
            if options.get(name) is not None:
                options[name] = seconds(options[name], name, least=SHORTEST_TTL)
        for name in ("min_hold", "once"):
            if name in options:
                options[name] = seconds(options[name] or 0, name)
        if options.get("renew") is not None:
            flag(options["renew"], "renew")
        key = options.get("key")
        if not (key is None or isinstance(key, str) or callable(key)):
            raise ValueError(
                f"key must be a format string over the task's arguments, or a function of them,"
                f" not {key!r}."
            )
        policy = options.get("on_conflict", "skip")
        if policy not in CONFLICT_POLICIES:
            choices = ", ".join(map(repr, CONFLICT_POLICIES))
            raise ValueError(f"on_conflict must be one of {choices}, not {policy!r}.")
        return cls(**options)


OPTIONS = frozenset(field.name for field in fields(SingleInstance))

# What Celery takes beside the attributes of a task: from its decorators, for autoretry, and for
# publishing (celery.app.task.extract_exec_options).
_OF_CELERY = frozenset(
    {
        *("name", "base", "bind", "pydantic", "pydantic_strict", "pydantic_context"),
        *("pydantic_dump_kwargs", "autoretry_for", "dont_autoretry_for", "retry_kwargs"),
        *("retry_backoff", "retry_backoff_max", "retry_jitter", "queue", "routing_key", "exchange"),
        *("immediate", "mandatory", "delivery_mode", "compression"),
    }
)


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tell our options from Celery's, and a slip of the pen from both.

    Celery makes an attribute of whatever it is given; then a misspelt option would lock less, or
    longer, than it says.

    Raises:
        TypeError: An option belongs to nobody.
    """
    base = options.get("base") or Task
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    theirs = {name: value for name, value in options.items() if name not in OPTIONS}
    unknown = [name for name in theirs if name not in _OF_CELERY and not hasattr(base, name)]
    if unknown:
        raise TypeError(_unknown(unknown, OPTIONS | _OF_CELERY))
    return ours, theirs


def _unknown(names: Iterable[str], known: Iterable[str]) -> str:
    lines = []
    for name in names:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = _CALLED_ELSEWHERE.get(name) or (f"did you mean {close[0]!r}?" if close else "")
        lines.append(f"{name!r}" + (f" ({hint})" if hint else ""))
    ours = ", ".join(sorted(OPTIONS))
    return (
        f"single_instance_task does not know the option {', '.join(lines)}. Its own options are"
        f" {ours}; all of @shared_task are taken too. An attribute of your own belongs on the"
        " class given as base=."
    )


# What the same thing is called in other libraries.
_CALLED_ELSEWHERE = {
    "timeout": "the lease's length is 'ttl'",
    "lock_timeout": "the lease's length is 'ttl'",
    "lock_expiry": "the lease's length is 'ttl'",
    "expire": "the lease's length is 'ttl'",
    "lock_key": "the lock's name is 'key'",
    "unique_on": "name the arguments in 'key'",
    "keys": "name the arguments in 'key'",
}
