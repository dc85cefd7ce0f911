"""LeaderScheduler: of several beats one sends, and the others stand by.

Each entry of the schedule has a lock, with a record of when the entry was last sent. Only the
holder of the lock may write that. A beat takes the lock and writes the time before it sends. If the
record is not the one that it knows, another beat has sent meanwhile: it takes over that time
instead.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.utils.time import maybe_make_aware
from django.core.exceptions import ImproperlyConfigured

from django_redislock import logs, task_runs
from django_redislock.activity import Activity, busy_with
from django_redislock.exceptions import (
    InvalidLockName,
    LockError,
    LockLost,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.lock import Lock
from django_redislock.rules.arguments import SHORTEST_TTL, seconds
from django_redislock.rules.flows import RunMarker
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
# Of a sending: the broker makes no duplicates of it, but it has a record.
SENDING = RunMarker("", LOOKS_EVERY)


class LeaderScheduler(Scheduler):  # type: ignore[misc] # Celery has no types
    """A scheduler around another one, by which only one of several beats sends.

    Start ``celery -A proj beat -S django_redislock.celery.beat:LeaderScheduler`` several times.
    Celery's setting ``beat_leader_scheduler`` names the other scheduler, by default Celery's
    PersistentScheduler. ``beat_leader_ttl`` says after how many seconds another beat sends if the
    leader dies; by default it is the setting TTL of the alias "default".

    Raises:
        ImproperlyConfigured: One of these settings is wrong.
    """

    def __new__(cls, app: Celery, *args: Any, **kwargs: Any) -> Self:
        wrapped = _wrapped(app)
        if not issubclass(cls, wrapped):
            cls = type(cls.__name__, (cls, wrapped), {})  # noqa: PLW0642 - a class of both
        made: Self = super().__new__(cls)
        return made

    def __init__(self, app: Celery, *args: Any, **kwargs: Any) -> None:
        ttl, name = _ttl(app), f"celery-beat:{app.main or 'celery'}"
        self._term = leadership(name, ttl=ttl, wait=LOOKS_EVERY, max_silence=MAX_SILENCE)
        self._options = Options(ttl=ttl, wait=0.0)
        self._leads = False
        self._is_new = False  # Whether the wrapped scheduler may have read old data.
        self._said = ""
        self._sent: dict[str, datetime] = {}  # When each entry was last sent, as the server says.
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
        return min(super().tick(*args, **kwargs) or 0.0, LOOKS_EVERY)

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
        for name, at in self._sent.items():
            schedule[name].last_run_at = at.astimezone(self.app.timezone)
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

    def is_due(self, entry: ScheduleEntry) -> tuple[bool, float]:
        """Whether *entry* is due and this beat has written down that it sends it now."""
        was_late = False
        while self._term.held:
            sent = self._sent.get(entry.name)
            if sent and sent > maybe_make_aware(entry.last_run_at):
                entry.last_run_at = sent.astimezone(self.app.timezone)
                was_late = True
            found: tuple[bool, float] = super().is_due(entry)
            if not found[0]:
                if was_late:  # In Celery 5.6 it would stay at the head, and hold up the others.
                    self._heap = None  # To be made anew.
                return found
            try:
                if self._write_down(entry):
                    self._said = ""  # The next outage is news.
                    return found
            except LockTimeout:
                return False, LOOKS_EVERY  # Another beat has its lock, and was stopped, maybe.
            except (LockLost, LockUnavailable) as error:
                self._say(logging.WARNING, "This beat sends nothing that is due: %s", error)
                return False, LOOKS_EVERY
        return False, 0.0

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

    def _write_down(self, entry: ScheduleEntry) -> bool:
        """Write down on the server that *entry* is sent now, so that no other beat sends it too.

        Returns:
            Whether that was done; if not, another beat has sent it meanwhile.

        Raises:
            LockTimeout: Another beat is about to write, or was stopped then.
            LockLost, LockUnavailable: Nobody knows whether it was written.
        """
        now: datetime = maybe_make_aware(entry.default_now())
        known = self._sent.get(entry.name)
        with busy_with(Activity(task_id=now.isoformat())):
            lock = Lock(self._lock_of(entry.name), self._options, SENDING)
            with lock as lease:
                latest = self._last_sent([entry.name])
                if latest.get(entry.name, known) == known:
                    lock.release()  # The end of the block would not raise LockUnavailable.
                    latest = {entry.name: now}
                else:
                    lock.undo()
                    task_runs.forget_start(lease.name, lease, using=DEFAULT_ALIAS)
        self._sent |= latest
        return latest[entry.name] is now

    def _last_sent(self, entries: Iterable[str]) -> dict[str, datetime]:
        """When each entry was last sent, as far as the server knows."""
        names = {self._lock_of(entry): entry for entry in entries}
        found = task_runs.last_successes(list(names), using=DEFAULT_ALIAS)
        times = {names[lock]: _time_in(run.owner.task_id) for lock, run in found.items()}
        return {entry: at for entry, at in times.items() if at is not None}

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


def _time_in(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None  # Somebody else has used the lock.
