"""Asks sentinels for the master that they watch.

redis-py's own Sentinel asks through clients that retry behind the caller's back and have no common
time limit (rule R5). And it trusts the first sentinel that answers. So we use only its connections.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import closing
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from redis import exceptions as redis_errors

from django_redislock import humanize, process
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    ReplyError,
    at_servers,
    is_transient,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.dialing import Dialer

OPTIONS = "OPTIONS['sentinel_kwargs']"  # For connections to sentinels.
ASKED_LAST_FOR = 10.0  # Seconds since a sentinel did not answer.


class NoMaster(redis_errors.RedisError):
    """A sentinel knows no master of that name."""


class NoSentinel(redis_errors.RedisError):
    """The server that answers is no sentinel."""


class Master(NamedTuple):
    """The master, as a sentinel names it."""

    host: str
    port: int
    epoch: int  # Grows with each failover.

    @property
    def address(self) -> str:
        """As it stands in a URL."""
        return humanize.address(self.host, self.port)


def check_sentinel(hello: Any) -> None:
    """Judge a server by its answer to HELLO.

    Raises:
        NoSentinel: It is a server that keeps data.
    """
    if not isinstance(hello, dict) or hello.get(b"mode") != b"sentinel":
        raise NoSentinel(
            "this is no sentinel; LOCATION names the sentinels, mostly on port 26379, and they name"
            " the servers"
        )


class Sentinels:
    """The sentinels that watch one master, which they call a service."""

    def __init__(self, service: str, dialers: Mapping[str, Dialer]) -> None:
        """Ask nobody yet.

        Args:
            service: Their name for the master.
            dialers: How to reach each of them, by its address.
        """
        self.service = service
        # In random order: else all processes would ask the first in LOCATION.
        self._dialers = dict(random.sample(list(dialers.items()), len(dialers)))
        self._question = (
            packed("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),
            packed("SENTINEL", "MASTER", service),
        )
        self._agreed: Master | None = None  # The master that a majority has named last.
        self._unanswered: dict[str, float] = {}  # When, by address.

    def after_fork(self) -> None:
        """In a forked child: none of the parent's dials is under way."""
        for dialer in self._dialers.values():
            dialer.after_fork()

    def master(self, seconds: float) -> Master:
        """Ask until a majority names the same master, each with its share of the time.

        Raises:
            AtServers: No sentinel has named a master.
            redis.ConnectionError: Those that answer do not agree, or contradict the last majority;
                later they may.
        """
        inquiry, share = _Inquiry(len(self._dialers)), seconds / len(self._dialers)
        for address, dialer in self._in_turn(inquiry):
            try:
                with closing(dialer.dial(share / 2)) as connection:
                    inquiry.answers.append(self.master_named_on(connection, share / 2))
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                self._note(inquiry, address, error)
        return self._result(inquiry)

    async def amaster(self, seconds: float) -> Master:
        """See master(), without blocking the event loop."""
        inquiry, share = _Inquiry(len(self._dialers)), seconds / len(self._dialers)
        for address, dialer in self._in_turn(inquiry):
            try:
                async with asyncio.timeout(share):
                    with closing(await dialer.adial(share)) as connection:
                        sending = [connection.send(command, share) for command in self._question]
                        inquiry.answers.append(self._read(*await asyncio.gather(*sending)))
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                self._note(inquiry, address, error)
        return self._result(inquiry)

    def master_named_on(self, connection: Connection, seconds: float) -> Master:
        """The master, as the sentinel at the other end of *connection* names it.

        Raises:
            NoMaster: The sentinel knows no master of that name.
        """
        return self._read(*connection.execute_all(self._question, seconds))

    def contradicts_majority(self, master: Master) -> bool:
        """Whether a majority has named another server last, or none has named any."""
        return self._agreed is None or master[:2] != self._agreed[:2]

    def _knows(self, master: Master | None) -> bool:
        """Whether a majority has named *master* last: then the silent ones need not be asked."""
        return master is not None and not self.contradicts_majority(master)

    def open_connections(self, seconds: float) -> Iterator[Connection]:
        """A connection to one sentinel after the other. One that cannot be dialed is skipped."""
        for address, dialer in self._in_turn(None):
            try:
                connection = dialer.dial(seconds)
            except CLIENT_ERRORS:
                self._unanswered[address] = time.monotonic()
                continue
            with closing(connection):
                yield connection

    def execute_on_each(
        self, seconds: float, *commands: tuple[str, ...]
    ) -> dict[str, list[Any] | Exception]:
        """The answers of each sentinel, by address; an error is returned, too."""
        said: dict[str, list[Any] | Exception] = {}
        for address, dialer in sorted(self._dialers.items()):
            try:
                with closing(dialer.dial(seconds / 2)) as connection:
                    packed_commands = [packed(*command) for command in commands]
                    said[address] = connection.execute_all(packed_commands, seconds / 2)
            except CLIENT_ERRORS as error:
                process.forget_frames(error)
                said[address] = error
        return said

    def _in_turn(self, inquiry: _Inquiry | None) -> Iterator[tuple[str, Dialer]]:
        """Sentinels to ask until the *inquiry* is over; the lately silent ones come last."""
        late = time.monotonic() - ASKED_LAST_FOR
        silent = {address for address, when in list(self._unanswered.items()) if when > late}
        for address, dialer in sorted(self._dialers.items(), key=lambda one: one[0] in silent):
            if inquiry and (inquiry.agreed or (address in silent and self._knows(inquiry.newest))):
                return
            yield address, dialer

    def _read(self, address: Any, state: Any) -> Master:
        if address is None:
            raise NoMaster(f"knows no {self.service!r}; check OPTIONS['service_name']")
        for reply in (address, state):
            if isinstance(reply, ReplyError):
                raise copy(reply)
        # Take the address from its own reply: during a failover only that reply has the new one.
        return Master(address[0].decode(), int(address[1]), int(state[b"config-epoch"]))

    def _note(self, inquiry: _Inquiry, address: str, error: Exception) -> None:
        inquiry.errors[address] = error
        if is_transient(error):
            self._unanswered[address] = time.monotonic()

    def _result(self, inquiry: _Inquiry) -> Master:
        if not inquiry.answers:
            raise at_servers("no sentinel names a master: ", inquiry.errors, OPTIONS)
        if inquiry.agreed is not None:
            self._agreed = inquiry.agreed
            return inquiry.agreed
        newest, agreed = inquiry.newest, self._agreed
        if newest is None:
            named = ", ".join(sorted({master.address for master in inquiry.answers}))
            raise redis_errors.ConnectionError(f"the sentinels name different masters: {named}")
        if agreed and newest.epoch <= agreed.epoch and self.contradicts_majority(newest):
            raise redis_errors.ConnectionError(
                f"the sentinels that answer name {newest.address}, but most of them have named"
                f" {agreed.address} last"
            )
        return newest


class _Inquiry:
    """The answers to one question."""

    def __init__(self, sentinels: int) -> None:
        self._majority = sentinels // 2 + 1
        self.answers: list[Master] = []
        self.errors: dict[str, Exception] = {}

    @property
    def agreed(self) -> Master | None:
        """The master that a majority of all sentinels names; two callers never get unlike ones."""
        for place, votes in Counter(master[:2] for master in self.answers).items():
            if votes >= self._majority:
                return Master(*place, max(one.epoch for one in self.answers if one[:2] == place))
        return None

    @property
    def newest(self) -> Master | None:
        """The master after the last failover; None if it is unknown, or the answers do not agree.

        A sentinel that was away may still name the former one.
        """
        last = max((master.epoch for master in self.answers), default=None)
        newest = {master for master in self.answers if master.epoch == last}
        return newest.pop() if len(newest) == 1 else None
