"""Locks within one process, by the same flows: for tests and first steps, without a server."""

from __future__ import annotations

import asyncio
import queue
import re
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock
from django_redislock.backends import drivers
from django_redislock.backends.base import Backend
from django_redislock.exceptions import LockLost, LockUnavailable
from django_redislock.rules.keys import channel
from django_redislock.rules.steps import Answer, Bell, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django_redislock.conf import Conf
    from django_redislock.lease import Lease
    from django_redislock.rules.steps import Call, Flow, Listen, Pause, Tell, Unanswered

Result = TypeVar("Result")

CLAIM_MS = 1000
PATIENCE_MS = 6000
NOTED_MS = 1500
OUTAGE = "the server does not answer, as a test has it"


@dataclass(frozen=True, kw_only=True)
class _Lease:
    token: str
    state: str  # As in lua/_lease.lua: h, c or k.
    id: str
    fence: int
    since: int  # ms
    ttl: int  # ms
    expires: int  # ms
    owner: str
    renews: str  # As in lua/_lease.lua: r or -.
    renewals: str = "00000"
    claim: int = 0  # ms
    channel: str = ""

    def packed(self) -> bytes:
        head = self.token + self.state + self.renews + self.renewals + self.id
        parts = (head, self.fence, self.since, self.ttl, self.claim, self.channel, self.owner)
        return "|".join(map(str, parts)).encode()


@dataclass(kw_only=True)
class _Waiter:
    token: str
    ticket: int
    expires: int  # ms
    channel: str
    ttl: int  # ms
    renews: str
    id: str
    owner: str


@dataclass
class _Lock:
    lease: _Lease | None = None
    queue: list[_Waiter] = field(default_factory=list)  # In the order of their tickets.
    fence: int = 0
    done: tuple[int, str] | None = None  # When it ends in ms, and its value.
    forced: tuple[str, _Lease] | None = None  # Id of the operator's request, and what he ended.
    past: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    finished: dict[str, int] = field(default_factory=dict)  # Id of a task run -> when in ms.
    runs: dict[str, str] = field(default_factory=dict)
    skips: int = 0
    queued: tuple[int, str] = (0, "")  # Until when in ms, and the id of the task.
    asked: int = 0  # When it last stood for another call, in ms.
    ran: int = 0  # When a task ran last, in ms.


class Server:
    """What lua/*.lua do, line by line, on Python objects. Not thread-safe; knows no clock."""

    def __init__(self, publish: Callable[[str, str], int]) -> None:
        """*publish* rings a channel, and returns how many heard it."""
        self.locks: dict[str, _Lock] = {}
        self._publish = publish

    def perform(self, script: str, name: str, args: Sequence[Any], us: int) -> Any:
        """Run an operation at server time *us*, and return what its script would."""
        lock = self.locks.setdefault(name, _Lock())
        ms = us // 1000
        if lock.lease is not None and lock.lease.expires <= ms:
            lock.lease = None
        if lock.done is not None and lock.done[0] <= ms:
            lock.done = None
        text = [arg.decode() if isinstance(arg, bytes) else arg for arg in args]
        return getattr(self, f"_{script}")(lock, us, ms, *text)

    def _acquire(
        self,
        lock: _Lock,
        us: int,
        ms: int,
        token: str,
        id: str,  # noqa: A002
        ttl: int,
        mode: str,
        ticket: str,
        heed: str,
        renews: str,
        owner: str,
        channel: str,
    ) -> Any:
        lease = lock.lease
        mine = lease is not None and lease.token == token and lease.state != "k"
        if heed and (pointless := _why_pointless(lock, ms, heed)):
            if mine:
                self._pass_on(lock, us, ms)
            _dequeue(lock, token)
            return pointless
        previous, left = lock.fence, 0
        if lease is not None:
            if mine:
                expires = ms + ttl if lease.state == "c" else max(lease.expires, ms + ttl)
                lock.lease = replace(lease, state="h", expires=expires)
                if heed:
                    _begin(lock, "", id, lease.since, owner)
                return b"%d" % lease.fence
            _remember_met(lock, lease, ms)
            left = (lease.claim if lease.state == "c" else lease.expires) - ms
            if left <= 0:
                process = lease.channel.rpartition(":")[0]
                if process != channel.rpartition(":")[0]:
                    lock.queue = [
                        one for one in lock.queue if one.channel.rpartition(":")[0] != process
                    ]
                previous = lease.fence
        if left <= 0:
            head = self._hand_over(lock, us, ms, previous, token)
            if head is None or head == token:
                _dequeue(lock, token)
                fence = max(us, previous + 1)
                lock.fence = fence
                lock.lease = _Lease(
                    token=token,
                    state="h",
                    id=id,
                    fence=fence,
                    since=ms,
                    ttl=ttl,
                    expires=ms + ttl,
                    owner=owner,
                    renews=renews,
                )
                if heed:
                    _begin(lock, "", id, ms, owner)
                return b"%d" % fence
            left = CLAIM_MS
        assert lock.lease is not None
        if mode != "queue":
            if mode == "last":
                _dequeue(lock, token)
            return [b"busy", _left(lock.lease, ms), lock.lease.packed()]
        entry = next((one for one in lock.queue if one.token == token), None)
        newly = entry is None
        last = lock.queue[-1].ticket if lock.queue else 0
        place = entry.ticket if entry else int(ticket) or max(us, last + 1)
        _dequeue(lock, token)
        lock.queue.append(
            _Waiter(
                token=token,
                ticket=place,
                expires=ms + PATIENCE_MS,
                channel=channel,
                ttl=ttl,
                renews=renews,
                id=id,
                owner=owner,
            )
        )
        lock.queue.sort(key=lambda one: one.ticket)
        return [b"queued", b"%d" % place, left, b"%d" % us, int(newly)]

    def _renew(
        self, lock: _Lock, us: int, ms: int, token: str, ttl: int, count: str, _: str
    ) -> bytes:
        lease = lock.lease
        if lease is None or lease.token != token or lease.state == "k":
            return _absence(lock, token)
        renews, renewals = count[:1], count[1:]
        newest = lease.state == "c" or renewals > lease.renewals
        lock.lease = replace(
            lease,
            state="h",
            renews=renews if newest else lease.renews,
            renewals=renewals if newest else lease.renewals,
            expires=ms + ttl if newest else max(lease.expires, ms + ttl),
            ttl=max(lease.ttl, ttl),
        )
        if renewals == "00001":
            _remember(lock, lease)
        return b"renewed"

    def _release(self, lock: _Lock, us: int, ms: int, token: str, _: str) -> bytes:
        lease = lock.lease
        if lease is None or lease.token != token:
            return _absence(lock, token)
        if lease.state != "k":
            self._pass_on(lock, us, ms)
        return b"released"

    def _conclude(
        self,
        lock: _Lock,
        us: int,
        ms: int,
        token: str,
        min_hold: int,
        once: int,
        owner: str,
        ended: str,
        run: str,
        remembered: int,
        _: str,
    ) -> bytes:
        lease = lock.lease
        if lease is None or lease.token != token:
            return _absence(lock, token)
        if lease.state == "k":
            return b"released"
        left = min(lease.since + min_hold - ms, min_hold)
        if once > 0:
            lock.done = (ms + once, f"{ms}|{owner}")
        if left > 0:
            lock.lease = replace(lease, state="k", expires=ms + left)
            if lock.queue:
                head = lock.queue[0]
                self._publish(head.channel, f"look {head.id} {left}")
        else:
            self._pass_on(lock, us, ms)
        if ended:
            _remember(lock, lease, ms, ended)
        if remembered:
            what = "success" if ended == "done" else "failure"
            lock.runs.pop("started", None)
            _note(lock, what, ms, ms - lease.since, "", owner)
            if ended == "done" and run:
                _finish_run(lock, _task_of(run), ms, remembered)
        return b"released"

    def _skip(self, lock: _Lock, us: int, ms: int, why: str, owner: str, _: str) -> int:
        _note(lock, "skip", ms, 0, why, owner)
        return lock.skips

    def _start(
        self,
        lock: _Lock,
        us: int,
        ms: int,
        permit: str,
        id: str,  # noqa: A002
        owner: str,
        _: str,
    ) -> int:
        _begin(lock, permit, id, ms, owner)
        return 1

    def _finish(
        self,
        lock: _Lock,
        us: int,
        ms: int,
        what: str,
        lasted: int,
        owner: str,
        run: str,
        remembered: int,
        permit: str,
        id: str,  # noqa: A002
        _: str,
    ) -> int:
        _forget(lock, permit, id)
        if what != "retried":
            _note(lock, what, ms, lasted, "", owner)
        if what != "failure" and run:
            _finish_run(lock, _task_of(run) if what == "success" else run, ms, remembered)
        return 1

    def _finished(self, lock: _Lock, us: int, ms: int, run: str, _: str) -> int:
        pointless = _why_pointless(lock, ms, "0" + run)
        return int(pointless[1]) if pointless else -1

    def _runs(self, lock: _Lock, us: int, ms: int, _: str) -> list[Any]:
        kinds = "success", "failure", "skip", "unended"
        notes = [lock.runs.get(what, "").encode() for what in kinds]
        started = sorted(
            f"{what.removeprefix('started')}|{entry}".encode()
            for what, entry in lock.runs.items()
            if what.startswith("started")
        )
        return [b"%d" % ms, *notes, started, lock.skips]

    def _announce(self, lock: _Lock, us: int, ms: int, id: str, ttl: int, _: str) -> bytes:  # noqa: A002
        until, waiting = lock.queued
        if until > ms and waiting != id:
            lock.asked = ms
            return waiting.encode()
        lock.queued, lock.asked = (ms + ttl, id), 0
        return b""

    def _requeue(self, lock: _Lock, us: int, ms: int, id: str, ttl: int, _: str) -> int:  # noqa: A002
        if lock.queued[1] != id:
            return -1
        lock.queued = (ms + ttl, id)
        return ms - lock.asked if lock.asked else -1

    def _retract(self, lock: _Lock, us: int, ms: int, id: str, _: str) -> int:  # noqa: A002
        mine = lock.queued[1] == id
        if mine:
            lock.queued, lock.asked = (0, ""), 0
        return int(mine)

    def _leave(self, lock: _Lock, us: int, ms: int, token: str, _: str) -> int:
        _dequeue(lock, token)
        lease = lock.lease
        if lease is not None and lease.token == token and lease.state != "k":
            self._pass_on(lock, us, ms)
            if lease.renewals == "00000":
                _forget(lock, "", lease.id)
            return 1
        return 0

    def _force_release(
        self,
        lock: _Lock,
        us: int,
        ms: int,
        id: str,  # noqa: A002
        request: str,
        _: str,
    ) -> list[bytes]:
        lease = lock.lease
        if lock.forced is not None and lock.forced[0] == request:
            return [b"released", lock.forced[1].packed()]
        if lease is None:
            return [b"gone", b""]
        if lease.id != id:
            return [b"taken", lease.packed()]
        self._pass_on(lock, us, ms)
        lock.forced = (request, lease)
        _remember(lock, lease, ms, "forced")
        return [b"released", lease.packed()]

    def _look(self, lock: _Lock, us: int, ms: int, _: str) -> list[Any]:
        lease = lock.lease
        if lease is not None:
            _remember_met(lock, lease, ms)
        waiters = sum(one.expires > ms for one in lock.queue)
        if lease is None or (lease.state == "c" and lease.claim <= ms):
            return [b"", -2, waiters, b"%d" % ms, b"", b""]
        return [lease.packed(), _left(lease, ms), waiters, b"%d" % ms, lease.id.encode(), b""]

    def _inspect(self, lock: _Lock, us: int, ms: int, limit: int, _: str) -> list[Any]:
        live = [one for one in lock.queue if one.expires > ms][:limit]
        return [
            b"%d" % ms,
            [[b"%d" % one.ticket, one.id.encode(), one.owner.encode()] for one in live],
            [entry.encode() for entry in lock.past],
        ]

    def _hand_over(
        self, lock: _Lock, us: int, ms: int, previous: int, me: str | None = None
    ) -> str | None:
        while lock.queue:
            head = lock.queue[0]
            if head.token == me:
                return me
            fence = max(us, previous + 1)
            rung = head.expires > ms and self._publish(
                head.channel, f"granted {head.id} {fence} {us}"
            )
            lock.queue.pop(0)
            if rung:
                lock.fence = fence
                lock.lease = _Lease(
                    token=head.token,
                    state="c",
                    id=head.id,
                    fence=fence,
                    since=ms,
                    ttl=head.ttl,
                    expires=ms + head.ttl + CLAIM_MS,
                    owner=head.owner,
                    renews=head.renews,
                    claim=ms + min(CLAIM_MS, head.ttl),
                    channel=head.channel,
                )
                return head.token
        return None

    def _pass_on(self, lock: _Lock, us: int, ms: int) -> None:
        assert lock.lease is not None
        if self._hand_over(lock, us, ms, lock.lease.fence) is None:
            lock.lease = None


def _left(lease: _Lease, ms: int) -> int:
    """What is shown as the time that is left; of a claim, that of the lease that it becomes."""
    left = lease.expires - ms
    return max(left - CLAIM_MS, 1) if lease.state == "c" else left


def _remember(lock: _Lock, lease: _Lease, until: int | str = "", ended: str = "") -> None:
    entry = (lease.id, lease.fence, lease.since, until, ended, lease.owner)
    if lock.past and lock.past[-1].startswith(f"{lease.id}|"):
        if not ended:
            return
        lock.past.pop()
    lock.past.append("|".join(map(str, entry)))


def _remember_met(lock: _Lock, lease: _Lease, ms: int) -> None:
    long = lease.state == "h" and ms - lease.since >= NOTED_MS
    lapsed = lease.state == "c" and lease.claim <= ms
    if lease.renewals == "00000" and (long or lapsed):
        _remember(lock, lease)


def _note(lock: _Lock, what: str, ms: int, lasted: int, why: str, owner: str) -> None:
    lock.runs[what] = f"{ms}|{lasted}|{why}|{owner}"
    lock.ran = ms
    if what in {"success", "skip"}:
        lock.skips = lock.skips + 1 if what == "skip" else 0


def _begun(lock: _Lock, permit: str, id: str) -> tuple[str, bool]:  # noqa: A002
    entry = lock.runs.get(f"started{permit}", "")
    return entry, entry.split("|")[2:3] == [id]


def _begin(lock: _Lock, permit: str, id: str, ms: int, owner: str) -> None:  # noqa: A002
    before, mine = _begun(lock, permit, id)
    if mine:
        return
    if before:
        lock.runs["unended"] = before
    _note(lock, f"started{permit}", ms, 0, id, owner)


def _forget(lock: _Lock, permit: str, id: str) -> None:  # noqa: A002
    if _begun(lock, permit, id)[1]:
        del lock.runs[f"started{permit}"]


def _finish_run(lock: _Lock, run: str, ms: int, remembered: int) -> None:
    lock.finished[run] = ms
    lock.finished = {one: when for one, when in lock.finished.items() if when > ms - remembered}


def _task_of(run: str) -> str:
    found = re.fullmatch(r"(.*):[0-9]+[.][0-9]+", run, re.DOTALL)
    return found[1] if found else run


def _why_pointless(lock: _Lock, ms: int, heed: str) -> list[bytes]:
    run = heed[1:]
    finished = lock.finished.get(_task_of(run), lock.finished.get(run)) if run else None
    if finished is not None:
        return [b"finished", b"%d" % (ms - finished)]
    done = lock.done if heed[0] == "1" else None
    return [] if done is None else [b"done", done[1].encode()]


def _dequeue(lock: _Lock, token: str) -> None:
    lock.queue = [one for one in lock.queue if one.token != token]


def _absence(lock: _Lock, token: str) -> bytes:
    if lock.forced is not None and lock.forced[1].token == token:
        return b"forced"
    return b"taken" if lock.lease is not None and lock.lease.token != token else b"gone"


class InMemoryBackend(Backend):
    """Locks within this process. They exclude threads and tasks, not processes."""

    def __init__(self, conf: Conf) -> None:
        if conf.replicas_ack:
            raise ImproperlyConfigured(
                f"REDISLOCK[{conf.alias!r}]['REPLICAS_ACK'] must be 0: InMemoryBackend has no"
                " replicas."
            )
        self._ahead = 0.0  # Seconds that a test has let pass at once.
        self.outages = 0  # While it is not 0, a test pretends that the server does not answer.
        self.clock = lambda: clock.now() + self._ahead
        super().__init__(conf)
        # As a server would count: its time only has to grow, also over restarts of a fence.
        self._epoch = time.time() - self.clock()

    def _start(self) -> None:
        super()._start()
        self._mutex = threading.Lock()
        self._listeners: dict[str, Callable[[str], object]] = {}
        self._numbers = count(1)
        self.server = Server(self._publish)

    def run(self, flow: Flow[Result]) -> Result:
        return drivers.run(flow, _Session(self))

    async def arun(self, flow: Flow[Result]) -> Result:
        return await drivers.arun(flow, _AsyncSession(self))

    def renew_many(self, calls: Sequence[Call]) -> list[Answer | Unanswered | Refused]:
        answers: list[Answer | Unanswered | Refused] = []
        for call in calls:
            try:
                answers.append(self.perform(call, ""))
            except Refused as refused:
                answers.append(refused)
        return answers

    def close_watchdog(self) -> None:
        pass  # It needs none.

    def ask_many(self, calls: Sequence[Call]) -> list[Any]:
        self._check_outage()
        return [self.perform(call, "").value for call in calls]

    def held_names(
        self, limit: int, offset: int = 0, *, latest_first: bool = False
    ) -> tuple[list[str], int]:
        self._check_outage()
        now = self._server_us() // 1000
        with self._mutex:
            held = sorted(
                (
                    (lock.lease.expires, name)
                    for name, lock in self.server.locks.items()
                    if lock.lease is not None and lock.lease.expires > now
                ),
                reverse=latest_first,
            )
        return [name for _, name in held[offset : offset + limit]], len(held)

    def ran_names(self, limit: int) -> tuple[list[str], int]:
        self._check_outage()
        with self._mutex:
            ran = sorted(
                ((lock.ran, name) for name, lock in self.server.locks.items() if lock.ran),
                reverse=True,
            )
        return [name for _, name in ran[:limit]], len(ran)

    def perform(self, step: Call | Tell, channel: str) -> Answer:
        """Run one operation."""
        if self.outages:
            raise Refused(OUTAGE)
        sent = self.clock()
        with self._mutex:
            value = self.server.perform(
                step.script.name, step.name, (*step.args, channel), self._server_us()
            )
        return Answer(value, sent, self.clock())

    # --- for tests, see testing.LockTestKit ----------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass at once. What the watchdog would have renewed is renewed."""
        left = seconds
        while left > 0:
            leases = [lease for name in list(self.leases) for lease in self.leases_of(name)]
            for lease in leases:
                if lease.grant.is_unanswered:
                    self._look_after(lease)  # What was not answered is tried again soon.
            step = min([left, *(lease.ttl / 3 for lease in leases if lease.grant.auto_renew)])
            self._ahead += step
            left -= step
            for lease in leases:
                self._look_after(lease)
        self.wake_waiters()

    def _look_after(self, lease: Lease) -> None:
        grant = lease.grant
        if not grant.is_active:
            return
        if grant.auto_renew:
            try:
                lease.renew()
            except LockUnavailable:
                grant.unanswered()
            except LockLost:
                pass
        self.note_expiry(lease)
        if grant.is_active:
            # It sleeps until a time that is past by now.
            self.watchdog.forget(lease)
            self.watchdog.watch(lease)

    def wake_waiters(self) -> None:
        """Let all who wait look at their lock again."""
        for ring in list(self._listeners.values()):
            ring("")

    def _check_outage(self) -> None:
        if self.outages:
            raise LockUnavailable(self.prefix, OUTAGE)

    # --- for the sessions -----------------------------------------------------------------------

    def listen(self, ring: Callable[[str], object]) -> str:
        """Call *ring* with what is published on the channel that is returned."""
        name = channel(self.prefix, self.process, next(self._numbers))
        self._listeners[name] = ring
        return name

    def stop_listening(self, name: str) -> None:
        """Nobody listens on this channel any more."""
        self._listeners.pop(name, None)

    def _publish(self, name: str, message: str) -> int:
        ring = self._listeners.get(name)
        if ring is None:
            return 0
        ring(message)
        return 1

    def _server_us(self) -> int:
        return int((self._epoch + self.clock()) * 1_000_000)


class _Session(drivers.Blocking):
    def __init__(self, backend: InMemoryBackend) -> None:
        self._backend = backend
        self._channel = ""
        self._rings: queue.SimpleQueue[str] = queue.SimpleQueue()

    def call(self, step: Call) -> Answer:
        if step.listening and not self._channel:
            self._channel = self._backend.listen(self._rings.put)
        return self._backend.perform(step, self._channel)

    def tell(self, step: Tell) -> None:
        self._backend.perform(step, self._channel)

    def listen(self, step: Listen) -> Bell:
        try:
            ring = self._rings.get(timeout=max(step.seconds, 0.0))
        except queue.Empty:
            return Bell([], self._backend.clock())
        return Bell(ring.split(), self._backend.clock())

    def pause(self, step: Pause) -> float:
        time.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        self._backend.stop_listening(self._channel)


class _AsyncSession(drivers.Awaiting):
    def __init__(self, backend: InMemoryBackend) -> None:
        self._backend = backend
        self._channel = ""
        self._rings: asyncio.Queue[str] = asyncio.Queue()

    async def call(self, step: Call) -> Answer:
        if step.listening and not self._channel:
            loop = asyncio.get_running_loop()
            self._channel = self._backend.listen(
                lambda ring: loop.call_soon_threadsafe(self._rings.put_nowait, ring)
            )
        return self._backend.perform(step, self._channel)

    async def tell(self, step: Tell) -> None:
        self._backend.perform(step, self._channel)

    async def listen(self, step: Listen) -> Bell:
        try:
            ring = await asyncio.wait_for(self._rings.get(), max(step.seconds, 0.0))
        except TimeoutError:
            return Bell([], self._backend.clock())
        return Bell(ring.split(), self._backend.clock())

    async def pause(self, step: Pause) -> float:
        await asyncio.sleep(step.seconds)
        return self._backend.clock()

    def close(self) -> None:
        self._backend.stop_listening(self._channel)
