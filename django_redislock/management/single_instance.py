"""SingleInstanceMixin: a management command of which one run happens at a time, anywhere."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from django_redislock import process
from django_redislock.exceptions import InvalidLockName, LockLost, LockTimeout, LockUnavailable
from django_redislock.holder import Activity
from django_redislock.humanize import visible
from django_redislock.jobs.decorator import namings
from django_redislock.jobs.options import JobOptions, Skipped
from django_redislock.jobs.run import JobRun, Named
from django_redislock.management.console import (
    FOUND,
    UNAVAILABLE,
    line_of,
    misuse,
    no_second_line,
)
from django_redislock.misuse import runs_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType


# --- SIGTERM ends a management command in an orderly way, so that its locks are free at once ------

Function = TypeVar("Function", bound="Callable[..., Any]")


def release_on_sigterm() -> _Block:
    """Have SIGTERM end the block as ``sys.exit(143)`` would, so that its locks are released.

    Without it, SIGTERM (``docker stop``, ``systemctl stop``) ends a Python program on the spot:
    nothing is cleaned up, and its locks stay taken until their ttl is over. It is a decorator too::

        class Command(BaseCommand):
            @release_on_sigterm()
            def handle(self, *args, **options):
                with distributed_lock("import"):
                    ...

    Python runs signal handlers in the main thread alone: in another thread this does nothing. If
    SIGTERM is ignored, it stays so. A child that is forked within the block dies of SIGTERM on the
    spot, as it would without this. Its parent cleans up.

    Raises:
        TypeError: It decorates a coroutine function or a generator function, whose body would run
            after the block.
    """
    return _Block()


class _Block:
    """The block, which can decorate a function."""

    def __enter__(self) -> None:
        self._handled = _handled()
        self._handled.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handled.__exit__(kind, error, traceback)

    def __call__(self, function: Function) -> Function:
        if runs_later(function):
            raise TypeError(
                f"release_on_sigterm cannot decorate {getattr(function, '__qualname__', function)}"
                "(): its body runs after the call has returned. Write `with release_on_sigterm():`"
                " around what runs it, such as asyncio.run()."
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Block():
                return function(*args, **kwargs)

        return cast("Function", call)


@contextmanager
def _handled() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


if TYPE_CHECKING:
    _Base = BaseCommand
else:
    _Base = object


class SkippedCommand(CommandError):
    """A run was skipped, and by skip_exit that is an error.

    Attributes:
        skipped: The result of the skipped job.
    """

    def __init__(self, skipped: Skipped, returncode: int) -> None:
        super().__init__(line_of(skipped).removeprefix("Skipped: "), returncode=returncode)
        self.skipped = skipped

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.skipped, self.returncode)


SkippedCommand.__name__ = "Skipped"  # Django prints it before the message.


class SingleInstanceMixin(_Base):
    """Let one run of a management command happen at a time, anywhere; others are skipped::

        class Command(SingleInstanceMixin, BaseCommand):
            single_instance = {"name": "import:{source}", "ttl": 60}

    A skipped run prints one line on standard error, unless verbosity is 0, and exits with
    ``skip_exit``. SIGTERM ends the body as ``sys.exit(143)`` would, so that the lock is free at
    once. If Redis does not answer, or an option cannot be in a lock's name, that is a CommandError
    of one line.

    Attributes:
        single_instance: The options of @single_instance, and two more. ``name`` is a format string
            over the options of the command; default: the name of the command. ``skip_exit`` is the
            exit status of a skipped run; default: 0. With 0, call_command() returns Skipped; with
            another status it raises a CommandError.
    """

    single_instance: ClassVar[Mapping[str, Any]] = {}

    _options: ClassVar[JobOptions]
    _named: ClassVar[Named]
    _activity: ClassVar[Activity]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the options now, at the line that is wrong."""
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if BaseCommand in bases and bases.index(BaseCommand) < bases.index(SingleInstanceMixin):
            raise TypeError(
                f"{cls.__name__} would run without its lock: write SingleInstanceMixin before the"
                f" other base, as in class {cls.__name__}(SingleInstanceMixin, BaseCommand)."
            )
        given = cls.single_instance
        if not isinstance(given, Mapping):
            raise TypeError(
                f"single_instance of {cls.__name__} must be a dictionary of options, such as"
                f' {{"name": "import:{{source}}"}}, not {given!r}.'
            )
        skip_exit = given.get("skip_exit", 0)
        if type(skip_exit) is not int or not 0 <= skip_exit <= 255:
            raise ValueError(f"skip_exit must be an exit status, 0 to 255, not {skip_exit!r}.")
        of_job = {key: value for key, value in given.items() if key not in {"name", "skip_exit"}}
        cls._options = JobOptions(**of_job)
        cls._options.check_answered()
        command = cls.__module__.rpartition(".")[2]
        cls._named = namings(given.get("name"), cls._options, _taking_options(command), command)
        cls._activity = Activity(task=f"manage.py {command}")

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run the command under its lock, or skip it."""
        run = JobRun(self._activity, self._options, self._named, args, options, sender=self)
        execute, exits, began_in = super().execute, [], process.this()

        def body(*args: Any, **options: Any) -> Any:
            try:
                return execute(*args, **options)
            except SystemExit as end:
                if end.code not in (None, 0) or process.this() is not began_in:  # Of a fork.
                    raise
                exits.append(end)  # A success, as for the shell. It goes on after the release.
                return None

        try:
            with release_on_sigterm(), no_second_line(self._activity.task):
                outcome = run.execute(body)
        except (LockLost, LockTimeout, LockUnavailable) as error:
            if error.name not in {run.name, *(limit.name for limit in run.limits)}:
                raise  # The error of another lock, in the body.
            status = UNAVAILABLE if isinstance(error, LockUnavailable) else FOUND
            raise CommandError(visible(str(error)), returncode=status) from error
        except InvalidLockName as error:
            if run.has_begun:
                raise
            raise misuse(visible(str(error))) from error
        if exits:
            raise exits[0]
        # A body may return the Skipped of another job.
        if isinstance(outcome, Skipped) and not run.has_begun:
            if status := self.single_instance.get("skip_exit", 0):
                raise SkippedCommand(outcome, status)
            if options.get("verbosity", 1):
                given = options.get("stderr")
                errors = OutputWrapper(given) if given else self.stderr
                errors.write(line_of(outcome), str)
        return outcome


def _taking_options(command: str) -> Callable[..., Any]:
    """A function with the arguments of the command, to make the lock's name from."""

    def taking_options(*args: Any, **options: Any) -> None: ...

    taking_options.__qualname__ = command
    return taking_options
