"""What happens to locks, as Django signals. All are sent with ``send_robust``, after the fact."""

from __future__ import annotations

from django.dispatch import Signal

#: A lease was granted. Arguments: lease, waited (seconds).
lock_acquired = Signal()
#: A lease was ended by its owner. Arguments: lease, held_for (seconds), success.
lock_released = Signal()
#: The wait ran out. Arguments: name, using, holder, waited (seconds).
lock_timed_out = Signal()
#: A lease ended while it was relied on. Arguments: lease, reason.
lock_lost = Signal()
#: An operator ended a lease. Arguments: name, using, id, holder, by.
lock_force_released = Signal()
#: A task run did not happen because of its lock. Sender: the task. Arguments: result (the marked
#: value; docs/celery.md has its keys), task_id.
task_skipped = Signal()
