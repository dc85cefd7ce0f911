"""distributed_lock: context manager, async context manager, decorator and handle."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import threading
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypeVar
from weakref import ref

from asgiref.sync import iscoroutinefunction

from django_redislock import flows, signals
from django_redislock import lease as lease_module
from django_redislock.backends.base import read_holding
from django_redislock.conf import DEFAULT_ALIAS, SHORTEST_TTL, backends, flag, seconds, text
from django_redislock.exceptions import (
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.flows import Busy, Done, Finished, Granted
from django_redislock.lease import Lease, Owner
from django_redislock.names import check_name, formatter
from django_redislock.owner import current_owner

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from types import TracebackType

    from django.dispatch import Signal

    from django_redislock.backends.base import Backend
    from django_redislock.exceptions import LostReason

    Seconds = float | timedelta

logger = logging.getLogger("django_redislock")

# None without a loop, where get_running_loop() would raise, ten times as slow.
_running_loop = asyncio._get_running_loop

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


MAX_KNOWN_TERMS = 1000
# Leases at least this long, in seconds, and those of tasks are remembered for the timeline of who
# held a lock. Shorter ones would only push these out, and cost a release more than it takes.
REMEMBERED = 1.0


class _Thread:
    """A thread as a holder. Its ident would not do: idents are used again."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.holder = _Thread()


_this_thread = _ThisThread()


def _current_holder() -> asyncio.Task[Any] | _Thread:
    """What a lease granted here belongs to: the running asyncio task, or else the thread."""
    loop = _running_loop()
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


class Lock:
    """A handle on a lock: holds one lease at a time. Made by distributed_lock()."""

    __slots__ = ("_backend", "_depth", "_lease", "_options", "_run", "_terms", "name")

    # Set by acquire: a lease stays with the backend and the settings that granted it.
    _backend: Backend
    _terms: Terms

    def __init__(self, name: str, options: Options, run: flows.Run | None = None) -> None:
        self.name = name
        self._options = options
        self._run = run  # The run of a task that it is for.
        self._lease: Lease | None = None
        self._depth = 0  # How often this handle holds the lease, if it is reentrant.

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}: {self._lease or 'not held by this handle'}>"

    @property
    def lease(self) -> Lease | None:
        """The lease that this handle holds, or None."""
        return self._lease

    # --- acquire ------------------------------------------------------------------------------

    def acquire(self) -> bool:
        """Take the lock, waiting up to ``wait`` seconds for it. Returns whether it is ours.

        Raises:
            LockUnavailable: The server did not or could not answer; never means "busy".
            LockMisuse: This handle, thread or asyncio task holds it already.
            LockLost: A reentrant acquire within a lease that was lost.
        """
        return self.attempt() is self._lease

    async def aacquire(self) -> bool:
        """See acquire()."""
        return await self.aattempt() is self._lease

    # Python runs signal handlers, which may raise, where a function begins and after a call of C
    # code. From the end of attempt() to the code of the caller there is neither, so isinstance()
    # would not do: a lease that nobody knows of would be renewed for ever.

    def attempt(self) -> Lease | Busy | Done | Finished:
        """As acquire(), with the whole outcome. For the package's own integrations."""
        before, depth = self._lease, self._depth
        try:
            request = self._begin(blocking=True)
            if isinstance(request, Lease):
                return request
            backend = self._backend
            started = backend.clock()
            outcome = self._conclude(backend.run(flows.acquire(request, started, self._keep)))
            if news := self._news_of(outcome, started):
                _tell(*news)
            return outcome
        except BaseException:
            if undo := self._undo(self._lease, depth if self._lease is before else 0):
                self._backend.run(undo)
            raise

    async def aattempt(self) -> Lease | Busy | Done | Finished:
        """See attempt()."""
        before, depth = self._lease, self._depth
        try:
            request = self._begin(blocking=False)
            if isinstance(request, Lease):
                return request
            backend = self._backend
            started = backend.clock()
            outcome = self._conclude(
                await backend.arun(flows.acquire(request, started, self._keep))
            )
            if news := self._news_of(outcome, started):
                await _atell(*news)
            return outcome
        except GeneratorExit:
            raise  # Nothing can be awaited any more.
        except BaseException:
            if undo := self._undo(self._lease, depth if self._lease is before else 0):
                await self._backend.arun(undo)
            raise

    def _begin(self, *, blocking: bool) -> flows.Request | Lease:
        """What to ask for; or the lease we are in already, if it may be taken again."""
        if self._lease is None or not self._lease._active:
            self._backend = backends[self._options.using]
        backend, options, name = self._backend, self._options, self.name
        if name in backend.leases and (nested := self._nest(blocking=blocking)):
            return nested
        # Programs use few combinations, many times.
        terms = self._terms = backend.terms.get(options) or _terms(backend, options)
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
            terms.unavailable_after,
        )

    def _nest(self, *, blocking: bool) -> Lease | None:
        """The lease we are in already, if it may be taken again; None if we are in none."""
        me = _current_holder()
        for lease in self._backend.leases_of(self.name):
            if lease._ended or lease._process is not lease_module.process:
                continue
            holder, held = lease._holder(), lease.held
            if holder is me and self._options.reentrant:
                if not held:
                    raise LockLost(self.name, lease.lost_reason or "expired")
                self._terms = _terms(self._backend, self._options)
                lease._holds += 1
                self._depth += 1
                self._lease = lease
                return lease
            if held:
                self._refuse_misuse(lease, holder, me, blocking=blocking)
        return None

    def _refuse_misuse(self, lease: Lease, holder: object, me: object, *, blocking: bool) -> None:
        if holder is me:
            who = "asyncio task" if isinstance(me, asyncio.Task) else "thread"
            raise LockMisuse(
                self.name,
                f"this {who} holds it already, so waiting for it would never end. Pass"
                " reentrant=True to nest, or release it first.",
            )
        if lease is self._lease:
            raise LockMisuse(
                self.name,
                "this handle holds it already, in another thread or asyncio task. Make one for"
                " each with distributed_lock().",
            )
        if isinstance(me, asyncio.Task) and holder is _this_thread.holder:
            raise LockMisuse(
                self.name,
                "blocking code of this thread holds it, beneath the event loop, and cannot release"
                " it before the loop has ended.",
            )
        if blocking and isinstance(holder, asyncio.Task) and holder.get_loop() is _running_loop():
            raise LockMisuse(
                self.name,
                "a task of this thread's event loop holds it, which cannot release it while this"
                " call blocks the loop. Use `async with`.",
            )

    def _heed(self) -> str:
        """What would make it pointless, see lua/_heed.lua."""
        return f"{self._options.once > 0:d}{self._run.id if self._run else ''}"

    def _keep(self, request: flows.Request, granted: Granted) -> None:
        """Take over from the flow, which undoes the grant if it is interrupted before."""
        backend, terms = self._backend, self._terms
        lease = Lease(
            name=request.name,
            token=request.token,
            id=request.id,
            fence=granted.fence,
            owner=request.owner,
            ttl=terms.ttl,
            deadline=granted.deadline,
            settled=granted.settled,
            granted_at=granted.at,
            hold_until=granted.at + terms.max_hold,
            auto_renew=terms.renew,
            keeper=backend,
            holder=ref(_current_holder()),
        )
        self._lease, self._depth, lease._holds = lease, 1, 1

    def _conclude(
        self, outcome: Granted | Busy | Done | Finished
    ) -> Lease | Busy | Done | Finished:
        if not isinstance(outcome, Granted):
            return outcome
        lease = self._lease
        assert lease is not None
        self._backend.watch(lease)
        return lease

    def _undo(self, lease: Lease | None, depth: int) -> flows.Flow[bool] | None:
        """Interrupted: hold *lease* only *depth* times. Returns what ends it, if it is over."""
        if lease is None or lease._process is not lease_module.process:
            return None
        if self._depth > depth:
            self._let_go(lease)
        if lease._holds:
            return None
        lease._end()
        self._backend.forget(lease)
        return flows.undo(lease.name, lease._token, self._terms.patience)

    def _news_of(
        self, outcome: Lease | Busy | Done | Finished, started: float
    ) -> tuple[Signal, dict[str, Any]] | None:
        if isinstance(outcome, Lease):
            if signals.lock_acquired.receivers:
                waited = self._backend.clock() - started
                return signals.lock_acquired, {"lease": outcome, "waited": waited}
        elif isinstance(outcome, Busy) and signals.lock_timed_out.receivers:
            return signals.lock_timed_out, {
                "name": self.name,
                "using": self._backend.alias,
                "holder": holder_of(outcome),
                "waited": self._backend.clock() - started,
            }
        return None

    # --- release ------------------------------------------------------------------------------

    def release(self, success: bool = True) -> None:
        """End the lease; the next waiter has the lock when this returns.

        Args:
            success: Whether what the lock was taken for is done: only then min_hold counts.

        Raises:
            LockLost: It had been lost before.
            LockUnavailable: The server did not answer. The lease is not held any more, and ends
                on the server within one ttl.
            LockMisuse: This handle holds no lease, or it belongs to the parent process.
        """
        self._end(success, insist=False)

    async def arelease(self, success: bool = True) -> None:
        """See release()."""
        await self._aend(success, insist=False)

    def _end(self, success: bool, *, insist: bool) -> None:
        """End the lease, or leave it to an outer acquire; also if it is interrupted."""
        held, depth = self._lease, self._depth - 1
        try:
            if surrendered := self._surrender(success, insist=insist):
                lease, ending = surrendered
                reason = self._backend.run(flows.release(ending))
                if news := self._finish(lease, success, reason):
                    _tell(*news)
        except LockError:
            raise
        except BaseException:
            if undo := self._undo(held, depth):
                self._backend.run(undo)
            raise

    async def _aend(self, success: bool, *, insist: bool) -> None:
        """See _end()."""
        held, depth = self._lease, self._depth - 1
        try:
            if surrendered := self._surrender(success, insist=insist):
                lease, ending = surrendered
                reason = await self._backend.arun(flows.release(ending))
                if news := self._finish(lease, success, reason):
                    await _atell(*news)
        except (LockError, GeneratorExit):
            raise
        except BaseException:
            if undo := self._undo(held, depth):
                await self._backend.arun(undo)
            raise

    def _surrender(self, success: bool, *, insist: bool) -> tuple[Lease, flows.Ending] | None:
        """Stop relying on the lease, which is to be ended; None if there is nothing to end."""
        lease = self._lease
        if insist and (lease is None or lease._process is not lease_module.process):
            return None  # The block holds nothing: released within it, or a forked child's.
        if lease is None:
            raise LockMisuse(self.name, "this handle holds no lease, so there is none to release.")
        if lease._process is not lease_module.process:
            raise LockMisuse(
                self.name, "its lease belongs to the parent process; only that may release it."
            )
        self._let_go(lease)
        if lease._holds:
            return None
        backend, options = self._backend, self._options
        now = backend.clock()
        if now >= lease._deadline and not lease.held:
            lease._expire()
        backend.forget(lease)
        if reason := lease._end():
            raise LockLost(self.name, reason)
        # One that was renewed has a beginning in the timeline, so it must have an end.
        lasted = lease.renewals or lease.owner.task or now - lease.granted_at >= REMEMBERED
        return lease, flows.Ending(
            lease.name,
            lease._token,
            lease.owner,
            lease._deadline,
            options.min_hold if success else 0.0,
            options.once if success else 0.0,
            self._terms.patience,
            insist,
            ("done" if success else "failed") if lasted or self._run else "",
            self._run,
        )

    def _let_go(self, lease: Lease) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._lease = None
        lease._holds -= 1

    def _finish(
        self, lease: Lease, success: bool, reason: LostReason | None
    ) -> tuple[Signal, dict[str, Any]] | None:
        if reason is not None:
            lease._lose(reason, at_release=True)
            raise LockLost(self.name, reason)
        if not signals.lock_released.receivers:
            return None
        held_for = self._backend.clock() - lease.granted_at
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
            self._end(exc_type is None, insist=True)
        except (LockLost, LockUnavailable) as error:
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
            await self._aend(exc_type is None, insist=True)
        except (LockLost, LockUnavailable) as error:
            self._leave_with(error, exc_type is None)

    def _refuse(self, outcome: Busy | Done | Finished) -> NoReturn:
        assert isinstance(outcome, Busy)
        raise LockTimeout(self.name, holder_of(outcome), outcome.expires_in)

    def _leave_with(self, error: LockLost | LockUnavailable, success: bool) -> None:
        # The work is done, or its own exception is on its way and must not be masked. A loss is
        # news to a body that succeeded; an unanswered release is not, the lease ends by itself.
        if success and isinstance(error, LockLost):
            raise error
        logger.error("Left the block of lock %r: %s", self.name, error)

    # --- decorator ----------------------------------------------------------------------------

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        """Decorate a function or coroutine function: each call is made under the lock."""
        if not callable(function):
            raise TypeError(
                f"distributed_lock decorates functions, not {function!r}; write it below"
                " @classmethod and @property."
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise _too_late(function)
        name_of = formatter(self.name, function)
        options = self._options

        # asgiref knows coroutine functions that were marked as such, too.
        if iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__):

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
        """
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


def _too_late(function: Callable[..., Any]) -> TypeError:
    generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    what = "the generator function " if generates else ""
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
