"""Locks on one Redis or Valkey server."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import drivers, scripts
from django_redislock.backends import plain
from django_redislock.backends.base import Backend
from django_redislock.backends.location import LOOKS_LIKE, check_options, check_url, has_option
from django_redislock.backends.wires import (
    TROUBLE,
    Crowded,
    Dialer,
    Pool,
    ReplyError,
    is_transient,
    packed,
)
from django_redislock.conf import LONGEST
from django_redislock.exceptions import LockUnavailable
from django_redislock.flows import Answer, Bell, Call, Refused, Unanswered
from django_redislock.keys import channel, index_key, lock_keys, name_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from django_redislock.backends.wires import AsyncWire, Wire
    from django_redislock.conf import Conf
    from django_redislock.flows import Flow, Listen, Pause, Tell
    from django_redislock.scripts import Script

logger = logging.getLogger("django_redislock")

Result = TypeVar("Result")

LISTED_AT_ONCE = 10_000  # Names in an index.
BATCH = 500  # Commands sent before their replies are read; more could fill both buffers.
DEFAULT_MAX_CONNECTIONS = 128
# The watchdog's own, two that waiters may not take (Pool.KEPT_BACK), and one for a waiter.
LEAST_MAX_CONNECTIONS = 4


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
        self.scripting = True  # Until the server says that we may not.
        super().__init__(conf)

    def _start(self) -> None:
        super()._start()
        self._pool = Pool(self._dialer.dial, self._most_connections - 1)
        self._numbers = count(1)
        self._watchdog_wire: Wire | None = None
        self._loops: dict[asyncio.AbstractEventLoop, _LoopWire] = {}

    def after_fork(self) -> None:
        # Only this process's copies are closed; the parent goes on using its own.
        self._pool.forsake()
        if self._watchdog_wire is not None:
            self._watchdog_wire.close()
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
        return drivers.run(flow, _Session(self))

    async def arun(self, flow: Flow[Result]) -> Result:
        return await drivers.arun(flow, _AsyncSession(self))

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
        with self._lent_wire() as wire:
            for start in range(0, len(calls), BATCH):
                answers += self._exchange_many(wire, calls[start : start + BATCH])
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

        Raises:
            LockUnavailable: The server did not answer.
        """
        with self._lent_wire() as wire:
            wire.send(b"".join([packed(*command) for command in commands]), self.within)
            return [wire.reply(self.within) for _ in commands]

    @contextmanager
    def _lent_wire(self) -> Iterator[Wire]:
        wire = None
        try:
            wire = self._pool.take(self.within)
            yield wire
        except BaseException as error:
            if wire is not None:
                self._pool.drop(wire)
            if isinstance(error, TROUBLE):
                raise LockUnavailable(self.prefix, _described(error)) from error
            raise
        self._pool.give(wire)

    def _exchange_many(
        self, wire: Wire, calls: Sequence[Call]
    ) -> list[Answer | Unanswered | Refused]:
        if not self.scripting:
            return [self._answer_plain(wire, call) for call in calls]
        sent = self.clock()
        replies = self._ask_all(wire, calls)
        lacking = [number for number, reply in enumerate(replies) if _lacks_script(reply)]
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
        return [wire.reply(within) for _ in calls]

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

    def exchange(self, wire: Wire, step: Call) -> Answer:
        """Send one call and read its answer; transport errors go through."""
        if not self.scripting:
            return self._call_plain(wire, step)
        command = self.pack(step, wire.channel)
        replicas = packed(*_wait_for_replicas(step)) if step.replicas else b""
        sent = self.clock()
        reply = wire.ask(command + replicas, step.within)
        acknowledged = wire.reply(step.within) if replicas else 0
        if isinstance(reply, ReplyError) and reply.code == "NOSCRIPT":
            sent = self.clock()
            command = self.pack(step, wire.channel, in_full=True)
            reply = wire.ask(command + replicas, step.within)
            acknowledged = wire.reply(step.within) if replicas else 0
        error = reply if isinstance(reply, ReplyError) else acknowledged
        if isinstance(error, ReplyError):
            if self.forbids_scripting(error):
                return self._call_plain(wire, step)
            raise error
        return Answer(reply, sent, self.clock(), acknowledged)

    def forbids_scripting(self, error: ReplyError) -> bool:
        """Whether the server's rights leave us only plain commands; says so once in the log."""
        if error.code != "NOPERM" or not any(
            f"'{command}'" in str(error) for command in ("evalsha", "eval")
        ):
            return False
        if self.scripting:
            self.scripting = False
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
            crowded = isinstance(error, Crowded)
            outcome = Unanswered(_described(error), sent, self.clock(), crowded=crowded)
        else:
            outcome = Refused(_described(error))
        outcome.__cause__ = error
        return outcome

    def _call_plain(self, wire: Wire, step: Call) -> Answer:
        sent = self.clock()
        ask = _Asker(wire, step.within)
        value = plain.perform(step, lock_keys(self.prefix, step.name), ask)
        acknowledged = ask(*_wait_for_replicas(step)) if step.replicas else 0
        return Answer(value, sent, self.clock(), acknowledged)

    def _answer_plain(self, wire: Wire, call: Call) -> Answer | Unanswered | Refused:
        sent = self.clock()
        try:
            return self._call_plain(wire, call)
        except ReplyError as error:  # Of one lock; the others want their answers.
            return self._outcome(error, sent)

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
            loop_wire = self._loops[loop] = _LoopWire(partial(self._loops.pop, loop, None))
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
    """Runs plain commands one by one on a wire, for backends.plain."""

    def __init__(self, wire: Wire, seconds: float) -> None:
        self._wire = wire
        self._seconds = seconds

    def __call__(self, *command: str | bytes | int) -> Any:
        reply = self._wire.ask(packed(*command), self._seconds)
        if isinstance(reply, ReplyError):
            raise reply
        return reply


class _Session:
    """One flow's use of the blocking connections: one, kept from the first step to the last."""

    __slots__ = ("_backend", "_wire")

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._wire: Wire | None = None

    def call(self, step: Call) -> Answer:
        backend = self._backend
        sent = backend.clock()
        wire = self._wire
        try:
            if wire is None:
                wire = self._wire = backend._pool.take(step.within, to_wait=bool(step.listening))
            if step.listening and not wire.channel and backend.scripting:
                wire.subscribe(backend.new_channel(), step.within)
            left = step.within - (backend.clock() - sent)
            if left < 0.9 * step.within:  # It took long to get here; all is one try.
                step = step._replace(within=max(left, 0.001))
            return backend.exchange(wire, step)
        except ReplyError as error:
            backend.raise_outcome(error, sent)  # The connection is in step.
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, sent)
        except BaseException:
            self._drop()
            raise

    def tell(self, step: Tell) -> None:
        backend = self._backend
        wire = self._wire
        assert wire is not None
        sent = backend.clock()
        try:
            wire.tell(backend.pack(step, wire.channel))
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, sent)
        except BaseException:
            self._drop()
            raise

    def listen(self, step: Listen) -> Bell:
        backend = self._backend
        wire = self._wire
        now = backend.clock()
        until = now + step.seconds
        if wire is None:
            raise Unanswered("the connection was lost", now, now)
        try:
            while True:
                ring = wire.bell(until - now)
                now = backend.clock()
                if ring is None:
                    return Bell([], now)
                words = ring.decode().split()
                if len(words) > 1 and words[1] == step.id:
                    return Bell(words, now)
        except TROUBLE as error:
            self._drop()
            backend.raise_outcome(error, now)
        except BaseException:
            self._drop()
            raise

    def pause(self, step: Pause) -> float:
        self.close()  # Others may need the connection meanwhile.
        time.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        wire = self._wire
        if wire is not None:
            if wire.bells:
                wire.bells.clear()  # Nobody waits for them any more.
            self._backend._pool.give(wire)
            self._wire = None

    def _drop(self) -> None:
        if self._wire is not None:
            self._backend._pool.drop(self._wire)
            self._wire = None


class _AsyncSession:
    """One flow's use of its event loop's connection."""

    __slots__ = ("_backend", "_id", "_wire")

    def __init__(self, backend: RedisBackend) -> None:
        self._backend = backend
        self._wire: AsyncWire | None = None
        self._id = ""

    async def call(self, step: Call) -> Answer:
        if step.shielded:
            return await self._call_shielded(step)
        backend = self._backend
        sent = backend.clock()
        try:
            wire = self._wire
            if wire is None or wire.closed:
                wire = self._wire = backend.open_wire() or await backend.wire(step.within)
            if not backend.scripting:
                return await _call_in_thread(backend, step)
            if step.listening:
                if not wire.channel:
                    await wire.subscribe(backend.new_channel(), step.within)
                self._id = step.listening
                wire.expect_bell(step.listening)
            for in_full in (False, True):
                sent = backend.clock()
                command = backend.pack(step, wire.channel, in_full=in_full)
                answered, acknowledged = wire.send(command, step.within), 0
                if step.replicas:
                    replicas = wire.send(packed(*_wait_for_replicas(step)), step.within)
                    reply, acknowledged = await asyncio.gather(answered, replicas)
                else:
                    reply = await answered
                if not (isinstance(reply, ReplyError) and reply.code == "NOSCRIPT"):
                    break
            if isinstance(reply, ReplyError):
                if backend.forbids_scripting(reply):
                    return await _call_in_thread(backend, step)
                raise reply
            return Answer(reply, sent, backend.clock(), acknowledged)
        except TROUBLE as error:
            backend.raise_outcome(error, sent)

    async def tell(self, step: Tell) -> None:
        wire = self._wire
        assert wire is not None
        sent = self._backend.clock()
        try:
            wire.tell(self._backend.pack(step, wire.channel))
        except TROUBLE as error:
            self._backend.raise_outcome(error, sent)

    async def listen(self, step: Listen) -> Bell:
        backend = self._backend
        now = backend.clock()
        try:
            assert self._wire is not None
            ring = await self._wire.bell(step.id, step.seconds)
        except TROUBLE as error:
            backend.raise_outcome(error, now)
        return Bell(ring.decode().split() if ring else [], backend.clock())

    async def pause(self, step: Pause) -> float:
        await asyncio.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        if self._wire is not None and self._id:
            self._wire.forget_bell(self._id)

    async def _call_shielded(self, step: Call) -> Answer:
        # An undo runs to its end, which is bounded, however often its task is cancelled.
        task = asyncio.ensure_future(self.call(step._replace(shielded=False)))
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise
            except (Unanswered, Refused):
                break
        return task.result()


def _lacks_script(reply: Any) -> bool:
    return isinstance(reply, ReplyError) and reply.code == "NOSCRIPT"


def _wait_for_replicas(step: Call) -> tuple[str | int, ...]:
    return "WAIT", step.replicas, max(1, int(step.within * 500))


async def _call_in_thread(backend: RedisBackend, step: Call) -> Answer:
    # Without scripting an operation is several commands between WATCH and EXEC, which cannot
    # share a connection with other tasks. A cancelled one is awaited, which is bounded: undoing
    # it must not begin before it has ended.
    call = asyncio.ensure_future(asyncio.to_thread(_call_blocking, backend, step))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _call_blocking(backend: RedisBackend, step: Call) -> Answer:
    session = _Session(backend)
    try:
        return session.call(step._replace(listening=""))
    finally:
        session.close()


class _LoopWire:
    """The connection of one event loop: dialed once for all tasks that want it, closed with it."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self.wire: AsyncWire | None = None
        self._forget = forget
        self._dialing = asyncio.Lock()
        self._closer: AsyncGenerator[None, None] | None = None

    async def get(self, dialer: Dialer, seconds: float) -> AsyncWire:
        async with self._dialing:
            if self.wire is None or self.wire.closed:
                self.wire = await dialer.adial(seconds)
            return self.wire

    async def close_with_loop(self) -> None:
        # asyncio.run() closes the asynchronous generators of its loop at the end, and with this
        # one our connection; otherwise nobody would tell us that the loop is going away.
        self._closer = self._close_at_end()
        await anext(self._closer)

    async def _close_at_end(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            if self.wire is not None:
                self.wire.close()


def _described(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.rstrip(".")
