"""What the acquires of a handle got: which lease belongs to whom, from the request to the release.

Each method here may be interrupted between any two of its lines, by a signal handler that raises.
So what the server may have granted is noted before anything else is done, and whatever leaves a
method undoes it or says that it is over.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from django_redislock import misuse, process, signals, transactions
from django_redislock.activity import current_owner
from django_redislock.backends.registry import backends
from django_redislock.exceptions import LockError
from django_redislock.holder import current_holder, must_not_block, new_holder, running_loop
from django_redislock.lease import Lease
from django_redislock.rules import flows
from django_redislock.rules.flows import Busy, Done, Finished, Granted
from django_redislock.rules.grant import Grant, will_renew
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFER
from django_redislock.rules.replies import RELEASED
from django_redislock.rules.scripts import RELEASE
from django_redislock.rules.steps import Answer, Notify
from django_redislock.rules.stored import NO_MARKERS, DoneMarkers, new_identity

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from django_redislock.backends.base import Backend
    from django_redislock.backends.drivers import Begun
    from django_redislock.rules.options import Options, Terms
    from django_redislock.rules.steps import Call, Flow

logger = logging.getLogger("django_redislock")

# Leases at least this long, in seconds, and those of tasks are noted in the timeline of who held a
# lock. Shorter ones would only push these out, and cost a release more than it takes.
NOTED_FROM = 1.0
# What RELEASE_BEFORE_COMMIT has the log be told of.
_TOLD = ("warn", "error")
# What has the transactions of the thread judged before the lock is taken.
_REFUSED = ("error", DEFER)
# Leases of one handle that have ended without a release; the oldest are forgotten.
MOST_HOLDS = 1000


class Hold:
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
        caller = self.lease.grant.caller
        return caller is None or caller.is_served()

    @property
    def may_be_held(self) -> bool:
        """Whether its lease is not known to be over."""
        return self.lease is not None and self.lease.grant.may_be_held(self.backend.clock())


def _only_step(hold: Hold, ending: flows.Ending) -> Call | None:
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
    return isinstance(outcome, Answer) and outcome.value == RELEASED


class Holds:
    """What one handle holds: the private half of lock.Lock."""

    __slots__ = ("_holds", "_options", "_place", "_run", "name")

    def __init__(
        self, name: str, options: Options, run: flows.RunMarker | None = None, place: str = ""
    ) -> None:
        self.name = name
        self._options = options
        self._run = run  # The run of a task that it is for.
        self._place = place  # Where it stands as a decorator.
        self._holds: list[Hold] = []  # The newest last.

    def _own_hold(self) -> Hold | None:
        me = current_holder()
        for hold in reversed(tuple(self._holds)):  # Other threads take out theirs meanwhile.
            if not hold.over and hold.is_of(me):
                return hold
        return None

    def _hold_to_end(self, *, block: bool) -> Hold | None:
        """What a release or the end of a *block* ends: the caller's last, or else the only one."""
        # Of a copy: other threads take out theirs meanwhile, and one of ours would be passed over.
        every = tuple(self._holds)
        holds = [hold for hold in every if (hold.block if block else not hold.over)]
        if len(holds) > 1:
            me = current_holder()
            holds = [hold for hold in holds if hold.is_of(me)]
        return holds[-1] if holds else None

    def _add(self, hold: Hold) -> None:
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

    def _remove(self, hold: Hold) -> None:
        # Not suppress(), which costs each release more than the rest of this.
        try:  # noqa: SIM105
            self._holds.remove(hold)
        except ValueError:
            pass  # It is not there any more.

    def _drop(self, hold: Hold, *, block: bool) -> int:
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

    # --- acquire ------------------------------------------------------------------------------

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
            if running_loop() is not None and must_not_block():
                raise misuse.blocks_the_loop(self.name, "`async with` or `await lock.aacquire()`")
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
                raise misuse.awaits_a_commit(self.name)
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

    def _new_hold(self, *, block: bool) -> Hold:
        if self._options.atomic is not None and not block:
            raise misuse.needs_a_block(self.name)
        outer = self._own_hold() if self._holds else None
        # Settings that are changed while it is held count from the next lease on.
        if outer is not None and outer.may_be_held:
            backend = outer.backend
        else:
            backend = backends[self._options.using]
        return Hold(backend, backend.terms(self._options), block=block)

    def _nest(self, hold: Hold, *, blocking: bool) -> Lease | None:
        """The lease we are in already, if it may be taken again; None if we are in none."""
        me = current_holder()
        now = hold.backend.clock()
        for lease in hold.backend.leases_of(self.name):
            grant = lease.grant
            if grant.is_ended or not grant.is_ours:
                continue
            holder, may_be_held = grant.holder(), grant.may_be_held(now)
            is_mine = holder is me and (grant.caller is None or grant.caller.is_served())
            if is_mine and (self._options.reentrant or grant.is_only_kept):
                if not may_be_held:
                    raise grant.loss(now)
                # First: after an interrupt where this begins, the hold has no lease to give back.
                grant.nest()
                hold.lease = lease
                self._add(hold)
                return lease
            if may_be_held and holder is me and not is_mine:
                raise misuse.shares_a_thread(self.name)
            if may_be_held and (
                error := misuse.waits_for_itself(self.name, holder, me, blocking=blocking)
            ):
                raise error
        return None

    def _request(self, hold: Hold) -> flows.Request:
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

    def _markers(self, backend: Backend) -> DoneMarkers:
        once, run = self._options.once > 0, self._run
        if run is not None:
            return DoneMarkers(once, run.id, backend.kept)
        return DoneMarkers(once) if once else NO_MARKERS

    def _refuse_transaction(self, hold: Hold) -> None:
        """Refuse an acquire whose release would come before the commit, or never."""
        if hold.terms.release_before_commit == DEFER:
            if database := transactions.by_hand():
                raise transactions.never_ends(self.name, database)
        elif transactions.is_open():
            raise transactions.refused(self.name, hold.backend.alias, of_task=self._is_of_task)

    def _taken_at_once(self, hold: Hold, request: flows.Request, begun: Begun) -> Lease | None:
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
        self, hold: Hold, request: flows.Request, started: float, since: float | None
    ) -> Flow[Lease | Busy | Done | Finished]:
        backend = hold.backend
        outcome = yield from flows.acquire(request, started, partial(self._take_over, hold))
        if isinstance(outcome, Granted):
            assert hold.lease is not None
            backend.watch(hold.lease)
            if signals.lock_acquired.receivers:
                waited = backend.clock() - (started if since is None else since)
                yield Notify(
                    signals.lock_acquired,
                    {"sender": type(self), "lease": hold.lease, "waited": waited},
                )
            return hold.lease
        if isinstance(outcome, Busy) and since is None and signals.lock_timed_out.receivers:
            news = {
                "sender": type(self),
                "name": self.name,
                "using": backend.alias,
                "holder": outcome.holder,
                "waited": backend.clock() - started,
            }
            yield Notify(signals.lock_timed_out, news)
        return outcome

    def _take_over(self, hold: Hold, request: flows.Request, granted: Granted) -> Lease:
        """Make the lease. Until this returns, the flow undoes the grant if it is interrupted."""
        terms = hold.terms
        holder, caller = new_holder(for_block=hold.block)
        grant = Grant(
            name=request.name,
            token=request.token,
            ttl=terms.ttl,
            granted_at=granted.at,
            deadline=granted.deadline,
            ends=granted.ends,
            hold_until=granted.at + terms.max_hold,
            auto_renew=terms.renew,
            holder=holder,
            for_block=hold.block,
            caller=caller,
        )
        lease = hold.lease = Lease(
            request.name, request.id, granted.fence, request.owner, hold.backend, grant
        )
        grant.nest()
        self._add(hold)
        return lease

    def _undo(
        self,
        hold: Hold,
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

    def _end(self, success: bool, *, block: bool, hold: Hold | None = None) -> None:
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

    def _let_go(self, hold: Hold | None, success: bool, *, block: bool) -> flows.Ending | None:
        """Rely on the lease no more. Returns its ending, or None if an outer acquire goes on."""
        if hold is None:
            if self._holds or not block:
                has_none = all(one.over for one in tuple(self._holds))
                raise (misuse.holds_none if has_none else misuse.holds_several)(self.name)
            return None
        lease, backend, options = hold.lease, hold.backend, self._options
        assert lease is not None
        grant = lease.grant
        if not grant.is_ours:
            if not block:
                raise misuse.belongs_to_the_parent(self.name)
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

    def _keep(self, hold: Hold, success: bool) -> str | None:
        """Let the transactions that are open hold the lease too, until they are over.

        Returns the alias of a database whose commit nobody hears of, if there is one.
        """
        if hold.over or not hold.may_be_held:
            return None  # It is over, which the block or release() will say.
        lease = hold.lease
        assert lease is not None
        terms = hold.terms._replace(release_before_commit="ignore")
        theirs = Hold(hold.backend, terms, block=True)
        theirs.lease, theirs.over = lease, True
        if transactions.at_end(partial(self._end_kept, theirs, success)):
            theirs.over = not lease.grant.keep()  # In one step, whatever interrupts it.
        return transactions.by_hand()

    def _end_kept(self, hold: Hold, success: bool, committed: bool) -> None:
        """The transactions are over. Nobody is left whom an error could be told but the log."""
        if hold.over or hold.lease is None:
            return  # The release was interrupted before they held it.
        try:
            self._end(success and committed, block=True, hold=hold)
        except LockError as error:
            logger.error("The transaction under lock %r is over: %s", self.name, error)  # noqa: TRY400 - it is no bug
        finally:
            hold.lease.grant.unkeep()

    def _release(self, hold: Hold, ending: flows.Ending, success: bool) -> Flow[None]:
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

    def _tell_released(self, hold: Hold, success: bool) -> Flow[None]:
        if signals.lock_released.receivers:
            assert hold.lease is not None
            held_for = hold.backend.clock() - hold.lease.grant.granted_at
            news = {
                "sender": type(self),
                "lease": hold.lease,
                "held_for": held_for,
                "success": success,
            }
            yield Notify(signals.lock_released, news)

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

    def _given_back(self, hold: Hold, undo: Flow[bool]) -> Flow[None]:
        yield from undo
        yield from self._tell_released(hold, success=False)

    @property
    def _is_of_task(self) -> bool:
        return self._run is not None or current_owner().permit != ""
