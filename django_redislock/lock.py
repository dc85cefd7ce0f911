"""distributed_lock: context manager, async context manager, decorator and handle."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar
from weakref import ref

from django_redislock import process, signals, transactions
from django_redislock.activity import current_owner
from django_redislock.backends.registry import backends
from django_redislock.decorating import (
    check_decorated,
    explaining,
    is_awaited,
    runs_too_late,
    without_transaction,
)
from django_redislock.exceptions import (
    LockError,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.holder import (
    current_holder,
    is_marked,
    must_not_block,
    new_mark,
    running_loop,
    this_thread,
)
from django_redislock.lease import Lease
from django_redislock.rules import flows
from django_redislock.rules.flows import Busy, Done, Finished, Granted
from django_redislock.rules.grant import Grant, will_renew
from django_redislock.rules.names import check_name, formatter
from django_redislock.rules.options import DEFAULT_ALIAS, DEFER, options_of
from django_redislock.rules.scripts import RELEASE
from django_redislock.rules.steps import Answer, Notify
from django_redislock.rules.stored import NO_MARKERS, DoneMarkers, new_identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from datetime import timedelta
    from types import TracebackType

    from django_redislock.backends.base import Backend
    from django_redislock.backends.drivers import Begun
    from django_redislock.rules.options import Options, Terms
    from django_redislock.rules.steps import Call, Flow

    Seconds = float | timedelta

logger = logging.getLogger("django_redislock")

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


# Leases at least this long, in seconds, and those of tasks are noted in the timeline of who held a
# lock. Shorter ones would only push these out, and cost a release more than it takes.
NOTED_FROM = 1.0
# What RELEASE_BEFORE_COMMIT has the log be told of.
_TOLD = ("warn", "error")
# What has the transactions of the thread judged before the lock is taken.
_REFUSED = ("error", DEFER)
# Leases of one handle that have ended without a release; the oldest are forgotten.
MOST_HOLDS = 1000


@explaining
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
    atomic: bool | str = False,
    release_on_commit: bool = False,
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
        atomic: Whether the block is a transaction too, see Lease.atomic(); a string is the alias
            in DATABASES. It is committed before the lock is released.
        release_on_commit: Whether a release while a transaction is open waits for its end, the
            commit or rollback of the outermost atomic(). Blocking code only.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        ValueError: An argument is of the wrong type or out of range.
    """
    given = ttl, wait, renew, max_hold, min_hold, reentrant, using, atomic, release_on_commit
    try:
        options = options_of(*given)
    except TypeError:  # An argument that cannot be hashed; the check says which.
        options = options_of.__wrapped__(*given)
    if options.atomic is not None:
        from django_redislock import effects

        effects.check_database(options.atomic, "atomic")
    return Lock(check_name(name, template=isinstance(name, str) and "{" in name), options)


class _Hold:
    """What one acquire, or one entry of a block, got by a handle."""

    __slots__ = ("backend", "block", "lease", "over", "process", "terms", "transaction")

    def __init__(self, backend: Backend, terms: Terms, *, block: bool) -> None:
        # A lease stays with the backend and the settings that granted it.
        self.backend = backend
        self.terms = terms
        self.block = block  # Whether leaving a block ends it.
        self.process = process.current
        self.lease: Lease | None = None
        self.over = False  # Released within its block, which has not been left yet.
        self.transaction: AbstractContextManager[None] | None = None  # That of the block.

    def is_of(self, holder: object) -> bool:
        """Whether *holder* got it."""
        if self.lease is None or self.lease.grant.holder() is not holder:
            return False
        mark = self.lease.grant.mark
        return mark is None or is_marked(mark)

    @property
    def may_be_held(self) -> bool:
        """Whether its lease is not known to be over."""
        return self.lease is not None and self.lease.grant.may_be_held(self.backend.clock())


def _only_step(hold: _Hold, ending: flows.Ending) -> Call | None:
    """The one step of a plain release; None if there may be more to do than that.

    What is to be noted at the end must not be lost if it is interrupted, so its flow does it.
    """
    assert hold.lease is not None
    call = flows.release_call(ending)
    return call if call.script is RELEASE and not hold.lease.grant.is_lost else None


def _is_released(begun: Begun | None) -> bool:
    """Whether the first step has released it, and nobody is to be told."""
    if begun is None or signals.lock_released.receivers:
        return False
    outcome = begun.outcome
    return isinstance(outcome, Answer) and outcome.value == flows.RELEASED


class Lock:
    """A handle on a lock, made by distributed_lock(). Threads and asyncio tasks may share it.

    Each acquire, and each entry of a block, has a lease of its own and ends only that.
    """

    __slots__ = ("_holds", "_options", "_place", "_run", "name")

    def __init__(
        self, name: str, options: Options, run: flows.RunMarker | None = None, place: str = ""
    ) -> None:
        self.name = name
        self._options = options
        self._run = run  # The run of a task that it is for.
        self._place = place  # Where it stands as a decorator.
        self._holds: list[_Hold] = []  # The newest last.

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

    def _own_hold(self) -> _Hold | None:
        me = current_holder()
        for hold in reversed(tuple(self._holds)):  # Other threads take out theirs meanwhile.
            if not hold.over and hold.is_of(me):
                return hold
        return None

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
        return self.attempt(block=False).__class__ is Lease

    async def aacquire(self) -> bool:
        """See acquire()."""
        return (await self.aattempt(block=False)).__class__ is Lease

    def attempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished:
        """As acquire(), with the whole outcome. For the package's own integrations.

        Args:
            block: Whether ``__exit__()`` ends what is got, as for a block; else ``release()``.
            since: When the wait began of which this is a part. The caller tells if it runs out.
        """
        hold = self._new_hold(block=block)
        backend, request, begun = hold.backend, None, None
        try:
            if running_loop() is not None:
                self._refuse_to_block_the_loop("`async with` or `await lock.aacquire()`")
            if self.name in backend.leases and (nested := self._nest(hold, blocking=True)):
                return nested
            started = backend.clock()
            request = self._request(hold)
            begun = backend.ask(flows.first_try(request))
            if lease := self._taken_at_once(hold, request, begun):
                return lease
            return backend.run(self._attempt(hold, request, started, since), begun)
        except BaseException:
            if undo := self._undo(hold, request, begun, block=block):
                backend.run(undo)
            raise

    async def aattempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished:
        """See attempt()."""
        hold = self._new_hold(block=block)
        backend, request, begun = hold.backend, None, None
        try:
            if self._options.release_on_commit:
                self._refuse_to_await_a_commit()
            if self.name in backend.leases and (nested := self._nest(hold, blocking=False)):
                return nested
            started = backend.clock()
            request = self._request(hold)
            begun = await backend.aask(flows.first_try(request))
            if lease := self._taken_at_once(hold, request, begun):
                return lease
            return await backend.arun(self._attempt(hold, request, started, since), begun)
        except GeneratorExit:
            self._undo(hold, request, begun, block=block)  # Nothing can be awaited any more.
            raise
        except BaseException:
            if undo := self._undo(hold, request, begun, block=block):
                await backend.arun(undo)
            raise

    def _new_hold(self, *, block: bool) -> _Hold:
        if self._options.atomic is not None and not block:
            raise LockMisuse(
                self.name,
                "with atomic, the lock needs a block that ends its transaction. Write `with`; or"
                " leave atomic out, and write `with lock.lease.atomic():` between acquire() and"
                " release().",
            )
        outer = self._own_hold() if self._holds else None
        # Settings that are changed while it is held count from the next lease on.
        if outer is not None and outer.may_be_held:
            backend = outer.backend
        else:
            backend = backends[self._options.using]
        return _Hold(backend, backend.terms(self._options), block=block)

    def _request(self, hold: _Hold) -> flows.Request:
        terms = hold.terms
        if terms.release_before_commit in _REFUSED:
            self._refuse_transaction(hold)
        token, id = new_identity()  # noqa: A001
        return flows.Request(
            # What might have been a template was not judged by its length before.
            check_name(self.name) if "{" in self.name else self.name,
            token,
            id,
            current_owner(),
            terms.first_ttl,
            terms.wait,
            terms.operation_timeout,
            hold.backend.conf.replicas_ack,
            self._markers(hold.backend),
            will_renew(terms.renew, terms.first_ttl, terms.max_hold),
            terms.unavailable_after,
        )

    def _taken_at_once(self, hold: _Hold, request: flows.Request, begun: Begun) -> Lease | None:
        """The lease, if the first try was granted and nobody is to be told; else None."""
        if signals.lock_acquired.receivers or not isinstance(begun.outcome, Answer):
            return None
        granted = flows.granted_by(begun.outcome, request)
        if granted is None or not begun.is_ours:
            return None
        lease = self._take_over(hold, request, granted)
        hold.backend.watch(lease)
        return lease

    def _attempt(
        self, hold: _Hold, request: flows.Request, started: float, since: float | None
    ) -> Flow[Lease | Busy | Done | Finished]:
        backend = hold.backend
        outcome = yield from flows.acquire(request, started, partial(self._take_over, hold))
        if isinstance(outcome, Granted):
            assert hold.lease is not None
            backend.watch(hold.lease)
            if signals.lock_acquired.receivers:
                waited = backend.clock() - (started if since is None else since)
                yield Notify(
                    signals.lock_acquired, {"sender": Lock, "lease": hold.lease, "waited": waited}
                )
            return hold.lease
        if isinstance(outcome, Busy) and since is None and signals.lock_timed_out.receivers:
            news = {
                "sender": Lock,
                "name": self.name,
                "using": backend.alias,
                "holder": outcome.holder,
                "waited": backend.clock() - started,
            }
            yield Notify(signals.lock_timed_out, news)
        return outcome

    def _markers(self, backend: Backend) -> DoneMarkers:
        once, run = self._options.once > 0, self._run
        if run is not None:
            return DoneMarkers(once, run.id, backend.kept)
        return DoneMarkers(once) if once else NO_MARKERS

    def _nest(self, hold: _Hold, *, blocking: bool) -> Lease | None:
        """The lease we are in already, if it may be taken again; None if we are in none."""
        me = current_holder()
        now = hold.backend.clock()
        for lease in hold.backend.leases_of(self.name):
            grant = lease.grant
            if grant.is_ended or not grant.is_ours:
                continue
            holder, may_be_held = grant.holder(), grant.may_be_held(now)
            is_mine = holder is me and is_marked(grant.mark)
            if is_mine and (self._options.reentrant or grant.is_only_kept):
                if not may_be_held:
                    raise grant.loss(now)
                # First: after an interrupt where this begins, the hold has no lease to give back.
                grant.nest()
                hold.lease = lease
                self._add(hold)
                return lease
            if may_be_held and holder is me and not is_mine:
                self._refuse_to_share_a_thread()
            if may_be_held:
                self._refuse_misuse(holder, me, blocking=blocking)
        return None

    def _refuse_to_block_the_loop(self, instead: str) -> None:
        if must_not_block():
            raise LockMisuse(
                self.name,
                "blocking code asks for it in a thread whose event loop runs, so all tasks of"
                f" that would stand still. Use {instead}; or call it in another thread, as"
                " sync_to_async does.",
            )

    def _refuse_transaction(self, hold: _Hold) -> None:
        """Refuse an acquire whose release would come before the commit, or never."""
        if hold.terms.release_before_commit == DEFER:
            if database := transactions.by_hand():
                raise transactions.never_ends(self.name, database)
        elif transactions.is_open():
            raise transactions.refused(self.name, hold.backend.alias, of_task=self._is_of_task)

    def _refuse_to_await_a_commit(self) -> None:
        raise LockMisuse(
            self.name,
            "release_on_commit=True is for blocking code, since Django has no asynchronous"
            " transactions. Use `with` in the function that opens the transaction, and call that by"
            " `await sync_to_async(function)()`.",
        )

    def _refuse_to_share_a_thread(self) -> NoReturn:
        raise LockMisuse(
            self.name,
            "another asyncio task holds it by the thread that sync_to_async lends to both, which"
            " would stand still meanwhile. Write `async with"
            f" distributed_lock({self.name!r})` in the tasks.",
        )

    def _refuse_misuse(self, holder: object, me: object, *, blocking: bool) -> None:
        if holder is me:
            who = "asyncio task" if isinstance(me, asyncio.Task) else "thread"
            raise LockMisuse(
                self.name,
                f"this {who} holds it already, so waiting for it would never end. Pass"
                " reentrant=True to nest, or release it first.",
            )
        if isinstance(me, asyncio.Task) and holder is this_thread():
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

    def _take_over(self, hold: _Hold, request: flows.Request, granted: Granted) -> Lease:
        """Make the lease. Until this returns, the flow undoes the grant if it is interrupted."""
        terms = hold.terms
        grant = Grant(
            name=request.name,
            token=request.token,
            ttl=terms.ttl,
            granted_at=granted.at,
            deadline=granted.deadline,
            ends=granted.ends,
            hold_until=granted.at + terms.max_hold,
            auto_renew=terms.renew,
            holder=ref(current_holder()),
            for_block=hold.block,
            mark=new_mark(),
        )
        lease = hold.lease = Lease(
            request.name, request.id, granted.fence, request.owner, hold.backend, grant
        )
        grant.nest()
        self._add(hold)
        return lease

    def _add(self, hold: _Hold) -> None:
        if not self._holds:
            self._holds.append(hold)
            return
        me = current_holder()
        over = [other for other in tuple(self._holds) if other.over and other.is_of(me)]
        if over and not hold.block:
            # Acquired again within a block that it was released in: the block's end ends it.
            hold.block = True
            self._holds.append(hold)
            self._remove(over[-1])
            return
        self._holds.append(hold)
        if len(self._holds) > MOST_HOLDS:
            # Whoever lets leases run out instead of releasing them must not fill the memory.
            forgotten = (one for one in tuple(self._holds) if not (one.block or one.may_be_held))
            if oldest := next(forgotten, None):
                self._remove(oldest)

    def _remove(self, hold: _Hold) -> None:
        # Not suppress(), which costs each release more than the rest of this.
        try:  # noqa: SIM105
            self._holds.remove(hold)
        except ValueError:
            pass  # It is not there any more.

    def _undo(
        self,
        hold: _Hold,
        request: flows.Request | None = None,
        begun: Begun | None = None,
        *,
        block: bool,
    ) -> Flow[bool] | None:
        """Interrupted: *hold* counts no more. Returns what ends its lease, if that is over.

        Of a *request* that was not judged yet, nobody knows whether it was granted.
        """
        if hold.process is not process.this():
            return None
        lease = hold.lease
        if lease is None:
            if request is None or (begun is not None and begun.outcome is None):
                return None  # Nothing was sent, or its flow has undone it.
            return flows.undo(request.name, request.token, request.operation_timeout)
        if self._drop(hold, block=block) > 0:
            return None
        lease.grant.end()
        hold.backend.forget(lease)
        return flows.undo(lease.name, lease.grant.token, hold.terms.operation_timeout)

    # --- release ------------------------------------------------------------------------------

    def release(self, success: bool = True) -> None:
        """End the lease; the next waiter has the lock when this returns.

        With release_on_commit and an open transaction, it has it when that is over.

        It is that of the calling thread or asyncio task; or, if that has none and the handle has
        just one, that one, wherever it was acquired.

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

    def undo(self) -> None:
        """End the lease of a block as if it had not been granted: nothing of it stays behind.

        For the package's own integrations. The end of the block does nothing then.
        """
        hold = self._hold_to_end(block=True)
        if hold is None or hold.lease is None:
            return
        try:
            if undo := self._undo(hold, block=True):
                hold.backend.run(self._given_back(hold, undo))
        except BaseException:
            if undo := self._undo(hold, block=True):
                hold.backend.run(undo)
            raise

    def _given_back(self, hold: _Hold, undo: Flow[bool]) -> Flow[None]:
        yield from undo
        yield from self._tell_released(hold, success=False)

    async def arelease(self, success: bool = True) -> None:
        """See release()."""
        await self._aend(success, block=False)

    def _end(self, success: bool, *, block: bool, hold: _Hold | None = None) -> None:
        """End the lease, or leave it to an outer acquire; also if it is interrupted."""
        try:
            hold = hold or self._hold_to_end(block=block)
            if (
                hold is not None
                and hold.terms.release_before_commit == DEFER
                and (database := self._keep(hold, success))
            ):
                hold.terms = hold.terms._replace(release_before_commit="ignore")
                self._end(success, block=block, hold=hold)
                raise transactions.never_ends(self.name, database, released=True)
            if ending := self._let_go(hold, success, block=block):
                assert hold is not None
                first = _only_step(hold, ending)
                begun = hold.backend.ask(first) if first is not None else None
                if not _is_released(begun):
                    hold.backend.run(self._release(hold, ending, success), begun)
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
            if ending := self._let_go(hold, success, block=block):
                assert hold is not None
                first = _only_step(hold, ending)
                begun = await hold.backend.aask(first) if first is not None else None
                if not _is_released(begun):
                    await hold.backend.arun(self._release(hold, ending, success), begun)
        except (LockError, GeneratorExit):
            raise
        except BaseException:
            hold = hold or self._hold_to_end(block=block)
            if hold is not None and (undo := self._undo(hold, block=block)):
                await hold.backend.arun(undo)
            raise

    def _hold_to_end(self, *, block: bool) -> _Hold | None:
        """What a release or the end of a *block* ends: the caller's last, or else the only one."""
        # Of a copy: other threads take out theirs meanwhile, and one of ours would be passed over.
        every = tuple(self._holds)
        holds = [hold for hold in every if (hold.block if block else not hold.over)]
        if len(holds) > 1:
            me = current_holder()
            holds = [hold for hold in holds if hold.is_of(me)]
        return holds[-1] if holds else None

    def _refuse_release(self) -> NoReturn:
        if any(not hold.over for hold in tuple(self._holds)):
            raise LockMisuse(
                self.name,
                "this handle holds several leases, and none of them is of this thread or asyncio"
                " task, so it is not known which one to release.",
            )
        raise LockMisuse(self.name, "this handle holds no lease, so there is none to release.")

    def _let_go(self, hold: _Hold | None, success: bool, *, block: bool) -> flows.Ending | None:
        """Rely on the lease no more. Returns its ending, or None if an outer acquire goes on."""
        if hold is None:
            if self._holds or not block:
                self._refuse_release()
            return None
        lease, backend, options = hold.lease, hold.backend, self._options
        assert lease is not None
        grant = lease.grant
        if not grant.is_ours:
            if not block:
                raise LockMisuse(
                    self.name, "its lease belongs to the parent process; only that may release it."
                )
            self._remove(hold)
            return None
        if hold.over:  # Released within the block.
            self._remove(hold)
            return None
        if self._drop(hold, block=block) > 0:
            return None
        if hold.terms.release_before_commit in _TOLD and transactions.is_open():
            transactions.warn(self.name, backend.alias, self._place, of_task=self._is_of_task)
        backend.note_expiry(lease)
        backend.forget(lease)
        grant.end()
        held_for = backend.clock() - grant.granted_at
        # One that was renewed has a beginning in the timeline, so it must have an end.
        noted = grant.renewals or lease.owner.task or held_for >= NOTED_FROM
        return flows.Ending(
            lease.name,
            grant.token,
            lease.id,
            lease.owner,
            grant.deadline,
            grant.ends,
            options.min_hold if success else 0.0,
            options.once if success else 0.0,
            hold.terms.operation_timeout,
            block,
            ("done" if success else "failed") if noted or self._run else "",
            self._run,
            backend.kept,
        )

    def _keep(self, hold: _Hold, success: bool) -> str | None:
        """Let the transactions that are open hold the lease too, until they are over.

        Returns the alias of a database whose commit nobody hears of, if there is one.
        """
        if hold.over or not hold.may_be_held:
            return None  # It is over, which the block or release() will say.
        lease = hold.lease
        assert lease is not None
        terms = hold.terms._replace(release_before_commit="ignore")
        theirs = _Hold(hold.backend, terms, block=True)
        theirs.lease, theirs.over = lease, True
        if transactions.at_end(partial(self._end_kept, theirs, success)):
            theirs.over = not lease.grant.keep()  # In one step, whatever interrupts it.
        return transactions.by_hand()

    def _end_kept(self, hold: _Hold, success: bool, committed: bool) -> None:
        """The transactions are over. Nobody is left whom an error could be told but the log."""
        if hold.over or hold.lease is None:
            return  # The release was interrupted before they held it.
        try:
            self._end(success and committed, block=True, hold=hold)
        except LockError as error:
            logger.error("The transaction under lock %r is over: %s", self.name, error)  # noqa: TRY400 - it is no bug
        finally:
            hold.lease.grant.unkeep()

    @property
    def _is_of_task(self) -> bool:
        return self._run is not None or current_owner().permit != ""

    def _release(self, hold: _Hold, ending: flows.Ending, success: bool) -> Flow[None]:
        lease, backend = hold.lease, hold.backend
        assert lease is not None
        grant = lease.grant
        now = backend.clock()
        if grant.is_lost:
            if grant.lost_reason(now) in {"expired", "unreachable"}:
                # A renewal that was answered too late, or not at all, may have kept it on the
                # server, for others to wait for.
                yield from flows.undo(self.name, grant.token, hold.terms.operation_timeout)
            raise grant.loss(now)
        reason = yield from flows.release(ending)
        now = backend.clock()
        if reason is not None:
            backend.lost(lease, reason, at_release=True)
            raise grant.loss(now)
        yield from self._tell_released(hold, success)

    def _tell_released(self, hold: _Hold, success: bool) -> Flow[None]:
        if signals.lock_released.receivers:
            assert hold.lease is not None
            held_for = hold.backend.clock() - hold.lease.grant.granted_at
            news = {"sender": Lock, "lease": hold.lease, "held_for": held_for, "success": success}
            yield Notify(signals.lock_released, news)

    def _drop(self, hold: _Hold, *, block: bool) -> int:
        """It counts no more. Returns how many acquires of its lease still do.

        It stays in the list until its block ends: the end of a block looks for its hold there, and
        would else find that of another thread.
        """
        lease = hold.lease
        assert lease is not None
        left = lease.grant.holds
        if not hold.over:
            # First: an interrupt where this begins leaves both as they were.
            left = lease.grant.unnest()
            hold.over = True
        if block or not hold.block:
            self._remove(hold)
        return left

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
        from django_redislock import effects

        # Before the lock is taken: whoever waits for it must not wait for nothing.
        effects.check_outermost(self.name, database)
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
            if self._options.atomic is not None:
                self._end_transaction(exc_type, exc, traceback)
            success = exc_type is None
        finally:
            try:
                self._end(success, block=True)
            except (LockLost, LockMisuse, LockUnavailable) as error:
                self._leave_with(error, success)

    def _end_transaction(self, *exc_info: Any) -> None:
        """Commit the transaction of the block, or roll it back, while the lock is still held."""
        hold = self._hold_to_end(block=True)
        if hold is None or hold.transaction is None:
            return
        try:
            hold.transaction.__exit__(*exc_info)
        except BaseException as error:
            # If it was interrupted before it began, the transaction is still open. Else this does
            # nothing.
            hold.transaction.__exit__(type(error), error, error.__traceback__)
            raise

    async def __aenter__(self) -> Lease:
        if self._options.atomic is not None:
            raise LockMisuse(
                self.name,
                "Django has no asynchronous transactions. Call a function through sync_to_async,"
                " and write `with` in that.",
            )
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
        using = self._options.using
        raise LockTimeout(self.name, outcome.holder, outcome.expires_in, outcome.cooling, using)

    def _leave_with(self, error: LockLost | LockMisuse | LockUnavailable, success: bool) -> None:
        # The work is done, or its own exception is on its way and must not be masked. A loss is
        # news to a body that succeeded; an unanswered release is not, the lease ends by itself.
        # With atomic, the commit is behind us, and the database had no later lease: what LockLost
        # tells is that nothing was written, so it must not be raised here.
        is_committed = self._options.atomic is not None and isinstance(error, LockLost)
        if success and not is_committed and not isinstance(error, LockUnavailable):
            raise error
        logger.error("Left the block of lock %r: %s", self.name, error)

    # --- decorator ----------------------------------------------------------------------------

    def __call__(self, function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        """Decorate a function or coroutine function: each call is made under the lock."""
        line = f"@distributed_lock({self.name!r})"
        check_decorated(function, line)
        name_of = formatter(self.name, function)
        options = self._options
        place = f"{line} of {function.__module__}.{getattr(function, '__qualname__', function)}()"

        if is_awaited(function):
            if options.atomic is not None:
                raise without_transaction(function)
            if options.release_on_commit:
                self._refuse_to_await_a_commit()

            @functools.wraps(function)
            async def alocked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                async with Lock(name_of(args, kwargs), options, place=place):
                    return await function(*args, **kwargs)  # type: ignore[misc] # see above

            return alocked  # type: ignore[return-value] # it is the coroutine that is returned

        @functools.wraps(function)
        def locked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
            with Lock(name_of(args, kwargs), options, place=place):
                result = function(*args, **kwargs)
                if inspect.isawaitable(result) or inspect.isgenerator(result):
                    if hasattr(result, "close"):
                        result.close()
                    raise runs_too_late(function)
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

    def _look(self, backend: Backend) -> Flow[bool]:
        name = check_name(self.name)
        value = yield from flows.ask(backend.look(name))
        return backend.seen(name, value).holding is not None
