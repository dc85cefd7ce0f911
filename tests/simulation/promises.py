"""What must not be: looked for at every command, after every event, and at the end of each call.

P1 to P9 and R4, R9 are those of docs/guarantees.md. What is not promised is no violation: a lease
that an operator has ended, or that the server has lost with its data or by a clock that was set, is
no longer the only one; a try that arrives after the end of its acquire may leave a lease for one
ttl, or a place in the queue for six seconds.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from greenlet import getcurrent

from django_redislock.lease import Lease as HeldLease
from django_redislock.rules import scripts
from django_redislock.rules.flows import Busy, Replaced
from django_redislock.rules.lease_state import token_of
from django_redislock.rules.options import REPLACED_WITHIN, operation_timeout
from django_redislock.rules.replies import AcquireArgs
from django_redislock.rules.steps import Call
from tests.simulation.commands import Kept, Violation, belongs, check_command, check_end
from tests.simulation.plan import Setup, Work, times_to_end
from tests.simulation.process import CALM_AFTER, Process
from tests.simulation.server import Server
from tests.simulation.timeline import Timeline, this_thread

ROUNDED = 0.002  # Seconds: the server counts in milliseconds.
ROUNDED_US = 3  # us.
TRAVEL = 0.5  # Seconds that a few messages take at most, if nothing is slow.
DEAD_DELAYS = 2.0  # Seconds: P6.
UNDOES = {scripts.LEAVE, scripts.GIVE_BACK_START}
ENDS = {scripts.RELEASE, scripts.CONCLUDE, scripts.HAND_OVER} | UNDOES
ASKS = {scripts.ACQUIRE, scripts.ACQUIRE_MARKED, scripts.ACQUIRE_PERMIT}
ASKS |= {scripts.ACQUIRE_PERMIT_MARKED, scripts.TAKE_UP, scripts.ACQUIRE_REPLACING}
ASKS |= {scripts.TAKE_START}


class Interrupted(Exception):
    """A time limit, a cancellation: it comes from outside, while a call waits."""


@dataclass(eq=False)
class Claim:
    """One acquire, from its first command to the end of what came of it.

    That of several locks has a part for each token that it sends.
    """

    process: Process
    work: Work
    began_at: float
    token: str = ""  # Until it has sent anything.
    successor: str = ""  # The token of the lease that it is handed over to, until that is done.
    id: str = ""
    phase: str = "asking"  # Or waiting, holding, releasing, over.
    lease: HeldLease | None = None
    under_way: int = 0  # Commands.
    has_asked_after_its_end: bool = False  # A try came when it was given up, and no undo since.
    has_ended: bool = False  # An undo or a release has been carried out.
    end_was_troubled: bool = False  # One was lost, or not answered.
    end_sent_at: float | None = None
    gone_at: float | None = None  # When the server ended the lease, if its owner did not.
    is_doubled: bool = False  # A command of it arrives twice.
    is_excused: bool = False  # It may be held by others too.
    interrupted_at: float | None = None  # By the clock of its process, less its pauses.
    whole: Claim | None = None  # Of which this is a part.
    parts: list[Claim] = field(default_factory=list)
    made_at: float | None = None  # When the server granted the start that it has,
    due_at: float = math.inf  # and when that was due, if it was waited for.
    is_kept: bool = False  # Its start is reserved, and will be asked for by another acquire.
    ran_at: float = math.inf  # When the server first ran a command of it.
    was_ended: bool = False  # The server has ended its lease for a newer call.

    @property
    def name(self):
        return self.work.name

    @property
    def each(self):
        """Its parts; itself, if it has none."""
        return self.parts if self.work.start else [self]

    @property
    def waits_well(self):
        """Whether it waits, and nothing is wrong with its process."""
        return self.phase == "waiting" and self.process.is_well

    def part(self, name):
        """A new part."""
        work = self.work._replace(name=name, start="")
        self.parts.append(Claim(self.process, work, self.process.now, whole=self))
        return self.parts[-1]

    def end_is_troubled(self):
        """An end of it may not have been carried out."""
        for one in (self, *self.parts):
            one.end_was_troubled = True

    def interrupt(self):
        """Note an interrupt; False if there was one before."""
        if self.interrupted_at is not None:
            return False
        self.interrupted_at = self.process.running()
        # That of an undo cuts it short: two things have gone wrong.
        for one in (self, *self.parts):
            one.end_was_troubled |= one.end_sent_at is not None and one.phase != "releasing"
        return True

    @property
    def since_interrupt(self):
        """Seconds."""
        assert self.interrupted_at is not None
        return self.process.running() - self.interrupted_at


@dataclass
class Lock:
    """What is known of one name."""

    limit: int
    ttl: float
    kept: Kept
    fence: int = 0  # The highest.
    held_until: int = 0  # ms
    vacant_since: float | None = None
    vacant_with: str = ""  # Whom it was handed to meanwhile.
    replaced: dict[str, int] = field(default_factory=dict)  # Until when (ms) runs have to end.
    told: dict[str, int] = field(default_factory=dict)  # How long (ms) they were told to have.
    unknown: set[str] = field(default_factory=set)  # Leases of which the server may have another.


@dataclass
class Schedule:
    """When starts were that were used, in us from the beginning of the world."""

    every: int
    burst: int
    # In order, and until when they take up the rate: since the server lost the last ones.
    used: list[list[tuple[int, int]]] = field(default_factory=lambda: [[]])
    ages: list[int] = field(default_factory=lambda: [0])  # Since when each of these lists counts.

    def lose(self, now):
        """The server may have lost starts: it admits a whole burst again."""
        self.ages.append(now)
        self.used.append([])

    def use(self, at):
        """Note a start at that time. Returns by how much it came too early."""
        used = self.used[bisect(self.ages, at) - 1]
        place = bisect(used, (at, 0))
        used.insert(place, (at, 0))
        # As many in any time as are due then, and the burst: so each start comes no earlier than
        # *burst* times *every* before it is over, if one after the other takes *every*.
        over, worst = used[place - 1][1] if place else 0, -math.inf
        for number in range(place, len(used)):
            at = used[number][0]
            over = max(over, at) + self.every
            used[number] = at, over
            worst = max(worst, over - self.burst * self.every - at)
        return worst


class Rate:
    """What is known of one rate. Times in us, the true ones from the beginning of the world."""

    def __init__(self, every, burst):
        self.every, self.burst = every, burst
        self.may_be_late = max(2 * every, 500_000)
        self.starts: dict[str, tuple[int, bool]] = {}  # See Server.starts().
        self.moved: dict[str, int] = {}  # Since when each of these is due as it is.
        self.due: dict[str, float] = {}  # When, by the clock that the server had.
        self.as_due, self.as_made = Schedule(every, burst), Schedule(every, burst)
        self.is_even_from = 0  # us of the server: starts that are over later leave no gaps.

    def lose(self, now):
        """The server may have lost starts."""
        self.as_due.lose(now)
        self.as_made.lose(now)


@dataclass
class Watch:
    """Looks for violations, and counts."""

    timeline: Timeline
    setup: Setup
    counts: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    tell: Callable[[str], object] | None = None  # Is told the story.

    def __post_init__(self):
        self.server: Server
        self.locks = {}
        self.claims = {}
        self.held = []
        self.over = []
        self.now_doing = {}
        self.calm_after = 0.0  # The server was disturbed until then.
        self.touched = set()  # Locks about which something may have changed.
        self.rates = {
            name: Rate(math.ceil(starts.every * 1e6), starts.burst)
            for name, starts in self.setup.starts.items()
        }
        self._before: Kept

    def begin(self, server):
        """There is a server now."""
        self.server = server
        for name, limit in self.setup.limits.items():
            self.locks[name] = Lock(limit, self.setup.ttls[name], server.look(name))

    def say(self, text):
        """Go on with the story."""
        if self.tell is not None:
            self.tell(f"{self.timeline.now:9.3f} s  {text}")

    # --- commands -------------------------------------------------------------------------------

    def sent(self, process, message, trouble):
        """A message is on its way. Returns whose it is."""
        if trouble is not None:
            process.disturb()
            self.counts[f"{trouble.kind} | {message.steps[0].script.name}"] += 1
        tokens = []
        for step in message.steps:
            claim = self._claim_of(step)
            if claim is not None:
                claim.under_way += 1
                tokens.append(claim.token)
                if step.script is scripts.HAND_OVER:
                    claim.successor = str(step.args[1])
                    self.claims[claim.successor] = claim
                if step.script in ENDS:
                    claim.end_was_troubled |= trouble is not None or process.is_cut_off
                    if claim.end_sent_at is None:
                        claim.end_sent_at = self.timeline.now
            if self.tell is not None:
                befalls = "" if trouble is None else f", which {_befalls(trouble)}"
                self.say(f"{process} sends {_named(step)}{befalls}")
        return tuple(tokens)

    def _claim_of(self, step):
        """Whose command it is, if it is that of an acquire or of its lease."""
        token = step.args[0] if step.args else ""
        if not isinstance(token, str):
            return None
        claim = self.claims.get(token)
        if claim is None and step.script in ASKS:
            claim = self.now_doing.get(getcurrent())
            if claim is not None:
                claim = claim.part(step.name) if claim.work.start else claim
                claim.token, claim.id = token, str(step.args[1])
                self.claims[token] = claim
        return claim

    def lost(self, message):
        """A message never arrives."""
        for claim in self._of(message):
            claim.under_way -= 1
            claim.end_was_troubled |= any(step.script in ENDS for step in message.steps)

    def could_not_send(self):
        """There was no way to the server."""
        claim = self.now_doing.get(this_thread())
        if claim is not None:
            claim.end_is_troubled()

    def doubled(self, message):
        """A message arrives once more."""
        for claim in self._of(message):
            claim.under_way += 1
            claim.is_doubled = True

    def arrived(self, message):
        """A message has arrived."""
        for claim in self._of(message):
            claim.under_way -= 1

    def answered(self, message):
        """A process has an answer, and may rely on a lease for longer."""
        for claim in self._of(message):
            self.touch(claim.name)

    def _of(self, message):
        return [self.claims[token] for token in message.tokens]

    def before(self, step):
        """The server is about to run a script."""
        self._before = self._kept(step.name)

    def after(self, step, answer):
        """It has run it."""
        self.counts[f"ran {step.script.name}"] += 1
        name, ms, lock = step.name, self.server.ms, self.locks[step.name]
        before, after = self._before, self.server.look(step.name)
        self.touch(name)
        if self.tell is not None:
            self._say_what_changed(name, before, after, step)
        self._note_operators(step, answer, before, lock)
        if step.script is scripts.ACQUIRE_REPLACING:
            self._note_replaced(lock, before, after, step, answer)
        over = lock.unknown | {one for one, ends in lock.replaced.items() if ends <= ms}
        lock.fence = check_command(before, after, step, ms, lock.fence, lock.held_until, over)
        if name in self.rates:
            self._check_starts(step, answer, lock)
        if step.script in ASKS and _mode(step) == "pause" and not _is_busy(answer):
            # Not before: a waiter whose turn had come is served by this very command.
            lock.held_until = ms + int(step.args[2])
        lock.kept = after
        claim = self._claim_of(step)
        if claim is not None:
            self._note(claim, step, answer, after)
        for was, lease in zip(before.leases, after.leases, strict=True):
            if lease != was:
                self._changed(lock, was, lease, step, ms)

    def _note_replaced(self, lock, before, after, step, answer):
        """A newer call has met a run, which has so long to end from now on; and older waiters."""
        for token in set(before.queue) - set(after.queue) - {step.args[0]}:
            claim = self.claims.get(token)
            if claim is not None and self.server.is_replaced(step.name, claim.id):
                lock.replaced[claim.id] = 0
                self.counts["replaced a waiter"] += 1
        lease, within, ms = before.leases[0], int(step.args[8]), self.server.ms
        claim = lease and self.claims.get(lease.token)
        if claim is None or not isinstance(answer, list) or answer[0] != b"queued":
            return
        if claim.work.replace_within is None or lease.value[32:33] == b"k":
            return
        ends = lock.replaced.get(lease.id)
        told = lock.told.setdefault(lease.id, within)
        if ends is None or ends - ms > told:
            lock.replaced[lease.id] = ms + told
            self.counts["replaced a run"] += 1
            self.touch_at(self.server.true(ms + told + 1), step.name)

    def _check_starts(self, step, answer, lock):
        """What a command does to the starts under a rate."""
        name, us, rate = step.name, self.server.us, self.rates[step.name]
        before, rate.starts = rate.starts, self.server.starts(name)
        own, claimed = step.args[0] if step.args else "", ""
        if step.script is scripts.TAKE_START:
            claimed, claim = step.args[2], self._claim_of(step)
            was_made = own in before and not before[own][1]
            if answer == b"0" and not was_made:
                self.counts["granted a start"] += 1
                if lock.held_until > self.server.ms:
                    raise Violation(f"P6: a start of {name!r} was granted during a pause")
                if claim is not None:
                    claim.made_at = self.timeline.now
                    if waited := before.get(own) or before.get(claimed):
                        due = waited[0] - rate.burst * rate.every
                        known = rate.due.get(own, rate.due.get(claimed, math.inf))
                        claim.due_at = min(self.server.true(due / 1000), known)
            elif own in before and isinstance(answer, list) and answer[0] == b"queued":
                rate.moved[own] = us + 1000 * answer[2]  # Late ones have taken the room.
            elif claim is not None and claim.phase == "asking" and rate.starts.get(own, (0, 0))[1]:
                claim.phase = "waiting"
                self.counts["waited for a start"] += 1
            others = (
                over for token, (over, waits) in rate.starts.items() if waits and token != own
            )
            last = max(others, default=0)
            is_new = not {own, claimed} & before.keys() and own in rate.starts
            if is_new and rate.starts[own][0] <= last and last > us:
                raise Violation(f"P6: {own[:2]} passes others who wait for a start of {name!r}")
        for token, (over, is_waited_for) in rate.starts.items():
            was = before.get(token, (over, False))[0]
            is_late = was <= us or was - rate.burst * rate.every < us - rate.may_be_late
            if over > was and not (token == own and is_late):
                whose = "its own" if token == own else f"that of {token[:2]}"
                raise Violation(f"P6: a command of {own[:2]} delays a start of {name!r}: {whose}")
            if is_waited_for and (over != was or token not in before):
                rate.moved[token] = us
                due = over - rate.burst * rate.every
                rate.due[token] = self.server.true(due / 1000)
                if token == own and before.get(claimed, (None,))[0] == over:
                    # It is the start of an earlier acquire. The clock may have been set since.
                    rate.due[token] = rate.due.get(claimed, rate.due[token])
                due = self.server.true(max(due, us) / 1000)
                self.touch_at(due + DEAD_DELAYS + TRAVEL + 0.002, name)
        if us < rate.is_even_from:
            return
        previous = us
        for over in sorted(over for over, _ in rate.starts.values()):
            if over > previous + rate.every:
                raise Violation(
                    f"R4: {over - previous - rate.every} us of the rate {name!r} are nobody's"
                )
            previous = max(previous, over)

    def _note(self, claim, step, answer, after):
        claim.ran_at = min(claim.ran_at, self.timeline.now)
        if step.script in ENDS:
            claim.has_ended = True
            if step.script in UNDOES:
                claim.has_asked_after_its_end = False
        elif step.script in ASKS and (claim.has_ended or claim.phase == "over"):
            # Its sender has given up a call. What it only tells, it still relies on.
            claim.has_asked_after_its_end |= isinstance(step, Call)
        elif claim.is_doubled and _is_busy(answer) and _mode(step) != "queue":
            claim.has_ended = True  # Its sender knows of no copy that may come later.
        if claim.phase == "asking" and claim.token in after.queue:
            claim.phase = "waiting"
        extends = step.script not in ENDS and step.script is not scripts.STAND_BY
        if extends and any(belongs(one, claim.token) for one in after.leases):
            claim.is_excused = False  # It has the lock for its ttl from now on.

    def _note_operators(self, step, answer, before, lock):
        script = step.script
        if script is scripts.FORCE_RELEASE and answer[0] == b"released":
            self.counts["released by force"] += 1
            lock.held_until = 0
            for lease in filter(None, before.leases):
                if lease.id.encode() in step.args and (claim := self.claims.get(lease.token)):
                    claim.is_excused = True
        elif script is scripts.RESUME:
            lock.held_until = 0

    def _changed(self, lock, was, now, step, ms):
        """A command has changed a lease."""
        if was is not None and (now is None or now.token != was.token):
            claim = self.claims.get(was.token)
            if claim is not None and step.script not in ENDS and claim.gone_at is None:
                claim.gone_at = self.timeline.now
                may_end = was.id in lock.replaced or was.id in lock.unknown
                if step.script is scripts.ACQUIRE_REPLACING and may_end:
                    claim.was_ended = True
                    self.counts["ended a replaced run"] += 1
        if now is None or now.is_pause:
            return
        if now.token in self.claims:
            self.claims[now.token].gone_at = None  # It was handed over for the second time, say.
        if now.value[32:33] != b"k" and not now.waits_for_baton:
            check_end(now, ms, lock.ttl)
        if was is None or now.fence != was.fence:
            self.counts["handed over" if now.is_unconfirmed else "granted"] += 1
        elif was.is_unconfirmed and not now.is_unconfirmed:
            self.counts["confirmed"] += 1
        if now.ends is not None:  # Look again when it is over.
            self.touch_at(self.server.true(now.ends + 1), step.name)

    def _kept(self, name):
        """What the server has of a lock now."""
        kept, ms = self.locks[name].kept, self.server.ms
        if all(one is None or one.ends is None or one.ends >= ms for one in kept.leases):
            return kept
        self.locks[name].kept = kept = self.server.look(name)
        return kept

    # --- what the server lost -------------------------------------------------------------------

    def disturbed(self, *, forgets=False, loses_starts=True):
        """Something went wrong with the server; it may have forgotten what it had granted."""
        self.calm_after = self.timeline.now
        if not forgets:
            return
        for name, lock in self.locks.items():
            self.touch(name)
            if name in self.rates:
                self._disturb_starts(name, loses_starts=loses_starts)
            lock.kept = self.server.look(name)
            lock.replaced.clear()
            lock.told.clear()
            lock.unknown = {one.id for one in lock.kept.leases if one is not None}
            first = lock.kept.leases[0]
            if first is None or not first.is_pause:
                lock.held_until = 0
            # Of data loss and a clock that was set back together, nothing is promised.
            greatest = max((one.fence for one in lock.kept.leases if one), default=0)
            lock.fence = max(min(lock.fence, self.server.us), greatest)
            for lease in filter(None, lock.kept.leases):
                if lease.ends is not None:
                    self.touch_at(self.server.true(lease.ends + 1), name)
        for claim in self.claims.values():
            if claim.phase != "over":
                for one in filter(None, (claim, claim.whole)):
                    one.is_excused = True
                    one.gone_at = None
                    one.end_was_troubled = True

    def _disturb_starts(self, name, *, loses_starts):
        rate = self.rates[name]
        rate.starts = self.server.starts(name)
        overs = [over for over, _ in rate.starts.values()]
        rate.is_even_from = max([rate.is_even_from, *overs])
        if loses_starts:
            rate.lose(self._true_us(self.timeline.now))

    def _true_us(self, seconds):
        return int(seconds * 1e6)

    # --- calls ----------------------------------------------------------------------------------

    @contextmanager
    def doing(self, claim):
        """For the block, this thread is in a call about it."""
        self.now_doing[this_thread()] = claim
        try:
            yield
        finally:
            self.now_doing.pop(this_thread(), None)

    def interrupting(self):
        """What interrupts the call that this thread is in, unless that has ended by then."""
        thread = this_thread()
        return self.interrupt, thread, self.now_doing.get(thread)

    def interrupt(self, thread, within=None):
        """Interrupt the call that a thread waits in, if it does, and if it is *within* that one."""
        claim = self.now_doing.get(thread)
        if claim is None or (within is not None and claim is not within) or not thread.is_asleep:
            return False
        interrupted = claim.interrupt()
        if interrupted:
            self.say(f"{claim.process} is interrupted")
            thread.interrupt(Interrupted())
        return interrupted

    def has(self, claim, lease):
        """Its process has the lock."""
        claim.lease, claim.phase = lease, "holding"
        granted = {token_of(part): part for part in lease.parts} if claim.work.start else {}
        for one in claim.each:
            if one is not claim and one.token not in granted:
                self._is_over(one)  # It was given back, and asked for once more.
            elif one.name in self.rates:
                self._uses(one)
            else:
                one.lease, one.phase = granted.get(one.token, lease), "holding"
                self.held.append(one)
                if self.locks[one.name].replaced.get(one.id) == 0 and not one.is_excused:
                    raise Violation(
                        f"NEWEST: {one.process} has {one.name!r}, though a newer call has replaced"
                        " it while it waited"
                    )
            self.touch(one.name)
        self.say(f"{claim.process} has {claim.name!r}")

    def _uses(self, claim):
        """A start was granted, and the body begins."""
        claim.phase = "made"
        self.counts["started"] += 1
        if claim.made_at is None:
            raise Violation(f"RATE: {claim.process} starts without a start of {claim.name!r}")
        # A waiter that comes late has the start that was due before.
        rate, at = self.rates[claim.name], min(claim.made_at, claim.due_at)
        self._check_early(claim, rate.as_made, claim.made_at, rate.may_be_late)
        if self._true_us(at) < rate.as_due.ages[-1] <= self._true_us(claim.made_at):
            return  # The server has lost starts since, or its clock was set forward.
        self._check_early(claim, rate.as_due, at, 0)

    def _check_early(self, claim, schedule, at, most):
        early = schedule.use(self._true_us(at)) - most
        what = "late start too early" if most else "start too early"
        self.longest[what] = max(self.longest.get(what, -math.inf), early / 1e6)
        if early > ROUNDED_US:
            raise Violation(
                f"RATE: {claim.process} starts {early} us before the rate {claim.name!r} says"
                f"{', even of late starts' if most else ''}"
            )

    def lets_go(self, claim):
        """Its process is about to end it."""
        claim.phase = "releasing"
        for one in claim.each:
            if one in self.held:
                one.phase = "releasing"
                self.held.remove(one)

    def ended(self, claim):
        """All of it is over, as far as its process knows."""
        claim.phase = "over"
        for one in claim.each:
            if one.phase != "made" and one not in self.over:
                self._is_over(one)

    def _is_over(self, claim):
        claim.phase = "over"
        self.over.append(claim)
        self.touch(claim.name)

    def killed(self, process):
        """A process is dead: nothing is held there."""
        self.held = [claim for claim in self.held if claim.process is not process]

    def forget(self):
        """It is over: no lease is dropped later, and says so in the log."""
        for claim in self.claims.values():
            if claim.lease is not None:
                claim.lease.is_ended = True

    def check_busy(self, claim, outcome):
        """Nobody is told that its own command keeps the lock from it."""
        if isinstance(outcome, Replaced) and not claim.is_excused:
            others = [one for one in self.claims.values() if one.name == claim.name]
            # A try that arrives after the end of its acquire counts as newer.
            newer = [
                one
                for one in others
                if one is not claim and (one.ran_at >= claim.ran_at or one.has_asked_after_its_end)
            ]
            if all(one.work.replace_within is None for one in newer):
                raise Violation(f"NEWEST: {claim.process} is replaced in {claim.name!r} by nobody")
        if not isinstance(outcome, Busy):
            return
        if claim.work.replace_within is not None and self._is_calm(claim):
            ends = self.locks[claim.name].replaced.get(outcome.holding.id)
            if ends is not None:
                raise Violation(
                    f"NEWEST: {claim.process} gives up {claim.name!r}, though the run that it has"
                    f" replaced has to end in {ends - self.server.ms} ms"
                )
        for one in claim.each:
            # What a part of several locks has left behind by an undo that failed does not count.
            if one.id == outcome.holding.id and not (one is not claim and _is_in_doubt(one)):
                raise Violation(
                    f"P4: {claim.process} is told that {one.name!r} is busy with itself"
                )

    def check_duration(self, what, took, most, claim):
        """No call lasts longer than it may."""
        self.longest[what] = max(self.longest.get(what, -math.inf), took - most)
        if took > most + TRAVEL:
            raise Violation(
                f"R5: {what} of {claim.name!r} by {claim.process} took {took:.3f} s,"
                f" and may take {most:.3f} s"
            )

    def check_trouble(self, what, claim):
        """Nothing ends in trouble while there is none."""
        process, work = claim.process, claim.work
        if claim.is_excused or not self._is_calm(claim):
            return
        if what == "unavailable":
            raise Violation(f"R13: {work.name!r} is unavailable to {process}, though nothing fails")
        if what in {"lost: expired", "lost: unreachable"} and work.renew and not work.max_hold:
            raise Violation(f"R7: {process} has {what} {work.name!r}, though nothing fails")

    def _is_calm(self, claim):
        """Whether nothing has gone wrong since it began, and for a while before."""
        disturbed = max(self.calm_after, claim.process.disturbed_at)
        is_calm = claim.process.is_well and self.server.is_up
        return is_calm and claim.began_at >= disturbed + CALM_AFTER

    def check_end_of_block(self, claim):
        """Whoever left a block without an error had the lock until its release was sent."""
        gone, sent = claim.gone_at, claim.end_sent_at
        if gone is None or sent is None or claim.is_excused or claim.end_was_troubled:
            return
        if claim.was_ended and not claim.process.is_well:
            return  # Its release may not have been answered, which is no error of the block.
        if gone < sent:
            raise Violation(
                f"P5: {claim.process} is not told that {claim.name!r} was lost"
                f" {sent - gone:.3f} s before its release"
            )

    # --- every moment ---------------------------------------------------------------------------

    def touch(self, name):
        """Something may have changed about a lock: look at it after this event."""
        self.touched.add(name)

    def touch_at(self, when, name):
        """Look at a lock then."""
        self.timeline.at(when, self.touch, name)

    def check(self):
        """Check what is true at this moment."""
        if not self.touched:
            return
        for claim in self.held:
            if claim.name in self.touched:
                self._check_held(claim)
        if self.over:
            self.over = [claim for claim in self.over if self._may_leave_something(claim)]
        for name in sorted(self.touched):
            self._check_vacancy(name, self.locks[name])
            if name in self.rates:
                self._check_due(name, self.rates[name])
        self.touched.clear()

    def _check_held(self, claim):
        lease, process = claim.lease, claim.process
        if claim.is_excused or not lease.is_held(process.clock()):
            return
        if claim.was_ended and lease.replaced_by is None:
            return  # It has not heard of that, and hears of it by its next renewal.
        if claim.was_ended and claim.id in self.locks[claim.name].unknown:
            return  # The clock of the server was set since the server said when it had to end.
        kept, permit = self._kept(claim.name), lease.permit_number
        if permit > claim.work.limit:
            raise Violation(f"P1: {process} has permit {permit} of {claim.name!r}, one too many")
        if not belongs(kept.leases[permit - 1], claim.token):
            other = kept.leases[permit - 1]
            holder = other and self.claims.get(other.token)
            whose = "nobody's" if holder is None else f"that of {holder.process}"
            left = lease.deadline - process.clock()
            raise Violation(
                f"P1: {process} relies on {claim.name!r} for {left:.3f} s more, which is {whose}"
            )

    def _may_leave_something(self, claim):
        """Whether it is not certain yet that nothing of it stays behind.

        Raises:
            Violation: Something does.
        """
        if claim.under_way > 0:
            return True
        if claim.has_asked_after_its_end or claim.end_was_troubled or claim.process.is_dead:
            return False
        if claim.is_excused:
            return False
        if claim.name in self.rates:
            over, _ = self.rates[claim.name].starts.get(claim.token, (0, False))
            if over > self.server.us and not claim.is_kept:
                raise Violation(
                    f"R4: {claim.process} has gone, and its start of {claim.name!r} stays"
                )
            return False
        kept = self._kept(claim.name)
        tokens = {claim.token, claim.successor}
        stays = [one for one in kept.leases if one is not None and one.token in tokens]
        if any(one.value[32:33] != b"k" for one in stays):
            raise Violation(f"R4: {claim.process} has gone, and its lease of {claim.name!r} stays")
        if claim.token in kept.queue:
            raise Violation(
                f"R4: {claim.process} has gone, and stays in the queue of {claim.name!r}"
            )
        return False

    def _check_due(self, name, rate):
        """Whoever waits for a start has it soon after it is due."""
        if self.timeline.now < self.calm_after + CALM_AFTER or not self.server.is_up:
            return
        if self.locks[name].held_until > self.server.ms or self.server.us < rate.is_even_from:
            return
        for token, (over, is_waited_for) in rate.starts.items():
            claim = self.claims.get(token)
            if not is_waited_for or claim is None or claim.phase != "waiting":
                continue
            due = max(over - rate.burst * rate.every, rate.moved.get(token, 0))
            late = (self.server.us - due) / 1e6
            if not self._is_calm(claim):
                continue  # It may have missed a ring, which says that its start is due earlier.
            self.longest["start late"] = max(self.longest.get("start late", -math.inf), late)
            if late > DEAD_DELAYS + TRAVEL:
                raise Violation(
                    f"P6: {claim.process} waits for {name!r}, and its start was due"
                    f" {late:.3f} s before"
                )

    def _check_vacancy(self, name, lock):
        """Nobody waits long for a lock that nobody has."""
        if lock.limit > 1 or not self._is_vacant(name, lock):
            lock.vacant_since = None
            return
        now, lease = self.timeline.now, lock.kept.leases[0]
        handed_to = self._process_of(lease)
        if lock.vacant_since is None or (lease is not None and lock.vacant_with != handed_to):
            lock.vacant_since, lock.vacant_with = now, handed_to
            self.touch_at(now + DEAD_DELAYS + TRAVEL + 0.001, name)
        vacant = now - lock.vacant_since
        self.longest["vacant"] = max(self.longest.get("vacant", 0.0), vacant)
        if vacant > DEAD_DELAYS + TRAVEL:
            raise Violation(
                f"P6: for {vacant:.3f} s nobody has {name!r}, and somebody waits for it"
            )

    def _is_vacant(self, name, lock):
        if self.timeline.now < self.calm_after + CALM_AFTER or not self.server.is_up:
            return False
        kept = self._kept(name)
        if not kept.queue:
            return False
        lease = kept.leases[0]
        if lease is not None and lock.replaced.get(lease.id, math.inf) <= self.server.ms:
            # Its time to end is over: the call that has replaced it is to have the lock.
            first = self.claims.get(kept.queue[0])
            return first is not None and first.waits_well and first.work.replace_within is not None
        if lease is not None and (not lease.is_unconfirmed or self._may_confirm(lease)):
            return False
        waiters = (self.claims.get(token) for token in kept.queue)
        return any(claim is not None and claim.waits_well for claim in waiters)

    def _may_confirm(self, lease):
        """Whether an unconfirmed lease may be confirmed in time."""
        if lease.confirm_by <= self.server.ms:
            return False
        claim = self.claims.get(lease.token)
        return lease.waits_for_baton or (claim is not None and claim.process.is_well)

    def _process_of(self, lease):
        claim = lease and self.claims.get(lease.token)
        return claim.process.alias if claim else ""

    # --- the story ------------------------------------------------------------------------------

    def _say_what_changed(self, name, before, after, step):
        what = []
        for number, (was, now) in enumerate(zip(before.leases, after.leases, strict=True), 1):
            which = repr(name) if len(after.leases) == 1 else f"permit {number} of {name!r}"
            if now is None and was is not None:
                what.append(f"{which} is free")
            elif now is not None and (was is None or now.token != was.token):
                how = "is handed to" if now.is_unconfirmed else "is granted to"
                what.append(f"{which} {how} {self._holder(now)}")
            elif now is not None and was is not None and now.value[32:33] != was.value[32:33]:
                states = {b"h": "is confirmed", b"k": "cools down"}
                what.append(f"{which} {states.get(now.value[32:33], 'is handed over')}")
        if len(after.queue) != len(before.queue):
            what.append(f"{len(after.queue)} wait for {name!r}")
        self.say(f"the server runs {_named(step)}: {'; '.join(what) or 'nothing changes'}")

    def _holder(self, lease):
        if lease.is_pause:
            return "an operator"
        claim = self.claims.get(lease.token)
        return str(claim.process) if claim else "whoever has the baton"


def most_seconds(work):
    """How long an acquire may last."""
    if work.start and work.start != work.name:
        return math.inf  # Each of several locks may be asked for and undone more than once.
    if work.replace_within is not None:
        # Twice: once the clock of the server is set back, a run has its whole time to end again.
        longest = 2 * max(times_to_end(work.ttl))
        return longest + REPLACED_WITHIN + 2 * operation_timeout(work.ttl)
    return work.wait + 2 * operation_timeout(work.ttl)


def _is_in_doubt(claim):
    """Whether a command of it may have been lost, or is still on its way."""
    return claim.end_was_troubled or claim.has_asked_after_its_end or claim.under_way > 0


def _befalls(trouble):
    from tests.simulation.plan import TROUBLES

    return TROUBLES[trouble.kind]


def _named(step):
    mode = f" ({_mode(step)})" if step.script in ASKS else ""
    return f"{step.script.name}{mode} of {step.name!r}"


def _mode(step):
    """How an acquire asks."""
    return AcquireArgs(*step.args[:8]).mode


def _is_busy(answer):
    return isinstance(answer, list) and answer[0] == b"busy"
