"""distributed_lock: context manager, async context manager, decorator and handle."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import threading
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import ref

from asgiref.sync import iscoroutinefunction

from django_redislock import lease as lease_module
from django_redislock import signals
from django_redislock.activity import current_owner
from django_redislock.backends.base import read_holding, running_loop
from django_redislock.conf import DEFAULT_ALIAS, SHORTEST_TTL, backends, flag, seconds, text
from django_redislock.exceptions import (
    InvalidLockName,
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.lease import Lease, Owner
from django_redislock.rules import flows
from django_redislock.rules.flows import Busy, Done, Finished, Granted
from django_redislock.rules.names import check_name, formatter

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

    from django.dispatch import Signal

    from django_redislock.backends.base import Backend
    from django_redislock.exceptions import LostReason

    Seconds = float | timedelta

logger = logging.getLogger("django_redislock")

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


MAX_KNOWN_TERMS = 1000
# Leases at least this long, in seconds, and those of tasks are remembered for the timeline of who
# held a lock. Shorter ones would only push these out, and cost a release more than it takes.
REMEMBERED = 1.0
# Leases of one handle that have ended without a release; the oldest are forgotten.
MOST_HOLDS = 1000


class _Thread:
    """A thread as a holder. Its ident would not do: idents are used again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.holder = _Thread()


_this_thread = _ThisThread()


def _current_holder() -> asyncio.Task[Any] | _Thread:
    """What a lease granted here belongs to: the running asyncio task, or else the thread."""
    loop = running_loop()
    return (loop and asyncio.current_task(loop)) or _this_thread.holder


class Options(NamedTuple):
    """How to lock, checked; None means the setting. Durations are seconds."""

    ttl: float | None = None
    wait: float | None = None
    renew: bool | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    reentrant: bool = False
    using: str = DEFAULT_ALIAS
    once: float = 0.0


class Terms(NamedTuple):
    """What options and settings come to. Durations are seconds."""

    ttl: float
    first_ttl: float  # Of the grant: max_hold may be shorter than ttl.
    wait: float
    renew: bool
    max_hold: float  # math.inf if there is no bound.
    patience: float  # The operation timeout.
    unavailable_after: float


def _terms(backend: Backend, options: Options) -> Terms:
    conf = backend.conf
    ttl = conf.ttl if options.ttl is None else options.ttl
    max_hold = conf.max_hold if options.max_hold is None else options.max_hold
    terms = Terms(
        ttl=ttl,
        first_ttl=ttl if max_hold is None else min(ttl, max_hold),
        wait=conf.wait if options.wait is None else options.wait,
        renew=conf.renew if options.renew is None else options.renew,
        max_hold=math.inf if max_hold is None else max_hold,
        patience=(patience := backend.patience(ttl)),
        unavailable_after=(patience if conf.unavailable_after is None else conf.unavailable_after),
    )
    if len(backend.terms) < MAX_KNOWN_TERMS:
        backend.terms[options] = terms
    return terms


# What an argument of other libraries is called here.
_CALLED_HERE = {
    "timeout": "ttl=, how long the lease lasts unless renewed, or wait=, how long to wait for it",
    "expire": "ttl=, how long the lease lasts unless renewed",
    "blocking": "wait=, how long to wait for it; 0 tries once",
    "blocking_timeout": "wait=, how long to wait for it; 0 tries once",
}


def _explaining(make: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let a call that cannot be right say which line to write instead."""
    known = inspect.signature(make).parameters

    @functools.wraps(make)
    def explained(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            return make(*args, **kwargs)
        except (TypeError, InvalidLockName):
            if args and (callable(args[0]) or isinstance(args[0], classmethod | property)):
                raise _nameless(args[0]) from None
            if len(args) > 1:
                raise TypeError(
                    "distributed_lock takes only the name by position: say what the other"
                    " arguments are, as in distributed_lock('report', ttl=30, wait=5)."
                ) from None
            if unknown := [name for name in kwargs if name not in known]:
                here = _CALLED_HERE.get(unknown[0], f"one of {', '.join(list(known)[1:])}")
                raise TypeError(
                    f"distributed_lock takes no argument {unknown[0]!r}; pass {here}."
                ) from None
            raise

    return explained


@_explaining
def distributed_lock(
    name: str,
    *,
    ttl: Seconds | None = None,
    wait: Seconds | None = None,
    renew: bool | None = None,
    max_hold: Seconds | None = None,
    min_hold: Seconds | None = None,
    reentrant: bool = False,
    using: str = DEFAULT_ALIAS,
) -> Lock:
    """A lock shared by all processes and machines that use the same server and name.

    Use it as ``with distributed_lock("lottery") as lease:``, as ``async with``, as a decorator of
    a function or coroutine function, or by its ``acquire()`` and ``release()``. Making it does no
    I/O. All durations are seconds or a timedelta; None means the setting in REDISLOCK.

    Args:
        name: What is contended for: 1 to 200 bytes of UTF-8 without control characters. As a
            decorator it is a format string over the function's arguments: "report:{report_id}".
        ttl: How long the lease lasts unless renewed; a dead holder blocks others no longer.
        wait: How long to wait for it; 0 tries once, math.inf waits for ever.
        renew: Whether the lease is renewed, every ttl/3, while it is held.
        max_hold: The lease is renewed at most this long, so that a body that never ends does not
            hold for ever.
        min_hold: After a success the lock stays taken at least this long, counted from the grant.
        reentrant: Whether the thread or asyncio task that holds it already may take it again.
        using: Alias in REDISLOCK.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: An argument is of the wrong type or out of range.
    """
    given = (ttl, wait, renew, max_hold, min_hold, reentrant, using)
    try:
        options = _options(*given)
    except TypeError:  # An argument that cannot be hashed; the check says which.
        options = _options.__wrapped__(*given)
    return Lock(check_name(name, template=isinstance(name, str) and "{" in name), options)


# Programs use few combinations, many times. Typed: 1 is no flag, though it equals True.
@lru_cache(maxsize=MAX_KNOWN_TERMS, typed=True)
def _options(
    ttl: Seconds | None,
    wait: Seconds | None,
    renew: bool | None,
    max_hold: Seconds | None,
    min_hold: Seconds | None,
    reentrant: bool,
    using: str,
) -> Options:
    return Options(
        ttl=None if ttl is None else seconds(ttl, "ttl", least=SHORTEST_TTL),
        wait=None if wait is None else seconds(wait, "wait", endless=True),
        renew=None if renew is None else flag(renew, "renew"),
        max_hold=None if max_hold is None else seconds(max_hold, "max_hold", least=SHORTEST_TTL),
        min_hold=0.0 if min_hold is None else seconds(min_hold, "min_hold"),
        reentrant=flag(reentrant, "reentrant"),
        using=text(using, "using"),
    )


class _Hold:
    """What one acquire, or one entry of a block, got by a handle."""

    __slots__ = ("backend", "block", "lease", "over", "terms")

    # Set by acquire: a lease stays with the backend and the settings that granted it.
    backend: Backend
    terms: Terms

    def __init__(self, *, block: bool) -> None:
        self.block = block  # Whether leaving a block ends it.
        self.lease: Lease | None = None
        self.over = False  # Released within its block, which has not been left yet.

    def is_of(self, holder: object) -> bool:
        """Whether *holder* got it."""
        return self.lease is not None and self.lease._holder() is holder

    @property
    def may_be_held(self) -> bool:
        """Whether its lease is not known to be over."""
        return self.lease is not None and self.lease._may_be_held


class Lock:
    """A handle on a lock, made by distributed_lock(). Threads and asyncio tasks may share it.

    Each acquire, and each entry of a block, has a lease of its own and ends only that.
    """

    __slots__ = ("_holds", "_options", "_run", "name")

    def __init__(self, name: str, options: Options, run: flows.Run | None = None) -> None:
        self.name = name
        self._options = options
        self._run = run  # The run of a task that it is for.
        self._holds: list[_Hold] = []  # The newest last.

    def __repr__(self) -> str:
        if lease := self.lease:
            return f"<Lock {self.name!r}: {lease}>"
        if any(hold.may_be_held for hold in self._holds):
            return f"<Lock {self.name!r}: held by another thread or asyncio task>"
        return f"<Lock {self.name!r}: not held by this handle>"

    @property
    def lease(self) -> Lease | None:
        """The lease that the calling thread or asyncio task has by this handle, or None."""
        hold = self._own_hold()
        return hold.lease if hold is not None else None

    def _own_hold(self) -> _Hold | None:
        me = _current_holder()
        for hold in reversed(self._holds):
            if not hold.over and hold.is_of(me):
                return hold
        return None

    # --- acquire ------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it. Returns whether it is ours.

        Raises:
            LockUnavailable: The server did not or could not answer; never means "busy".
            LockMisuse: This thread or asyncio task holds it already; or it is called in a thread
                whose event loop runs, which would stand still.
            LockLost: A reentrant acquire within a lease that was lost.
        """
        return self.attempt(block=False).__class__ is Lease

    async def aacquire(self) -> bool:
        """See acquire()."""
        return (await self.aattempt(block=False)).__class__ is Lease

    # Python runs signal handlers, which may raise, where a function begins and after a call of C
    # code. From the end of attempt() to the code of the caller there is neither, so isinstance()
    # would not do: a lease that nobody knows of would be renewed for ever.

    def attempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished:
        """As acquire(), with the whole outcome. For the package's own integrations.

        Args:
            block: Whether ``__exit__()`` ends what is got, as for a block; else ``release()``.
            since: When the wait began of which this is a part. The caller tells if it runs out.
        """
        hold = _Hold(block=block)
        try:
            request = self._begin(hold, blocking=True)
            if isinstance(request, Lease):
                return request
            backend = hold.backend
            started = backend.clock()
            outcome = self._conclude(
                hold, backend.run(flows.acquire(request, started, partial(self._keep, hold)))
            )
            if since is not None and isinstance(outcome, Busy):
                return outcome
            if news := self._news_of(hold, outcome, started if since is None else since):
                _tell(*news)
            return outcome
        except BaseException:
            if undo := self._undo(hold, block=block):
                hold.backend.run(undo)
            raise

    async def aattempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished:
        """See attempt()."""
        hold = _Hold(block=block)
        try:
            request = self._begin(hold, blocking=False)
            if isinstance(request, Lease):
                return request
            backend = hold.backend
            started = backend.clock()
            outcome = self._conclude(
                hold, await backend.arun(flows.acquire(request, started, partial(self._keep, hold)))
            )
            if since is not None and isinstance(outcome, Busy):
                return outcome
            if news := self._news_of(hold, outcome, started if since is None else since):
                await _atell(*news)
            return outcome
        except GeneratorExit:
            self._undo(hold, block=block)  # Nothing can be awaited any more.
            raise
        except BaseException:
            if undo := self._undo(hold, block=block):
                await hold.backend.arun(undo)
            raise

    def _begin(self, hold: _Hold, *, blocking: bool) -> flows.Request | Lease:
        """What to ask for; or the lease we are in already, if it may be taken again."""
        options, name = self._options, self.name
        if blocking and running_loop() is not None:
            self._refuse_to_block_the_loop("`async with` or `await lock.aacquire()`")
        outer = self._own_hold() if self._holds else None
        # Settings that are changed while it is held count from the next lease on.
        if outer is not None and outer.may_be_held:
            backend = outer.backend
        else:
            backend = backends[options.using]
        hold.backend = backend
        # Programs use few combinations, many times.
        terms = hold.terms = backend.terms.get(options) or _terms(backend, options)
        if name in backend.leases and (nested := self._nest(hold, blocking=blocking)):
            return nested
        token = os.urandom(16).hex()
        return flows.Request(
            # What might have been a template was not judged by its length before.
            check_name(name) if "{" in name else name,
            token,
            sha256(token.encode()).hexdigest()[:16],
            current_owner(),
            terms.first_ttl,
            terms.wait,
            terms.patience,
            backend.conf.replicas_ack,
            self._heed() if options.once or self._run else "",
            flows.will_renew(terms.renew, terms.first_ttl, terms.max_hold),
            terms.unavailable_after,
        )

    def _nest(self, hold: _Hold, *, blocking: bool) -> Lease | None:
        """The lease we are in already, if it may be taken again; None if we are in none."""
        me = _current_holder()
        for lease in hold.backend.leases_of(self.name):
            if lease._ended or lease._process is not lease_module.process:
                continue
            holder, may_be_held = lease._holder(), lease._may_be_held
            if holder is me and self._options.reentrant:
                if not may_be_held:
                    raise lease._loss()
                hold.lease = lease
                lease._holds += 1
                self._add(hold)
                return lease
            if may_be_held:
                self._refuse_misuse(holder, me, blocking=blocking)
        return None

    def _refuse_to_block_the_loop(self, instead: str) -> None:
        # As Django's ORM does, and with the same way out.
        if not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
            raise LockMisuse(
                self.name,
                "blocking code asks for it in a thread whose event loop runs, so all tasks of"
                f" that would stand still. Use {instead}; or call it in another thread, as"
                " sync_to_async does.",
            )

    def _refuse_misuse(self, holder: object, me: object, *, blocking: bool) -> None:
        if holder is me:
            who = "asyncio task" if isinstance(me, asyncio.Task) else "thread"
            raise LockMisuse(
                self.name,
                f"this {who} holds it already, so waiting for it would never end. Pass"
                " reentrant=True to nest, or release it first.",
            )
        if isinstance(me, asyncio.Task) and holder is _this_thread.holder:
            raise LockMisuse(
                self.name,
                "blocking code of this thread holds it, beneath the event loop, and cannot release"
                " it before the loop has ended.",
            )
        if blocking and isinstance(holder, asyncio.Task) and holder.get_loop() is running_loop():
            raise LockMisuse(
                self.name,
                "a task of this thread's event loop holds it, which cannot release it while this"
                " call blocks the loop. Use `async with`.",
            )

    def _heed(self) -> str:
        """What would make it pointless, see lua/_heed.lua."""
        return f"{self._options.once > 0:d}{self._run.id if self._run else ''}"

    def _keep(self, hold: _Hold, request: flows.Request, granted: Granted) -> None:
        """Take over from the flow, which undoes the grant if it is interrupted before."""
        terms = hold.terms
        lease = Lease(
            name=request.name,
            token=request.token,
            id=request.id,
            fence=granted.fence,
            owner=request.owner,
            ttl=terms.ttl,
            deadline=granted.deadline,
            ends=granted.ends,
            granted_at=granted.at,
            hold_until=granted.at + terms.max_hold,
            auto_renew=terms.renew,
            keeper=hold.backend,
            holder=ref(_current_holder()),
            block=hold.block,
        )
        hold.lease, lease._holds = lease, 1
        self._add(hold)

    def _add(self, hold: _Hold) -> None:
        if not self._holds:
            self._holds.append(hold)
            return
        me = _current_holder()
        over = [other for other in self._holds if other.over and other.is_of(me)]
        if over and not hold.block:
            # Acquired again within a block that it was released in: the block's end ends it.
            hold.block = True
            self._holds.append(hold)
            self._remove(over[-1])
            return
        self._holds.append(hold)
        if len(self._holds) > MOST_HOLDS:
            # Whoever lets leases run out instead of releasing them must not fill the memory.
            forgotten = (one for one in self._holds if not (one.block or one.may_be_held))
            if oldest := next(forgotten, None):
                self._remove(oldest)

    def _remove(self, hold: _Hold) -> None:
        with suppress(ValueError):  # It is not there any more.
            self._holds.remove(hold)

    def _conclude(
        self, hold: _Hold, outcome: Granted | Busy | Done | Finished
    ) -> Lease | Busy | Done | Finished:
        if not isinstance(outcome, Granted):
            return outcome
        assert hold.lease is not None
        hold.backend.watch(hold.lease)
        return hold.lease

    def _undo(self, hold: _Hold, *, block: bool) -> flows.Flow[bool] | None:
        """Interrupted: *hold* counts no more. Returns what ends its lease, if that is over."""
        lease = hold.lease
        if lease is None or lease._process is not lease_module.process:
            return None
        self._drop(hold, block=block)
        if lease._holds:
            return None
        lease._end()
        hold.backend.forget(lease)
        return flows.undo(lease.name, lease._token, hold.terms.patience)

    def _news_of(
        self, hold: _Hold, outcome: Lease | Busy | Done | Finished, started: float
    ) -> tuple[Signal, dict[str, Any]] | None:
        if isinstance(outcome, Lease):
            if signals.lock_acquired.receivers:
                waited = hold.backend.clock() - started
                return signals.lock_acquired, {"lease": outcome, "waited": waited}
        elif isinstance(outcome, Busy) and signals.lock_timed_out.receivers:
            return signals.lock_timed_out, {
                "name": self.name,
                "using": hold.backend.alias,
                "holder": holder_of(outcome),
                "waited": hold.backend.clock() - started,
            }
        return None

    # --- release ------------------------------------------------------------------------------

    def release(self, success: bool = True) -> None:
        """End the lease; the next waiter has the lock when this returns.

        It is that of the calling thread or asyncio task; or, if that has none and the handle has
        just one, that one, wherever it was acquired.

        Args:
            success: Whether what the lock was taken for is done: only then min_hold counts.

        Raises:
            LockLost: It had been lost before.
            LockUnavailable: The server did not answer. The lease is not held any more, and ends
                on the server within one ttl.
            LockMisuse: There is no such lease, or it belongs to the parent process.
        """
        self._end(success, block=False)

    async def arelease(self, success: bool = True) -> None:
        """See release()."""
        await self._aend(success, block=False)

    def _end(self, success: bool, *, block: bool) -> None:
        """End the lease, or leave it to an outer acquire; also if it is interrupted."""
        hold = None
        try:
            hold = self._hold_to_end(block=block)
            if hold is None and (self._holds or not block):
                self._refuse_release()
            if hold is not None and (flow := self._surrender(hold, success, block=block)):
                reason = hold.backend.run(flow)
                if news := self._finish(hold, success, reason):
                    _tell(*news)
        except LockError:
            raise
        except BaseException:
            hold = hold or self._hold_to_end(block=block)
            if hold is not None and (undo := self._undo(hold, block=block)):
                hold.backend.run(undo)
            raise

    async def _aend(self, success: bool, *, block: bool) -> None:
        """See _end()."""
        hold = None
        try:
            hold = self._hold_to_end(block=block)
            if hold is None and (self._holds or not block):
                self._refuse_release()
            if hold is not None and (flow := self._surrender(hold, success, block=block)):
                reason = await hold.backend.arun(flow)
                if news := self._finish(hold, success, reason):
                    await _atell(*news)
        except (LockError, GeneratorExit):
            raise
        except BaseException:
            hold = hold or self._hold_to_end(block=block)
            if hold is not None and (undo := self._undo(hold, block=block)):
                await hold.backend.arun(undo)
            raise

    def _hold_to_end(self, *, block: bool) -> _Hold | None:
        """What a release or the end of a *block* ends: the caller's last, or else the only one."""
        holds = [hold for hold in self._holds if (hold.block if block else not hold.over)]
        if len(holds) > 1:
            me = _current_holder()
            holds = [hold for hold in holds if hold.is_of(me)]
        return holds[-1] if holds else None

    def _refuse_release(self) -> NoReturn:
        if any(not hold.over for hold in self._holds):
            raise LockMisuse(
                self.name,
                "this handle holds several leases, and none of them is of this thread or asyncio"
                " task, so it is not known which one to release.",
            )
        raise LockMisuse(self.name, "this handle holds no lease, so there is none to release.")

    def _surrender(
        self, hold: _Hold, success: bool, *, block: bool
    ) -> flows.Flow[LostReason | None] | None:
        """Stop relying on the lease, and return what ends it; None if there is nothing to end."""
        lease = hold.lease
        assert lease is not None
        if lease._process is not lease_module.process:
            if not block:
                raise LockMisuse(
                    self.name, "its lease belongs to the parent process; only that may release it."
                )
            self._remove(hold)
            return None
        if hold.over:  # Released within the block.
            self._remove(hold)
            return None
        self._drop(hold, block=block)
        if lease._holds:
            return None
        backend, options = hold.backend, self._options
        now = backend.clock()
        if now >= lease._ends:
            lease._expire()
        backend.forget(lease)
        if reason := lease._end():
            if reason == "unreachable":
                return flows.give_back(self.name, lease._token, hold.terms.patience, reason)
            raise lease._loss()
        # One that was renewed has a beginning in the timeline, so it must have an end.
        lasted = lease.renewals or lease.owner.task or now - lease.granted_at >= REMEMBERED
        return flows.release(
            flows.Ending(
                lease.name,
                lease._token,
                lease.owner,
                lease._deadline,
                lease._ends,
                options.min_hold if success else 0.0,
                options.once if success else 0.0,
                hold.terms.patience,
                block,
                ("done" if success else "failed") if lasted or self._run else "",
                self._run,
            )
        )

    def _drop(self, hold: _Hold, *, block: bool) -> None:
        """It counts no more; but the end of its block will ask for it, and must find no other."""
        if not hold.over and hold.lease is not None:
            hold.over = True
            hold.lease._holds -= 1
        if block or not hold.block:
            self._remove(hold)

    def _finish(
        self, hold: _Hold, success: bool, reason: LostReason | None
    ) -> tuple[Signal, dict[str, Any]] | None:
        lease = hold.lease
        assert lease is not None
        if reason is not None:
            lease._lose(reason, at_release=True)
            raise lease._loss()
        if not signals.lock_released.receivers:
            return None
        held_for = hold.backend.clock() - lease.granted_at
        news = {"lease": lease, "held_for": held_for, "success": success}
        return signals.lock_released, news

    # --- with, async with ---------------------------------------------------------------------

    def __enter__(self) -> Lease:
        match self.attempt():
            case Lease() as lease:
                return lease
            case outcome:
                return self._refuse(outcome)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end(exc_type is None, block=True)
        except (LockLost, LockMisuse, LockUnavailable) as error:
            self._leave_with(error, exc_type is None)

    async def __aenter__(self) -> Lease:
        match await self.aattempt():
            case Lease() as lease:
                return lease
            case outcome:
                return self._refuse(outcome)

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

    def _refuse(self, outcome: Busy | Done | Finished) -> NoReturn:
        assert isinstance(outcome, Busy)
        raise LockTimeout(self.name, holder_of(outcome), outcome.expires_in)

    def _leave_with(self, error: LockLost | LockMisuse | LockUnavailable, success: bool) -> None:
        # The work is done, or its own exception is on its way and must not be masked. A loss is
        # news to a body that succeeded; an unanswered release is not, the lease ends by itself.
        if success and not isinstance(error, LockUnavailable):
            raise error
        logger.error("Left the block of lock %r: %s", self.name, error)

    # --- decorator ----------------------------------------------------------------------------

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        """Decorate a function or coroutine function: each call is made under the lock."""
        _check_decorated(function, f"@distributed_lock({self.name!r})")
        name_of = formatter(self.name, function)
        options = self._options

        if _is_awaited(function):

            @functools.wraps(function)
            async def alocked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                async with Lock(name_of(args, kwargs), options):
                    return await function(*args, **kwargs)  # type: ignore[misc] # see above

            return alocked  # type: ignore[return-value] # it is the coroutine that is returned

        @functools.wraps(function)
        def locked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            with Lock(name_of(args, kwargs), options):
                result = function(*args, **kwargs)
                if inspect.isawaitable(result) or inspect.isgenerator(result):
                    if hasattr(result, "close"):
                        result.close()
                    raise _too_late(function)
                return result

        return locked

    # --- looking ------------------------------------------------------------------------------

    def locked(self) -> bool:
        """Whether anyone holds the lock on the server; also True while it cools down.

        Raises:
            LockUnavailable: The server did not or could not answer.
            LockMisuse: It is called in a thread whose event loop runs.
        """
        if running_loop() is not None:
            self._refuse_to_block_the_loop("`await lock.alocked()`")
        backend = backends[self._options.using]
        return backend.run(self._look(backend))

    async def alocked(self) -> bool:
        """See locked()."""
        backend = backends[self._options.using]
        return await backend.arun(self._look(backend))

    def _look(self, backend: Backend) -> flows.Flow[bool]:
        name = check_name(self.name)
        value = yield from flows.ask(backend.look(name))
        return backend.seen(name, value).holding is not None


def _nameless(function: object) -> TypeError:
    name = getattr(function, "__name__", "name")
    line = f"@distributed_lock({name!r})"
    _check_decorated(function, line)
    return TypeError(
        f"@distributed_lock needs the name of the lock: write {line} above def {name}(...). The"
        " name may have arguments in it, as in 'report:{report_id}'."
    )


def _check_decorated(function: object, line: str) -> None:
    """Refuse whatever would not run under the lock if *line* stood above it."""
    if any(cls.__module__.partition(".")[0] == "celery" for cls in type(function).__mro__):
        # Not looked at in any other way, or Celery would set its application up.
        raise TypeError(
            "distributed_lock was given a Celery task, and workers would run it without the lock."
            f" Write @shared_task above {line}, or @single_instance_task in their place."
        )
    if inspect.isclass(function):
        raise TypeError(
            f"distributed_lock was given the class {function.__qualname__}, and only the making of"
            f" objects would be under the lock. Write {line} above a method; for a view,"
            f' @method_decorator({line[1:]}, name="dispatch") above the class.'
        )
    if isinstance(function, staticmethod | classmethod | property) or not callable(function):
        cure = f"; write @{type(function).__name__} above {line}" * hasattr(function, "__get__")
        raise TypeError(f"distributed_lock decorates functions, not {function!r}{cure}.")
    if _generates(function):
        raise _too_late(function)


def _is_awaited(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    # asgiref knows coroutine functions that were marked as such, too.
    if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):
        return True
    # dispatch() of an asynchronous view is a plain function, and returns a coroutine.
    method = function.func if isinstance(function, functools.partial) else function
    view = getattr(method, "__self__", None)
    return getattr(method, "__name__", "") == "dispatch" and getattr(view, "view_is_async", False)


def _generates(function: Callable[..., Any]) -> bool:
    """Whether calling it runs nothing of its body; also with contextlib.contextmanager over it."""
    if getattr(function, "__globals__", {}).get("__name__") == "contextlib":
        function = inspect.unwrap(function)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _too_late(function: Callable[..., Any]) -> TypeError:
    what = "the generator function " if _generates(function) else ""
    return TypeError(
        f"distributed_lock cannot decorate {what}{getattr(function, '__qualname__', function)}():"
        " its body runs after the call has returned, when the lock is released. Use `with` within"
        " the body, or decorate the coroutine function itself."
    )


def _tell(signal: Signal, news: dict[str, Any]) -> None:
    try:
        signal.send_robust(sender=Lock, **news)
    except RuntimeError:
        # Not a receiver's, which are logged by Django: it cannot call asynchronous receivers
        # from blocking code in an event loop's thread.
        logger.exception("Could not send a signal about a lock")


async def _atell(signal: Signal, news: dict[str, Any]) -> None:
    await signal.asend_robust(sender=Lock, **news)


def holder_of(busy: Busy) -> str:
    """Who holds the lock that an acquire found busy, as ``host:pid task-id``."""
    return str(read_holding(busy.value).owner)


def done_by(done: Done) -> str:
    """Who did what a `once` says is done, in the same form."""
    return str(Owner.unpack(done.value.decode(errors="replace").partition("|")[2]))
