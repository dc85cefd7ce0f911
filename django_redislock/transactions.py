"""The transactions that this thread has open in databases: whether there are any, and their end.

If a lock is released before the commit, its next holder reads the old state. So each release asks
here whether a transaction is open. If one is, the release is logged, or put off until that has
ended.

Nothing here opens a connection, or imports django.db into a program that does not use it.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

from django.conf import settings

from django_redislock import logs
from django_redislock.exceptions import LockMisuse
from django_redislock.process import cached_property

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from django.db.backends.base.base import BaseDatabaseWrapper

logger = logs.logger("django_redislock")


# --- which are open -------------------------------------------------------------------------------


def _used() -> list[BaseDatabaseWrapper]:
    """The connections that this thread has used."""
    db = sys.modules.get("django.db")
    if db is None or not settings.configured:  # Nobody has asked for the names of databases yet.
        return []
    used: list[BaseDatabaseWrapper] = db.connections.all(initialized_only=True)
    return used


class _ThisThread(threading.local):
    @cached_property
    def connections(self) -> list[BaseDatabaseWrapper]:
        """The list of _used(), kept: making it takes longer than a release may."""
        if "django.db" in sys.modules and not _listening:
            _listen()
        return _used()


of_this_thread = _ThisThread()


def watch_connections() -> None:
    """Notice the open connections of all threads, and each that is opened from now on.

    A thread that used a lock earlier may have looked before there was one.
    """
    global of_this_thread  # noqa: PLW0603 - that of all threads at once
    _listen()
    of_this_thread = _ThisThread()


_listening = False  # Whether each new connection is noted.
_about_to_listen: set[int] = set()  # Threads.


def _listen() -> None:
    """Have each new connection noted. The app calls this when it is ready, other programs once."""
    global _listening  # noqa: PLW0603 - of the process
    from django.db.backends.signals import connection_created

    # connect() takes a mutex. A signal handler that uses a lock may have interrupted this thread
    # there. It would wait for the mutex for ever.
    thread = threading.get_ident()
    if thread in _about_to_listen:
        return
    _about_to_listen.add(thread)
    try:
        connection_created.connect(note_connection, dispatch_uid="django_redislock.connection")
        _listening = True
    finally:
        _about_to_listen.discard(thread)


def note_connection(**kwargs: object) -> None:
    """Note a new connection of this thread: a receiver of Django's signal connection_created."""
    of_this_thread.connections = _used()


def is_open() -> bool:
    """Whether this thread has a transaction open."""
    for connection in of_this_thread.connections:
        if connection.in_atomic_block and _is_in_transaction(connection):
            return True
    return False


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    # If the connection was closed within the block, the transaction is gone already.
    return open_blocks(connection) > 0 and not connection.closed_in_transaction


def open_blocks(connection: BaseDatabaseWrapper) -> int:
    """How many atomic blocks are open, without those that a TestCase puts around its tests.

    Django tells them apart in the same way, for ``atomic(durable=True)``.
    """
    blocks: list[Any] = connection.atomic_blocks
    return sum(not getattr(block, "_from_testcase", False) for block in blocks)


def is_by_hand(connection: BaseDatabaseWrapper) -> bool:
    """Whether autocommit is off there, so that no end of a block commits.

    It opens no connection: if none is open, the settings have the answer.
    """
    if connection.atomic_blocks:  # Within them autocommit is always off.
        return not connection.commit_on_exit
    is_connected = connection.connection is not None
    return not (connection.autocommit if is_connected else connection.settings_dict["AUTOCOMMIT"])


def by_hand() -> str | None:
    """The alias of a database that this thread uses with autocommit off; None if there is none."""
    return next((connection.alias for connection in _used() if is_by_hand(connection)), None)


# --- when they are over ---------------------------------------------------------------------------


def at_end(then: Callable[[bool], object]) -> bool:
    """Have *then* called once, when all transactions that this thread has open now are over.

    *then* is told whether all of them were committed. The end of an inner block, which is a
    savepoint, is not the end of the transaction. Transactions with autocommit off do not count: see
    by_hand().

    *then* is never called if the thread ends without ending them, if only the garbage collector
    finds them, or if the interpreter exits.

    Returns:
        Whether a transaction is open. If not, *then* will not be called.
    """
    connections = [
        connection
        for connection in _used()
        # Callbacks of on_commit() are called there when autocommit is on again, if ever.
        if _is_in_transaction(connection) and not is_by_hand(connection)
    ]
    if not connections:
        return False
    if note_collection not in gc.callbacks:
        gc.callbacks.append(note_collection)
    ends = _Ends(then, len(connections))
    for connection in connections:
        connection.on_commit(_Mark(ends), robust=True)
        # Django notes the savepoints in which a callback was registered. When one of them is rolled
        # back, it forgets the callback. There is no public way to register one for the outermost
        # block, so the savepoints are taken out again; but not that of a TestCase, which ends with
        # the test.
        savepoints, *_ = connection.run_on_commit[-1]
        savepoints.difference_update(connection.savepoint_ids[-open_blocks(connection) :])
    return True


class _Life(threading.local):
    def __init__(self) -> None:
        self.of_thread = _Thread()


class _Thread:
    """Is deleted when its thread ends."""


_life = _Life()


class _Mark:
    """A callback that a connection keeps as long as its transaction is open.

    Django announces no rollback. But it calls the callbacks of on_commit() at a commit, and forgets
    them at any end, also if the connection is closed. So this one is called, or deleted.
    """

    is_over = False
    _ends: _Ends | None = None  # If __init__ was interrupted.

    def __init__(self, ends: _Ends) -> None:
        self._ends = ends

    def __call__(self) -> None:
        self._note(committed=True)

    def __del__(self) -> None:
        self._note(committed=False)

    def _note(self, *, committed: bool) -> None:
        if self._ends is not None and not self.is_over:
            self._ends.note(self, committed=committed)


class _Ends:
    """The ends of all the transactions that one call of at_end() has found open."""

    def __init__(self, then: Callable[[bool], object], left: int) -> None:
        self._then: Callable[[bool], object] | None = then
        self._left = left
        self._committed = True
        self._life = ref(_life.of_thread, self._drop)

    def _drop(self, _: object) -> None:
        self._then = None

    def note(self, mark: _Mark, *, committed: bool) -> None:
        """Note that one of them is over."""
        # The garbage collector may run anywhere, also while this thread has a mutex of ours, which
        # `then` would wait for.
        may_wait = _collector != threading.get_ident() and not sys.is_finalizing()
        # From here to `then`, no function is called: an interrupt could come where one begins.
        mark.is_over = True
        self._left -= 1
        self._committed = self._committed and committed
        if self._left > 0:
            return
        then, self._then = self._then, None
        if then is not None and may_wait:
            then(self._committed)


_collector: int | None = None  # The thread in which the garbage collector runs.


def note_collection(phase: str, info: object) -> None:
    """Note that the garbage collector begins or ends. The collector calls this.

    As in destructors, Python drops what a signal handler raises here. So only programs that use
    at_end() have it called.
    """
    global _collector  # noqa: PLW0603 - there is one garbage collector
    _collector = threading.get_ident() if phase == "start" else None


# --- what is said about a release before the commit -----------------------------------------------

# Packages between a release and the line of the program that caused it.
_ON_THE_WAY = {"django_redislock", "celery", "contextlib"}

CURE_OF_JOB = (
    "Call it after the commit, a task with delay_on_commit() and a function by on_commit(), or"
    " outside of the transaction."
)

_told: set[str] = set()  # The places that were logged.


def warn(name: str, alias: str, place: str, *, of_task: bool) -> None:
    """Log once for each *place* that a lock is released before the commit.

    Args:
        name: The lock.
        alias: Its alias in REDISLOCK.
        place: Where that is written; "" if it is the line that runs.
        of_task: Whether it is the lock of a task run.
    """
    place = place or _line(inspect.currentframe())
    if place in _told:
        return
    _told.add(place)
    logger.warning(
        "Lock %r is released at %s while a transaction is open there: until its commit, the next"
        " holder reads the old data. %s REDISLOCK[%r]['RELEASE_BEFORE_COMMIT'] can make"
        " this an error, or turn it off.",
        name,
        place,
        _cure(of_task=of_task),
        alias,
        extra=logs.of(lock=name, alias=alias),
    )


def refused(name: str, alias: str, *, of_task: bool) -> LockMisuse:
    """The error in place of the warning, before the lock is taken; see warn()."""
    return LockMisuse(
        name,
        "a transaction is open, and its commit would come after the release: until then, the next"
        f" holder reads the old data. {_cure(of_task=of_task)}"
        f" (REDISLOCK[{alias!r}]['RELEASE_BEFORE_COMMIT'] is \"error\".)",
    )


def never_ends(name: str, database: str, *, released: bool = False) -> LockMisuse:
    """The error if release_on_commit would wait for a commit that Django does not announce.

    Args:
        name: The lock.
        database: The alias of the database whose autocommit is off.
        released: Whether it was switched off under the lock, so that this comes with the release.
    """
    return LockMisuse(
        name,
        ("it was released at once: " if released else "")
        + f"release_on_commit cannot wait for the commit of database {database!r}, whose autocommit"
        " is off: Django tells nobody of a commit by hand. Switch it on (AUTOCOMMIT,"
        " transaction.set_autocommit), and write `with transaction.atomic():`; or leave"
        " release_on_commit out, and commit before the release.",
    )


def _line(frame: FrameType | None) -> str:
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _ON_THE_WAY:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def _cure(*, of_task: bool) -> str:
    if of_task:
        return CURE_OF_JOB
    cure = "Take the lock first and open the transaction under it, or pass release_on_commit=True."
    if any(one.settings_dict["ATOMIC_REQUESTS"] for one in _used() if _is_in_transaction(one)):
        cure += (
            " If it is that of ATOMIC_REQUESTS, @transaction.non_atomic_requests above the view"
            " leaves it out."
        )
    return cure
