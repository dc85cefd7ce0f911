"""Locks on one Redis or Valkey server."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock.backends import drivers
from django_redislock.backends.base import Backend
from django_redislock.backends.redis import without_scripts
from django_redislock.backends.redis.connection import packed
from django_redislock.backends.redis.dialing import Dialer
from django_redislock.backends.redis.errors import (
    TROUBLE,
    ReplyError,
    is_transient,
    is_wrong_server,
)
from django_redislock.backends.redis.location import (
    LOOKS_LIKE,
    check_options,
    check_url,
    has_option,
)
from django_redislock.backends.redis.pool import Pool, SharedBell
from django_redislock.backends.redis.sessions import (
    SHORTEST,
    AsyncSession,
    LoopWire,
    Session,
    count_of,
    lacks_script,
    wait_for_replicas,
)
from django_redislock.conf import LONGEST
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules import scripts
from django_redislock.rules.flows import Answer, Call, Refused, Unanswered
from django_redislock.rules.keys import channel, index_key, lock_keys, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.backends.redis.connection import AsyncWire, Wire
    from django_redislock.conf import Conf
    from django_redislock.rules.flows import Flow, Tell
    from django_redislock.rules.scripts import Script

logger = logging.getLogger("django_redislock")

Result = TypeVar("Result")

LISTED_AT_ONCE = 10_000  # Names in an index.
BATCH = 500  # Commands sent before their replies are read; more could fill both buffers.
DEFAULT_MAX_CONNECTIONS = 128
LEAST_MAX_CONNECTIONS = Pool.BESIDE + Pool.KEPT_BACK
LOOK_FOR_SCRIPTS_EVERY = 60.0  # Seconds until rights that were missing may be there again.


class RedisBackend(Backend):
    """Locks on one Redis (7.0 or newer) or Valkey server.

    OPTIONS are redis-py's connection options (username, password, ssl_*, socket_timeout, …), and
    ``max_connections``: how many connections a process may open for sync code, its watchdog
    included (default 128). Async code uses one connection per event loop.
    """

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
        _check_timeout(options.get("socket_timeout"), f"{where}['OPTIONS']['socket_timeout']")
        location = conf.location
        if not location:
            raise ImproperlyConfigured(
                f"{where} has no LOCATION, so no server is named. Add"
                " 'LOCATION': 'redis://host:6379/0'."
            )
        if not isinstance(location, str):
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] must be one URL: {type(self).__name__} uses one server, and"
                " those for Sentinel, a cluster or a quorum are not there yet."
            )
        try:
            check_url(location)
        except ValueError as error:
            raise ImproperlyConfigured(f"{where}['LOCATION'] {error}.") from None
        try:
            check_options(location, options)
        except ValueError as error:
            raise ImproperlyConfigured(f"{where}['OPTIONS']{error}.") from None
        try:
            self._dialer = Dialer(location, options)
        except TypeError as error:
            # Its text names the option, not its value.
            key = "LOCATION" if has_option(location, error) else "OPTIONS"
            raise ImproperlyConfigured(
                f"{where}['{key}'] has an option that redis-py does not accept: {error}"
            ) from error
        except Exception:  # noqa: BLE001 - whatever a URL parser raises
            # The text may quote a part of the URL, and so of the password: from None.
            raise ImproperlyConfigured(
                f"{where}['LOCATION'] is not a URL that redis-py understands; it should look like"
                f" {LOOKS_LIKE}."
            ) from None
        # That of the URL, if there is one: redis-py lets the URL win.
        self._patience = self._dialer.timeout
        _check_timeout(self._patience, f"{where}['LOCATION']: socket_timeout")
        self.scripting = True  # Until the server says that we may not; it is asked now and then.
        self._looks_for_scripts_at = math.inf
        super().__init__(conf)

    def _start(self) -> None:
        super()._start()
        self._pool = Pool(self._dialer.dial, self._most_connections - Pool.BESIDE)
        self._numbers = count(1)
        self._watchdog_wire: Wire | None = None
        self._shared_bell: SharedBell | None = None
        self._shared_bell_lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, LoopWire] = {}

    def after_fork(self) -> None:
        # Only this process's copies are closed; the parent goes on using its own.
        self._dialer.after_fork()
        self._pool.forsake()
        if self._watchdog_wire is not None:
            self._watchdog_wire.close()
        if self._shared_bell is not None:
            self._shared_bell.forsake()
        for loop_wire in self._loops.values():
            if loop_wire.wire is not None:
                loop_wire.wire.forsake()
        self._inherited = self._loops  # A transport must not be collected before its loop.
        super().after_fork()

    def retire(self) -> None:
        super().retire()
        self._pool.retire()

    def close_watchdog(self) -> None:
        wire, self._watchdog_wire = self._watchdog_wire, None
        if wire is not None:
            wire.close()

    def patience(self, ttl: float) -> float:
        return self._patience or super().patience(ttl)

    def run(self, flow: Flow[Result]) -> Result:
        return drivers.run(flow, Session(self))

    async def arun(self, flow: Flow[Result]) -> Result:
        return await drivers.arun(flow, AsyncSession(self))

    def renew_many(self, calls: Sequence[Call]) -> list[Answer | Unanswered | Refused]:
        within = calls[0].within
        sent = self.clock()
        try:
            if self._watchdog_wire is None:
                self._watchdog_wire = self._dialer.dial(within)
            answers: list[Answer | Unanswered | Refused] = []
            for start in range(0, len(calls), BATCH):
                part = calls[start : start + BATCH]
                answers += self._exchange_many(self._watchdog_wire, part)
            return answers
        except Exception as error:  # noqa: BLE001 - told apart by _outcome
            self.close_watchdog()
            return [self._outcome(error, sent)] * len(calls)

    def ask_many(self, calls: Sequence[Call]) -> list[Any]:
        answers: list[Any] = []
        for start in range(0, len(calls), BATCH):
            part = calls[start : start + BATCH]
            answers += self._with_wire(partial(self._exchange_many, calls=part))
        for answer, call in zip(answers, calls, strict=True):
            if not isinstance(answer, Answer):
                raise LockUnavailable(call.name, answer.problem) from answer.__cause__
        return [answer.value for answer in answers]

    def held_names(
        self, limit: int, offset: int = 0, *, latest_first: bool = False
    ) -> tuple[list[str], int]:
        return self._names("held", limit, offset, latest_first=latest_first)

    def ran_names(self, limit: int) -> tuple[list[str], int]:
        return self._names("ran", limit, 0, latest_first=True)

    def _names(
        self, which: str, limit: int, offset: int, *, latest_first: bool
    ) -> tuple[list[str], int]:
        """Names in an index, and how many it has in all."""
        names: list[str] = []
        end, total = offset + limit, offset + limit
        while True:
            # A part at a time: the server serves nobody else while it lists one.
            part = max(0, min(LISTED_AT_ONCE, end - offset))
            args = which, offset, part, int(latest_first)
            call = Call(scripts.NAMES, index_key(self.prefix), args, self.within)
            ((total, keys),) = self.ask_many([call])
            texts = [key.decode(errors="replace") for key in keys]
            names += [name for key in texts if (name := name_of(self.prefix, key))]
            offset += part
            if offset >= min(end, total):
                return names, total

    def commands(self, *commands: tuple[str | bytes | int, ...]) -> list[Any]:
        """Run plain commands in one round trip; an error reply is returned, not raised.

        They may be run twice, as they must be safe to repeat.

        Raises:
            LockUnavailable: The server did not answer, or is the wrong one.
        """
        data = b"".join([packed(*command) for command in commands])
        return self._with_wire(partial(self._replies, data=data, count=len(commands)))

    def _replies(self, wire: Wire, data: bytes, count: int) -> list[Any]:
        wire.send(data, self.within)
        replies = [wire.reply(self.within) for _ in range(count)]
        _check_server(replies)
        return replies

    def _with_wire(self, work: Callable[[Wire], Result]) -> Result:
        """Do *work* with a connection, and once more with a new one if that fails."""
        last = False
        while True:
            wire = None
            try:
                wire = self._pool.take(self.within)
                result = work(wire)
            except BaseException as error:
                if wire is not None:
                    self._pool.drop(wire)
                if isinstance(error, TROUBLE) and (last or not is_transient(error)):
                    raise LockUnavailable(self.prefix, _described(error)) from error
                if not isinstance(error, TROUBLE):
                    raise
                last = True
            else:
                self._pool.give(wire)
                return result

    def _exchange_many(
        self, wire: Wire, calls: Sequence[Call]
    ) -> list[Answer | Unanswered | Refused]:
        if not self.scripting:
            return [self._answer_plain(wire, call) for call in calls]
        sent = self.clock()
        replies = self._ask_all(wire, calls)
        lacking = [number for number, reply in enumerate(replies) if lacks_script(reply)]
        if lacking:
            # Once more in one go, or a first look at many locks would take a trip for each. All
            # are safe to repeat.
            again = self._ask_all(wire, [calls[number] for number in lacking], in_full=True)
            for number, reply in zip(lacking, again, strict=True):
                replies[number] = reply
        now = self.clock()
        answers: list[Answer | Unanswered | Refused] = []
        for call, reply in zip(calls, replies, strict=True):
            if not isinstance(reply, ReplyError):
                answers.append(Answer(reply, sent, now))
            elif self.forbids_scripting(reply):
                answers.append(self._answer_plain(wire, call))
            else:
                answers.append(self._outcome(reply, sent))
        return answers

    def _ask_all(self, wire: Wire, calls: Sequence[Call], *, in_full: bool = False) -> list[Any]:
        """The replies to many calls; *in_full* sends the text of each script with its first one."""
        lacking = {call.script.name for call in calls} if in_full else set()
        batch = []
        for call in calls:
            batch.append(self.pack(call, "", in_full=call.script.name in lacking))
            lacking.discard(call.script.name)
        within = calls[0].within
        wire.send(b"".join(batch), within)
        replies = [wire.reply(within) for _ in calls]
        _check_server(replies)
        return replies

    # --- for the sessions -----------------------------------------------------------------------

    def pack(self, step: Call | Tell, channel: str, *, in_full: bool = False) -> bytes:
        """One script call as bytes: by its SHA, or *in_full* with the whole text."""
        if in_full:
            keys = step.script.given(lock_keys(self.prefix, step.name))
            return packed("EVAL", step.script.source, len(keys), *keys, *step.args, channel)
        args = packed(*step.args, channel)
        head = _head(self.prefix, step.name, step.script, len(step.args) + 1)
        return head + args[args.index(b"$") :]

    def new_channel(self) -> str:
        """A channel for one more connection of this process."""
        return channel(self.prefix, self.process, next(self._numbers))

    def exchange(self, wire: Wire, step: Call, channel: str, *, in_full: bool = False) -> Answer:
        """Send one call and read its answer; errors go through."""
        if not self.scripting:
            return self._call_plain(wire, step)
        sent = self.clock()
        command = self.pack(step, channel, in_full=in_full)
        if step.replicas:
            command += packed(*wait_for_replicas(step))
        reply: Any = wire.ask(command, step.within)
        acknowledged = wire.reply(self.rest_of(step, sent).within) if step.replicas else 0
        if isinstance(reply, ReplyError):
            rest = self.rest_of(step, sent)
            if lacks_script(reply) and not in_full:
                return self.exchange(wire, rest, channel, in_full=True)
            if self.forbids_scripting(reply):
                return self._call_plain(wire, rest)
            raise reply
        return Answer(reply, sent, self.clock(), count_of(acknowledged))

    def rest_of(self, step: Call, since: float) -> Call:
        """The same step with what is left of its time: all that it takes is one try."""
        return step._replace(within=max(step.within - (self.clock() - since), SHORTEST))

    def forbids_scripting(self, error: ReplyError) -> bool:
        """Whether the server's rights leave us only plain commands; says so once in the log."""
        if error.code != "NOPERM" or not any(
            f"'{command}'" in str(error) for command in ("evalsha", "eval")
        ):
            return False
        if self.scripting:
            self.scripting = False
            self._looks_for_scripts_at = self.clock() + LOOK_FOR_SCRIPTS_EVERY
            logger.warning(
                "REDISLOCK[%r]: the server forbids scripts (%s). Locks work with plain commands,"
                " with less: waiters poll instead of being served in turn, and operations take"
                " more round trips. Allow +eval and +evalsha to get both back.",
                self.alias,
                error,
            )
        return True

    def raise_outcome(self, error: BaseException, sent: float) -> NoReturn:
        """Raise what *error* means to a flow."""
        raise self._outcome(error, sent) from error

    def _outcome(self, error: BaseException, sent: float) -> Unanswered | Refused:
        outcome: Unanswered | Refused
        if is_transient(error):
            outcome = Unanswered(_described(error), sent, self.clock())
        else:
            outcome = Refused(_described(error))
        outcome.__cause__ = error
        return outcome

    def _call_plain(self, wire: Wire, step: Call) -> Answer:
        sent = self.clock()
        ask = _Asker(self, wire, step, sent)
        self._look_for_scripts(ask)
        value = without_scripts.perform(step, lock_keys(self.prefix, step.name), ask)
        acknowledged = 0
        if step.replicas:
            rest = self.rest_of(step, sent)
            reply = wire.ask(packed(*wait_for_replicas(rest)), rest.within)
            acknowledged = count_of(reply)
        return Answer(value, sent, self.clock(), acknowledged)

    def _answer_plain(self, wire: Wire, call: Call) -> Answer | Unanswered | Refused:
        sent = self.clock()
        try:
            return self._call_plain(wire, call)
        except ReplyError as error:  # Of one lock; the others want their answers.
            if is_wrong_server(error):
                raise
            return self._outcome(error, sent)

    def _look_for_scripts(self, ask: _Asker) -> None:
        """Find out now and then whether scripts are allowed again; for what comes next."""
        now = self.clock()
        if now < self._looks_for_scripts_at:
            return
        self._looks_for_scripts_at = now + LOOK_FOR_SCRIPTS_EVERY
        try:
            ask("EVAL", "return 1", 0)
            ask("EVALSHA", "0" * 40, 0)
        except ReplyError as error:
            if not lacks_script(error):
                return
        self.scripting = True
        logger.warning(
            "REDISLOCK[%r]: the server allows scripts again; waiters are served in turn", self.alias
        )

    def shared_bell(self, seconds: float) -> SharedBell:
        """The bell of waiters without a connection of their own; a new one opens in that time."""
        with self._shared_bell_lock:
            bell = self._shared_bell
            if bell is None or bell.closed:
                bell = SharedBell(self._dialer.dial, self.new_channel(), seconds)
                self._shared_bell = bell
            return bell

    def open_wire(self) -> AsyncWire | None:
        """The connection of the running loop, if it has one."""
        loop_wire = self._loops.get(asyncio.get_running_loop())
        wire = loop_wire.wire if loop_wire is not None else None
        return None if wire is None or wire.closed else wire

    async def wire(self, seconds: float) -> AsyncWire:
        """The connection of the running loop."""
        loop = asyncio.get_running_loop()
        loop_wire = self._loops.get(loop)
        if loop_wire is None:
            # A connection refers to its loop, so those of loops that did not end well stay here.
            for other in [other for other in self._loops if other.is_closed()]:
                self._loops.pop(other, None)
            loop_wire = self._loops[loop] = LoopWire(partial(self._loops.pop, loop, None))
            await loop_wire.close_with_loop()
        return await loop_wire.get(self._dialer, seconds)


def _check_timeout(value: object, what: str) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= LONGEST):  # type: ignore[operator] # Also refuses nan.
        raise ImproperlyConfigured(f"{what} must be a positive number of seconds, not {value!r}.")


@lru_cache(maxsize=4096)
def _head(prefix: str, name: str, script: Script, args: int) -> bytes:
    """What a call of *script* with so many arguments begins with, packed once: it has many keys."""
    keys = script.given(lock_keys(prefix, name))
    head = packed("EVALSHA", script.sha, len(keys), *keys)
    return b"*%d\r\n" % (3 + len(keys) + args) + head[head.index(b"$") :]


class _Asker:
    """Runs the plain commands of one step one by one, all within its time; for backends.plain."""

    def __init__(self, backend: RedisBackend, wire: Wire, step: Call, sent: float) -> None:
        self._backend = backend
        self._wire = wire
        self._step = step
        self._sent = sent

    def __call__(self, *command: str | bytes | int) -> Any:
        rest = self._backend.rest_of(self._step, self._sent)
        reply = self._wire.ask(packed(*command), rest.within)
        if isinstance(reply, ReplyError):
            raise reply
        return reply


def _check_server(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, ReplyError) and is_wrong_server(reply):
            raise reply


def _described(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.rstrip(".")
