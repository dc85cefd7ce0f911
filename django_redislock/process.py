"""Which process this is, what forks and signals do to it, and whether another is still there.

In a forked child, a lease of the parent is not held (LeaseState.is_ours), and a backend begins anew
(Backend.after_fork()).
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from inspect import currentframe
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801 - it is the standard library's, but for this
    """As functools.cached_property, without the mutex that it has before Python 3.12.

    A fork while the mutex is taken would leave it taken in the child, which would wait for ever.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, one: None, owner: type) -> Self: ...
    @overload
    def __get__(self, one: object, owner: type) -> Value: ...
    def __get__(self, one: object, owner: type) -> Self | Value:
        if one is None:
            return self
        value: Value = self._function(one)
        vars(one)[self._function.__name__] = value  # Found before this from now on.
        return value


class Process:
    """One process. It is told apart from others by identity: process ids are used again."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    @cached_property
    def birth(self) -> str:
        """Tells it from all others, also in other programs, hosts and containers; "" if unknown."""
        where, started = _namespace(), _start_of(self.pid)
        return f"{where}.{started}" if where and started else ""


class Forked(Protocol):
    """An object with threads, connections or leases that a forked child must not use."""

    def after_fork(self) -> None:
        """In a forked child: leave the parent's alone, and begin anew."""


current = Process()  # This one, or its parent while a fork made in C has not been noticed.

# In a forked child: objects of its parents that must not be collected there. An event loop, for
# one, would unregister itself from a selector that it shares with the parent's.
inherited: list[object] = []

tell_after_fork: WeakSet[Forked] = WeakSet()  # In each child that is forked from now on.
_untold: list[Forked] = []  # Those of them that do not know yet that this process was forked.
pid = current.pid  # That of the last process in which all of them know.
# By process id: a child must not wait for a mutex that a thread of its parent had at the fork.
_telling: dict[int, threading.RLock] = {}


def this() -> Process:
    """This process, also after a fork made in C, which runs no hook of Python: uWSGI's, say.

    Call it once per operation, before the operation uses anything that a fork changes: where it
    takes a backend, and where it takes a lease. From there on ``current`` is right.
    """
    if os.getpid() != pid:
        _notice_fork()
    return current


def is_gone(host: str, pid: int | None, birth: str) -> bool:
    """Whether a process does not exist any more that this one could see.

    False also means that nobody can tell: a process of another host or container, one from before
    the host's last start, or one whose birth is unknown.

    Args:
        host: Its host.
        pid: Its process id, which may be in use again.
        birth: See Process.
    """
    where, _, started = birth.rpartition(".")
    if pid is None or pid <= 0 or not where or host != socket.gethostname():
        return False
    if where != current.birth.rpartition(".")[0]:
        return False
    if found := _start_of(pid):
        return found != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # Hidden in /proc; or a number that is no process id.
        return False
    return False


def _namespace() -> str:
    """The boot of this host, and the PID namespace of this process; "" if nobody can tell."""
    try:
        if Path("/proc/self").readlink().name != str(os.getpid()):  # It shows another namespace.
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:13]
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:  # It is not Linux.
        return ""
    return f"{boot}.{namespace}"


def _start_of(pid: int) -> str:
    """When a process of this PID namespace was started, since the boot; "" if it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[19]  # Behind the name, which may be anything.
    except (OSError, IndexError):
        return ""


# --- signal handlers that raise ----------------------------------------------------------------


def pass_on_interrupt(error: BaseException) -> None:
    """If *error* is that of a signal handler, or a client made it from one, raise the handler's.

    Call it where *error* is caught.

    Handlers may raise TimeoutError or OSError, as the one in the documentation of Python does.
    """
    for one in _chain_since(error):
        if is_of_handler(one):
            context = one.__context__
            try:
                raise one
            finally:
                # Else the two would refer to each other, and by its frames it to itself: cycles,
                # which keep the frames of all callers until the garbage collector comes.
                one.__context__ = context
                del one, error, context


def start(thread: threading.Thread) -> None:
    """Start *thread*. What a signal handler raises meanwhile is raised as it is.

    If it is raised in the last steps of a start, threading raises a KeyError in its place.

    Raises:
        RuntimeError: There are no more threads, or the interpreter is shutting down.
    """
    try:
        thread.start()
    except KeyError as error:
        pass_on_interrupt(error)
        raise


def forget_frames(error: BaseException) -> None:
    """As pass_on_interrupt(). Else let *error* refer to no frames, since it is kept from here on.

    Most often these refer to it. Such a cycle would keep the frames of all callers, and what their
    variables refer to, until the garbage collector comes.
    """
    try:
        pass_on_interrupt(error)
        for one in _chain_since(error):
            one.__traceback__ = None
    finally:
        del error


def _chain_since(error: BaseException) -> Iterator[BaseException]:
    """The error that is being handled, and its chain up to what the program handles meanwhile."""
    for one in chain_of(error):
        begins_in = one.__traceback__ and one.__traceback__.tb_frame
        is_handled = any(frame is begins_in for frame, _ in walk_stack(currentframe()))
        if is_handled is not (one is error):
            return
        yield one


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was made of or raised in the course of. The chain may be a circle."""
    one: BaseException | None = error
    passed: list[BaseException] = []
    while one is not None and one not in passed:
        yield one
        passed.append(one)
        one = one.__cause__ or one.__context__


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised *error*: Ctrl-C, Celery's soft time limit."""
    codes = _codes_of_handlers()
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def _codes_of_handlers() -> set[object]:
    return {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}


def _code_of(handler: Any) -> object:
    while isinstance(handler, partial):
        handler = handler.func
    for called in (handler, type(handler).__call__):
        if hasattr(called, "__code__"):
            return called.__code__
    return None


# --- forks -------------------------------------------------------------------------------------


def _after_fork_in_child() -> None:
    global current  # noqa: PLW0603 - a forked child is another process
    current = Process()
    _untold[:] = tell_after_fork
    _tell()


def _tell() -> None:
    global pid  # noqa: PLW0603 - see above
    while _untold:
        one = _untold[-1]
        one.after_fork()
        with suppress(ValueError):  # A signal handler that used a lock meanwhile has told it, too.
            _untold.remove(one)
    pid = current.pid


def _notice_fork() -> None:
    pid = os.getpid()
    with _telling.setdefault(pid, threading.RLock()):  # Other threads wait until all know.
        if current.pid != pid:
            _after_fork_in_child()
        _tell()


os.register_at_fork(after_in_child=_after_fork_in_child)
