"""What happens to locks, as Django signals. All are sent with ``send_robust``, after the fact."""

from __future__ import annotations

import threading

from django.dispatch import Signal


class _Reentrant(Signal):
    """A signal that a handler of SIGTERM, say, or a destructor may send while it is being sent.

    Django finds the receivers under a mutex that is not reentrant, so it would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()  # type: ignore[assignment] # it is used in the same way


#: A lease was granted. Arguments: lease, waited (seconds).
lock_acquired = _Reentrant()
#: A lease was ended by its owner. Arguments: lease, held_for (seconds), success.
lock_released = _Reentrant()
#: The wait ran out. Arguments: name, using, holder, waited (seconds).
lock_timed_out = _Reentrant()
#: A lease ended while it was relied on. Arguments: lease, reason.
lock_lost = _Reentrant()
#: An operator ended a lease. Arguments: name, using, id, holder, by.
lock_force_released = _Reentrant()
#: A run did not happen because of its lock. Sender: the task, or the function with its lock.
#: Arguments: result (Skipped; docs/jobs.md and docs/celery.md have its keys), task_id (or None).
task_skipped = _Reentrant()
#: A call of a task with give_up_after was started so often, never ended, and is given up.
#: Sender: the task. Arguments: name (the lock), using, task_id, starts.
task_abandoned = _Reentrant()
