"""Locks on the master that sentinels watch, and on its successor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from redis.connection import parse_url

from django_redislock.backends.redis.backend import RedisBackend
from django_redislock.backends.redis.checking import checked_dialer
from django_redislock.backends.sentinel import examination
from django_redislock.backends.sentinel.dialing import MasterDialer, check_master
from django_redislock.backends.sentinel.sentinels import Sentinels, check_sentinel
from django_redislock.humanize import address_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.redis.dialing import Dialer
    from django_redislock.findings import Finding

# Client options that say where a server is, each with advice.
_NOT_FOR_SERVERS = dict.fromkeys(
    ("host", "port", "path"), "the sentinels say where the servers are; leave it out"
)
_NOT_FOR_SENTINELS = {
    **dict.fromkeys(
        ("host", "port", "path"), "LOCATION says where the sentinels are; leave it out"
    ),
    "db": "a sentinel has no databases; that of the locks is OPTIONS['db']",
    "ssl": "write rediss:// in LOCATION",
}


class SentinelBackend(RedisBackend):
    """Locks on the master that Redis or Valkey sentinels watch; when it fails, on its successor.

    LOCATION is a list of the addresses of the sentinels. OPTIONS are those of RedisBackend, for the
    servers, and ``service_name`` (the name that sentinels have for the master), ``sentinel_kwargs``
    (redis-py's connection options for the sentinels) and ``ssl`` (whether servers are reached by
    TLS; for sentinels write ``rediss://``).
    """

    location_is = "['redis://host-1:26379', 'redis://host-2:26379', 'redis://host-3:26379']"
    supports_failover = True
    _dialer: MasterDialer

    @property
    def sentinels(self) -> Sentinels:
        """The sentinels, which name the master."""
        return self._dialer.sentinels

    def examine(self) -> Iterator[Finding]:
        (replication,) = self.commands(("INFO", "replication"))
        yield examination.agreement(self.sentinels, len(self.conf.location), self.within)
        yield examination.isolation(replication)

    def _make_dialer(
        self, location: str | tuple[str, ...], options: dict[str, Any], where: str
    ) -> MasterDialer:
        of_options = f"{where}['OPTIONS']"
        service = options.pop("service_name", None)
        if not isinstance(service, str) or not service:
            raise ImproperlyConfigured(
                f"{of_options}['service_name'] must be what the sentinels call the master, as in"
                f" 'sentinel monitor mymaster ...', not {service!r}."
            )
        sentinels = self._sentinels(service, location, options.pop("sentinel_kwargs", {}), where)
        tls = options.pop("ssl", False)
        if not isinstance(tls, bool):
            raise ImproperlyConfigured(f"{of_options}['ssl'] must be True or False, not {tls!r}.")
        _check_options(options, _NOT_FOR_SERVERS, of_options)
        scheme = "rediss" if tls else "redis"

        def dialer_to(address: str) -> Dialer:
            of_url = "The address of the master that the sentinels name"
            return checked_dialer(
                f"{scheme}://{address}", options, of_url, of_options, check_master
            )

        return MasterDialer(sentinels, dialer_to)

    def _sentinels(
        self, service: str, location: str | tuple[str, ...], options: Any, where: str
    ) -> Sentinels:
        of_options = f"{where}['OPTIONS']['sentinel_kwargs']"
        if isinstance(location, str):
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] must be a list of the addresses of the sentinels, such as"
                f" {self.location_is}."
            )
        if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
            raise ImproperlyConfigured(
                f"{of_options} must be a dictionary of client options for the sentinels, such as"
                " {'password': ...}."
            )
        _check_options(options, _NOT_FOR_SENTINELS, of_options)
        dialers: dict[str, Dialer] = {}
        for number, url in enumerate(location):
            of_url = f"{where}['LOCATION'][{number}]"
            dialer = checked_dialer(url, options, of_url, of_options, check_sentinel)
            place = _address(url, of_url)
            if place in dialers:
                raise ImproperlyConfigured(f"{of_url} names {place} twice; name each once.")
            dialers[place] = dialer
        return Sentinels(service, dialers)


def _check_options(options: dict[str, Any], refused: dict[str, str], of_options: str) -> None:
    for name, cure in refused.items():
        if name in options:
            raise ImproperlyConfigured(f"{of_options}[{name!r}]: {cure}.")


def _address(url: str, of_url: str) -> str:
    """The host and port in the URL of a sentinel."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or parts.port is None:
        raise ImproperlyConfigured(
            f"{of_url} names no port. That of a sentinel is mostly 26379, as in redis://host:26379."
        )
    if "db" in parse_url(url):  # type: ignore[no-untyped-call]
        raise ImproperlyConfigured(
            f"{of_url} names a database, which a sentinel does not have; that of the locks is"
            " OPTIONS['db']."
        )
    return address_of(url)
