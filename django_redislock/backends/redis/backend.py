"""Locks on one Redis or Valkey server."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from django_redislock.backends.base import Backend
from django_redislock.backends.redis.checking import (
    check_timeout,
    checked_dialer,
    checked_options,
)
from django_redislock.backends.redis.dialing import PROTOCOLS
from django_redislock.backends.redis.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from django_redislock.backends.base import TakesCommands
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.conf import Conf


class RedisBackend(Server, Backend):
    """Locks on one Redis (7.0 or newer) or Valkey server.

    OPTIONS are redis-py's connection options (username, password, ssl_*, socket_timeout, …), and
    ``max_connections``: how many connections a process may open for sync code, its watchdog
    included (default 128). Async code uses one connection per event loop, and with ``protocol`` 2
    another one to be rung on.
    """

    location_is = "'redis://host:6379/0'"  # What LOCATION looks like, for messages.

    def __init__(self, conf: Conf) -> None:
        where = f"REDISLOCK[{conf.alias!r}]"
        options, self._most_connections = checked_options(conf.options, f"{where}['OPTIONS']")
        if not conf.location:
            raise ImproperlyConfigured(
                f"{where} has no LOCATION, so no server is named. Add"
                f" 'LOCATION': {self.location_is}."
            )
        self._dialer = self._make_dialer(conf.location, options, where)
        # That of the URL, if there is one: redis-py lets the URL win.
        self._timeout = self._dialer.timeout
        check_timeout(self._timeout, f"{where}['LOCATION']: socket_timeout")
        Backend.__init__(self, conf)

    def _make_dialer(
        self, location: str | tuple[str, ...], options: dict[str, Any], where: str
    ) -> Dialing:
        """How this backend comes to its connections.

        Raises:
            ImproperlyConfigured: Names the setting and says what to do.
        """
        if not isinstance(location, str):
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] must be one URL: {type(self).__name__} uses one server. A"
                " list of sentinels is for django_redislock.backends.SentinelBackend, one of nodes"
                " of a cluster for ClusterBackend, one of independent servers for QuorumBackend."
            )
        of_url, of_options = f"{where}['LOCATION']", f"{where}['OPTIONS']"
        return checked_dialer(location, options, of_url, of_options, protocols=PROTOCOLS)

    def _start(self) -> None:
        super()._start()
        Server.__init__(self, self, self._dialer, self._most_connections)
        self.watch = self.watchdog.watch  # type: ignore[method-assign] # a hop less

    def after_fork(self) -> None:
        self.abandon()
        super().after_fork()

    def operation_timeout(self, ttl: float) -> float:
        return self._timeout or super().operation_timeout(ttl)

    @contextmanager
    def servers(self) -> Iterator[Mapping[str, TakesCommands]]:
        yield {self.conf.address: self}
