"""The REDISLOCK setting: the checked settings of each alias."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from django_redislock.humanize import address_of
from django_redislock.process import cached_property
from django_redislock.rules.arguments import SHORTEST_TTL, flag, seconds, text
from django_redislock.rules.options import DEFAULT_ALIAS, RELEASES_BEFORE_COMMIT

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_BACKEND = "django_redislock.backends.RedisBackend"
DEFAULT_LOCATION = "redis://127.0.0.1:6379/0"  # Without REDISLOCK, and while DEBUG is on.
MOST_RECORDS = 10_000_000
SHORTEST_TIMELINE, LONGEST_TIMELINE = 10, 1000  # Leases.
CURE = "Name the server: REDISLOCK = {'default': {'LOCATION': 'redis://host:6379/0'}}"


def _key(brief: str, default: Any = None, **options: Any) -> Any:
    """A key of an alias. The page of settings says *brief* of it."""
    if "default_factory" not in options:
        options["default"] = default
    return field(metadata={"brief": brief}, **options)


@dataclass(frozen=True, kw_only=True)
class Conf:
    """One alias of REDISLOCK. Durations are seconds."""

    alias: str
    backend: str = _key("where locks are kept, see below", DEFAULT_BACKEND)
    # These two have passwords. "": not given.
    location: str | tuple[str, ...] = _key("URLs of the servers", "", repr=False)
    options: Mapping[str, Any] = _key(
        "redis-py's connection options, and those below", default_factory=dict, repr=False
    )
    key_prefix: str = _key(
        "begins every key; programs with different prefixes share no locks", "redislock"
    )
    ttl: float = _key("the lease of a lock ends so long after its last renewal", 30.0)
    wait: float = _key("how long an acquire waits for a taken lock", 10.0)
    renew: bool = _key("whether leases are renewed while their holder lives", True)
    max_hold: float | None = _key("how long a lease lasts at most; `None`: no end")
    replicas_ack: int = _key(
        "how many replicas must acknowledge a grant; with fewer the acquire tries again", 0
    )
    unavailable_after: float | None = _key(
        "when an acquire without an answer raises `LockUnavailable` despite its `wait`;"
        " `None`: after `socket_timeout`, `math.inf`: after `wait`"
    )
    release_before_commit: str = _key(
        "`warn`, `error` or `ignore` a [release within a transaction](databases.md#the-warning)",
        RELEASES_BEFORE_COMMIT[0],
    )
    records: int = _key("for how many locks [records](#records) of runs are kept", 10_000)
    records_for: float = _key("how long after the last run", 30 * 86_400.0)
    timeline: int = _key("how many earlier leases of each lock are kept, 10 to 1000", 40)
    longest_retry_after: float = _key(
        "the longest `Retry-After` of [the middleware](locks.md#in-views) for a held lock, from 1",
        30.0,
    )

    @cached_property
    def address(self) -> str:
        """The address of the server, without user, password and options; "" if the URL has none.

        An address of sentinels begins with the name of the service that they watch.
        """
        urls = [self.location] if isinstance(self.location, str) else self.location
        addresses = ", ".join(filter(None, map(_address, urls)))
        service = self.options.get("service_name")
        return f"{service}, of the sentinels {addresses}" if service else addresses


def _address(url: str) -> str:
    """Where *url* leads; "" if it is malformed, or the address might show a part of a password."""
    try:
        address, parts = address_of(url), urlsplit(url)
    except ValueError:
        return ""
    # An odd sign in a password may have ended the host too early. Then any part may contain it.
    return "" if "@" in parts.path + parts.query + parts.fragment else address


def parse(alias: str, raw: object) -> Conf:
    """Check one alias of REDISLOCK.

    Raises:
        ImproperlyConfigured: Names the key and says what to do.
    """
    where = f"REDISLOCK[{alias!r}]"
    if not isinstance(raw, dict):
        raise ImproperlyConfigured(f"{where} must be a dictionary, not {type(raw).__name__}.")
    known = {name.upper(): name for name in Conf.__dataclass_fields__ if name != "alias"}
    if unknown := sorted(str(key) for key in raw if key not in known):
        raise ImproperlyConfigured(
            f"{where} has unknown keys: {', '.join(unknown)}. Known are: {', '.join(known)}."
        )
    values: dict[str, Any] = {}
    try:
        for key, value in raw.items():
            values[known[key]] = _PARSERS[key](value, f"{where}[{key!r}]")
    except ValueError as error:
        raise ImproperlyConfigured(str(error)) from error
    return Conf(alias=alias, **values)


def _max_hold(value: object, where: str) -> float | None:
    return None if value is None else seconds(value, where, least=SHORTEST_TTL)


def _unavailable_after(value: object, where: str) -> float | None:
    return None if value is None else seconds(value, where, endless=True)


def _prefix(value: object, where: str) -> str:
    prefix = text(value, where)
    if any(char in "{}*?[]\\|" or char.isspace() or not char.isprintable() for char in prefix):
        raise ValueError(
            f"{where} must have no braces, glob characters, bars or white space, not {prefix!r}:"
            " a lock's name alone decides its cluster slot, and listings match the prefix."
        )
    return prefix


def _location(value: object, where: str) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value):
        return tuple(value)
    # The value may hold a password, so it is not shown.
    what = type(value).__name__ if value else repr(value)
    raise ValueError(f"{where} must be a URL, not {what}.")


def _options(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} must be a dictionary of client options.")
    return dict(value)


def _replicas(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise ValueError(f"{where} must be a number of replicas, 0 to 100, not {value!r}.")
    return value


def _records(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_RECORDS:
        raise ValueError(
            f"{where} must be a number of locks, 1 to {MOST_RECORDS}, not {value!r}: the records"
            " of task runs are kept for that many."
        )
    return value


def _timeline(value: object, where: str) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not SHORTEST_TIMELINE <= value <= LONGEST_TIMELINE
    ):
        raise ValueError(
            f"{where} must be a number of leases, {SHORTEST_TIMELINE} to {LONGEST_TIMELINE}, not"
            f" {value!r}: the timeline of each lock keeps that many. It cannot be off: the server"
            " recognises a release that is sent twice by it."
        )
    return value


def _release_before_commit(value: object, where: str) -> str:
    if not isinstance(value, str) or value not in RELEASES_BEFORE_COMMIT:
        known = ", ".join(map(repr, RELEASES_BEFORE_COMMIT))
        raise ValueError(
            f"{where} must be one of {known}, not {value!r}. It says what becomes of a lock that"
            " is released while a transaction is open."
        )
    return value


_PARSERS: dict[str, Any] = {
    "BACKEND": text,
    "LOCATION": _location,
    "OPTIONS": _options,
    "KEY_PREFIX": _prefix,
    "TTL": partial(seconds, least=SHORTEST_TTL),
    "WAIT": partial(seconds, endless=True),
    "RENEW": flag,
    "MAX_HOLD": _max_hold,
    "REPLICAS_ACK": _replicas,
    "UNAVAILABLE_AFTER": _unavailable_after,
    "RELEASE_BEFORE_COMMIT": _release_before_commit,
    "RECORDS": _records,
    "RECORDS_FOR": partial(seconds, least=60.0),
    "TIMELINE": _timeline,
    "LONGEST_RETRY_AFTER": partial(seconds, least=1.0, endless=True),
}


def aliases() -> list[str]:
    """The aliases in REDISLOCK; only "default" if it is not set."""
    return list(_setting())


def conf(alias: str) -> Conf:
    """The checked settings of one alias.

    Raises:
        ImproperlyConfigured: There is no such alias, or something about it is wrong.
    """
    return parse(alias, given(alias))


def given(alias: str) -> object:
    """The settings of one alias as they are in REDISLOCK, not checked.

    Raises:
        ImproperlyConfigured: There is no such alias.
    """
    setting = _setting()
    if alias not in setting:
        known = ", ".join(repr(name) for name in setting) or "none"
        cure = "" if alias != DEFAULT_ALIAS else f" {CURE}, or pass using= to each lock."
        raise ImproperlyConfigured(f"REDISLOCK has no alias {alias!r}. Known are: {known}.{cure}")
    if is_set():
        return setting[alias]
    if not settings.DEBUG:
        raise ImproperlyConfigured(f"REDISLOCK is not set, and DEBUG is off. {CURE}.")
    return {"LOCATION": DEFAULT_LOCATION}


def is_set() -> bool:
    """Whether the project has the setting REDISLOCK."""
    return hasattr(settings, "REDISLOCK")


def _setting() -> dict[str, Any]:
    if not is_set():
        return {DEFAULT_ALIAS: {}}
    setting = settings.REDISLOCK
    if not isinstance(setting, dict):
        raise ImproperlyConfigured(
            f"REDISLOCK must be a dictionary of aliases, not {type(setting).__name__}."
        )
    for key in setting:
        if key in _PARSERS:
            raise ImproperlyConfigured(
                f"REDISLOCK[{key!r}] stands where the name of an alias should; put it one level"
                f" deeper: REDISLOCK = {{{DEFAULT_ALIAS!r}: {{{key!r}: ...}}}}."
            )
        if not isinstance(key, str):
            raise ImproperlyConfigured(f"REDISLOCK: the name of an alias is a string, not {key!r}.")
    return setting
