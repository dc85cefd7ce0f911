"""How a handle acquires and releases, and which holder each lease belongs to.

A signal handler that raises may interrupt each method here between any two of its lines. So a
method first notes what the server may have granted. If an exception leaves the method, the grant
is undone, or known to be over.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from os import getpid
from typing import TYPE_CHECKING, Any, NoReturn

from django_redislock import logs, misuse, process, signals, transactions
from django_redislock.backends.registry import backends
from django_redislock.deadlocks import Lookout
from django_redislock.exceptions import LockError, LockUnavailable
from django_redislock.holder import (
    LOCAL,
    current_holder,
    current_owner,
    must_not_block,
    new_holder,
    running_loop,
)
from django_redislock.lease import Lease
from django_redislock.rules import flows
from django_redislock.rules.flows import Busy, Done, Finished, Replaced
from django_redislock.rules.forms import Attempt, Release, release, release_again
from django_redislock.rules.lease_state import Granted, granted_by, token_of
from django_redislock.rules.names import check_name
from django_redislock.rules.options import DEFER
from django_redislock.rules.replies import RELEASED
from django_redislock.rules.steps import Notify
from django_redislock.rules.stored import NO_MARKERS, DoneMarkers, Owner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from django.dispatch import Signal

    from django_redislock.backends.base import Backend
    from django_redislock.exceptions import LockMisuse, LostReason
    from django_redislock.rules.options import Options, Terms
    from django_redislock.rules.steps import Flow

logger = logs.logger("django_redislock")

# Leases at least this long, in seconds, and those of jobs are noted in the timeline of a lock.
# Shorter ones would push these out, and a note would cost more than the release itself.
NOTED_FROM = 1.0
# Values of RELEASE_BEFORE_COMMIT with which a release before the commit is logged.
_TOLD = ("warn", "error")
# Values with which the thread's transactions are judged before the lock is taken.
REFUSED = ("error", DEFER)
# Leases of one handle that have ended without a release; the oldest are forgotten.
MOST_ENTRIES = 1000
MOST_NAMES = 4096  # Names known to be of locks with or without a limit.


class Entry:
    """One acquire, or one entry of a block, by a handle."""

    lease: Lease | None = None
    over = False  # Released within its block, which has not been left yet.
    transaction: AbstractContextManager[None] | None = None  # That of the block.
    parts: Sequence[Any] = ()  # Of a joint lock: see joint_handle.Part.
    attempt: Attempt | None = None  # That asks for the lease; None if the holder has it already.

    def __init__(self, backend: Backend, terms: Terms, block: bool) -> None:
        # A lease stays with the backend and the settings that granted it.
        self.backend = backend
        self.terms = terms
        self.block = block  # Whether leaving a block ends it.
        self.process = process.current

    def __reduce__(self) -> NoReturn:  # Of a handle that is pickled or deep-copied.
        assert self.lease is not None  # Else no handle has it.
        raise TypeError(
            f"A handle that holds lock {self.lease.name!r} cannot be pickled: the lease belongs to"
            " this process. Pass the name, and make another handle there."
        )

    def is_of(self, holder: object) -> bool:
        """Whether it is an entry of *holder*."""
        if self.lease is None or self.lease.holder() is not holder:
            return False
        caller = self.lease.caller
        return caller is None or caller.is_served()

    @property
    def may_be_held(self) -> bool:
        """Whether its lease is not known to be over."""
        return self.lease is not None and self.lease.may_be_held(self.backend.clock())

    def end_transaction(self, *exc_info: Any) -> None:
        """Commit the transaction of the block, or roll it back, while the lock is still held."""
        if self.transaction is None:
            return
        try:
            self.transaction.__exit__(*exc_info)
        except BaseException as error:
            # If it was interrupted before it began, the transaction is still open. Else this does
            # nothing.
            self.transaction.__exit__(type(error), error, error.__traceback__)
            raise


def awaits_commit(entry: Entry) -> bool:
    """Whether transactions go on with its lease: its success counts when they are committed."""
    assert entry.lease is not None
    return entry.terms.release_before_commit == DEFER and entry.lease.transactions > 0


class Handle:
    """The entries of one handle: the private half of lock.Lock."""

    __slots__ = ("_entries", "_options", "_place", "_run", "name", "template")

    name: str
    template: str  # The name as it was written.
    _options: Options
    _run: flows.RunMarker | None  # The run of a task, if it is for one.
    _place: str  # Where the decorator stands.
    _entries: list[Entry]  # The newest last.

    def _own_entry(self) -> Entry | None:
        me = current_holder()
        for entry in reversed(tuple(self._entries)):  # Other threads take out theirs meanwhile.
            if not entry.over and entry.is_of(me):
                return entry
        return None

    def _entry_to_end(self, *, block: bool) -> Entry | None:
        """The entry to end, by a release or the end of a *block*: the caller's last, or else the
        only one of that kind. A release never ends another's block."""
        # A copy: other threads take out theirs meanwhile, and a loop would pass over one of ours.
        every = tuple(self._entries)
        if len(every) != 1 or every[0].block is not block or every[0].over:
            every = tuple([entry for entry in every if (entry.block if block else not entry.over)])
            me = current_holder()
            if mine := [entry for entry in every if entry.is_of(me)]:
                return mine[-1]
            every = tuple([entry for entry in every if entry.block is block])
        return every[0] if len(every) == 1 else None

    def _add(self, entry: Entry) -> None:
        """Add *entry* to a handle that has others."""
        me = current_holder()
        over = [other for other in tuple(self._entries) if other.over and other.is_of(me)]
        if over and not entry.block:
            # Released and acquired again within a block: the block's end ends this entry.
            entry.block = True
            self._entries.append(entry)
            self._remove(over[-1])
            return
        self._entries.append(entry)
        if len(self._entries) > MOST_ENTRIES:
            # Leases that run out instead of being released must not fill the memory.
            forgotten = (one for one in tuple(self._entries) if not (one.block or one.may_be_held))
            if oldest := next(forgotten, None):
                self._remove(oldest)

    def _remove(self, entry: Entry) -> None:
        with suppress(ValueError):  # It is not there any more.
            self._entries.remove(entry)

    def _drop(self, entry: Entry, *, block: bool) -> int:
        """End *entry*. Returns how many acquires of its lease are left.

        An entry of a block stays in the list until the block ends. Without it, the end of the block
        would find the entry of another thread.
        """
        lease = entry.lease
        assert lease is not None
        left = lease.times_held
        if not entry.over:
            # First: an interrupt where this begins leaves both as they were.
            left = lease.unnest()
            entry.over = True
        if block or not entry.block:
            try:  # noqa: SIM105 - suppress() costs more than all the rest
                self._entries.remove(entry)
            except ValueError:
                pass  # It is not there any more.
        return left

    # --- acquire ------------------------------------------------------------------------------

    def attempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished | Replaced:
        """As acquire(), with the whole outcome. For the package's own integrations.

        Args:
            block: Whether ``__exit__()`` ends the entry, as of a block; else ``release()`` does.
            since: When the whole wait began, if this is a part of it. The caller tells if it runs
                out.
        """
        entry = self._new_entry(block=block)
        backend = entry.backend
        try:
            if running_loop() is not None and must_not_block():
                raise misuse.blocks_the_loop(self.name, "`async with` or `await lock.aacquire()`")
            if self.name in backend.leases and (nested := self._nest(entry, blocking=True)):
                return nested
            form = entry.attempt = self._first_try(entry)
            backend.begin(form)
            granted = form.granted or granted_by(
                form.reply, form.sent, form.now, form.terms.certain
            )
            if granted and form.made_in is process.current:
                lease = self._take_over(entry, form, granted)
                if signals.lock_acquired.receivers:
                    news = self._news_of_grant(entry, form.sent if since is None else since)
                    signals.lock_acquired.send_robust(**news)
                return lease
            return backend.run(self._attempt(entry, form, since), form)
        except BaseException:
            if undo := self._undo(entry, block=block):
                backend.run(undo)
            raise

    async def aattempt(
        self, *, block: bool = True, since: float | None = None
    ) -> Lease | Busy | Done | Finished | Replaced:
        """See attempt()."""
        entry = self._new_entry(block=block)
        backend = entry.backend
        try:
            if self._options.release_on_commit:
                raise misuse.awaits_a_commit(self.name)
            if self.name in backend.leases and (nested := self._nest(entry, blocking=False)):
                return nested
            form = entry.attempt = self._first_try(entry)
            await backend.abegin(form)
            granted = form.granted or granted_by(
                form.reply, form.sent, form.now, form.terms.certain
            )
            if granted and form.made_in is process.current:
                lease = self._take_over(entry, form, granted)
                if signals.lock_acquired.receivers:
                    news = self._news_of_grant(entry, form.sent if since is None else since)
                    await signals.lock_acquired.asend_robust(**news)
                return lease
            return await backend.arun(self._attempt(entry, form, since), form)
        except GeneratorExit:
            self._undo(entry, block=block)  # Nothing can be awaited any more.
            raise
        except BaseException:
            if undo := self._undo(entry, block=block):
                await backend.arun(undo)
            raise

    async def _aenter(self) -> Lease:
        match await self.aattempt():
            case Lease() as lease:
                return lease
            case outcome:
                return self._refuse(outcome)

    def _refuse(self, outcome: object) -> NoReturn:
        assert isinstance(outcome, Busy)
        raise outcome.timeout(self._options.using)

    def _new_entry(self, *, block: bool) -> Entry:
        if self._options.atomic is not None and not block:
            raise misuse.needs_a_block(self.name)
        if threading.local is not LOCAL:
            raise misuse.is_patched_late(self.name)
        outer = self._own_entry() if self._entries else None
        if getpid() != process.pid:  # Here, to save a call: process.this() compares the same.
            process.this()
        # Settings that are changed while it is held count from the next lease on.
        if outer is not None and outer.may_be_held:
            backend = outer.backend
        else:
            using = self._options.using
            backend = backends.get(using) or backends[using]
        return Entry(backend, backend.terms(self._options), block)

    def _nest(self, entry: Entry, *, blocking: bool) -> Lease | None:
        """The lease that this holder has already, if it may be taken again; None if it has none."""
        me = current_holder()
        now = entry.backend.clock()
        limit, in_the_way = entry.terms.limit, 0
        lost: Lease | None = None
        error: LockMisuse | None = None
        # Of several, all but the newest are lost, or they are other permits.
        for lease in reversed(entry.backend.leases.of(self.name)):
            holder = lease.holder()
            if holder is not me and running_loop() is None:
                continue  # Another thread's, which can release it while this one waits.
            if lease.is_ended or not lease.is_ours:
                continue
            may_be_held = lease.may_be_held(now)
            is_mine = holder is me and (lease.caller is None or lease.caller.is_served())
            if is_mine and (self._options.reentrant or lease.is_held_by_transactions_only):
                if not may_be_held:
                    lost = lost or lease
                    continue
                # First: after an interrupt where this begins, the entry has no lease to give back.
                lease.nest()
                entry.lease = lease
                self._add(entry)
                return lease
            if not may_be_held or not entry.terms.wait:
                continue  # Without a wait, it is as busy as for anybody else.
            refusal: LockMisuse | None = misuse.shares_a_thread(self.name)
            if holder is not me or is_mine:
                of_job = self._run is not None
                refusal = misuse.waits_for_itself(
                    self.name, holder, me, blocking=blocking, of_job=of_job, limit=limit
                )
            if refusal is not None:
                in_the_way += 1  # There may be other permits.
                error = refusal
        if lost is not None:
            raise lost.loss(now)
        if error is not None and in_the_way >= limit:
            raise copy(error)  # Else this frame and the error would refer to each other.
        return None

    def _first_try(self, entry: Entry) -> Attempt:
        terms, options, run = entry.terms, self._options, self._run
        if terms.release_before_commit in REFUSED:
            self._refuse_transaction(entry)
        markers = NO_MARKERS
        if run is not None and entry.backend.supports_records:
            markers = DoneMarkers(options.once > 0, run.id, entry.backend.retention)
        elif options.once and not options.renews_once:
            markers = DoneMarkers(once=True)
        # A name that might be a template was not checked for its length before.
        name = check_name(self.name) if "{" in self.name else self.name
        with_limit, known = options.limit is not None, entry.backend.has_limit
        if known.setdefault(name, with_limit) is not with_limit:
            raise misuse.mixes_limits(name, options.limit)
        if len(known) > MOST_NAMES:
            known.clear()
        owner = current_owner(limit=terms.limit) if terms.limit > 1 else current_owner()
        if run is not None and terms.replace_within is not None:
            owner = replace(owner, called=run.called)
        form = Attempt(
            name,
            owner,
            terms,
            replicas=entry.backend.conf.replicas_ack,
            markers=markers,
            template=self.template,
            has_limit=with_limit,
            is_of_run=run is not None,
        )
        if run is not None and run.is_again:
            form.is_again = True
        return form

    def _refuse_transaction(self, entry: Entry) -> None:
        """Refuse an acquire whose release would come before the commit, or never."""
        if entry.terms.release_before_commit == DEFER:
            if database := transactions.by_hand():
                raise transactions.never_ends(self.name, database)
        elif transactions.is_open():
            raise transactions.refused(self.name, entry.backend.alias, of_task=self._is_of_task)

    def _attempt(
        self, entry: Entry, form: Attempt, since: float | None
    ) -> Flow[Lease | Busy | Done | Finished | Replaced]:
        """The flow of an attempt that is not granted at once."""
        started = form.sent or entry.backend.clock()
        outcome = yield from self._ask(entry, form, started if since is None else since)
        if isinstance(outcome, Lease):
            yield from self._tell_acquired(entry, started if since is None else since)
        elif isinstance(outcome, Busy) and since is None:
            yield from self._tell_timed_out(entry, outcome, started)
        return outcome

    def _ask(
        self, entry: Entry, form: Attempt, since: float
    ) -> Flow[Lease | Busy | Done | Finished | Replaced]:
        """Ask for the lock. Only if no server answers, somebody is told: who has waited *since*."""
        started = form.sent or entry.backend.clock()
        lookout = Lookout(entry.backend, form, started)
        take_over = partial(self._take_over, entry, form)
        try:
            outcome = yield from lookout.over(flows.acquire(form, started, take_over, lookout))
        except LockUnavailable as error:
            yield from self._tell_unavailable(entry, error, since)
            raise
        if isinstance(outcome, Granted):
            assert entry.lease is not None
            return entry.lease
        return outcome

    def _tell_acquired(self, entry: Entry, since: float) -> Flow[None]:
        if signals.lock_acquired.receivers:
            yield Notify(signals.lock_acquired, self._news_of_grant(entry, since))

    def _news_of_grant(self, entry: Entry, since: float) -> dict[str, Any]:
        lease, attempt = entry.lease, entry.attempt
        assert lease is not None
        owner = None if attempt is None else attempt.blocked_by
        return {
            "sender": self._sender,
            "lease": lease,
            "waited": entry.backend.clock() - since,
            "blocked_by": None if owner is None else Owner.unpack(owner.decode(errors="replace")),
            "template": lease.template,
        }

    def _tell_timed_out(self, entry: Entry, busy: Busy, since: float) -> Flow[None]:
        why = {"holder": busy.holder, "blocked_by": busy.holding.owner}
        yield from self._tell_in_vain(signals.lock_timed_out, entry, busy.name, since, **why)

    def _tell_unavailable(self, entry: Entry, error: LockUnavailable, since: float) -> Flow[None]:
        why = {"reason": error.reason, "lease": entry.lease}
        yield from self._tell_in_vain(signals.lock_unavailable, entry, self.name, since, **why)

    def _tell_in_vain(
        self, signal: Signal, entry: Entry, name: str, since: float, **why: Any
    ) -> Flow[None]:
        if signal.receivers:
            waited = entry.backend.clock() - since
            news = {"name": name, "using": entry.backend.alias, "waited": waited, **why}
            template = self._template_of(name)
            yield Notify(signal, {"sender": self._sender, "template": template, **news})

    def _template_of(self, name: str) -> str:
        """The template of one of its names."""
        return self.template

    def _take_over(self, entry: Entry, form: Attempt, granted: Granted) -> Lease:
        """Make the lease of a grant, and let the backend look after it."""
        backend = entry.backend
        holder, caller = new_holder(for_block=entry.block)
        lease = entry.lease = Lease(form, granted, holder, caller, backend)
        if self._entries:
            self._add(entry)
        else:
            self._entries.append(entry)
        backend.leases.add(lease)
        backend.watch(lease)
        return lease

    def _undo(self, entry: Entry, *, block: bool) -> Flow[bool] | None:
        """After an interrupt: drop *entry*. Returns the flow that ends its lease, if one is needed.

        The server may have granted its attempt. If its flow knows of it, the flow undoes the grant.
        """
        if entry.process is not process.this():
            return None
        lease, form = entry.lease, entry.attempt
        if lease is None:
            if form is None or form.is_told:
                return None
            return flows.undo_attempt(form)
        if self._drop(entry, block=block) > 0:
            return None
        entry.backend.leases.discard(lease)
        return self._undo_of(entry)

    def _undo_of(self, entry: Entry) -> Flow[bool]:
        """The flow that ends what the server keeps of the lease of *entry*."""
        assert entry.lease is not None
        lease, terms = entry.lease, entry.terms
        timeout, permit = terms.operation_timeout, lease.permit_number
        return flows.undo(lease.name, token_of(lease), timeout, permit, terms.limit)

    # --- release ------------------------------------------------------------------------------

    def _end(self, success: bool, *, block: bool, entry: Entry | None = None) -> None:
        """End the lease, or leave it to an outer acquire; also if it is interrupted."""
        form: Release | None = None
        try:
            entry = entry or self._entry_to_end(block=block)
            if (
                entry is not None
                and entry.terms.release_before_commit == DEFER
                and (database := self._defer(entry, success))
            ):
                entry.terms = replace(entry.terms, release_before_commit="ignore")
                self._end(success, block=block, entry=entry)
                raise transactions.never_ends(self.name, database, released=True)
            if form := self._let_go(entry, success, block=block):
                assert entry is not None
                if form.is_plain:
                    entry.backend.begin(form)
                if form.reply != RELEASED:
                    entry.backend.run(self._release(entry, form, success), form)
                elif signals.lock_released.receivers:
                    signals.lock_released.send_robust(**self._news_of_release(entry, success))
        except LockError:
            raise
        except BaseException:
            entry = entry or self._entry_to_end(block=block)
            if entry is not None and (undo := self._undo_end(entry, form, block=block)):
                entry.backend.run(undo)
            raise

    async def _aend(self, success: bool, *, block: bool, entry: Entry | None = None) -> None:
        """See _end()."""
        form: Release | None = None
        try:
            entry = entry or self._entry_to_end(block=block)
            if form := self._let_go(entry, success, block=block):
                assert entry is not None
                if form.is_plain:
                    await entry.backend.abegin(form)
                if form.reply != RELEASED:
                    await entry.backend.arun(self._release(entry, form, success), form)
                elif signals.lock_released.receivers:
                    news = self._news_of_release(entry, success)
                    await signals.lock_released.asend_robust(**news)
        except (LockError, GeneratorExit):
            raise
        except BaseException:
            entry = entry or self._entry_to_end(block=block)
            if entry is not None and (undo := self._undo_end(entry, form, block=block)):
                await entry.backend.arun(undo)
            raise

    def _undo_end(self, entry: Entry, form: Release | None, *, block: bool) -> Flow[bool] | None:
        """After an interrupt: as _undo(), once the server has noted what *form* leaves behind."""
        undo = self._undo(entry, block=block)
        if undo is None or form is None or not (form.is_plain and form.notes):
            return undo
        # If the flow has it, the flow has sent it again.
        return undo if form.is_told or form.reply is not None else _released_again(form, undo)

    def _let_go(self, entry: Entry | None, success: bool, *, block: bool) -> Release | None:
        """Rely on the lease no more. Returns its release, or None if an outer acquire goes on."""
        if entry is None:
            if self._entries or not block:
                several = [
                    one for one in tuple(self._entries) if one.block is block and not one.over
                ]
                raise (misuse.holds_several if several else misuse.holds_none)(self.name)
            return None
        lease, backend, options = entry.lease, entry.backend, self._options
        assert lease is not None
        if getpid() != process.pid:
            process.this()
        if entry.process is not process.current:
            if not block:
                raise misuse.belongs_to_the_parent(self.name)
            self._remove(entry)
            return None
        if entry.over:  # Released within the block.
            self._remove(entry)
            return None
        now = backend.clock()
        if now >= lease.ends:
            backend.note_expiry(lease)  # Before it is ended here: an ended lease does not expire.
        if success and options.min_hold and not awaits_commit(entry):
            lease.succeeded(options.min_hold)
        if self._drop(entry, block=block) > 0:
            return None
        if entry.terms.release_before_commit in _TOLD:
            for connection in transactions.of_this_thread.connections:
                if (
                    connection.in_atomic_block
                    and transactions.is_open()
                    and self._ends_a_lease(entry)
                ):
                    of_task = self._is_of_task
                    transactions.warn(self.name, backend.alias, self._place, of_task=of_task)
                    break
        backend.leases.discard(lease)
        # A renewed lease has a beginning in the timeline, so it must have an end.
        noted = lease.renewals or now - lease.granted_at >= NOTED_FROM
        run = self._run if backend.supports_records and not lease.gave_way else None
        how = "done" if success else "replaced" if lease.gave_way else "failed"
        ended = how if noted or run or lease.gave_way else ""
        once = options.once if success else 0.0
        return Release(
            lease,
            entry.terms,
            insist=block,
            ended=ended,
            once=once,
            run=run,
            retention=backend.retention,
        )

    def _ends_a_lease(self, entry: Entry) -> bool:
        """Whether the end of *entry* ends a lease. Of a joint lock, all may be held further."""
        return True

    def _defer(self, entry: Entry, success: bool) -> str | None:
        """Let the transactions that are open hold the lease too, until they are over.

        Returns the alias of a database with autocommit off, if there is one: nobody hears of its
        commit.
        """
        if entry.over or not entry.may_be_held:
            return None  # It is over; the block or release() will say so.
        theirs = self._entry_of_transactions(entry)
        lease = theirs.lease
        assert lease is not None
        if transactions.at_end(partial(self._end_deferred, theirs, success)):
            theirs.over = not lease.hold_for_transactions()  # In one step, whatever interrupts it.
        return transactions.by_hand()

    def _entry_of_transactions(self, entry: Entry) -> Entry:
        """An entry with the same lease for transactions; it counts as over until they have it."""
        terms = replace(entry.terms, release_before_commit="ignore")
        theirs = Entry(entry.backend, terms, block=True)
        theirs.lease, theirs.over = entry.lease, True
        return theirs

    def _end_deferred(self, entry: Entry, success: bool, committed: bool) -> None:
        """End the lease after its transactions. Errors are logged: no code can catch them."""
        if entry.over or entry.lease is None:
            return  # The release was interrupted before they held it.
        try:
            self._end(success and committed, block=True, entry=entry)
        except LockError as error:
            logger.error(  # noqa: TRY400 - it is no bug
                "The transaction under lock %r is over: %s",
                self.name,
                error,
                extra=logs.of(entry.lease),
            )
        finally:
            entry.lease.transactions_are_over()

    def _release(self, entry: Entry, form: Release, success: bool) -> Flow[None]:
        lease, backend = entry.lease, entry.backend
        assert lease is not None
        now = backend.clock()
        if lease.is_lost:
            yield from self._clear_up(entry, lease.loss_reason(now))
            raise lease.loss(now)
        try:
            reason = yield from release(form)
        except LockUnavailable as error:
            yield from self._tell_unavailable(entry, error, form.sent or now)
            raise
        now = backend.clock()
        if reason is not None:
            backend.lost(lease, reason, at_release=True)
            yield from self._clear_up(entry, reason)
            raise lease.loss(now)
        yield from self._tell_released(entry, success)

    def _clear_up(self, entry: Entry, reason: LostReason | None) -> Flow[None]:
        """End what the server may keep of a lost lease (R4): others would wait for that."""
        # A renewal that was answered too late, or never, may have kept the lease. With a limit, its
        # acquire may have arrived once more after its end, and got another permit.
        if entry.terms.limit > 1 or reason in {"expired", "unreachable", "replaced"}:
            yield from self._undo_of(entry)

    def _tell_released(self, entry: Entry, success: bool) -> Flow[None]:
        if signals.lock_released.receivers:
            yield Notify(signals.lock_released, self._news_of_release(entry, success))

    def _news_of_release(self, entry: Entry, success: bool) -> dict[str, Any]:
        lease = entry.lease
        assert lease is not None
        return {
            "sender": self._sender,
            "lease": lease,
            "held_for": entry.backend.clock() - lease.granted_at,
            "success": success,
            "template": lease.template,
        }

    def undo(self) -> None:
        """End the lease of a block as if it had not been granted: nothing of it stays behind.

        For the package's own integrations. The end of the block does nothing then.
        """
        entry = self._entry_to_end(block=True)
        if entry is None or entry.lease is None:
            return
        try:
            if undo := self._undo(entry, block=True):
                entry.backend.run(self._given_back(entry, undo))
        except BaseException:
            if undo := self._undo(entry, block=True):
                entry.backend.run(undo)
            raise

    def _given_back(self, entry: Entry, undo: Flow[bool]) -> Flow[None]:
        yield from undo
        yield from self._tell_released(entry, success=False)

    @property
    def _sender(self) -> type:
        """The sender of signals."""
        return type(self)

    @property
    def _is_of_task(self) -> bool:
        return self._run is not None


def _released_again(form: Release, undo: Flow[bool]) -> Flow[bool]:
    yield from release_again(form)
    return (yield from undo)
