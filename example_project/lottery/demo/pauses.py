"""Winners that are stopped, as by the kernel, or by a virtual machine that moves.

Always at the worst moment: after the last look at the lease, before the transaction that writes.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created

from django_redislock.signals import lock_acquired

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock import Lease

STOPPED = "Stopped before the transaction of "  # And the name of the lock; to standard error.


class Pauses:
    """Stops this process again and again; somebody else must let it go on."""

    def __init__(self, every: int) -> None:
        self._every = every  # grants
        self._grants = count(os.getpid())  # So not all are stopped at once.
        self._due = ""  # The lock under which it is stopped next.
        lock_acquired.connect(self._count)
        connection_created.connect(self._look_at_statements)

    def _count(self, *, lease: Lease, **_: Any) -> None:
        self._due = lease.name if next(self._grants) % self._every == 0 else ""

    def _look_at_statements(self, *, connection: Any, **_: Any) -> None:
        connection.execute_wrappers[:] = [self._send]

    def _send(self, execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if self._due and sql.startswith("BEGIN"):
            # Celery has put its log in the place of sys.stderr.
            os.write(sys.__stderr__.fileno(), f"{STOPPED}{self._due}\n".encode())
            self._due = ""
            os.kill(os.getpid(), signal.SIGSTOP)
        return execute(sql, *rest)
