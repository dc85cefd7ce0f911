"""What must not be: looked for at every command, after every event, and at the end of each call.

P1 to P9 and R4, R9 are those of docs/guarantees.md. What is not promised is no violation: a lease
that an operator has ended, or that the server has lost with its data or by a clock that was set, is
no longer the only one; a try that arrives after the end of its acquire may leave a lease for one
ttl, or a place in the queue for six seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from greenlet import getcurrent

from django_redislock.lease import Lease as HeldLease
from django_redislock.rules import scripts
from django_redislock.rules.flows import Busy
from django_redislock.rules.options import operation_timeout
from django_redislock.rules.replies import AcquireArgs
from django_redislock.rules.steps import Call
from tests.rules.model.promises import Violation, belongs, check_command, check_end
from tests.rules.model.server import Kept
from tests.simulation.plan import Setup, Work
from tests.simulation.process import CALM_AFTER, Process
from tests.simulation.server import Server
from tests.simulation.timeline import Timeline, this_thread

ROUNDED = 0.002  # Seconds: the server counts in milliseconds.
TRAVEL = 0.5  # Seconds that a few messages take at most, if nothing is slow.
DEAD_DELAYS = 2.0  # Seconds: P6.
ENDS = {scripts.RELEASE, scripts.CONCLUDE, scripts.LEAVE, scripts.HAND_OVER}
ASKS = {scripts.ACQUIRE, scripts.ACQUIRE_MARKED, scripts.ACQUIRE_PERMIT}
ASKS |= {scripts.ACQUIRE_PERMIT_MARKED, scripts.TAKE_UP}


class Interrupted(Exception):
    """A time limit, a cancellation: it comes from outside, while a call waits."""


@dataclass(eq=False)
class Claim:
    """One acquire, from its first command to the end of what came of it."""

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

    @property
    def name(self):
        return self.work.name

    def interrupt(self):
        """Note an interrupt; False if there was one before."""
        if self.interrupted_at is not None:
            return False
        self.interrupted_at = self.process.running()
        # That of an undo cuts it short: two things have gone wrong.
        self.end_was_troubled |= self.end_sent_at is not None and self.phase != "releasing"
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
            claim.end_was_troubled = True

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
        lock.fence = check_command(before, after, step, ms, lock.fence, lock.held_until)
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

    def _note(self, claim, step, answer, after):
        if step.script in ENDS:
            claim.has_ended = True
            if step.script is scripts.LEAVE:
                claim.has_asked_after_its_end = False
        elif step.script in ASKS and (claim.has_ended or claim.phase == "over"):
            # Its sender has given up a call. What it only tells, it still relies on.
            claim.has_asked_after_its_end |= isinstance(step, Call)
        elif claim.is_doubled and _is_busy(answer) and _mode(step) != "queue":
            claim.has_ended = True  # Its sender knows of no copy that may come later.
        if claim.phase == "asking" and claim.token in after.queue:
            claim.phase = "waiting"
        if step.script not in ENDS and any(belongs(one, claim.token) for one in after.leases):
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

    def disturbed(self, *, forgets=False):
        """Something went wrong with the server; it may have forgotten what it had granted."""
        self.calm_after = self.timeline.now
        if not forgets:
            return
        for name, lock in self.locks.items():
            self.touch(name)
            lock.kept = self.server.look(name)
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
                claim.is_excused = True
                claim.gone_at = None
                claim.end_was_troubled = True

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
        self.touch(claim.name)
        self.held.append(claim)
        self.say(f"{claim.process} has {claim.name!r}")

    def lets_go(self, claim):
        """Its process is about to end it."""
        claim.phase = "releasing"
        self.held.remove(claim)

    def ended(self, claim):
        """All of it is over, as far as its process knows."""
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
        if isinstance(outcome, Busy) and outcome.holding.id == claim.id:
            raise Violation(f"P4: {claim.process} is told that {claim.name!r} is busy with itself")

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
        disturbed = max(self.calm_after, process.disturbed_at)
        is_calm = process.is_well and self.server.is_up
        if claim.began_at < disturbed + CALM_AFTER or not is_calm or claim.is_excused:
            return
        if what == "unavailable":
            raise Violation(f"R13: {work.name!r} is unavailable to {process}, though nothing fails")
        if what in {"lost: expired", "lost: unreachable"} and work.renew and not work.max_hold:
            raise Violation(f"R7: {process} has {what} {work.name!r}, though nothing fails")

    def check_end_of_block(self, claim):
        """Whoever left a block without an error had the lock until its release was sent."""
        gone, sent = claim.gone_at, claim.end_sent_at
        if gone is None or sent is None or claim.is_excused or claim.end_was_troubled:
            return
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
        self.touched.clear()

    def _check_held(self, claim):
        lease, process = claim.lease, claim.process
        if claim.is_excused or not lease.is_held(process.clock()):
            return
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
        if lease is not None:
            if not lease.is_unconfirmed:
                return False
            if lease.waits_for_baton:
                if lease.confirm_by > self.server.ms:
                    return False
            else:
                claim = self.claims.get(lease.token)
                if (
                    claim is not None
                    and claim.process.is_well
                    and lease.confirm_by > self.server.ms
                ):
                    return False
        return any(
            (claim := self.claims.get(token)) is not None
            and claim.phase == "waiting"
            and claim.process.is_well
            for token in kept.queue
        )

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
    return work.wait + 2 * operation_timeout(work.ttl)


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
