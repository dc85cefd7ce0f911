"""Locks on one Redis or Valkey server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock.backends.base import Backend
from django_redislock.backends.redis import sessions
from django_redislock.backends.redis.calling import Caller, trouble
from django_redislock.backends.redis.checking import check_timeout, checked_dialer
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.errors import (
    TROUBLE,
    ReplyError,
    described,
    is_transient,
    is_wrong_server,
)
from django_redislock.backends.redis.loops import Loops
from django_redislock.backends.redis.pool import Pool
from django_redislock.backends.redis.sessions import AsyncSession, Session
from django_redislock.exceptions import LockUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from django_redislock.backends.drivers import Begun
    from django_redislock.backends.redis.connection import Wire
    from django_redislock.backends.redis.dialing import Dialing
    from django_redislock.conf import Conf
    from django_redislock.rules.steps import Call, Outcome

Result = TypeVar("Result")

DEFAULT_MAX_CONNECTIONS = 128
LEAST_MAX_CONNECTIONS = Pool.BESIDE + Pool.KEPT_BACK


class RedisBackend(Backend):
    """Locks on one Redis (7.0 or newer) or Valkey server.

    OPTIONS are redis-py's connection options (username, password, ssl_*, socket_timeout, …), and
    ``max_connections``: how many connections a process may open for sync code, its watchdog
    included (default 128). Async code uses one connection per event loop.
    """

    location_is = "'redis://host:6379/0'"  # What LOCATION looks like, for messages.

    def __init__(self, conf: Conf) -> None:
        options = dict(conf.options)
        where = f"REDISLOCK[{conf.alias!r}]"
        limit = options.pop("max_connections", DEFAULT_MAX_CONNECTIONS)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < LEAST_MAX_CONNECTIONS:
            raise ImproperlyConfigured(
                f"{where}['OPTIONS']['max_connections'] must be an integer of at least"
                f" {LEAST_MAX_CONNECTIONS}, not {limit!r}."
            )
        self._most_connections = limit
        check_timeout(options.get("socket_timeout"), f"{where}['OPTIONS']['socket_timeout']")
        if not conf.location:
            raise ImproperlyConfigured(
                f"{where} has no LOCATION, so no server is named. Add"
                f" 'LOCATION': {self.location_is}."
            )
        self._dialer = self._make_dialer(conf.location, options, where)
        # That of the URL, if there is one: redis-py lets the URL win.
        self._timeout = self._dialer.timeout
        check_timeout(self._timeout, f"{where}['LOCATION']: socket_timeout")
        super().__init__(conf)

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
                " list of sentinels is for django_redislock.backends.SentinelBackend. Backends for"
                " a cluster or a quorum are not there yet."
            )
        return checked_dialer(location, options, f"{where}['LOCATION']", f"{where}['OPTIONS']")

    def _start(self) -> None:
        super()._start()
        self._caller = Caller(self.alias, self.prefix, self.process)
        self._pool = Pool(self._dialer.dial, self._most_connections - Pool.BESIDE)
        self._loops = Loops(self._dialer)
        self._watchdog_wire: Wire | None = None

    def after_fork(self) -> None:
        # Only this process's copies are closed; the parent goes on using its own.
        self._dialer.after_fork()
        self._pool.forsake()
        self.close_watchdog()
        self._loops.forsake()
        self._inherited = self._loops  # A transport must not be collected before its loop.
        super().after_fork()

    def retire(self) -> None:
        super().retire()
        self._pool.retire()

    def close_watchdog(self) -> None:
        wire, self._watchdog_wire = self._watchdog_wire, None
        if wire is not None:
            wire.close()

    def operation_timeout(self, ttl: float) -> float:
        return self._timeout or super().operation_timeout(ttl)

    @property
    def scripting(self) -> bool:
        """Whether the server allows scripts, as far as we know."""
        return self._caller.scripting

    def session(self) -> Session:
        return Session(self._caller, self._pool)

    def async_session(self) -> AsyncSession:
        return AsyncSession(self._caller, self._loops, self._pool)

    def ask(self, step: Call) -> Begun:
        return sessions.ask(step, self._caller, self._pool)

    def aask(self, step: Call) -> Coroutine[Any, Any, Begun]:
        return sessions.aask(step, self._caller, self._loops, self._pool)

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        begun = self.clock()
        try:
            if self._watchdog_wire is None:
                self._watchdog_wire = self._dialer.dial(calls[0].within)
            return self._caller.call(self._watchdog_wire, calls, self.clock())
        except Exception as error:  # noqa: BLE001 - told apart by trouble()
            self.close_watchdog()
            return [trouble(error, begun)] * len(calls)

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        return self._with_wire(lambda wire: self._caller.call(wire, calls, self.clock()))

    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Run plain commands in one round trip; an error reply is returned, not raised.

        They may be run twice, as they must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or is the wrong one.
        """

        def ask(wire: Wire) -> list[Any]:
            replies = wire.ask_all([packed(*command) for command in commands], self.within)
            for reply in replies:
                if isinstance(reply, ReplyError) and is_wrong_server(reply):
                    raise reply
            return replies

        return self._with_wire(ask)

    def _with_wire(self, work: Callable[[Wire], Result], *, last: bool = False) -> Result:
        """Do *work* with a connection, and once more with a new one if that may help."""
        try:
            return self._pool.use(work, self.within)
        except TROUBLE as error:
            if last or not is_transient(error):
                raise LockUnavailable(self.prefix, described(error)) from error
        return self._with_wire(work, last=True)
