"""How several locks are acquired and released as one: all of them, or none.

Each is a single lock, asked for and ended by the flows of handle.py. This module decides the order
of the waits, and which locks are given back meanwhile.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from django_redislock import misuse, process
from django_redislock.exceptions import LockError, LockLost, LockUnavailable
from django_redislock.handle import REFUSED, Entry, Handle, awaits_commit
from django_redislock.holder import current_owner, new_holder
from django_redislock.lease import Lease
from django_redislock.misuse import check_callback
from django_redislock.rules.arguments import LONGEST
from django_redislock.rules.flows import Busy, Done, Finished, Replaced, undo_attempt, undone
from django_redislock.rules.forms import Form, StartAttempt, giving_back
from django_redislock.rules.limit import Limit, Rate
from django_redislock.rules.steps import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import timedelta

    from django_redislock.backends.base import Backend
    from django_redislock.exceptions import LostReason
    from django_redislock.rules.flows import RunMarker
    from django_redislock.rules.forms import Attempt, Release
    from django_redislock.rules.lease_state import Granted
    from django_redislock.rules.options import Options, Terms
    from django_redislock.rules.steps import Flow


# --- the lease of a joint lock, made of the leases of its parts -----------------------------------


def _least(of: str) -> Any:
    """Of a joint lease, the least of what its parts have."""
    return property(lambda joint: min(getattr(part, of) for part in joint.parts))


class JointLease(Lease):
    """The lease of several locks. It is held while each of its parts is held, and lost with one.

    Each part is renewed, lost and ended by itself. A joint lease changes them only for
    transactions.

    Attributes:
        name: All names, in the order in which they were taken.
        fence: The greatest of *fences*. Comparable only between leases of the same names. None
            if there are only rates.
        parts: The lease of each name. Each is renewed by itself, and operators see each as a row.
    """

    times_held = 1  # By its own acquire; a reentrant one makes a joint lease of its own.
    min_hold = 0.0  # Each part keeps that of its own acquires.
    _token = ""  # Each part has its own.
    ttl = _least("ttl")
    renewals = _least("renewals")
    deadline = _least("deadline")
    ends = _least("ends")
    transactions = _least("transactions")

    def __init__(self, parts: Sequence[Lease], backend: Backend) -> None:
        self._parts = tuple(parts)
        self._backend = backend
        self._process = process.current
        self.name = ", ".join(part.name for part in parts)
        self.template = ", ".join(part.template for part in parts)
        # mypy: see StartLease.
        self.fence = max(self.fences.values(), default=None)  # type: ignore[assignment]
        self.granted_at = max(part.granted_at for part in parts)
        self.is_of_run = any(part.is_of_run for part in parts)
        first = parts[0]
        self.id, self.owner = first.id, first.owner
        self.holder, self.caller = first.holder, first.caller  # All have the same.
        self.permit = None
        self.permit_number = first.permit_number  # The records of a run are those of the first.

    def __del__(self) -> None:
        """Nothing: each dropped part logs that itself."""

    @property
    def is_active(self) -> bool:
        return all(part.is_active for part in self._parts)

    @property
    def is_lost(self) -> bool:
        return any(part.is_lost for part in self._parts)

    def is_held(self, now: float) -> bool:
        return all(part.is_held(now) for part in self._parts)

    def may_be_held(self, now: float) -> bool:
        return all(part.may_be_held(now) for part in self._parts)

    def loss_reason(self, now: float) -> LostReason | None:
        return next(filter(None, (part.loss_reason(now) for part in self._parts)), None)

    def loss(self, now: float) -> LockLost:
        lost = (part for part in self._parts if part.loss_reason(now))
        return next(lost, self._parts[0]).loss(now)

    def lose(self, *_: Any, **__: Any) -> bool:
        """Returns False: the part that is lost tells of the loss."""
        return False

    def unnest(self) -> int:
        """It is over. The release of each part ends that part."""
        return 0

    def succeeded(self, min_hold: float) -> None:
        """Nothing: the release of each part says so."""

    def hold_for_transactions(self) -> bool:
        """Transactions hold all parts too, until they are over. Returns True."""
        for part in self._parts:
            part.hold_for_transactions()
        return True

    def transactions_are_over(self) -> None:
        """The transactions are over and no longer hold a part."""
        for part in self._parts:
            part.transactions_are_over()

    @property
    def parts(self) -> tuple[Lease, ...]:
        """The lease of each name."""
        return self._parts

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call *callback* with this lease once, when its first part is lost."""
        check_callback(callback, "on_lost()")
        untold = [callback]

        def tell(_: Lease) -> None:
            try:
                told = untold.pop()
            except IndexError:
                return  # Another part was lost before.
            told(self)

        for part in self._parts:
            part.on_lost(tell)

    def on_endangered(self, callback: Callable[[Lease], object], left: float = 0.5) -> None:
        """Call *callback* with this lease when a part of it may soon be lost; see Lease.

        It is not called again until no part is endangered.
        """
        check_callback(callback, "on_endangered()")
        told: list[tuple[Lease, object]] = []  # Of which part, in which of its dangers.
        mutex = threading.Lock()

        def tell(part: Lease) -> None:
            danger = part.danger
            with mutex:
                told[:] = [one for one in told if one[0].danger is one[1]]
                is_first = not told
                told.append((part, danger))
            if is_first and danger is not None:
                callback(self)

        for part in self._parts:
            part.on_endangered(tell, left)

    def renewing(self, ttl: float | None, until: float = -math.inf) -> Flow[None]:
        yield from together([part.renewing(ttl, until) for part in self._parts])

    def _hand_over(self, within: float | timedelta) -> NoReturn:
        raise misuse.is_joint(self.name)


class StartLease(Lease):
    """A start that was made under a rate. Nothing is held, so it never ends, and is never lost.

    It has no fence. (Its type says that it has: only code that takes rates alone meets it.)
    """

    def __init__(self, attempt: StartAttempt, granted: Granted, *whose: Any) -> None:
        super().__init__(attempt, granted, *whose)
        self.fence = None  # type: ignore[assignment]
        self.ends = self.deadline = self.hold_until = self.ttl = math.inf

    def __del__(self) -> None:
        """Nothing: it needs no release."""

    def renewing(self, ttl: float | None, until: float = -math.inf) -> Flow[None]:
        return _nothing()


def _nothing() -> Flow[None]:
    """The flow that does nothing."""
    yield from ()


Outcome = Lease | Busy | Done | Finished | Replaced
NO_TEMPLATES: Mapping[str, str] = {}  # No name was formatted: each is its own template.


class Part(Handle):
    """One lock of a joint lock, and its entry."""

    __slots__ = ("_belongs_to", "_ending", "_of", "_terms", "entry", "is_nested")

    def __init__(
        self,
        name: str,
        options: Options,
        run: RunMarker | None,
        entry: Entry,
        belongs_to: str,
        of: type[Handle],
        template: str,
    ) -> None:
        """Ask for nothing yet.

        Args:
            name: The name of the lock.
            options: The options of the lock.
            run: The run of a task, if this lock keeps its record.
            entry: That of the lock.
            belongs_to: All names of the joint lock, for operators.
            of: The class of the joint lock: the sender of signals.
            template: The name as it was written.
        """
        self.name = name
        self.template = template
        self._options = options
        self._run = run
        self._place = ""
        self._entries = []
        self._belongs_to = belongs_to
        self._of = of
        self._terms = entry.terms
        self._ending: Release | None = None
        self.entry = entry
        self.is_nested = False

    @property
    def _sender(self) -> type:
        return self._of

    @property
    def may_be_held(self) -> bool:
        """Whether it need not be asked for: it was granted, and is not known to be lost."""
        return self.is_nested or self.entry.may_be_held

    def ensure_nested(self) -> None:
        """Ensure that the lease which it has taken already was not lost during a wait.

        Raises:
            LockLost: It was lost.
        """
        if self.is_nested and not self.entry.may_be_held:
            assert self.entry.lease is not None
            raise self.entry.lease.loss(self.entry.backend.clock())

    def nest(self) -> None:
        """Take the lease that this thread or asyncio task has already, if it may.

        Raises:
            LockMisuse: It may not, or another lease is in the way that cannot be released.
            LockLost: That lease was lost.
        """
        # Whether it blocks matters only in an event loop's thread, where blocking is refused.
        if self.name in self.entry.backend.leases:
            self.is_nested = self._nest(self.entry, blocking=False) is not None

    def asking(self, wait: float, since: float, *, queues: bool) -> Flow[Outcome]:
        """Ask for it.

        Args:
            wait: Seconds, for its turn in the queue or for a server that does not answer.
            since: When the wait for all of them began.
            queues: Whether it waits in the queue if it is not free.
        """
        terms = replace(self._terms, wait=wait)
        entry = self.entry = Entry(self.entry.backend, terms, self.entry.block)
        form = entry.attempt = self._first_try(entry)
        form.owner = replace(form.owner, names=self._belongs_to)
        form.queues = queues
        form.is_told = True  # Nothing is sent before its flow begins.
        return self._ask(entry, form, since)

    def tell_acquired(self, since: float) -> Flow[None]:
        """Say that it is held, unless it was held before."""
        if not self.is_nested:
            yield from self._tell_acquired(self.entry, since)

    def tell_released(self, success: bool) -> Flow[None]:
        """Say that it is released."""
        return self._tell_released(self.entry, success)

    def await_others(self) -> None:
        """If it is held: keep it without max_hold, and renewed, while others are awaited."""
        lease = self.entry.lease
        if self.is_nested or lease is None or not self.entry.may_be_held:
            return
        if lease.await_others():
            self._look_now(lease)

    def beginning(self, until: float) -> Flow[None]:
        """All are held: let max_hold and renew count from now on, with a whole ttl.

        If the server does not answer, it is asked until *until*.
        """
        lease, terms = self.entry.lease, self.entry.terms
        assert lease is not None
        lease.begin(self.entry.backend.clock(), terms.max_hold, terms.renew)
        yield from lease.renewing(None, until)
        self._look_now(lease)

    def _look_now(self, lease: Lease) -> None:
        backend = self.entry.backend
        backend.watchdog_of(self.name).watch(lease, backend.clock())

    def giving_back(self) -> Flow[bool] | None:
        """The flow that ends it as if it had not been granted; None if none is needed."""
        return self._undo(self.entry, block=True)

    def unreserving(self) -> Flow[bool] | None:
        """The flow that gives back what is reserved for an acquire to come; None without that."""
        return None

    def use(self) -> None:
        """Note that the body may have begun."""

    def let_go(self, success: bool) -> None:
        """Rely on it no more; its release follows."""
        self._ending = self._let_go(self.entry, success, block=True)

    def releasing(self, success: bool) -> Flow[None] | None:
        """Its release; None if an outer acquire holds it further."""
        if self._ending is None:
            return None
        return self._release(self.entry, self._ending, success)

    def of_transactions(self) -> Part:
        """The part for transactions to hold."""
        entry = self._entry_of_transactions(self.entry)
        entry.over = False
        return Part(
            self.name, self._options, self._run, entry, self._belongs_to, self._of, self.template
        )


class RatePart(Part):
    """A rate of a joint lock. Its start was made once it is granted: that needs no release."""

    __slots__ = ("_is_used", "_rate", "_reserved")

    def __init__(self, rate: Rate, reserved: dict[str, str] | None, *of_part: Any) -> None:
        """Ask for nothing yet.

        Args:
            rate: The rate.
            reserved: The tokens of starts that are reserved, by name; None if none is to be.
            of_part: See Part.
        """
        super().__init__(*of_part)
        self._rate, self._reserved = rate, reserved
        self._is_used = False
        # Nothing ends, and an answer is never too late.
        self._terms = replace(self._terms, ttl=LONGEST, max_hold=math.inf)

    @property
    def _every(self) -> int:
        """us between two starts."""
        return math.ceil(self._rate.between * 1e6)

    def nest(self) -> None:
        """Nothing: each acquire takes a start of its own."""

    def _first_try(self, entry: Entry) -> Attempt:
        if not entry.backend.supports_rates:
            raise misuse.keeps_no_rates(entry.backend.alias, self.name)
        form = StartAttempt(self.name, current_owner(), entry.terms, template=self.template)
        form.every, form.burst = self._every, self._rate.at_once
        if self._reserved is not None:
            form.reserves, form.claimed = True, self._reserved.get(self.name, "")
        return form

    def _ask(self, entry: Entry, form: Attempt, since: float) -> Flow[Outcome]:
        assert isinstance(form, StartAttempt)
        outcome = yield from super()._ask(entry, form, since)
        if self._reserved is not None:
            # A start that is not due stays reserved, but for a waiter that has given up.
            kept = {"reserve": form.token, "try": form.claimed}.get(form.mode)
            self._reserved.pop(self.name, None)
            if kept and isinstance(outcome, Busy) and outcome.of_rate:
                self._reserved[self.name] = kept
        return outcome

    def giving_back(self) -> Flow[bool] | None:
        return None if self._is_used else super().giving_back()

    def use(self) -> None:
        self._is_used = True

    def unreserving(self) -> Flow[bool] | None:
        token = self._reserved.pop(self.name, "") if self._reserved else ""
        return undone(giving_back(self.name, token, self._every, self._terms)) if token else None

    def _take_over(self, entry: Entry, form: Attempt, granted: Granted) -> Lease:
        assert isinstance(form, StartAttempt)
        whose = new_holder(for_block=entry.block)
        lease = entry.lease = StartLease(form, granted, *whose, entry.backend)
        return lease

    def _undo_of(self, entry: Entry) -> Flow[bool]:
        assert entry.attempt is not None
        return undo_attempt(entry.attempt)

    def tell_acquired(self, since: float) -> Flow[None]:
        return _nothing()

    def tell_released(self, success: bool) -> Flow[None]:
        return _nothing()

    def await_others(self) -> None:
        """Nothing: it lasts."""

    def beginning(self, until: float) -> Flow[None]:
        return _nothing()

    def let_go(self, success: bool) -> None:
        """Nothing: it was made."""

    def releasing(self, success: bool) -> Flow[None] | None:
        """None: it needs no release."""
        return None

    def of_transactions(self) -> Part:
        return self


class _FirstTry(Form):
    """The first try for several locks, left to the flow: it asks for all of them in one go."""

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self.terms = terms
        self.made_in = process.current


class JointHandle(Handle):
    """The entries of one handle of several locks: the private half of lock.JointLock."""

    __slots__ = ("_reserved", "_templates", "_wanted")

    # In the order in which they are taken: names, with the limit in the options; or limits, and
    # then rates.
    _wanted: tuple[str | Limit | Rate, ...]
    _templates: Mapping[str, str]  # By name; a name without one is its own.
    _reserved: dict[str, str] | None  # See RatePart.

    # --- acquire ------------------------------------------------------------------------------

    def _new_entry(self, *, block: bool) -> Entry:
        entry = super()._new_entry(block=block)
        entry.parts = [
            self._part(one, entry, is_first=one is self._wanted[0]) for one in self._wanted
        ]
        return entry

    def _part(self, wanted: str | Limit | Rate, entry: Entry, *, is_first: bool) -> Part:
        name, limit = name_and_limit(wanted, self._options)
        # The first lock keeps the record of a run.
        run, once = (self._run, self._options.once) if is_first else (None, 0.0)
        options = self._options._replace(limit=limit, once=once, atomic=None)
        # A release in a transaction is judged once, for the joint lock.
        terms = replace(entry.backend.terms(options), release_before_commit="ignore")
        theirs = Entry(entry.backend, terms, entry.block)
        belongs_to = self.name if len(self._wanted) > 1 else ""
        template = self._template_of(name)
        of_part = name, options, run, theirs, belongs_to, type(self), template
        if isinstance(wanted, Rate):
            return RatePart(wanted, self._reserved, *of_part)
        return Part(*of_part)

    def _template_of(self, name: str) -> str:
        return self.template if name == self.name else self._templates.get(name, name)

    def _nest(self, entry: Entry, *, blocking: bool) -> Lease | None:
        return None  # Each part nests by itself.

    def _first_try(self, entry: Entry) -> Any:
        for part in entry.parts:
            part.nest()
        is_nested = all(part.is_nested for part in entry.parts)
        if entry.terms.release_before_commit in REFUSED and not is_nested:
            self._refuse_transaction(entry)
        return _FirstTry(self.name, entry.terms)

    def _attempt(self, entry: Entry, form: Form, since: float | None) -> Flow[Outcome]:
        try:
            return (yield from self._take_or_leave(entry, since))
        except (GeneratorExit, LockError):
            raise  # Its run may come back, and claim what it has reserved.
        except BaseException:
            yield from together([flow for part in entry.parts if (flow := part.unreserving())])
            raise

    def _take_or_leave(self, entry: Entry, since: float | None) -> Flow[Outcome]:
        backend = entry.backend
        started = backend.clock()
        refused = yield from self._take_all(entry, started)
        if refused is None:
            entry.lease = JointLease([part.entry.lease for part in entry.parts], backend)
            self._add(entry)
            for part in entry.parts:
                yield from part.tell_acquired(started if since is None else since)
            return entry.lease
        yield from _give_back(entry.parts)
        if isinstance(refused, Busy) and since is None:
            yield from self._tell_timed_out(entry, refused, started)
        return refused

    def _take_all(self, entry: Entry, started: float) -> Flow[Outcome | None]:
        """Take all parts. Returns None, or the outcome of the first part that was refused.

        All lacking parts are tried in one go. If one of them is not free, those behind it are given
        back, and the wait for it begins. So no waiter for a lock holds one that comes later in the
        order. What is held meanwhile has no bound: max_hold and renew count from when all are held.
        """
        give_up = started + entry.terms.wait
        is_bounded = not entry.terms.renew or entry.terms.max_hold < math.inf
        queues = has_waited = False
        while True:
            for part in entry.parts:
                part.ensure_nested()
            lacking = _from_first_lacking(entry.parts)
            if not lacking and not has_waited:
                return None
            if not lacking:
                has_waited = False
                yield from self._begin(entry, started)
                continue
            yield from _give_back(lacking)
            if has_waited:
                for part in entry.parts:
                    part.await_others()
            wait = max(give_up - entry.backend.clock(), 0.0)
            queues = wait > 0 and (queues or len(lacking) == 1)
            asked = lacking[:1] if queues else lacking
            asking = [part.asking(wait, started, queues=queues) for part in asked]
            # Alone, it may listen for the bell.
            outcomes = yield from (together(asking) if len(asking) > 1 else _alone(asking[0]))
            refused = next((one for one in outcomes if not isinstance(one, Lease)), None)
            if refused is not None and (queues or not wait or not isinstance(refused, Busy)):
                return refused
            queues = refused is not None
            has_waited = has_waited or (is_bounded and queues)

    def _begin(self, entry: Entry, started: float) -> Flow[None]:
        """Let max_hold and renew of all parts count from now on. A part may be lost after that."""
        until = min(
            started + entry.terms.wait, entry.backend.clock() + entry.terms.unavailable_after
        )
        own = [part for part in entry.parts if not part.is_nested]
        try:
            yield from together([part.beginning(until) for part in own])
        except LockLost:
            return  # It is lacking, and taken again.
        except LockUnavailable as error:
            yield from self._tell_unavailable(entry, error, started)
            raise

    def _undo(self, entry: Entry, *, block: bool) -> Flow[bool] | None:
        if entry.process is not process.this():
            return None
        if entry.lease is not None:
            self._drop(entry, block=block)
        undoing = [flow for part in entry.parts if (flow := part.giving_back())]
        return _all_done(undoing) if undoing else None

    # --- release ------------------------------------------------------------------------------

    def _undo_end(self, entry: Entry, form: Release | None, *, block: bool) -> Flow[bool] | None:
        for part in entry.parts:
            part.use()
        return super()._undo_end(entry, form, block=block)

    def _let_go(self, entry: Entry | None, success: bool, *, block: bool) -> Release | None:
        ending = super()._let_go(entry, success, block=block)
        if ending is not None:
            assert entry is not None
            ending.is_plain = False  # Its flow releases all parts.
            success = success and not awaits_commit(entry)
            for part in entry.parts:
                part.let_go(success)
        return ending

    def _ends_a_lease(self, entry: Entry) -> bool:
        return any(part.entry.lease.times_held == 1 for part in entry.parts)

    def _release(self, entry: Entry, form: Release, success: bool) -> Flow[None]:
        releasing = [part.releasing(success) for part in entry.parts]
        yield from together([flow for flow in releasing if flow is not None])

    def _entry_of_transactions(self, entry: Entry) -> Entry:
        theirs = super()._entry_of_transactions(entry)
        theirs.parts = [part.of_transactions() for part in entry.parts]
        return theirs

    def _tell_released(self, entry: Entry, success: bool) -> Flow[None]:
        for part in entry.parts:
            yield from part.tell_released(success)


def name_and_limit(wanted: str | Limit | Rate, options: Options) -> tuple[str, int | None]:
    """The name and the limit of one of several locks; a rate has none.

    Raises:
        LockMisuse: Its limit or rate is a function of arguments, and there are none.
    """
    if isinstance(wanted, str):
        return wanted, options.limit
    if callable(wanted.value):
        raise misuse.counts_arguments(wanted.name)
    return wanted.name, wanted.value if isinstance(wanted, Limit) else None


def _from_first_lacking(parts: Sequence[Part]) -> list[Part]:
    """The parts to ask for: the first that is lacking, and all behind it."""
    first = next((number for number, part in enumerate(parts) if not part.may_be_held), len(parts))
    return [part for part in parts[first:] if not part.is_nested]


def _give_back(parts: Iterable[Part]) -> Flow[None]:
    undoing = [flow for part in parts if not part.entry.over and (flow := part.giving_back())]
    if undoing:
        yield from together(undoing)


def _all_done(undoing: Iterable[Flow[bool]]) -> Flow[bool]:
    return all((yield from together(undoing)))


def _alone(flow: Flow[Outcome]) -> Flow[list[Outcome]]:
    return [(yield from flow)]
