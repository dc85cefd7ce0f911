"""distributed_lock: context manager, async context manager, decorator and handle."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django_redislock import logs, misuse
from django_redislock.backends.registry import backends
from django_redislock.decorating import (
    check_decorated,
    finished,
    is_awaited,
    is_decorated,
    misspelt,
    nameless,
    without_transaction,
)
from django_redislock.exceptions import LockLost, LockMisuse, LockUnavailable
from django_redislock.holder import must_not_block, running_loop
from django_redislock.holds import Holds
from django_redislock.joint_holds import NO_TEMPLATES, JointHolds, name_and_limit
from django_redislock.joint_lease import JointLease
from django_redislock.lease import Lease
from django_redislock.rules.limit import Limit, check_limits, each_once
from django_redislock.rules.names import (
    Written,
    check_limited,
    check_name,
    checked_name,
    formatter,
    in_order,
    several_names,
)
from django_redislock.rules.options import DEFAULT_ALIAS, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from datetime import timedelta
    from types import TracebackType

    from django_redislock.backends.base import Backend
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.options import Options
    from django_redislock.rules.steps import Flow

    Seconds = float | timedelta

logger = logs.logger("django_redislock")

_LEASES = (Lease, JointLease)

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def explaining(make: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let a call of a decorator that cannot be right say which line to write instead."""
    known = list(inspect.signature(make).parameters)

    @functools.wraps(make)
    def explaining_call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            return make(*args, **kwargs)
        except TypeError:
            if not (problem := misspelt(make.__name__, known, args, kwargs)):
                raise
        raise TypeError(problem)

    return explaining_call


@explaining
def distributed_lock(
    *names: str,
    ttl: Seconds | None = None,
    wait: Seconds | None = None,
    renew: bool | None = None,
    max_hold: Seconds | None = None,
    min_hold: Seconds | None = None,
    reentrant: bool = False,
    limit: int | None = None,
    limits: Sequence[Limit] | None = None,
    using: str = DEFAULT_ALIAS,
    atomic: bool | str = False,
    release_on_commit: bool = False,
) -> Lock:
    """A lock shared by all processes and machines that use the same server and name.

    Of several names, ``distributed_lock("account:1", "account:2")``, all are taken or none. They
    are taken in the order of the alphabet, so that no two programs wait for each other. Of several
    limits, ``distributed_lock(limits=[Limit("export:acme", 2), Limit("export", 10)])``, all are
    taken or none, in the order given.

    Use it as ``with distributed_lock("lottery") as lease:``, as ``async with``, as a decorator of
    a function or coroutine function, or by its ``acquire()`` and ``release()``. Making it does no
    I/O. All durations are seconds or a timedelta; None means the setting in REDISLOCK.

    Args:
        names: What is contended for: each has 1 to 200 bytes of UTF-8 without control characters.
            As a decorator they are format strings over the function's arguments:
            "report:{report_id}". Of one that is named twice, one is taken.
        ttl: How long the lease lasts unless renewed; a dead holder blocks others no longer.
        wait: How long to wait for it, or for all names together; 0 tries once, math.inf waits for
            ever.
        renew: Whether the lease is renewed, every ttl/3, while it is held.
        max_hold: The lease is renewed at most this long, so that a body that never ends does not
            hold for ever.
        min_hold: After a success the lock stays taken at least this long, counted from the grant.
        reentrant: Whether the thread or asyncio task that holds it already may take it again.
            With a limit that is the same permit; without reentrant, it may take a second one.
        limit: How many may hold it at a time, 1 to 1,000. Each has one of so many permits, a lease
            of its own that says which: ``lease.permit``. First come, first served over all of them.
            Write the same limit wherever the lock is taken. Of several names, each has this limit.
        limits: In place of names and a limit: locks with a limit each, of which all are taken or
            none. Write the narrowest first, so that nobody holds a wide one while it waits for a
            narrow one, and in the same order everywhere. Above a function, names are format strings
            over its arguments, and a number may be a function of them.
        using: Alias in REDISLOCK.
        atomic: Whether the block is a transaction too, see Lease.atomic(); a string is the alias
            in DATABASES. It is committed before the lock is released.
        release_on_commit: Whether a release while a transaction is open waits for its end, the
            commit or rollback of the outermost atomic(). Blocking code only.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: An argument is of the wrong type or out of range.
    """
    given = ttl, wait, renew, max_hold, min_hold, reentrant, using, atomic, release_on_commit, limit
    try:
        options = options_of(*given)
    except TypeError:  # An argument that cannot be hashed; the check says which.
        options = options_of.__wrapped__(*given)
    if limits is not None:
        if names or limit is not None:
            raise ValueError(
                "limits=[...] has the names and how many may hold each: leave out names and limit"
                " beside it."
            )
        return JointLock(check_limits(limits), options)
    if len(names) != 1:
        return JointLock(several_names(names), options)
    (name,) = names
    try:
        checked = checked_name(name, template="{" in name)
    except TypeError:
        if is_decorated(name):
            raise nameless(name) from None
        checked = check_name(name)  # Which says that it is no string.
    return Lock(checked, options)


class Lock(Holds):
    """A handle on a lock, made by distributed_lock(). Threads and asyncio tasks may share it.

    Each acquire, and each entry of a block, has a lease of its own and ends only that.
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
        self._holds = []

    def __repr__(self) -> str:
        if lease := self.lease:
            return f"<Lock {self.name!r}: {lease}>"
        if any(hold.may_be_held for hold in tuple(self._holds)):
            return f"<Lock {self.name!r}: held by another thread or asyncio task>"
        return f"<Lock {self.name!r}: not held by this handle>"

    @property
    def lease(self) -> Lease | None:
        """The lease that the calling thread or asyncio task has by this handle, or None."""
        hold = self._own_hold()
        return hold.lease if hold is not None else None

    # --- acquire ------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it. Returns whether it is ours.

        Raises:
            LockUnavailable: The server did not or could not answer; never means "busy".
            LockMisuse: This thread or asyncio task holds it already; or it is called in a thread
                whose event loop runs, which would stand still; or a transaction is open, and
                RELEASE_BEFORE_COMMIT is "error"; or autocommit of a database is off, and
                release_on_commit would wait for a commit that nobody hears of.
            LockLost: A reentrant acquire within a lease that was lost.
        """
        # Not isinstance(): that is C code, after which Python may run a signal handler, which may
        # raise (Ctrl-C, a time limit). Nobody would know of the lease that attempt() has returned,
        # and it would be renewed for ever. A comparison of classes leaves no such moment.
        return self.attempt(block=False).__class__ in _LEASES

    async def aacquire(self) -> bool:
        """See acquire()."""
        return (await self.aattempt(block=False)).__class__ in _LEASES

    # --- release ------------------------------------------------------------------------------

    def release(self, success: bool = True) -> None:
        """End the lease; the next waiter has the lock when this returns.

        With release_on_commit and an open transaction, it has it when that is over.

        It ends the lease of this thread or asyncio task; if that has none and the handle holds
        exactly one, that one.

        Args:
            success: Whether what the lock was taken for is done: only then min_hold counts.

        Raises:
            LockLost: It had been lost before.
            LockUnavailable: The server did not answer. The lease is not held any more, and ends
                on the server within one ttl.
            LockMisuse: There is no such lease, or it belongs to the parent process. Or autocommit
                of a database was switched off since, so that release_on_commit has not waited.
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

        # Before the lock is taken: whoever waits for it must not wait for nothing.
        fencing.check_outermost(self.name, database)
        outcome = self.attempt()
        try:  # At once: an interrupt from here on must not leave the lock taken.
            if not isinstance(outcome, Lease):
                self._refuse(outcome)
            hold = self._own_hold()
            assert hold is not None
            hold.transaction = outcome.atomic(database)
            hold.transaction.__enter__()
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
        success = False
        try:
            if self._options.atomic is not None and (hold := self._hold_to_end(block=True)):
                hold.end_transaction(exc_type, exc, traceback)
            success = exc_type is None
        finally:
            try:
                self._end(success, block=True)
            except (LockLost, LockMisuse, LockUnavailable) as error:
                self._leave_with(error, success)

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
        try:
            await self._aend(exc_type is None, block=True)
        except (LockLost, LockMisuse, LockUnavailable) as error:
            self._leave_with(error, exc_type is None)

    def _leave_with(self, error: LockLost | LockMisuse | LockUnavailable, success: bool) -> None:
        # The work is done, or its own exception is on its way and must not be masked. A loss is
        # news to a body that succeeded; an unanswered release is not, the lease ends by itself.
        # With atomic, the commit is behind us, and the database had no later lease: what LockLost
        # tells is that nothing was written, so it must not be raised here.
        is_committed = self._options.atomic is not None and isinstance(error, LockLost)
        if success and not is_committed and not isinstance(error, LockUnavailable):
            raise error
        extra = logs.of(lock=self.name, alias=self._options.using)
        logger.error("Left the block of lock %r: %s", self.name, error, extra=extra)

    # --- decorator ----------------------------------------------------------------------------

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        """Decorate a function or coroutine function: each call is made under the lock."""
        line = f"@distributed_lock({self._written})"
        check_decorated(function, line)
        options = self._options
        place = f"{line} of {function.__module__}.{getattr(function, '__qualname__', function)}()"
        handle_of = self._maker(function, place)

        if is_awaited(function):
            if options.atomic is not None:
                raise without_transaction(function, line)
            if options.release_on_commit:
                raise misuse.awaits_a_commit(self.name)

            @functools.wraps(function)
            async def alocked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                async with handle_of(args, kwargs):
                    return await function(*args, **kwargs)  # type: ignore[misc] # see above

            return alocked  # type: ignore[return-value] # it is the coroutine that is returned

        body = finished(function, line)

        @functools.wraps(function)
        def locked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            with handle_of(args, kwargs):
                return body(*args, **kwargs)

        return locked

    @property
    def _written(self) -> str:
        """What stands in the brackets of distributed_lock()."""
        return repr(self.name)

    def _maker(self, function: Callable[..., Any], place: str) -> Callable[..., Lock]:
        """How to make the lock of a call of *function*: (args, kwargs) -> lock."""
        handle, options, template = type(self), self._options, Written(self.name)
        name_of = formatter(template, function)
        return lambda args, kwargs: handle(name_of(args, kwargs), options, None, place, template)

    # --- looking ------------------------------------------------------------------------------

    def locked(self) -> bool:
        """Whether the lock is held on the server, so that others wait; also while it cools down.

        With a limit: whether all permits are.

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


class JointLock(Lock, JointHolds):
    """A handle on several locks, of which all are taken or none; made by distributed_lock()."""

    __slots__ = ()

    def __init__(
        self,
        wanted: tuple[str | Limit, ...],
        options: Options,
        run: RunMarker | None = None,
        place: str = "",
        templates: Mapping[str, str] = NO_TEMPLATES,
    ) -> None:
        """Take nothing yet.

        Args:
            wanted: In the order in which they are taken: names, with the limit in *options*; or
                limits.
            options: How they are locked.
            run: The run of a task whose records are those of the first of them.
            place: Where they stand as a decorator.
            templates: By name, as what those were written that were formatted.
        """
        for one in wanted:
            name, limit = (one, options.limit) if isinstance(one, str) else (one.name, one.number)
            if limit not in {None, 1}:
                check_limited(name)
        names = [one if isinstance(one, str) else one.name for one in wanted]
        template = ", ".join(templates.get(name, name) for name in names)
        if templates:  # At a decorator all are.
            template = Written(template)
        super().__init__(", ".join(names), options, run, place, template)
        self._wanted, self._templates = wanted, templates

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
            Written(one.name): one.maker(function) for one in self._wanted if isinstance(one, Limit)
        }

        def make(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lock:
            wanted: tuple[str | Limit, ...]
            templates = {name_of(args, kwargs): template for template, name_of in names.items()}
            wanted = in_order(templates)
            if limits:
                wanted = each_once(limit_of(args, kwargs) for limit_of in limits.values())
                templates = {one.name: of for one, of in zip(wanted, limits, strict=True)}
            return JointLock(wanted, options, None, place, templates)

        return make

    def _look(self, backend: Backend) -> Flow[bool]:
        wanted = [name_and_limit(one, self._options) for one in self._wanted]
        return backend.is_taken([(check_name(name), limit) for name, limit in wanted])
