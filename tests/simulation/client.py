"""A client: it wants locks and lets them go again, in one process after the other."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from django_redislock import held
from django_redislock.exceptions import LockLost, LockMisuse, LockTimeout, LockUnavailable
from django_redislock.jobs.replaced import told_when_replaced
from django_redislock.jobs.run import NO_DUPLICATES, milliseconds_of
from django_redislock.lease import Baton, Lease
from django_redislock.lock import JointLock, Lock, TakingUp
from django_redislock.rules.flows import Busy
from django_redislock.rules.limit import Limit, Rate
from django_redislock.rules.options import Options, operation_timeout
from tests.simulation.plan import BESIDE
from tests.simulation.process import Process
from tests.simulation.promises import Claim, Interrupted, most_seconds
from tests.simulation.server import EPOCH
from tests.simulation.timeline import this_thread

MOST_RETRIES = 6
LOOKS_EVERY = 0.3  # Seconds, of a body that looks whether its run is replaced.
UNDONE_WITHIN = 1.0  # Seconds: R4.


class Failed(Exception):
    """What a body raises."""


class Client:
    """What wants locks, in one process after the other."""

    def __init__(self, world, number):
        self._world = world
        self._number = number
        self._lives = 0
        self.process: Process
        self._works = [deque() for _ in range(world.plan.setup.threads)]
        self._workers = [None] * len(self._works)
        self._watch = world.watch

    # --- its life -------------------------------------------------------------------------------

    def start(self):
        """Start a process, unless one runs."""
        if self._lives and not self.process.is_dead:
            return
        setup = self._world.plan.setup
        self._lives += 1
        self.process = Process(
            self._number,
            self._lives,
            self._world.timeline,
            self._world.network,
            setup.rates[self._number],
            setup.seed,
            setup.seconds_per_message,
        )
        self.process.disturb()
        for thread, works in enumerate(self._works):
            if works:
                self._work(thread)

    def kill(self, *, unplugged):
        """End the process."""
        self.process.is_unplugged = unplugged
        self.process.kill()
        self._workers = [None] * len(self._works)
        self._watch.killed(self.process)

    def interrupt(self):
        """Interrupt one of its calls, if one goes on."""
        for worker in self._workers:
            if worker is not None and self._watch.interrupt(worker):
                return

    def count(self, kind):
        """Count what went wrong, and what this client was doing."""
        claims = [self._watch.now_doing.get(worker) for worker in self._workers if worker]
        phases = {claim.phase for claim in claims if claim is not None}
        phases |= {one.phase for one in self._watch.held if one.process is self.process}
        for phase in phases or {"idle"}:
            self._watch.counts[f"{kind} | {phase}"] += 1

    @property
    def is_done(self):
        """Whether it does nothing, and will do nothing."""
        return not any(self._works) and all(one is None for one in self._workers)

    def doing(self):
        """What it does, for people."""
        claims = [self._watch.now_doing.get(worker) for worker in self._workers if worker]
        return ", ".join(f"{one.phase} {one.name!r}" for one in claims if one) or "nothing"

    # --- what it does ---------------------------------------------------------------------------

    def give(self, work):
        """Do some work as soon as its thread is idle."""
        self._give(work.thread, lambda: self._lock(work))

    def take_up(self, baton, work):
        """Take up a lease that was handed over."""
        self._give(work.thread, lambda: self._lock(work, baton))

    def operate(self, step):
        """Be the operator."""
        self._give(0, lambda: self._operate(step))

    def _give(self, thread, job):
        self._works[thread].append(job)
        if self._workers[thread] is None and not self.process.is_dead:
            self._work(thread)

    def _work(self, thread):
        works = self._works[thread]

        def run():
            while works:
                works.popleft()()
            self._workers[thread] = None

        self._workers[thread] = self.process.begin(run)

    def _operate(self, step):
        alias = self.process.alias
        try:
            match step.kind:
                case "maintenance":
                    held.pause(step.name, step.seconds, by="an operator", using=alias)
                case "resume":
                    held.resume(step.name, using=alias)
                case "force":
                    seen = held.get(step.name, using=alias)
                    self._sleep(0.1)
                    if seen is not None:
                        held.force_release(seen.name, seen.id, using=alias)
        except (LockTimeout, LockUnavailable) as error:
            self._watch.counts[f"operator: {type(error).__name__}"] += 1

    def _lock(self, work, baton=""):
        """Want a lock, and do something under it."""
        if work.start:
            self._start(work)
            return
        if work.replace_within is not None:
            self._replace(work)
            return
        options = Options(
            ttl=work.ttl,
            wait=work.wait,
            renew=work.renew,
            max_hold=work.max_hold,
            min_hold=work.min_hold,
            once=work.once,
            using=self.process.alias,
            limit=self._limit(work),
        )
        lock = Lock(work.name, options)
        if baton:
            taken = Baton.read(baton)._replace(alias=self.process.alias)
            lock = TakingUp(taken, options._replace(wait=0.0))
            work = work._replace(wait=0.0, min_hold=0.0, once=0.0)
        self._watch.say(f"{self.process} takes {work.name!r} up" if baton else str(work))
        claim = Claim(self.process, work, self.process.now)
        if isinstance(lease := self._ask(lock, claim), Lease):
            self._hold(lock, lease, claim)

    def _limit(self, work):
        """The option: a lock has a limit always or never."""
        has_one = work.name == BESIDE or self._world.plan.setup.limits[work.name] > 1
        return work.limit if has_one else None

    def _start(self, work):
        """Want a start under a rate, alone or beside a lock; come back for it, if it is planned."""
        starts = self._world.plan.setup.starts[work.start]
        limits = [Rate(work.start, (1, starts.every), burst=starts.burst)]
        if work.name != work.start:
            limits.insert(0, Limit(work.name, work.limit))
        options = Options(ttl=work.ttl, wait=work.wait, using=self.process.alias)
        reserved = {} if work.comes_back else None
        self._watch.say(str(work))
        for _ in range(MOST_RETRIES):
            claim = Claim(self.process, work, self.process.now)
            lock = JointLock(tuple(limits), options, reserved=reserved)
            outcome = self._ask(lock, claim)
            if isinstance(outcome, Lease):
                self._hold(lock, outcome, claim)
                return
            if not reserved or not isinstance(outcome, Busy):
                return
            self._sleep(outcome.expires_in)
            self._watch.counts["came back for a start"] += 1

    def _replace(self, work):
        """Want a lock that a newer call replaces, and replace an older one."""
        options = Options(
            ttl=work.ttl,
            renew=work.renew,
            using=self.process.alias,
            replace=True,
            replace_within=work.replace_within,
        )
        called = milliseconds_of(EPOCH + self.process.now)
        self._watch.say(str(work))
        lock = Lock(work.name, options, NO_DUPLICATES._replace(called=called))
        claim = Claim(self.process, work, self.process.now)
        if isinstance(lease := self._ask(lock, claim), Lease):
            self._hold(lock, lease, claim)

    def _ask(self, lock, claim):
        """Ask for it. Returns the lease, or anything else."""
        watch, process, work = self._watch, self.process, claim.work
        outcome = None
        with Stopwatch(process) as watched, watch.doing(claim):
            try:
                outcome = lock.attempt()
                told = "acquired" if isinstance(outcome, Lease) else type(outcome).__name__.lower()
                watch.check_busy(claim, outcome)
            except LockUnavailable:
                told = "unavailable"
            except LockLost:
                told = "not taken up"
            except LockMisuse:
                told = "a circle"
            except Interrupted:
                told = "interrupted"
        watch.counts[told] += 1
        watch.check_trouble(told, claim)
        watch.say(f"{process}: {work.name!r} {told}")
        if told == "interrupted":
            # Of several locks: the start, the lock, and the start that is reserved.
            most = UNDONE_WITHIN * (3 if work.start else 1)
            watch.check_duration("undoing an acquire", claim.since_interrupt, most, claim)
        else:
            watch.check_duration("an acquire", watched.seconds, most_seconds(work), claim)
        if not isinstance(outcome, Lease):
            for part in claim.parts if isinstance(outcome, Busy) else ():
                part.is_kept = part.token in (lock._reserved or {}).values()
            watch.ended(claim)
        return outcome

    def _hold(self, lock, lease, claim):
        watch, work = self._watch, claim.work
        watch.has(claim, lease)
        if work.replace_within is not None:
            with told_when_replaced(lease):
                self._work_until_replaced(lease, work)
        else:
            self._sleep(work.body)
        if work.inner and work.inner != work.name:
            setup = self._world.plan.setup
            limit, ttl = setup.limits[work.inner], setup.ttls[work.inner]
            inner = work._replace(name=work.inner, limit=limit, ttl=ttl, inner="", end="releases")
            self._lock(inner._replace(wait=min(work.wait, 4 * ttl)))
        with Stopwatch(self.process) as watched, watch.doing(claim):
            left = max(lease.ends - self.process.clock(), 0.0)
            watch.lets_go(claim)
            outcome = self._let_go(lock, lease, claim)
        watch.counts[outcome] += 1
        watch.say(f"{self.process}: {work.name!r} {outcome}")
        watch.check_trouble(outcome, claim)
        most = left + 3 * operation_timeout(work.ttl)
        watch.check_duration("a release", watched.seconds, most, claim)
        watch.ended(claim)

    def _work_until_replaced(self, lease, work):
        until = self.process.now + work.body
        while (left := until - self.process.now) > 0:
            self._sleep(min(left, LOOKS_EVERY) if work.looks else left)
            if lease.loss_reason(self.process.clock()) == "replaced":
                self._watch.counts["a run was told that it is replaced"] += 1
                return

    def _let_go(self, lock, lease, claim):
        """End it as planned. Returns what came of that."""
        end = claim.work.end
        if end == "never releases":
            lease.is_ended = True  # As by the destructor of a handle that is dropped.
            claim.end_is_troubled()
            return "not released"
        outcome = "released"
        try:
            with ExitStack() as block:
                block.push(lock)
                if end == "fails":
                    outcome = "released after an error"
                    raise Failed
                if end == "hands over":
                    self._world.leave_baton(lease.hand_over(within=1.0), claim.work)
                    outcome, claim.successor = "handed to whoever has the baton", ""
            for one in claim.each:
                self._watch.check_end_of_block(one)
        except Failed:
            pass
        except LockLost as lost:
            outcome = f"lost: {lost.reason}"
        except LockUnavailable:
            outcome = "release unavailable"
            claim.end_is_troubled()
        except Interrupted:
            outcome = "release interrupted"
        return outcome

    def _sleep(self, seconds):
        this_thread().sleep(self.process.now + seconds)


class Stopwatch:
    """Measures by the clock of a process, without the time that it stood still."""

    seconds = 0.0

    def __init__(self, process):
        self._process = process

    def __enter__(self):
        self._began = self._process.running()
        return self

    def __exit__(self, *_):
        self.seconds = self._process.running() - self._began
