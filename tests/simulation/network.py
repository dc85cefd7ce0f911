"""Connections between processes and the server, and what becomes of a message on them.

Messages on one connection arrive in the order in which they were sent. Those on two may overtake
each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_redislock.rules.steps import Call, NotDone, Tell, Unanswered
from tests.simulation.timeline import Killed, this_thread

SOONEST = 0.0002  # Seconds that a message takes at least.
REFUSED_AFTER = 0.001  # Seconds until a server that is down has refused a connection.
KEEPALIVE = 30.0  # Seconds until a server notices that nobody is behind a connection.


class Trouble(NamedTuple):
    """What befalls the next message of a process."""

    kind: str  # One of plan.TROUBLES.
    seconds: float = 0.0


@dataclass(eq=False)
class Message:
    """Scripts that are sent in one go."""

    steps: Sequence[Call | Tell]
    is_rung: bool = False  # Whether the server is to ring this connection from now on.
    is_awaited: bool = True
    answers: list[Any] | None = None
    tokens: tuple[str, ...] = field(default=())


class Line:
    """One connection of a process."""

    def __init__(self, process, network, channel):
        self.process = process
        self.channel = channel
        self.is_open = True  # To the process.
        self.is_known = True  # To the server.
        self.is_rung = False
        self.up = self.down = 0.0  # When the last message to the server, and from it, arrives.
        self._network = network
        self._arrived = deque()
        self._rings = deque()
        self._reader = None

    # --- for the process ------------------------------------------------------------------------

    def ask(self, steps, within, *, rung=False):
        """Send scripts, and wait for the answers, by the clock of the process.

        Raises:
            Unanswered: There are none in time. The line is closed.
        """
        sent, until = self.process.clock(), self.process.after(within)
        message = Message(steps, is_rung=rung)
        self._network.send(self, message)
        try:
            while True:
                while self._arrived:
                    if self._arrived.popleft() is message:
                        assert message.answers is not None
                        self._network.watch.answered(message)
                        return message.answers
                if not self.is_open or self.process.now >= until:
                    problem = "no answer came in time" if self.is_open else "the line was cut"
                    raise Unanswered(problem, sent, self.process.clock())
                self._sleep(until)
        except BaseException:
            self.close()
            raise

    def tell(self, step):
        """Send a script whose answer nobody awaits."""
        if not self.is_open:
            now = self.process.clock()
            raise Unanswered("the line was cut", now, now)
        self._network.send(self, Message([step], is_awaited=False))

    def next_ring(self, lease_id, seconds):
        """The next ring for a lease; None if there is none within these seconds.

        Raises:
            Unanswered: The line was cut.
        """
        now, until = self.process.clock(), self.process.after(seconds)
        try:
            while True:
                while self._rings:
                    ring = self._rings.popleft()
                    if ring.split()[1:2] == [lease_id.encode()]:
                        return ring
                if not self.is_open:
                    raise Unanswered("the line was cut", now, self.process.clock())
                if self.process.now >= until:
                    return None
                self._sleep(until)
        except BaseException:
            self.close()
            raise

    def close(self):
        """Use it no more."""
        if self.is_open:
            self.is_open = False
            self._network.hang_up(self)

    def _sleep(self, until):
        self._reader = this_thread()
        try:
            self._reader.sleep(until)
        finally:
            self._reader = None

    # --- for the network ------------------------------------------------------------------------

    def arrived(self, message):
        """An answer is there to read."""
        if self.is_open:
            self._arrived.append(message)
            self._wake()

    def rung(self, words):
        """A ring is there to read."""
        if self.is_open:
            self._rings.append(words)
            self._wake()

    def was_cut(self):
        """The other end is gone."""
        self.is_open = False
        self._wake()

    def _wake(self):
        if self._reader is not None:
            self._reader.wake()


class Network:
    """Carries messages, and does to them what was planned."""

    def __init__(self, server):
        self._server = server
        self._timeline = server.timeline
        self.watch = server.watch

    def connect(self, process, channel, within):
        """A new connection.

        Raises:
            NotDone: The server cannot be reached.
        """
        began = process.clock()
        if process.is_cut_off:
            this_thread().sleep(process.after(within))
            if process.is_cut_off:
                self.watch.could_not_send()
                raise NotDone("the server cannot be reached", began, process.clock())
        if not self._server.is_up:
            this_thread().sleep(self._timeline.now + REFUSED_AFTER)
            self.watch.could_not_send()
            raise NotDone("the server refuses connections", began, process.clock())
        line = Line(process, self, channel)
        self._server.lines[channel] = line
        return line

    def send(self, line, message):
        """Send a message on its way to the server."""
        process = line.process
        if process.is_dead:  # What its code does on its way out is never done.
            raise Killed
        trouble = process.next_trouble(message)
        message.tokens = self.watch.sent(process, message, trouble)
        if not line.is_known:
            self._reset(line)
            self.watch.lost(message)
            return
        kind, seconds = trouble or Trouble("")
        delay = process.latency()
        if process.is_cut_off:
            if not process.retransmits:
                self.watch.lost(message)
                return
            delay += process.cut_off_until - self._timeline.now
        if kind == "late":
            delay += seconds
        line.up = max(line.up, self._timeline.now + delay)
        if kind in {"lost", "cut before"}:
            self.watch.lost(message)
        else:
            self._timeline.at(line.up, self._server.receive, line, message, trouble)
        if kind == "cut before":
            self._timeline.at(line.up, self._cut, line)
        if kind == "interrupted":
            # Before it arrives, or after that.
            self._timeline.at(
                self._timeline.now + 2 * process.latency(), *self.watch.interrupting()
            )
        if kind == "twice":
            self.watch.doubled(message)
            self._timeline.at(line.up + seconds, self._server.receive, line, message, None)

    def answer(self, line, message, trouble):
        """Send the answers back."""
        kind, seconds = trouble or Trouble("")
        if kind == "cut after":
            self._cut(line)
        elif kind != "unanswered" and message.is_awaited:
            self._back(line, line.arrived, message, seconds if kind == "answered late" else 0.0)

    def ring(self, line, words):
        """Ring a process."""
        if not line.process.misses_ring():
            self._back(line, line.rung, words)

    def hang_up(self, line):
        """Tell the server that a line is closed, as soon as it can be told."""
        process = line.process
        delay = KEEPALIVE if process.is_cut_off or process.is_unplugged else process.latency()
        self._timeline.at(max(line.up, self._timeline.now + delay), self._server.forget, line)

    def _back(self, line, arrive, what, more=0.0):
        process = line.process
        if process.is_cut_off:
            if not process.retransmits:
                return
            more += process.cut_off_until - self._timeline.now
        line.down = max(line.down, self._timeline.now + process.latency() + more)
        self._timeline.at(line.down, arrive, what)

    def _cut(self, line):
        """Both ends lose the connection."""
        self._server.forget(line)
        line.was_cut()

    def _reset(self, line):
        """The server says that it does not know this connection, if it can be reached."""
        if not line.process.is_cut_off:
            self._timeline.at(self._timeline.now + REFUSED_AFTER, line.was_cut)
