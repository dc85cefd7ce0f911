"""System checks. Each id has a section in docs/checks.md; ids are never used again.

E001 to W019 judge the settings alone. E020 to W039 ask the server, which ``manage.py check`` does
with ``--deploy`` only. (Those of tasks are in django_redislock.celery.checks, from W050 on.)
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_redislock import doctor
from django_redislock.backends.memory.backend import InMemoryBackend
from django_redislock.backends.registry import make
from django_redislock.conf import CURE, DEFAULT_LOCATION, aliases, conf, given, is_set, parse
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.apps import AppConfig

    from django_redislock.backends.base import Backend
    from django_redislock.conf import Conf

TAG = "django_redislock"

# What the doctor may find. (That a cache shares the database is known without asking: W004.)
_FOUND = {
    ("server", "warn"): "W020",
    ("server", "fail"): "E020",
    ("version", "warn"): "W021",
    ("version", "fail"): "E021",
    ("cluster", "warn"): "W022",
    ("cluster", "fail"): "E022",
    ("rights", "fail"): "E023",
    ("scripting", "warn"): "W024",
    ("eviction", "warn"): "W025",
    ("eviction", "fail"): "E025",
    ("persistence", "warn"): "W026",
    ("persistence", "fail"): "E026",
    ("replication", "warn"): "W027",
    ("replication", "fail"): "E027",
    ("clock", "warn"): "W028",
    ("sentinels", "warn"): "W032",
    ("sentinels", "fail"): "E032",
    ("isolation", "warn"): "W033",
    ("ttl", "warn"): "W035",
    ("quorum", "warn"): "W034",
    ("quorum", "fail"): "E034",
    ("keys", "fail"): "E029",
    ("index", "warn"): "W030",
    ("locks", "warn"): "W031",
    ("locks", "fail"): "E031",
    ("memory", "warn"): "W036",
    ("records", "warn"): "W037",
}

# What to do about settings that are refused: malformed, of no use to the backend, or missing.
_REFUSED = {
    "E001": "REDISLOCK has a dictionary for each alias, as in CACHES. Durations are seconds, as a"
    " number or a timedelta.",
    "E002": "Until this is put right, every lock of this alias raises this error.",
    "E004": "All machines must name the same server, or each of them locks for itself.",
}


def register_checks() -> None:
    """Let ``manage.py check`` run them."""
    checks.register(check_settings, TAG, checks.Tags.security)
    checks.register(check_passwords, TAG, checks.Tags.security, deploy=True)
    # Not Tags.database: since Django 6.1, those run only for a named --database.
    checks.register(check_servers, TAG, deploy=True)


def check_settings(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Whether REDISLOCK can work, as far as can be said without asking a server."""
    return list(_check_settings())


def check_passwords(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Whether a password stands where Django's own error pages would show it."""
    return [
        checks.Warning(
            f"REDISLOCK[{one.alias!r}]['LOCATION'] contains a password, and Django's error reports"
            " show it: they hide what is called PASSWORD, but look into no URL.",
            hint="Move it to OPTIONS: {'username': ..., 'password': ...}.",
            id="django_redislock.W007",
        )
        for one, _ in _configured()
        if any(parts.get("password") for parts in doctor.addresses(one.location, {}))
    ]


def check_servers(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """What ``manage.py locks doctor`` finds wrong with the servers."""
    found: list[checks.CheckMessage] = []
    for one, backend in _configured():
        if isinstance(backend, InMemoryBackend):
            continue
        for finding in doctor.examine(one.alias):
            id = _FOUND.get((finding.about, finding.level))  # noqa: A001
            if id is None:
                continue
            kind = checks.Error if finding.level == "fail" else checks.Warning
            text = f"REDISLOCK[{one.alias!r}], {finding.about}: {finding.says}."
            found.append(kind(text, hint=finding.advice, id=f"django_redislock.{id}"))
    return found


def _check_settings() -> Iterator[checks.CheckMessage]:
    try:
        names = aliases()
    except ImproperlyConfigured as error:
        yield _refused(error, "E001")
        return
    if not is_set() and settings.DEBUG:
        yield checks.Warning(
            f"REDISLOCK is not set, so locks are kept on {DEFAULT_LOCATION} while DEBUG is on.",
            hint=f"{CURE}.",
            id="django_redislock.W001",
        )
    for alias in dict.fromkeys([DEFAULT_ALIAS, *names]):
        refused_as = "E004"
        try:
            raw = given(alias)
            refused_as = "E001"
            one = parse(alias, raw)
            refused_as = "E002"
            backend = make(one)
        except ImproperlyConfigured as error:
            yield _refused(error, refused_as)
        else:
            yield from _check_alias(one, backend)


def _refused(error: ImproperlyConfigured, id: str) -> checks.CheckMessage:  # noqa: A002
    return checks.Error(str(error), hint=_REFUSED[id], id=f"django_redislock.{id}")


def _check_alias(conf: Conf, backend: Backend) -> Iterator[checks.CheckMessage]:
    where = f"REDISLOCK[{conf.alias!r}]"
    if isinstance(backend, InMemoryBackend):
        if not settings.DEBUG:
            yield checks.Warning(
                f"{where} keeps locks in memory, and DEBUG is off: they exclude nothing outside of"
                " one process.",
                hint="Use django_redislock.backends.RedisBackend.",
                id="django_redislock.W005",
            )
        return
    for alias in doctor.shared_caches(conf):
        yield checks.Warning(
            f"{where} and CACHES[{alias!r}] use the same database: the cache's clear() flushes all"
            " locks.",
            hint="Give locks a database number of their own, such as .../1 in LOCATION or, behind"
            " sentinels, OPTIONS['db'].",
            id="django_redislock.W004",
        )
    for parts in [*doctor.servers(conf), *doctor.sentinels(conf)]:
        if timeout := parts.get("socket_timeout"):
            yield from _check_timeout(float(timeout), conf, where)
        host = str(parts.get("host", "localhost"))
        exposed = "connection_class" not in parts  # As of rediss:// and unix://.
        if parts.get("password") and exposed and not doctor.is_this_machine(host):
            yield checks.Warning(
                f"{where} sends its password to {host} over a connection that is not encrypted.",
                hint="Use rediss://, or a tunnel that ends on this machine.",
                id="django_redislock.W006",
            )


def _check_timeout(timeout: float, conf: Conf, where: str) -> Iterator[checks.CheckMessage]:
    says = f"{where}: socket_timeout is {timeout:g} s and TTL is {conf.ttl:g} s"
    hint = "Make socket_timeout at most a third of TTL, or leave it out."
    if timeout >= conf.ttl:
        yield checks.Error(
            f"{says}: a lease may have ended before its grant or its renewal is known to have"
            " failed.",
            hint=hint,
            id="django_redislock.E003",
        )
    elif timeout > conf.ttl / 3:
        yield checks.Warning(
            f"{says}: a renewal that is not answered cannot be repeated in time.",
            hint=hint,
            id="django_redislock.W003",
        )


def _configured() -> Iterator[tuple[Conf, Backend]]:
    """The aliases whose settings are well-formed; check_settings() complains about the others."""
    with suppress(ImproperlyConfigured):
        for alias in aliases():
            with suppress(ImproperlyConfigured):
                one = conf(alias)
                yield one, make(one)
