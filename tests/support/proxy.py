"""A proxy that understands Redis's protocol and breaks it on purpose, command by command.

    proxy.rule("EVALSHA", "cut_after")            # the server runs the next one; its reply is lost
    proxy.rule_for_script(sha, "delayreply:4.5")  # the same for one script only
    proxy.rule("*", "cut_before", times=None, probability=0.04)   # for soaks; seeded

Actions:

=================  ================================================================================
cut_before         reset the connection; the command never arrives
cut_after          let the server run it, then reset the connection; the reply is lost
hang_before        half-open: neither it nor anything later passes, the connection stays
hang_after         the server runs it; neither its reply nor anything later passes
delay:SECONDS      it arrives late
delayreply:SECONDS the server runs it at once; the reply (and what follows it) arrives late
hold               it waits for forward_held(), also when its client is long gone: a zombie
=================  ================================================================================

What an "after" action hits has run: a NOSCRIPT reply passes, and does not count.

The order of pipelined commands is kept, replies to commands before a cut or a hang still arrive,
and what the server sends unasked (pub/sub, client tracking) passes at any moment, in RESP2 and in
RESP3. Not for MONITOR, replication or CLIENT REPLY, which answer in ways of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.servers import Endpoint, free_port
from tests.support.waiting import HUNG, wait_until

BEFORE = {"cut_before", "hang_before", "delay", "hold"}
AFTER = {"cut_after", "hang_after", "delayreply"}
TIMED = {"delay", "delayreply"}
MESSAGES = {b"message", b"pmessage", b"smessage"}
CONFIRMATIONS = {
    prefix + verb for prefix in (b"", b"p", b"s") for verb in (b"subscribe", b"unsubscribe")
}


@dataclass(slots=True)
class Command:
    """A command that a client sent."""

    name: str  # In capitals.
    args: tuple  # Without the name, as bytes.
    link: int  # Number of the connection, from 1.
    time: float  # When it came, by time.monotonic().
    action: str = "pass"  # What became of it.
    seconds: float = 0  # How long a timed action takes.
    rule: object = None
    frames_due: int = 1  # One, but for SUBSCRIBE a b c, which is confirmed thrice.

    def __str__(self):
        shown = " ".join(arg[:40].decode(errors="backslashreplace") for arg in self.args)
        return f"{self.link}: {self.name} {shown} -> {self.action}"


@dataclass(slots=True, eq=False)
class Rule:
    """What to do with the commands of a kind; made by Proxy.rule()."""

    name: str
    action: str
    seconds: float
    left: float  # How often it will still act.
    match: object  # Says whether it is for a command with these arguments.
    probability: float | None
    hits: int = 0  # How often it has acted; "after" rules act once the server has run the command.

    def wait(self, hits=1, timeout=HUNG):
        """Return once the rule has acted."""
        wait_until(lambda: self.hits >= hits, timeout, f"rule {self.name} {self.action} acts")

    def is_for(self, name, args):
        is_named = name == self.name or (self.name[-1] == "*" and name.startswith(self.name[:-1]))
        return bool(self.left and is_named and self.match(args))


class Frame(NamedTuple):
    """One whole reply or push, as it came and as values."""

    raw: bytes
    kind: bytes  # The first byte: + - : $ * > and so on.
    value: object

    @property
    def head(self):
        """The first item of an array or a push: what sort of message it is."""
        return self.value[0] if isinstance(self.value, list) and self.value else None


class Proxy(Endpoint):
    """A faulty network in front of a server.

    Args:
        server: Where commands go.
        seed: For rules with a probability.
    """

    def __init__(self, server, *, seed=0):
        super().__init__()
        self.server = server
        self.kind = server.kind
        self.log = []
        self.pushes = []  # Messages that the server sent unasked and that passed.
        self.pushes_dropped = 0
        self._pushes_to_drop = 0
        self._rules = []
        self._rewrites = {}
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._links = []
        self._made = 0
        self._black = False  # Is this a black hole?
        self._gate = threading.Condition()  # Where links wait for the end of that.
        self.port = free_port()
        # Bound by number, the port stays ours while refuse() does not listen on it.
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._accepter = None
        self._listen()

    # Rules

    def rule(self, name, action, *, times=1, match=None, probability=None):
        """Do *action* to the next commands called *name*; the oldest rule that applies acts.

        Args:
            name: The command; a ``*`` at its end stands for the rest, or for all.
            action: See the top of the module.
            times: How often; None for as long as the rule is there.
            match: Only if an argument contains this, or this says so when given the arguments.
            probability: Only in that share of the cases.
        """
        verb, _, seconds = action.partition(":")
        if verb not in BEFORE | AFTER or bool(seconds) is not (verb in TIMED):
            raise ValueError(f"no such action: {action!r}")
        rule = Rule(
            name=name.upper(),
            action=verb,
            seconds=float(seconds or 0),
            left=float("inf") if times is None else times,
            match=_matcher(match),
            probability=probability,
        )
        with self._lock:
            self._rules.append(rule)
        return rule

    def rule_for_script(self, sha, action, *, times=1):
        """Do *action* to the next runs of one script, be it sent by EVALSHA or by EVAL.

        With a "before" action, mind that the first EVALSHA on a fresh server runs nothing.
        """

        def runs_it(args):
            # Of a SHA-1, EVALSHA has the digits and EVAL has the text.
            return bool(args) and sha.encode() in (
                args[0].lower(),
                hashlib.sha1(args[0], usedforsecurity=False).hexdigest().encode(),
            )

        return self.rule("EVAL*", action, times=times, match=runs_it)

    def rewrite(self, name, change):
        """Pass the bytes of each reply to commands called *name* through *change*: another server.

        INFO, for one, could say that a replica is connected, HELLO that the server is old.
        """
        self._rewrites[name.upper()] = change

    def clear_rules(self):
        """Let everything pass again; what hangs keeps hanging."""
        with self._lock:
            self._rules.clear()

    def drop_pushes(self, count=1):
        """Lose the next *count* messages that the server sends unasked."""
        with self._lock:
            self._pushes_to_drop = count

    def forward_held(self):
        """Send the commands on hold to the server; return how many, once it has run them."""
        held = [link for link in self._links if link.holds.is_set()]
        for link in held:
            link.forward_held()
        return len(held)

    # The whole network

    def blackhole(self):
        """Accept connections and commands, pass nothing on, answer nothing."""
        self._black = True

    def refuse(self):
        """Reset all connections and refuse new ones, as if no server ran."""
        with contextlib.suppress(OSError):  # It did not listen.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepter.join()
        self.cut()

    def heal(self, *, deliver=False):
        """End blackhole() and refuse().

        Connections that were in the black hole are reset, and what was sent into it is lost. With
        ``deliver=True`` it arrives late instead, as TCP would send it again: zombies included.
        """
        if self._black and not deliver:
            self.cut()
        self._black = False
        self.wake_links()
        if self._accepter is None or not self._accepter.is_alive():
            self._listen()

    def cut(self):
        """Reset all connections, and return when it is done."""
        with self._lock:  # A new one is there when it has begun.
            links = list(self._links)
        for link in links:
            link.cut()
        for link in links:
            link.join()

    def close(self):
        super().close()
        self.refuse()
        self._listener.close()

    # What passed

    def commands(self, *names):
        """Return the commands so far that are called one of *names*."""
        return [command for command in list(self.log) if command.name in names]

    def report(self, last=40):
        """Return the last commands, one a line, for people."""
        return "\n".join(str(command) for command in self.log[-last:])

    def idle_rules(self):
        """Return the rules that should have acted by now and never did: a fault not injected."""
        return [rule for rule in self._rules if not rule.hits and rule.probability is None]

    # Called by the links

    def judge(self, link, raw_args):
        """Log a command and decide what becomes of it."""
        name, args = raw_args[0].decode(errors="replace").upper(), tuple(raw_args[1:])
        command = Command(name=name, args=args, link=link, time=time.monotonic())
        with self._lock:
            self.log.append(command)
            for rule in self._rules:
                if not rule.is_for(name, args):
                    continue
                if rule.probability is None or self._random.random() < rule.probability:
                    rule.left -= 1
                    command.rule = rule
                    command.action, command.seconds = rule.action, rule.seconds
                    break
        return command

    def acts(self, command):
        """Count that a decision is carried out."""
        with self._lock:
            if command.rule is not None:
                command.rule.hits += 1

    def take_back(self, command):
        """Undo a decision: the server did not run the command, so there is no "after"."""
        with self._lock:
            if command.rule is not None:
                command.rule.left += 1
            command.action, command.rule = "pass", None

    def rewritten(self, command, frame):
        """The reply to a command as its client is to see it."""
        change = self._rewrites.get(command.name)
        return frame if change is None else frame._replace(raw=change(frame.raw))

    def drops(self, push):
        """Log a push and decide whether it is lost."""
        with self._lock:
            if self._pushes_to_drop > 0:
                self._pushes_to_drop -= 1
                self.pushes_dropped += 1
                return True
            self.pushes.append(push.value)
            return False

    def lets_pass(self, over):
        """Stand still while this is a black hole; False when the link is *over* instead."""
        with self._gate:
            self._gate.wait_for(lambda: not self._black or over.is_set())
        return not over.is_set()

    def wake_links(self):
        """Let those who stand still look again."""
        with self._gate:
            self._gate.notify_all()

    def forget(self, link):
        with self._lock:
            self._links.remove(link)

    def _listen(self):
        self._listener.listen(128)
        self._accepter = threading.Thread(target=self._accept, name="proxy accepts", daemon=True)
        self._accepter.start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # refuse() or close().
                return
            try:
                upstream = socket.create_connection((self.server.host, self.server.port), 5)
            except OSError:
                _reset_on_close(client)
                client.close()
                continue
            upstream.settimeout(None)
            with self._lock:
                self._made += 1
                link = _Link(self, self._made, client, upstream)
                self._links.append(link)
                link.start()  # Whoever finds it in the list may end it.


class _Link:
    """One connection of a client and its twin to the server; a thread pumps each direction."""

    def __init__(self, proxy, number, client, upstream):
        self._proxy = proxy
        self._number = number
        self._client = client
        self._upstream = upstream
        for end in (client, upstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._changed = threading.Condition()
        self._unanswered = deque()  # What the server owes, in order.
        self._over = threading.Event()
        self._silent = False  # Half-open: reads and answers nothing any more.
        self._subscribed = False  # In RESP2, only this tells a push from a reply.
        self.holds = threading.Event()  # A command waits for forward_held().
        self._forward = threading.Event()
        self._pumps = [
            threading.Thread(target=self._pump, args=(direction,), name=name, daemon=True)
            for direction, name in (
                (self._requests, f"proxy link {number} requests"),
                (self._replies, f"proxy link {number} replies"),
            )
        ]
        self._pumping = len(self._pumps)

    def start(self):
        for pump in self._pumps:
            pump.start()

    def join(self):
        for pump in self._pumps:
            pump.join(HUNG)
            assert not pump.is_alive(), f"{pump.name} does not end"

    def cut(self):
        """Reset the client's connection. (The RST goes out when the last pump closes it.)"""
        _reset_on_close(self._client)
        self._hang_up()

    def forward_held(self):
        self._forward.set()
        wait_until(lambda: not self.holds.is_set(), message="the server runs the command on hold")

    def _pump(self, direction):
        try:
            with contextlib.suppress(OSError):  # One of the two ends is gone.
                direction()
        finally:
            self._hang_up()
            with self._changed:
                self._pumping -= 1
                last = not self._pumping
            if last:
                self._client.close()
                self._upstream.close()
                self._proxy.forget(self)

    def _hang_up(self):
        """End both pumps, wherever they wait."""
        self._over.set()
        self._forward.set()
        with self._changed:
            self._changed.notify_all()
        self._proxy.wake_links()
        # Closing a socket does not wake who reads from it; shutting it down does. SHUT_RD sends
        # nothing, so that what the client sees is decided by the close: FIN, or RST after a cut.
        for end, how in ((self._client, socket.SHUT_RD), (self._upstream, socket.SHUT_RDWR)):
            with contextlib.suppress(OSError):
                end.shutdown(how)

    def _requests(self):
        with self._client.makefile("rb") as stream:
            while (frame := read_frame(stream)) is not None:
                if not self._proxy.lets_pass(self._over):
                    return
                if self._silent:
                    continue
                # Without an array it is a line typed by hand, such as PING.
                args = frame.value if frame.kind == b"*" else frame.raw.split()
                command = self._proxy.judge(self._number, args)
                if not self._pass_on(command, frame.raw):
                    return

    def _pass_on(self, command, raw):
        """Do a command's "before" action and send it on; False ends the connection."""
        if command.action == "hold":
            self.holds.set()
        if command.action in BEFORE - {"hang_before"}:
            self._proxy.acts(command)  # First: the client may see at once what is done.
        match command.action:
            case "cut_before":
                self._wait_answered()
                self.cut()
                return False
            case "hang_before":
                self._wait_answered()
                self._silent = True
                self._proxy.acts(command)  # Whoever waits for that relies on the silence.
                return True
            case "delay":
                self._over.wait(command.seconds)
            case "hold":
                self._forward.wait()
        if self._over.is_set():
            return False
        if command.name.endswith("SUBSCRIBE"):
            self._subscribed = True
            command.frames_due = max(1, len(command.args))
        with self._changed:
            self._unanswered.append(command)
        self._upstream.sendall(raw)
        if command.action in {"cut_after", "hang_after", "hold"}:
            # Nothing behind it may run: neither what was pipelined nor, for a zombie, the end of
            # the connection.
            self._wait_answered()
        if command.action == "hold":
            self._forward.clear()
            self.holds.clear()
        return True

    def _wait_answered(self):
        with self._changed:
            self._changed.wait_for(lambda: not self._unanswered or self._over.is_set())

    def _replies(self):
        with self._upstream.makefile("rb") as stream:
            while (frame := read_frame(stream)) is not None:
                if not self._proxy.lets_pass(self._over):
                    return
                command = self._answered_by(frame)
                if command is None:
                    is_message = self._is_push(frame) and frame.head not in CONFIRMATIONS
                    if not (self._silent or (is_message and self._proxy.drops(frame))):
                        self._deliver(frame)
                    continue
                command.frames_due -= 1
                if command.frames_due:
                    self._deliver(frame)
                    continue
                if command.action in AFTER and frame.raw.startswith(b"-NOSCRIPT"):
                    self._proxy.take_back(command)
                if command.action in AFTER:
                    self._proxy.acts(command)
                if command.action == "cut_after":
                    self.cut()
                    return
                if command.action == "hang_after":
                    self._silent = True
                if command.action == "delayreply":
                    self._over.wait(command.seconds)
                self._deliver(self._proxy.rewritten(command, frame))
                with self._changed:
                    self._unanswered.popleft()
                    self._changed.notify_all()

    def _answered_by(self, frame):
        """Return the command that *frame* answers, or None if the server sent it unasked."""
        oldest = self._unanswered[0] if self._unanswered else None
        if not self._is_push(frame):
            return oldest
        # Subscribing is answered by pushes only.
        if oldest and oldest.name.endswith("SUBSCRIBE") and frame.head in CONFIRMATIONS:
            return oldest
        return None

    def _is_push(self, frame):
        if frame.kind == b">":
            return True
        return self._subscribed and frame.kind == b"*" and frame.head in MESSAGES | CONFIRMATIONS

    def _deliver(self, frame):
        if not self._silent:
            # A client that is gone is the other pump's business; a zombie's has long been.
            with contextlib.suppress(OSError):
                self._client.sendall(frame.raw)


def read_frame(stream):
    """Read one whole value of RESP2 or RESP3, or None at the end of the connection."""
    raw = bytearray()
    try:
        kind, value = _read_value(stream, raw)
    except EOFError:
        return None
    return Frame(bytes(raw), kind, value)


def _read_value(stream, raw):
    """Read one value, adding its bytes to *raw*."""
    line = stream.readline()
    while line == b"\n":  # A master is still at work on what it will send to its replica.
        raw += line
        line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    raw += line
    kind, rest = line[:1], line[1:-2]

    def values(count):
        for _ in range(count):
            yield _read_value(stream, raw)[1]

    match kind:
        case b"$" if rest.startswith(b"EOF:"):  # All data, for a replica, up to a mark.
            mark, start = rest[4:], len(raw)
            while not raw.endswith(mark, start):
                if not (byte := stream.read(1)):
                    raise EOFError
                raw += byte
            return kind, bytes(raw[start : -len(mark)])
        case b"$" | b"=" | b"!" if int(rest) >= 0:  # Text, by length.
            text = stream.read(int(rest) + 2)
            if len(text) < int(rest) + 2:
                raise EOFError
            raw += text
            return kind, text[:-2]
        case b"*" | b">" | b"~" if int(rest) >= 0:  # Array, push, set.
            return kind, list(values(int(rest)))
        case b"%":  # Map: names and values in turn.
            return kind, list(values(2 * int(rest)))
        case b"|":  # Attributes, which go before the value they belong to.
            list(values(2 * int(rest)))
            return _read_value(stream, raw)
    return kind, rest  # A line of its own, or a null ($-1, *-1, _).


def _matcher(match):
    if match is None or callable(match):
        return match or (lambda args: True)
    wanted = match.encode() if isinstance(match, str) else match
    return lambda args: any(wanted in arg for arg in args)


def _reset_on_close(end):
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
