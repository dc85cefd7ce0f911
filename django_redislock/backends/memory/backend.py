"""Locks within one process, by the same flows and scripts: for tests and first steps."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import ref

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, process
from django_redislock.backends import drivers
from django_redislock.backends.base import Backend
from django_redislock.backends.drivers import Inbox
from django_redislock.backends.watchdog import Watchdog
from django_redislock.exceptions import LockLost, LockUnavailable
from django_redislock.rules import scripts
from django_redislock.rules.keys import channel, lock_keys, permit_of
from django_redislock.rules.steps import Answer, Bell, Call, Refused
from django_redislock.rules.stored import confirmation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.conf import Conf
    from django_redislock.lease import Lease
    from django_redislock.rules.forms import Form
    from django_redislock.rules.steps import Listen, Outcome, Pause, Tell


LAST_MS = 0.001  # Seconds: a key is there until the millisecond in which it expires is over.
OUTAGE = "the server does not answer, as a test has it"


class InMemoryBackend(Backend):
    """Locks within this process. They exclude threads and tasks, not processes."""

    supports_processes = False

    def __init__(self, conf: Conf) -> None:
        if conf.replicas_ack:
            raise ImproperlyConfigured(
                f"REDISLOCK[{conf.alias!r}]['REPLICAS_ACK'] must be 0: InMemoryBackend has no"
                " replicas."
            )
        try:
            from django_redislock.backends.memory import interpreter
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] != "lupa":
                raise
            raise ImproperlyConfigured(
                f"REDISLOCK[{conf.alias!r}]['BACKEND'] {conf.backend!r} runs the scripts of locks"
                " in this process, and needs lupa for it: pip install 'django_redislock[testing]'."
            ) from error
        self._lua = interpreter
        self._ahead = 0.0  # Seconds that a test has let pass at once.
        # By alias, how many outages a test pretends: the server is silent.
        self.outages: Counter[str] = Counter()
        self.clock = lambda: clock.now() + self._ahead
        super().__init__(conf)
        # The clock in place of a server's. It has to grow, so that fences grow.
        self._epoch = time.time() - self.clock()

    def _start(self) -> None:
        super()._start()
        self.watchdog = Watchdog(self, self)
        self.watch = self.watchdog.watch  # type: ignore[method-assign] # a hop less
        self._listeners: dict[bytes, Callable[[str], object]] = {}
        self._numbers = count(1)
        self.interpreter = self._lua.Interpreter()

    def after_fork(self) -> None:
        # A thread of the parent may have been inside a script, so the interpreter is never closed.
        process.inherited.append(self.interpreter)
        super().after_fork()

    def session(self, form: Form | None = None) -> _Session:
        return _Session(self)

    def async_session(self, form: Form | None = None) -> _AsyncSession:
        return _AsyncSession(self)

    def renew_many(self, calls: Sequence[Call]) -> list[Outcome]:
        return self.call_many(calls)

    def call_many(self, calls: Sequence[Call]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for call in calls:
            try:
                outcomes.append(self.perform(call, ""))
            except Refused as refused:
                outcomes.append(refused.with_traceback(None))  # See process.forget_frames().
        return outcomes

    def prepare_watchdog(self) -> None:
        """See watchdog.Renewer: there is no connection."""

    def close_watchdog(self) -> None:
        pass  # There is no connection to close.

    def perform(self, step: Call | Tell, channel: str) -> Answer:
        """Run one operation."""
        if self.outages[self.conf.alias]:
            raise Refused(OUTAGE, "connection")
        sent = self.clock()
        try:
            value = self._perform(step, channel)
        except self._lua.ReplyError as error:
            raise Refused(str(error)) from error
        return Answer(value, sent, self.clock())

    def _perform(self, step: Call | Tell, channel: str) -> Any:
        keys = step.script.given(lock_keys(self.prefix, step.name, step.permit))
        args = step.script.told(step.args, channel)
        value, rings = self.interpreter.run(step.script, self._us, keys, args)
        for rung, message in zip(rings[::2], rings[1::2], strict=True):
            if ring := self._listeners.get(rung):
                ring(message.decode())
        return value

    @property
    def _us(self) -> int:
        return int((self._epoch + self.clock()) * 1_000_000)

    # --- for tests, see testing.LockTestKit ----------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once. Leases are renewed as by the watchdog."""
        left = seconds and seconds + LAST_MS
        while left > 0:
            for lease in self._every_lease():
                if lease.is_unanswered:
                    self._look_after(lease)  # The watchdog soon repeats an unanswered renewal.
            left -= self.interpreter.alone(partial(self._jump, left))
            for lease in self._every_lease():
                self._look_after(lease)
        self.wake_waiters()

    def _jump(self, most: float) -> float:
        """Let time pass, but no more than until a watchdog renews, or an alarm. Returns how much.

        Other threads can take no lock and hand none over meanwhile.
        """
        self._confirm_grants()
        leases, now = self._every_lease(), self.clock()
        alarms = [one.alarm_at(alarm) - now for one in leases for alarm in tuple(one.alarms)]
        renewals = (one.ttl / 3 for one in leases if one.auto_renew)
        seconds = min([most, *renewals, *(left for left in alarms if left > 0)])
        self._ahead += seconds
        # If a thread has read the clock already, its script runs at the new time, too.
        self.interpreter.perform("TIME", us=self._us)
        return seconds

    def _confirm_grants(self) -> None:
        """Confirm the leases just handed over, as their waiters would before time passes."""
        for key in self.interpreter.every_key():
            lock = permit_of(self.prefix, key.name.decode())
            value = self.interpreter.perform("GET", key.name, us=self._us) if lock else None
            if lock and value and (confirmation := confirmation_of(value)):
                name, permit = lock
                call = Call(scripts.RENEW, name, confirmation, self.within, permit=permit)
                self._perform(call, "")

    def _every_lease(self) -> list[Lease]:
        return [lease for name in list(self.leases) for lease in self.leases.of(name)]

    def _look_after(self, lease: Lease) -> None:
        if not lease.is_active:
            return
        if lease.auto_renew:
            try:
                lease.renew()
            except LockUnavailable:
                lease.unanswered()
                self.look_after(lease)
            except LockLost:
                pass
        self.note_expiry(lease)
        if lease.is_active:
            # The watchdog sleeps until a time that is past by now: wake it.
            self.watchdog.watch(lease, lease.granted_at)

    def wake_waiters(self) -> None:
        """Let all waiters look at their locks again."""
        for ring in list(self._listeners.values()):
            ring("")

    # --- for the sessions -----------------------------------------------------------------------

    def listen(self, ring: Callable[[str], object]) -> str:
        """Call *ring* with each message on the channel that is returned."""
        name = channel(self.prefix, self.process, next(self._numbers))
        self._listeners[name.encode()] = ring
        self.interpreter.listen(name.encode())
        return name

    def stop_listening(self, name: str) -> None:
        """End what listen() began."""
        if self._listeners.pop(name.encode(), None) is not None:
            self.interpreter.stop_listening(name.encode())


class _Session(drivers.Blocking):
    def __init__(self, backend: InMemoryBackend) -> None:
        self._backend = backend
        self._channel = ""
        self._rings: Inbox[str] = Inbox()

    def call(self, step: Call) -> Answer:
        if step.listening and not self._channel:
            self._channel = self._backend.listen(self._rings.put)
        return self._backend.perform(step, self._channel)

    def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        return self._backend.call_many(calls)

    def tell(self, step: Tell) -> None:
        self._backend.perform(step, self._channel)

    def listen(self, step: Listen) -> Bell:
        try:
            ring = self._rings.get(timeout=max(step.seconds, 0.0))
        except queue.Empty:
            return Bell([], self._backend.clock())
        return _bell(ring, step.id, self._backend.clock())

    def pause(self, step: Pause) -> float:
        time.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        self._backend.stop_listening(self._channel)


class _AsyncSession(drivers.Awaiting):
    def __init__(self, backend: InMemoryBackend) -> None:
        self._backend = backend
        self._channel = ""
        self._rings: deque[str] = deque()
        self._listener: asyncio.Future[None] | None = None

    async def call(self, step: Call) -> Answer:
        if step.listening and not self._channel:
            self._channel = self._backend.listen(_ring_of(self))
        return self._backend.perform(step, self._channel)

    async def call_all(self, calls: Sequence[Call]) -> list[Outcome]:
        return self._backend.call_many(calls)

    async def tell(self, step: Tell) -> None:
        self._backend.perform(step, self._channel)

    async def listen(self, step: Listen) -> Bell:
        # Not wait_for(): in Python 3.11 it drops a cancellation that comes with the ring.
        if not self._rings and step.seconds > 0:
            loop = asyncio.get_running_loop()
            self._listener = loop.create_future()
            alarm = loop.call_later(step.seconds, self._wake)
            try:
                await self._listener
            finally:
                alarm.cancel()
        return _bell(self._rings.popleft() if self._rings else "", step.id, self._backend.clock())

    async def pause(self, step: Pause) -> float:
        await asyncio.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        self._backend.stop_listening(self._channel)

    def hear(self, message: str) -> None:
        """The bell has rung."""
        self._rings.append(message)
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None and not self._listener.done():
            self._listener.set_result(None)


def _bell(ring: str, id: str, now: float) -> Bell:  # noqa: A002
    words = ring.split()
    # A ring for a lease that the flow wanted before says nothing: the flow looks instead.
    return Bell(words if words[1:2] == [id] else [], now)


def _ring_of(session: _AsyncSession) -> Callable[[str], None]:
    """A function that rings a session from any thread, and keeps neither it nor its loop alive."""
    waiter, of_loop = ref(session), ref(asyncio.get_running_loop())

    def ring(message: str) -> None:
        session, loop = waiter(), of_loop()
        if session is not None and loop is not None:
            with suppress(RuntimeError):  # The loop was closed while a task waited in it.
                loop.call_soon_threadsafe(session.hear, message)

    return ring
