"""LeaderScheduler: of several beats one sends, and the others stand by.

Each entry of the schedule has a lock, whose `once` says when the entry was last sent. Only the
holder of the lock may write that. A beat takes the lock and writes the time before it sends. If the
time is not the one that it knows, another beat has sent meanwhile: it takes over that time instead.

A time is that of the sender's clock, which may be ahead of ours. The server's clock tells how long
ago it was.
"""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heapreplace
from typing import TYPE_CHECKING, Any, Self

from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.utils.time import maybe_make_aware
from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, logs, task_runs
from django_redislock.conf import conf
from django_redislock.exceptions import (
    InvalidLockName,
    LockError,
    LockLost,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.rules.arguments import SHORTEST_TTL, seconds
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFAULT_ALIAS, Options
from django_redislock.term import leadership

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery import Celery

logger = logs.logger("django_redislock.celery")

# Seconds after which a beat looks again whether it leads, and whether it is to stop.
LOOKS_EVERY = 1.0
# Seconds without a tick, as when the broker does not answer, after which another beat leads.
MAX_SILENCE = 60.0


@dataclass(frozen=True, slots=True)
class Sending:
    """The last sending of an entry."""

    at: datetime  # By the clock of the beat that sent it.
    seen: float = field(compare=False)  # The same moment by clock.now() of this process.


class LeaderScheduler(Scheduler):  # type: ignore[misc] # Celery has no types
    """A scheduler around another one, by which only one of several beats sends.

    Start ``celery -A proj beat -S django_redislock.celery.beat:LeaderScheduler`` several times.
    Celery's setting ``beat_leader_scheduler`` names the other scheduler, by default Celery's
    PersistentScheduler. ``beat_leader_ttl`` says after how many seconds another beat sends if the
    leader dies; by default it is the setting TTL of the alias "default".

    Raises:
        ImproperlyConfigured: One of these settings is wrong, or "default" is a quorum.
    """

    _heap: Any  # Of Celery: what is due when.

    def __new__(cls, app: Celery, *args: Any, **kwargs: Any) -> Self:
        wrapped = _wrapped(app)
        if not issubclass(cls, wrapped):
            cls = type(cls.__name__, (cls, wrapped), {})  # noqa: PLW0642 - a class of both
        made: Self = super().__new__(cls)
        return made

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        ttl, name = _ttl(app), f"celery-beat:{app.main or 'celery'}"
        self._term = leadership(name, ttl=ttl, wait=LOOKS_EVERY, max_silence=MAX_SILENCE)
        if says := task_runs.unrecorded(DEFAULT_ALIAS):
            raise ImproperlyConfigured(
                f"{says} LeaderScheduler keeps there when each entry was last sent: let"
                f" {DEFAULT_ALIAS!r} be one server, and give the quorum another alias."
            )
        lasts = conf(DEFAULT_ALIAS).records_for
        self._options = Options(ttl=ttl, wait=0.0, once=lasts, renews_once=True)
        self._leads = False
        self._is_new = False  # Whether the wrapped scheduler may have read old data.
        self._said = ""
        self._sent: dict[str, Sending] = {}  # The last of each entry, as the server says.
        self._last_tick = 0.0
        super().__init__(app, *args, **kwargs)

    @property
    def info(self) -> str:
        """For the banner of the command."""
        return f"{super().info}\n    . leader -> {self._term.name}".lstrip("\n")

    # --- leading --------------------------------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due, if this beat leads. Returns after how many seconds to call it again."""
        try:
            self._lead()
        except LockTimeout as busy:
            self._say(logging.INFO, "This beat stands by: %s leads.", busy.holder)
            return 0.0  # It has waited.
        except (LockLost, LockUnavailable) as error:
            self._step_down(error)
            self._say(logging.WARNING, "This beat sends nothing until it leads: %s", error)
            return LOOKS_EVERY
        before, self._last_tick = self._last_tick, time.time()
        if self._last_tick < before:
            self._heap = None  # The clock was set back, and its times are too late.
        return max(0.0, min(super().tick(*args, **kwargs) or 0.0, LOOKS_EVERY))

    def close(self) -> None:
        """Also let another beat lead at once."""
        try:
            super().close()
        finally:
            self._step_down()

    def _lead(self) -> None:
        """Go on leading, or begin; if another beat leads, wait a moment for it to end.

        Raises:
            LockTimeout: The other beat still leads.
            LockLost, LockUnavailable: This beat does not lead any more, or cannot know.
        """
        if self._leads:
            self._term.beat()
            return
        self._term.__enter__()
        self._leads = True
        self._take_over()
        self._say(logging.INFO, "This beat leads.")

    def _step_down(self, error: LockError | None = None) -> None:
        self._leads = False
        with suppress(LockError):  # If the lease was lost, the log has it.
            self._term.__exit__(type(error) if error else None, error, None)

    def _take_over(self) -> None:
        """Go on from when each entry was last sent, by any beat."""
        self._is_new = True
        schedule = self.schedule
        self._sent = self._last_sent(schedule)
        for name, sent in self._sent.items():
            entry = schedule[name]
            # Without a run, and without a row in a database, it only knows when this beat began.
            if not entry.total_run_count and not hasattr(entry, "model"):
                entry.last_run_at = sent.at
        self._heap = None  # To be made anew.

    def schedule_changed(self) -> bool:
        """Whether to read the database again. django-celery-beat's scheduler asks this."""
        is_new, self._is_new = self._is_new, False
        return super().schedule_changed() or is_new

    def _say(self, level: int, text: str, *args: object) -> None:
        """Log *text* if it is new, not every second."""
        if text != self._said:
            self._said = text
            logger.log(level, text, *args, extra=self._shown)

    @property
    def _shown(self) -> Mapping[str, Any]:
        """The fields of each log record."""
        return logs.of(lock=self._term.name, alias=self._options.using)

    # --- sending --------------------------------------------------------------------------------

    def populate_heap(self, *args: Any, **kwargs: Any) -> None:
        """Put all entries into the order in which they are due."""
        for entry in self.schedule.values():
            self._count_from_sending(entry)
        super().populate_heap(*args, **kwargs)

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """Whether *entry* is due and this beat has written down that it sends it now."""
        while self._term.held:
            self._count_from_sending(entry)
            is_due, again_in = super().is_due(entry)
            if is_due:
                try:
                    if self._write_down(entry):
                        self._said = ""  # The next outage is news.
                        return True, again_in
                    continue
                except LockTimeout:
                    pass  # It is paused, or another beat has its lock, and was stopped, maybe.
                except (LockLost, LockUnavailable) as error:
                    self._say(logging.WARNING, "This beat sends nothing that is due: %s", error)
                again_in = LOOKS_EVERY
            return False, self._put_off(entry, again_in)
        return False, 0.0

    def _count_from_sending(self, entry: ScheduleEntry) -> None:
        """Let the next due time of *entry* be the first that nobody has sent."""
        sent = self._sent.get(entry.name)
        if sent is None:
            return
        now, last = _utc(entry.default_now()), _utc(entry.last_run_at)
        # What is still to come was written by a clock that was ahead, or ours was set back since.
        at = sent.at if sent.at <= now else now - timedelta(seconds=clock.now() - sent.seen)
        last = max(at, last) if last <= now else at
        last = _after(sent.at, entry, last, now)
        entry.last_run_at = last.astimezone(self.app.timezone)

    def _put_off(self, entry: ScheduleEntry, seconds: float) -> float:
        """Look at *entry* again in so many *seconds*. Returns in how many to look at the next one.

        Celery before 5.7 leaves it at the head of the heap, where it holds up all others.
        """
        heap = self._heap
        if not heap or heap[0].entry is not entry:
            return seconds
        heapreplace(heap, heap[0]._replace(time=self._when(entry, seconds)))
        return max(0.0, float(heap[0].time - self._when(heap[0].entry, 0)))

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send *entry*, unless the process was stopped for so long that another beat leads."""
        if getattr(getattr(entry, "model", None), "one_off", False):
            self._do_sync()  # The next leader reads in the database whether it was sent.
        if self._term.held:
            super().apply_entry(entry, producer=producer)
        else:
            logger.warning(
                "%s was due, but is not sent: this beat was stopped just before it, and may not"
                " lead any more.",
                entry.name,
                extra=self._shown,
            )

    def apply_async(self, entry: ScheduleEntry, *args: Any, **kwargs: Any) -> Any:
        """Send *entry* to the broker, and note in its record whether that worked."""
        is_sent = False
        try:
            result = super().apply_async(entry, *args, **kwargs)
            is_sent = True
            return result
        finally:
            if entry.name in self._sent:  # Not so with RedBeat, which decides alone what is due.
                with suppress(LockUnavailable):
                    name = self._lock_of(entry.name)
                    task_runs.note_end(name, success=is_sent, using=DEFAULT_ALIAS)

    def _write_down(self, entry: ScheduleEntry) -> bool:
        """Write down on the server that *entry* is sent now, so that no other beat sends it too.

        Returns:
            Whether that was done; if not, another beat has sent it meanwhile.

        Raises:
            LockTimeout: An operator has paused it. Or another beat is about to write, or was
                stopped then.
            LockLost, LockUnavailable: Nobody knows whether it was written.
        """
        now, known = _utc(entry.default_now()), self._sent.get(entry.name)
        lock = Lock(self._lock_of(entry.name), self._options)
        with busy_with(Activity(task_id=now.isoformat())), lock:
            latest = self._last_sent([entry.name])
            is_mine = latest.get(entry.name, known) == known
            lock.release(success=is_mine)  # The end of the block would not raise LockUnavailable.
        self._sent |= {entry.name: Sending(now, clock.now())} if is_mine else latest
        return is_mine

    def _last_sent(self, entries: Iterable[str]) -> dict[str, Sending]:
        """When each entry was last sent, as far as the server knows."""
        entries, found = list(entries), {}
        answers = task_runs.calls([*map(self._lock_of, entries)], using=DEFAULT_ALIAS)
        for entry, calls in zip(entries, answers, strict=True):
            at = _time_in(calls.done_by.task_id)
            if at is not None and calls.done_at is not None:
                ago = max(0.0, calls.server_time - calls.done_at)
                found[entry] = Sending(at, clock.now() - ago)
        return found

    def _lock_of(self, entry: str) -> str:
        try:
            return check_name(f"{self._term.name}:{entry}")
        except InvalidLockName:  # It is too long, or has line breaks.
            return f"{self._term.name}:{hashlib.sha256(entry.encode()).hexdigest()[:32]}"


def _wrapped(app: Celery) -> type[Scheduler]:
    """The class that beat_leader_scheduler names."""
    named = app.conf.get("beat_leader_scheduler") or PersistentScheduler
    setting = f"Celery's setting beat_leader_scheduler is {named!r}"
    try:
        aliases = dict(load_extension_class_names("celery.beat_schedulers"))
        found = symbol_by_name(named, aliases=aliases)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImproperlyConfigured(f"{setting}, which cannot be imported: {error}.") from error
    if not isinstance(found, type) or not issubclass(found, Scheduler):
        raise ImproperlyConfigured(f"{setting}, which is no subclass of celery.beat.Scheduler.")
    if issubclass(found, LeaderScheduler):
        raise ImproperlyConfigured(
            f"{setting}. Name the scheduler that it is to wrap there, and LeaderScheduler in"
            " beat_scheduler or after -S."
        )
    return found


def _ttl(app: Celery) -> float | None:
    ttl = app.conf.get("beat_leader_ttl")
    if ttl is None:
        return None
    try:
        return seconds(ttl, "Celery's setting beat_leader_ttl", least=SHORTEST_TTL)
    except ValueError as error:
        raise ImproperlyConfigured(str(error)) from None


def _after(sent_at: datetime, entry: ScheduleEntry, last: datetime, now: datetime) -> datetime:
    """*last*, or the last due time after it that the sending at *sent_at* was for.

    There is one if the clock's hour comes twice, since a schedule means the first one. Or if the
    sender's clock was ahead; then that time may be sent by ours, but not those before.
    """
    due, then = _due_times(entry, last, now)
    while due < then and due <= sent_at and (sent_at <= now or sent_at < then):
        last = due
        due, then = _due_times(entry, last, now)
    return last


def _due_times(entry: ScheduleEntry, last: datetime, now: datetime) -> tuple[datetime, datetime]:
    """The next two due times of *entry* after *last*; *last* twice if its schedule tells none."""
    schedule = entry.schedule
    before = schedule.nowfun
    schedule.nowfun = lambda: now  # It would look at the clock again, and tell another due time.
    try:
        due = now + schedule.remaining_estimate(last.astimezone(schedule.tz))
        return due, now + schedule.remaining_estimate(due.astimezone(schedule.tz))
    except Exception:  # noqa: BLE001 - of any schedule; Celery logs it when it asks
        return last, last
    finally:
        schedule.nowfun = before


def _utc(at: datetime) -> datetime:
    """Python compares times of one zone by what a clock on the wall shows, and that may repeat."""
    aware: datetime = maybe_make_aware(at)
    return aware.astimezone(UTC)


def _time_in(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError:
        return None  # Somebody else has used the lock.
