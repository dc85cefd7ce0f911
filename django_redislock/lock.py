"""distributed_lock: context manager, async context manager, decorator and handle."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, Unpack

from django_redislock import logs, misuse
from django_redislock.backends.registry import backends
from django_redislock.exceptions import LockError, LockLost, LockMisuse, LockUnavailable
from django_redislock.handle import Handle
from django_redislock.holder import must_not_block, running_loop
from django_redislock.joint_handle import NO_TEMPLATES, JointHandle, JointLease, name_and_limit
from django_redislock.lease import Baton, Lease
from django_redislock.misuse import (
    check_decorated,
    finished,
    is_awaited,
    is_decorated,
    nameless,
    without_transaction,
)
from django_redislock.options import (
    LockArguments,
    TakingUpArguments,
    checked,
    lock_options,
    taking,
)
from django_redislock.rules.limit import Limit, Rate, check_limits, check_rates, each_once
from django_redislock.rules.names import (
    Written,
    check_limited,
    check_name,
    checked_name,
    formatter,
    in_order,
    several_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from types import TracebackType

    from django_redislock.backends.base import Backend
    from django_redislock.handle import Entry
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.forms import Attempt
    from django_redislock.rules.options import Options
    from django_redislock.rules.steps import Flow


logger = logs.logger("django_redislock")

_LEASES = (Lease, JointLease)

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


@taking(LockArguments)
def distributed_lock(*names: str, **options: Unpack[LockArguments]) -> Lock:
    """A lock shared by all processes and machines that use the same server and name.

    With several names, ``distributed_lock("account:1", "account:2")``, it takes all or none, in
    alphabetical order, so that no two programs wait for each other. With several limits,
    ``distributed_lock(limits=[Limit("export:acme", 2), Limit("export", 10)])``, it takes all or
    none, in the order given.

    Use it as ``with distributed_lock("lottery") as lease:``, as ``async with``, as a decorator of
    a function or coroutine function, or call ``acquire()`` and ``release()``. Making the lock does
    no I/O. All durations are seconds or a timedelta; None means the setting in REDISLOCK.

    Args:
        names: The names of the locks: each 1 to 200 bytes of UTF-8 without control characters.
            Above a function they are format strings over its arguments: "report:{report_id}". A
            name given twice is taken once.
        {options}

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        TypeError: There is no name, or an argument is unknown.
        ValueError: An argument is of the wrong type or out of range, or excludes another.
    """
    limits = options.pop("limits", None)
    try:
        how = lock_options(**options)
    except TypeError:  # An argument that cannot be hashed, or is unknown; the check says which.
        how = lock_options.__wrapped__(**options)
    if limits is not None:
        if names or how.limit is not None:
            raise ValueError(
                "limits=[...] has the names and how many may hold each: leave out names and limit"
                " beside it."
            )
        checked_limits = check_limits(limits)
        check_rates(checked_limits, options)
        return JointLock(checked_limits, how)
    if len(names) != 1:
        try:
            return JointLock(several_names(names), how)
        except TypeError:
            if not names:
                raise
        raise TypeError(
            "distributed_lock takes only names by position: say what the other arguments are, as in"
            " distributed_lock('report', ttl=30, wait=5)."
        )
    (name,) = names
    try:
        known = checked_name(name, template="{" in name)
    except TypeError:
        if is_decorated(name):
            raise nameless(name) from None
        known = check_name(name)  # Its error says that the name is no string.
    return Lock(known, how)


class Lock(Handle):
    """A handle on a lock, made by distributed_lock(). Threads and asyncio tasks may share it.

    Each acquire, and each entry of a block, has a lease of its own and ends only that. Entering a
    block raises LockTimeout if the wait runs out, and what acquire() raises. Leaving it after a
    loss raises LockLost, unless the body has raised or atomic has committed.
    """

    __slots__ = ()

    def __init__(
        self,
        name: str,
        options: Options,
        run: RunMarker | None = None,
        place: str = "",
        template: str = "",
    ) -> None:
        if options.atomic is not None:
            from django_redislock import fencing

            fencing.check_database(options.atomic, "atomic")
        if options.limit is not None and options.limit > 1:
            check_limited(name)
        self.name = name
        self.template = template or name
        self._options = options
        self._run = run
        self._place = place
        self._entries = []

    def __repr__(self) -> str:
        if lease := self.lease:
            return f"<Lock {self.name!r}: {lease}>"
        if any(entry.may_be_held for entry in tuple(self._entries)):
            return f"<Lock {self.name!r}: held by another thread or asyncio task>"
        return f"<Lock {self.name!r}: not held by this handle>"

    @property
    def lease(self) -> Lease | None:
        """The lease of the calling thread or asyncio task by this handle, or None."""
        entry = self._own_entry()
        return entry.lease if entry is not None else None

    # --- acquire ------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lock, waiting up to ``wait`` seconds. Returns whether it was granted.

        Raises:
            LockUnavailable: The server did not or could not answer; never means "busy".
            LockMisuse: The wait would never end, say since this thread or asyncio task holds the
                lock already; or the call would block the event loop of its thread; or gevent or
                eventlet has patched too late; or *atomic* needs a block; or this process takes the
                lock both with a limit and without; or a transaction is open, and
                RELEASE_BEFORE_COMMIT is "error"; or autocommit of a database is off, and Django
                would not tell release_on_commit of a commit.
            LockLost: The acquire is reentrant, and the lease was lost.
            ImproperlyConfigured: REDISLOCK has no such alias, or something about it is wrong.
        """
        # Not isinstance(): after C code, Python may run a signal handler that raises (Ctrl-C, a
        # time limit). Then nobody would know of the new lease, and it would be renewed for ever. A
        # comparison of classes leaves no such moment.
        return self.attempt(block=False).__class__ in _LEASES

    async def aacquire(self) -> bool:
        """See acquire()."""
        return (await self.aattempt(block=False)).__class__ in _LEASES

    # --- release ------------------------------------------------------------------------------

    def release(self, success: bool = True) -> None:
        """End the lease. When this returns, the next waiter has the lock, unless min_hold keeps it.

        The lease goes on while an outer acquire holds it or, with release_on_commit, a transaction
        is open.

        The lease is that of this thread or asyncio task. If there is none, and the handle holds
        exactly one lease that it got by acquire(), that one ends; never that of another's block.

        Args:
            success: Whether the work under the lock is done; only then min_hold counts.

        Raises:
            LockLost: The lease was lost before.
            LockUnavailable: The server did not or could not answer. The lease is not held any
                more, and ends on the server within one ttl.
            LockMisuse: There is no such lease, or it belongs to the parent process. Or autocommit
                of a database was switched off since, so release_on_commit did not wait.
        """
        self._end(success, block=False)

    async def arelease(self, success: bool = True) -> None:
        """See release()."""
        await self._aend(success, block=False)

    # --- with, async with ---------------------------------------------------------------------

    def __enter__(self) -> Lease:
        if self._options.atomic is not None:
            return self._enter_atomic(self._options.atomic)
        match self.attempt():
            case Lease() as lease:
                return lease
            case outcome:
                return self._refuse(outcome)

    def _enter_atomic(self, database: str) -> Lease:
        from django_redislock import fencing

        # Before the lock is taken: the wait for it must not be in vain.
        fencing.check_outermost(self.name, database)
        outcome = self.attempt()
        try:  # At once: an interrupt from here on must not leave the lock taken.
            if not isinstance(outcome, Lease):
                self._refuse(outcome)
            entry = self._own_entry()
            assert entry is not None
            entry.transaction = outcome.atomic(database)
            entry.transaction.__enter__()
            return outcome
        except BaseException as error:
            if isinstance(outcome, Lease):
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entry, success = None, False
        try:
            entry = self._entry_to_end(block=True)
            if self._options.atomic is not None and entry is not None:
                entry.end_transaction(exc_type, exc, traceback)
            success = exc_type is None
        finally:
            try:
                self._end(success, block=True, entry=entry)
            except (LockLost, LockMisuse, LockUnavailable) as error:
                if self._is_told(error, success):
                    raise
            except BaseException:
                if entry is not None:  # Maybe it was interrupted where _end() begins.
                    with suppress(LockError):
                        self._end(False, block=True, entry=entry)
                raise

    # Returns the coroutine itself: `async def` would add another.
    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        if self._options.atomic is not None:
            raise misuse.has_no_transactions(self.name)
        return self._aenter()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entry = None
        try:
            entry = self._entry_to_end(block=True)
            await self._aend(exc_type is None, block=True, entry=entry)
        except (LockLost, LockMisuse, LockUnavailable) as error:
            if self._is_told(error, exc_type is None):
                raise
        except GeneratorExit:
            raise
        except BaseException:
            with suppress(LockError):  # See __exit__().
                await self._aend(False, block=True, entry=entry)
            raise

    def _is_told(self, error: LockLost | LockMisuse | LockUnavailable, success: bool) -> bool:
        """Whether the end of a block raises *error*; else it is logged."""
        # Only a body that succeeded is told of a loss; the exception of another must not be masked.
        # An unanswered release is no news, since the lease ends by itself. With atomic, the commit
        # has succeeded, so LockLost would wrongly say that nothing was written.
        is_committed = self._options.atomic is not None and isinstance(error, LockLost)
        if success and not is_committed and not isinstance(error, LockUnavailable):
            return True
        extra = logs.of(lock=self.name, alias=self._options.using)
        logger.error("Left the block of lock %r: %s", self.name, error, extra=extra)
        return False

    # --- decorator ----------------------------------------------------------------------------

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        """Decorate a function or coroutine function: each call is made under the lock.

        Raises:
            TypeError: It is neither, or its body would run after the call, or *atomic* meets a
                coroutine function.
            LockMisuse: *release_on_commit* meets a coroutine function.
            InvalidLockName: The name uses an argument that the function does not take.
        """
        line = f"@distributed_lock({self._written})"
        check_decorated(function, line)
        options = self._options
        place = f"{line} of {function.__module__}.{getattr(function, '__qualname__', function)}()"
        handle_of = self._maker(function, place)
        body = finished(function, line)

        if is_awaited(function):
            if options.atomic is not None:
                raise without_transaction(function, line)
            if options.release_on_commit:
                raise misuse.awaits_a_commit(self.name)

            @functools.wraps(function)
            async def alocked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                async with handle_of(args, kwargs):
                    return await body(*args, **kwargs)  # type: ignore[misc] # see above

            return alocked  # type: ignore[return-value] # it is the coroutine that is returned

        @functools.wraps(function)
        def locked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            with handle_of(args, kwargs):
                return body(*args, **kwargs)

        return locked

    @property
    def _written(self) -> str:
        """The arguments of distributed_lock(), as code."""
        return repr(self.name)

    def _maker(self, function: Callable[..., Any], place: str) -> Callable[..., Lock]:
        """A function that makes the lock of a call of *function*: (args, kwargs) -> lock."""
        handle, options, template = type(self), self._options, Written(self.name)
        name_of = formatter(template, function)
        return lambda args, kwargs: handle(name_of(args, kwargs), options, None, place, template)

    # --- looking ------------------------------------------------------------------------------

    def locked(self) -> bool:
        """Whether the lock is taken on the server: held, or cooling down.

        With a limit: whether all permits are taken. Of several locks: whether one is taken.

        Raises:
            LockUnavailable: The server did not or could not answer.
            LockMisuse: It is called in a thread whose event loop runs.
        """
        if running_loop() is not None and must_not_block():
            raise misuse.blocks_the_loop(self.name, "`await lock.alocked()`")
        backend = backends[self._options.using]
        return backend.run(self._look(backend))

    async def alocked(self) -> bool:
        """See locked()."""
        backend = backends[self._options.using]
        return await backend.arun(self._look(backend))

    def _look(self, backend: Backend) -> Flow[bool]:
        return backend.is_taken([(check_name(self.name), self._options.limit)])


class JointLock(Lock, JointHandle):
    """A handle on several locks, of which all are taken or none; made by distributed_lock()."""

    __slots__ = ()

    def __init__(
        self,
        wanted: tuple[str | Limit | Rate, ...],
        options: Options,
        run: RunMarker | None = None,
        place: str = "",
        templates: Mapping[str, str] = NO_TEMPLATES,
        reserved: dict[str, str] | None = None,
    ) -> None:
        """Take nothing yet.

        Args:
            wanted: Names, with the limit in *options*, or limits and then rates; in the order in
                which they are taken.
            options: Those of each lock.
            run: The run of a task. The first lock keeps its record.
            place: Where the decorator stands.
            templates: For each name that was formatted: the name as it was written.
            reserved: The tokens of starts that are reserved, by the name of the rate: one that is
                not due is put there. None: no start is to be reserved.
        """
        for one in wanted:
            if isinstance(one, Rate):
                continue
            name, limit = (one, options.limit) if isinstance(one, str) else (one.name, one.number)
            if limit not in {None, 1}:
                check_limited(name)
        names = [one if isinstance(one, str) else one.name for one in wanted]
        template = ", ".join(templates.get(name, name) for name in names)
        if templates:  # Of a decorator: it formats all names.
            template = Written(template)
        super().__init__(", ".join(names), options, run, place, template)
        self._wanted, self._templates, self._reserved = wanted, templates, reserved

    @property
    def _written(self) -> str:
        if isinstance(self._wanted[0], str):
            return ", ".join(map(repr, self._wanted))
        return f"limits=[{', '.join(map(str, self._wanted))}]"

    def _maker(self, function: Callable[..., Any], place: str) -> Callable[..., Lock]:
        options = self._options
        names = {
            Written(one): formatter(one, function) for one in self._wanted if isinstance(one, str)
        }
        limits = {
            Written(one.name): one.maker(function)
            for one in self._wanted
            if not isinstance(one, str)
        }

        def make(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lock:
            wanted: tuple[str | Limit | Rate, ...]
            templates = {name_of(args, kwargs): template for template, name_of in names.items()}
            wanted = in_order(templates)
            if limits:
                made = each_once(limit_of(args, kwargs) for limit_of in limits.values())
                templates = {one.name: of for one, of in zip(made, limits, strict=True)}
                wanted = made
            return JointLock(wanted, options, None, place, templates)

        return make

    def _look(self, backend: Backend) -> Flow[bool]:
        held = [one for one in self._wanted if not isinstance(one, Rate)]
        wanted = [name_and_limit(one, self._options) for one in held]
        return backend.is_taken([(check_name(name), limit) for name, limit in wanted])


# --- take_up(): go on with a lease that another process or thread has handed over -----------------

# The other half is ``Lease.hand_over()`` in lease.py.


@taking(TakingUpArguments)
def take_up(baton: str, **options: Unpack[TakingUpArguments]) -> Lock:
    """The lock that ``lease.hand_over()`` has handed over; nobody else has had it meanwhile.

    Use it as ``with take_up(baton) as lease:``, as ``async with``, or by its ``acquire()`` and
    ``release()``. The lease has a greater fence than the one that was handed over. Making the lock
    does no I/O, and taking it up never waits. A baton can be taken up once: entering the block, or
    ``acquire()``, raises LockLost if it was taken up before, is too old, or was released by force.
    Durations count from then on.

    Args:
        baton: The result of ``hand_over()``.
        {options}

    Raises:
        ValueError: The baton was changed, signed with another SECRET_KEY, or made by a newer
            version; or an argument is of the wrong type or out of range.
    """
    read = Baton.read(baton)
    given = checked(TakingUpArguments, options, "take_up")
    return TakingUp(read, lock_options(**given, wait=0, using=read.alias, limit=read.limit))


class TakingUp(Lock):
    """A handle on a lock whose lease was handed over, made by take_up()."""

    __slots__ = ("_lease_id", "_permit")

    def __init__(
        self, baton: Baton, options: Options, run: RunMarker | None = None, *, template: str = ""
    ) -> None:
        super().__init__(baton.name, options, run, template=template)
        self._lease_id, self._permit = baton.id, baton.permit

    def __call__(self, function: Callable[..., Any]) -> NoReturn:
        raise LockMisuse(
            self.name,
            "a baton can be taken up once, and a function be called more often. Write `with"
            " take_up(baton):` in the function.",
        )

    def _first_try(self, entry: Entry) -> Attempt:
        if not entry.backend.supports_batons:
            raise misuse.hands_nothing_over(entry.backend.alias, self.name)
        form = super()._first_try(entry)
        form.take_up(self._lease_id, self._permit)
        return form
