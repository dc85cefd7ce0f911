"""Django signals about locks. Each is sent with ``send_robust``, after the event.

Each has the argument *template*: the name of the lock as it was written, "report:{id}" for
"report:42". So there are few templates, however many names there are. If a name was not formatted,
the template is the name. docs/monitoring.md has a table of the signals.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal

from django_redislock import logs, process

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logs.logger("django_redislock")


class _Reentrant(Signal):
    """A signal that may be sent while it is being sent: by a destructor or a signal handler.

    Django finds the receivers under a mutex that is not reentrant, so the second send would wait
    for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()  # type: ignore[assignment] # it is used in the same way
        self._prompt: list[Callable[..., object]] = []
        self._alone: list[Any] = []  # The receivers while no others are connected.

    def connect_prompt(self, receiver: Callable[..., object]) -> None:
        """Connect a receiver that never blocks. For the package's own integrations.

        An event loop calls it directly. Django would have a thread call a plain function, and that
        takes longer than a lock.
        """
        with self.lock:
            self.connect(receiver, weak=False)
            self._prompt.append(receiver)
            self._alone = [one for one in self.receivers if one[1] in self._prompt]

    def disconnect_prompt(self, receiver: Callable[..., object]) -> None:
        """Undo connect_prompt()."""
        with self.lock:
            self.disconnect(receiver)
            self._prompt.remove(receiver)
            self._alone = [one for one in self._alone if one[1] != receiver]

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """As Django's, without its search for live receivers if only prompt ones are connected."""
        if self.receivers != self._alone:  # A program may also replace the list.
            return self._send_to_all(sender, **named)
        interrupt = None
        for receiver in self._prompt:
            try:
                receiver(signal=self, sender=sender, **named)
            except Exception as error:
                if process.is_of_handler(error):
                    interrupt = error
                    continue
                extra = logs.of(lock=_lock_in(named))
                logger.exception("A receiver of signals about locks failed", extra=extra)
        if interrupt is not None:
            try:
                raise interrupt
            finally:
                del interrupt  # See process.pass_on_interrupt().
        return []

    def _send_to_all(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        try:
            answers = super().send_robust(sender, **named)
        except RuntimeError as error:
            process.pass_on_interrupt(error)
            # Django's own: in an event loop's thread, blocking code cannot call asynchronous
            # receivers.
            extra = logs.of(lock=_lock_in(named))
            logger.exception("Could not send a signal about a lock", extra=extra)
            return []
        _pass_on_interrupt(answers)
        return answers

    async def asend_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        """As Django's, without a thread if only prompt receivers are connected."""
        if self.receivers == self._alone:
            return self.send_robust(sender, **named)
        answers = await super().asend_robust(sender, **named)
        _pass_on_interrupt(answers)
        return answers


#: A lease was granted. Arguments: lease, waited (seconds), blocked_by (the Owner that had the lock
#: when the wait began; None if it was free).
lock_acquired = _Reentrant()
#: A lease was ended by its owner. Arguments: lease, held_for (seconds), success.
lock_released = _Reentrant()
#: The wait ran out. Arguments: name, using, holder, waited (seconds), blocked_by (the Owner that
#: has the lock, or had it last; holder is the same as text).
lock_timed_out = _Reentrant()
#: An acquire or a release ends with LockUnavailable. Arguments: name, using, reason (that of the
#: exception), waited (seconds since the server was first asked), lease (of an acquire: None).
lock_unavailable = _Reentrant()
#: Renewals are unanswered, and half of the ttl is gone. Arguments: lease, left (seconds).
lease_endangered = _Reentrant()
#: A lease ended while its owner relied on it. Arguments: lease, reason, held_for (seconds).
lock_lost = _Reentrant()
#: An operator ended a lease. Arguments: name, using, id, holder, by. The template is the name.
lock_force_released = _Reentrant()
#: The body of a job begins. Sender: the task, the function with its lock, or the command; None for
#: run_job(). Arguments: job, name (the lock), using, task_id (or None), lease (None without the
#: lock).
run_started = _Reentrant()
#: The run of that body is over, and its lock is released. Sender and arguments: as of run_started;
#: outcome (see jobs.run.RunOutcome), took (seconds, with the release).
run_ended = _Reentrant()
#: A run did not happen because of its lock. Sender: as of run_started. Arguments: job, name, using,
#: task_id (or None), result (Skipped; docs/jobs.md and docs/celery.md have its keys).
task_skipped = _Reentrant()
#: A call of a task with give_up_after is given up: it was started so often, and never ended.
#: Sender: the task. Arguments: job, name (the lock), using, task_id, starts.
task_abandoned = _Reentrant()


def _pass_on_interrupt(answers: list[tuple[Any, Any]]) -> None:
    """Raise what a signal handler raised. A task must hear of its soft time limit.

    Django takes it for a failure of the receiver that the handler interrupted.
    """
    for _, answer in answers:
        if isinstance(answer, Exception) and process.is_of_handler(answer):
            try:
                raise answer
            finally:
                answers.clear()  # See process.pass_on_interrupt().
                del answer


def _lock_in(news: dict[str, Any]) -> str | None:
    lease = news.get("lease")
    return news.get("name") if lease is None else lease.name
