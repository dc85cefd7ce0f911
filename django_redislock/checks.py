"""System checks. Each id has a section in docs/checks.md, and is never used again.

E001 to W019 judge the settings alone. E020 to W040 are findings of the doctor at the servers; only
``manage.py check --deploy`` dials them. Their texts are in doctor/ and in the file examination.py
of a backend. From E050 on they are about tasks, in celery/checks.py.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from django_redislock import doctor
from django_redislock.backends.registry import make
from django_redislock.conf import CURE, DEFAULT_LOCATION, aliases, conf, given, is_set, parse
from django_redislock.doctor.server import (
    is_this_machine,
    of_sentinels,
    of_servers,
    parsed,
    shared_caches,
)
from django_redislock.rules.options import DEFAULT_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.base import Backend
    from django_redislock.conf import Conf

TAG = "django_redislock"


def register_checks() -> None:
    """Let ``manage.py check`` run them."""
    checks.register(check_settings, TAG, checks.Tags.security)
    checks.register(check_passwords, TAG, checks.Tags.security, deploy=True)
    # Not Tags.database: since Django 6.1, those run only for a named --database.
    checks.register(check_servers, TAG, deploy=True)


# --- the settings ---------------------------------------------------------------------------------


def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """Whether REDISLOCK can work, as far as can be said without asking a server."""
    return list(_check_settings())


def _check_settings() -> Iterator[checks.CheckMessage]:
    try:
        names = aliases()
    except ImproperlyConfigured as error:
        yield _refused(error, "E001")
        return
    if not is_set() and settings.DEBUG:
        yield _message(
            "W001",
            f"REDISLOCK is not set, so locks are kept on {DEFAULT_LOCATION} while DEBUG is on.",
            f"{CURE}.",
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
    hints = {
        "E001": "REDISLOCK has a dictionary for each alias, as in CACHES. Durations are seconds, as"
        " a number or a timedelta.",
        "E002": "Until this is put right, every lock of this alias raises this error.",
        "E004": "All machines must name the same server, or each of them locks for itself.",
    }
    return _message(id, str(error), hints[id])


def _check_alias(conf: Conf, backend: Backend) -> Iterator[checks.CheckMessage]:
    where = f"REDISLOCK[{conf.alias!r}]"
    if not backend.supports_processes:
        if not settings.DEBUG:
            yield _message(
                "W005",
                f"{where} keeps locks in memory, and DEBUG is off: they exclude nothing outside of"
                " one process.",
                "Use django_redislock.backends.RedisBackend.",
            )
        return
    for alias in shared_caches(conf):
        yield _message(
            "W004",
            f"{where} and CACHES[{alias!r}] use the same database: the cache's clear() flushes all"
            " locks.",
            "Give locks a database number of their own, such as .../1 in LOCATION or, behind"
            " sentinels, OPTIONS['db'].",
        )
    for address in [*of_servers(conf), *of_sentinels(conf)]:
        yield from _check_timeout(address, conf, where)
        yield from _check_encryption(address, where)


def _check_timeout(
    address: dict[str, Any], conf: Conf, where: str
) -> Iterator[checks.CheckMessage]:
    timeout = float(address.get("socket_timeout") or 0)
    says = f"{where}: socket_timeout is {timeout:g} s and TTL is {conf.ttl:g} s"
    hint = "Make socket_timeout at most a third of TTL, or leave it out."
    if timeout >= conf.ttl:
        yield _message(
            "E003",
            f"{says}: a lease may have ended before its grant or its renewal is known to have"
            " failed.",
            hint,
        )
    elif timeout > conf.ttl / 3:
        yield _message(
            "W003", f"{says}: a renewal that is not answered cannot be repeated in time.", hint
        )


def _check_encryption(address: dict[str, Any], where: str) -> Iterator[checks.CheckMessage]:
    host = str(address.get("host", "localhost"))
    is_exposed = "connection_class" not in address  # redis-py has one for rediss:// and unix://.
    if address.get("password") and is_exposed and not is_this_machine(host):
        yield _message(
            "W006",
            f"{where} sends its password to {host} over a connection that is not encrypted.",
            "Use rediss://, or a tunnel that ends on this machine.",
        )


# --- for deployment -------------------------------------------------------------------------------


def check_passwords(**kwargs: Any) -> list[checks.CheckMessage]:
    """Whether a password stands where Django's own error pages would show it."""
    return [
        _message(
            "W007",
            f"REDISLOCK[{alias!r}]['LOCATION'] contains a password, and Django's error reports"
            " show it: they hide values named PASSWORD, but look into no URL.",
            "Move it to OPTIONS: {'username': ..., 'password': ...}.",
        )
        for alias, one in _configured()
        if any(address.get("password") for address in parsed(one.location, {}))
    ]


def check_servers(**kwargs: Any) -> list[checks.CheckMessage]:
    """The problems that ``manage.py locks doctor`` finds at the servers."""
    return [
        (checks.Error if finding.level == "fail" else checks.Warning)(
            f"REDISLOCK[{alias!r}], {finding.about}: {finding.says}.",
            hint=finding.advice,
            # A finding of a third party's backend has an id of its own, such as "shop.W001".
            id=finding.id if "." in finding.id else f"django_redislock.{finding.id}",
        )
        for alias, _ in _configured()
        for finding in doctor.examine(alias)
        # check_settings() knows W004 and W005 without asking.
        if finding.id and finding.id not in {"W004", "W005"}
    ]


def _configured() -> Iterator[tuple[str, Conf]]:
    """The aliases that have a backend; check_settings() complains about the others."""
    with suppress(ImproperlyConfigured):
        for alias in aliases():
            with suppress(ImproperlyConfigured):
                one = conf(alias)
                make(one)
                yield alias, one


def _message(id: str, says: str, hint: str) -> checks.CheckMessage:  # noqa: A002
    """The message of a system check of this package."""
    kind = checks.Error if id[0] == "E" else checks.Warning
    return kind(says, hint=hint, id=f"django_redislock.{id}")
