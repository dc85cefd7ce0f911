"""Carries out a plan: clients want locks, and what was planned goes wrong."""

import gc
import logging
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from greenlet import getcurrent

from django_redislock import clock, held, holder
from django_redislock import lease as lease_module
from django_redislock.backends import watchdog
from django_redislock.backends.registry import backends
from django_redislock.jobs import replaced
from django_redislock.rules import flows, forms
from tests.simulation.client import Client
from tests.simulation.commands import Violation
from tests.simulation.network import Network, Trouble
from tests.simulation.plan import TROUBLES, Work
from tests.simulation.process import SimulatedBackend
from tests.simulation.promises import Watch
from tests.simulation.server import LASTING, Server
from tests.simulation.timeline import STANDINS, Thread, Timeline, this_thread

SLOW = 20.0  # How many times as long messages take while the network is slow.
LONGEST_IN_QUEUE = 6.0  # Seconds that a waiter stays there after it has gone; see lua/_lease.lua.
LAST_WORK = 3600.0  # Seconds after the last step in which all that was begun must end.


class World:
    """One simulation."""

    def __init__(self, plan, *, instead=None, tell=None):
        """Do nothing yet.

        Args:
            plan: What is to be.
            instead: For negative controls: scripts that the server runs in place of others.
            tell: Is told the story, line by line.
        """
        self.plan = plan
        self.timeline = Timeline()
        self.watch = Watch(self.timeline, plan.setup, tell=tell)
        self._random = Random(f"jitter {plan.setup.seed}")
        self.server = Server(self.timeline, self.watch, plan.setup.limits, instead or {})
        self.network = self.server.network = Network(self.server)
        self.watch.begin(self.server)
        self._clients = [Client(self, number) for number in range(len(plan.setup.rates))]
        self._batons = 0  # That nobody has taken up yet.

    @property
    def counts(self):
        """How often what has happened."""
        return self.watch.counts

    def run(self):
        """Carry out the plan to its end.

        Raises:
            Violation: A promise was broken.
        """
        with self._in_place():
            for client in self._clients:
                client.start()
            for step in self.plan.steps:
                self.timeline.at(step.when, self._do, step)
            end = max([self.plan.setup.seconds, *(step.when for step in self.plan.steps)])
            self._go_on(end)
            self._rest()
            self._go_on(end + LAST_WORK + 2 * self.plan.setup.seconds, until_all_is_done=True)
            self._check_that_all_is_done()
            longest = max(*self.plan.setup.ttls.values(), LONGEST_IN_QUEUE)
            self._go_on(self.timeline.now + 3 * longest + 1)
            self._check_that_nothing_stays()

    def _go_on(self, until, *, until_all_is_done=False):
        step, check = self.timeline.step, self.watch.check
        while step(until):
            check()
            if until_all_is_done and self._is_done:
                return
        if not until_all_is_done:
            self.timeline.now = max(self.timeline.now, until)

    @contextmanager
    def _in_place(self):
        """Have the shipped code run in this world: its clock, its chance, its threads."""
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(patch.object(clock, "now", self._local_time))
            enter(patch.object(holder, "_this_thread", OfThread()))
            for module in (flows, watchdog):
                enter(patch.object(module, "random", self._random))
            for module in (forms, lease_module):
                enter(patch.object(module, "urandom", self._random.randbytes))
            enter(
                patch.object(
                    held.secrets, "token_hex", lambda size: self._random.randbytes(size).hex()
                )
            )
            enter(patch.object(replaced, "threading", SimpleNamespace(**STANDINS)))
            enter(backends.made_by(self._backend))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            gc.disable()
            stack.callback(gc.enable)
            stack.callback(self._kill)  # However it ends, no thread of it goes on.
            yield

    def _kill(self):
        for client in self._clients:
            client.process.kill()
        self.watch.forget()

    def _local_time(self):
        thread = getcurrent()
        return thread.place.clock() if isinstance(thread, Thread) else self.timeline.now

    def _backend(self, alias):
        number = int(alias.partition(".")[0])
        return SimulatedBackend(self._clients[number].process)

    # --- the steps of a plan --------------------------------------------------------------------

    def _do(self, step):
        if isinstance(step, Work):
            self._clients[step.client].give(step)
            return
        self.watch.say(str(step))
        client = self._clients[step.client]
        client.count(step.kind)
        process = client.process
        process.disturb()
        match step.kind:
            case kind if kind in TROUBLES:
                process.troubles.append(Trouble(kind, step.seconds))
            case "no ring":
                process.rings_to_miss += 1
            case "cut off":
                process.cut_off_until = self.timeline.now + step.seconds
                process.retransmits = step.seconds < 1
                self._later(step.seconds, process.disturb)
            case "slow":
                process.slowness = SLOW
                self._later(step.seconds, process.at_full_speed)
            case "pause":
                process.pause(step.seconds)
                self._later(step.seconds, process.disturb)
            case "kill" | "unplug":
                client.kill(unplugged=step.kind == "unplug")
                self._later(step.back, client.start)
            case "interrupt":
                client.interrupt()
            case "crash" | "flush" | "failover":
                self._crash(step)
            case "replica":
                self.server.cut_off_replica()
            case "clock":
                self.server.set_clock(step.seconds)
                self.watch.disturbed(forgets=True, loses_starts=step.seconds > 0)
            case _:
                client.operate(step)

    def _crash(self, step):
        self.server.crash()
        self.watch.disturbed()
        for client in self._clients:
            client.process.disturb()
        if step.kind == "flush":
            self.server.flush()
        elif step.kind == "failover":
            self.server.promote_replica()
        if step.kind != "crash":
            self.watch.disturbed(forgets=True)
        self._later(step.back, self._recover)

    def _recover(self):
        self.server.recover()
        self.watch.say("the server is back")
        self.watch.disturbed()
        for client in self._clients:
            client.process.disturb()

    def _later(self, seconds, act, *args):
        self.timeline.at(self.timeline.now + seconds, act, *args)

    # --- the end --------------------------------------------------------------------------------

    def _rest(self):
        """Nothing goes wrong any more, and nobody wants anything new."""
        for client in self._clients:
            client.process.troubles.clear()
            client.process.rings_to_miss = 0

    @property
    def _is_done(self):
        return not self._batons and all(client.is_done for client in self._clients)

    def _check_that_all_is_done(self):
        for client in self._clients:
            if not client.is_done:
                raise Violation(f"P6: {client.process} hangs: {client.doing()}")

    def _check_that_nothing_stays(self):
        for key in self.server.every_key():
            name = key.name.decode()
            if name in LASTING:
                continue
            if key.ends is None:
                raise Violation(f"P2: the key {name} stays for ever")
            if name.endswith(":waiting") or ":lock" in name:
                raise Violation(f"R4: the key {name} stays, though everybody has gone")

    # --- for the clients ------------------------------------------------------------------------

    def leave_baton(self, baton, work):
        """Leave a baton to somebody, who takes it up soon."""
        takers = [client for client in self._clients[1:] if client.process.number != work.client]
        taker = self._random.choice(takers or self._clients[1:])
        again = work._replace(client=taker.process.number, end="releases", inner="")
        self._batons += 1
        self._later(self._random.choice([0.01, 0.5, 1.5]), self._pass_on, taker, baton, again)

    def _pass_on(self, taker, baton, work):
        self._batons -= 1
        taker.take_up(baton, work)


class OfThread:
    """What is one for each simulated thread, in place of holder.py's threading.local."""

    @property
    def holder(self):
        return this_thread().holder
