"""Every command that this process sends to a server, as text that is the same in each run.

It listens at the sockets themselves, so it does not care which code sends. What differs between two
runs gets a name: tokens, ids, times, hosts, processes, and the ports of servers.
"""

import json
import os
import re
import socket
import stat
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from unittest import mock

from django_redislock.rules import scripts
from django_redislock.rules.scripts import Script

_unheard = ContextVar("unheard", default=False)
SCRIPTS = {
    known: one.name
    for one in vars(scripts).values()
    if isinstance(one, Script)
    for known in (one.sha.encode(), one.source)
}
# What a connection says of itself. When one is made is chance, if several threads want one.
OF_CONNECTIONS = {
    *("HELLO", "AUTH", "SELECT", "CLIENT", "ROLE", "INFO", "SENTINEL", "CLUSTER", "ASKING"),
    *("SUBSCRIBE", "SSUBSCRIBE", "PSUBSCRIBE", "UNSUBSCRIBE", "SUNSUBSCRIBE"),
}


class Recorder:
    """What was sent since it began."""

    def __init__(self, servers, passed_over=()):
        """Listen to what goes to these.

        Args:
            servers: By port, the name of each.
            passed_over: Scripts that are sent by chance.
        """
        self._passed_over = passed_over
        self.lines = []  # Of the threads of the scene, in order.
        self.elsewhere = set()  # Of all other threads: their order and number are chance.
        self.connections = set()
        self._servers = servers
        self._threads = threading.local()
        self._threads.name = ""
        self._names = {}  # By what was sent, what stands for it.
        self._kinds = {}  # How many of each kind have a name.
        self._began = {}  # By file, the beginning of a command.
        self._mutex = threading.Lock()

    def title(self, text):
        """Begin a step of the scene."""
        self.lines.append(f"\n# {text}")

    def says(self, text):
        """Note an outcome."""
        self.lines.append(f"= {self._plain(str(text))}")

    def follow(self, name):
        """Take the calling thread for one of the scene."""
        self._threads.name = f"{name}: "

    def written(self, file, data):
        """Note what was written to a file, if that is a socket."""
        if stat.S_ISSOCK(os.fstat(file).st_mode):
            with socket.socket(fileno=os.dup(file)) as sock:
                self.sent(sock, data, file)

    def sent(self, sock, data, file=None):
        """Note what a socket has sent."""
        server, file = None, file or sock.fileno()
        with suppress(OSError, IndexError):
            server = self._servers.get(sock.getpeername()[1])
        if server is None or _unheard.get():
            return
        with self._mutex:
            data = self._began.pop(file, b"") + bytes(data)
            while data:
                command, left = _first_command(data)
                if command is None:
                    self._began[file] = data
                    return
                data = left
                self._note(server, command)

    def _note(self, server, command):
        if len(command) > 1 and SCRIPTS.get(command[1]) in self._passed_over:
            return
        thread = getattr(self._threads, "name", None)
        if command[0].decode().upper() in OF_CONNECTIONS:
            self.connections.add(f"{server} {self._words(command, named=False)}")
        elif thread is None or command[0] == b"ZADD":  # Which of a quorum's fences lag is chance.
            line = f"{server} {self._words(command, named=False)}"
            self.elsewhere.add(
                re.sub(r"{\d+}", "{<bucket>}", line)
            )  # Of a cluster: there are many.
        else:
            self.lines.append(f"{thread}{server} {self._words(command)}")

    def _words(self, command, named=True):
        first, *args = command
        name = first.decode().upper()
        if name in {"EVALSHA", "EVAL"}:
            script = SCRIPTS[args[0]]
            return " ".join([name, script, *(self._word(arg, named) for arg in args[1:])])
        words = " ".join([name, *(self._word(arg, named) for arg in args)])
        # Unless less than a millisecond has passed.
        return re.sub(r"(PEXPIRE wire:\{cooling\}:lock) 120000", r"\1 <left>", words)

    def _word(self, arg, named):
        text = arg.decode(errors="backslashreplace")
        if text.startswith("{") and '"' in text:
            with suppress(ValueError):
                text = json.dumps(_anonymous(json.loads(text)), separators=(",", ":"))
        text = self._plain(text, named)
        return json.dumps(text) if not text or re.search(r"[\s\"]", text) else text

    def _plain(self, text, named=True):
        text = re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
        # Only where it stands for this process: a time may have the same digits.
        text = re.sub(rf'(<host>:|"pid":){os.getpid()}\b', r"\1<pid>", text)
        text = re.sub(r"(<host>:<pid>) (pytest|-c)\b", r"\1 <command>", text)
        text = re.sub(r'"(thread|command|birth)":"[^"]*"', r'"\1":"<\1>"', text)
        text = re.sub(r"bell:[0-9a-f]+:\d+", "bell:<number>", text)
        text = re.sub(r"'(ago|expires_in)': [\d.]+", r"'\1': <left>", text)
        text = re.sub(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<uuid>", text)
        for kind, pattern in (
            ("token", r"(?<![0-9a-f])(?:[0-9a-f]{32}|hold[0-9a-f]{28})(?![0-9a-f])"),
            ("id", r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])"),
            ("mark", r"(?<=hr\d{5})[0-9a-f]{16}(?=\|)"),
        ):
            text = re.sub(pattern, lambda found: self._name(kind, found[0], named), text)  # noqa: B023
        # Round numbers are what the scene asks for; what is left of them is not round.
        text = re.sub(r"\b\d{10}\d*(\.\d+)?\b", "<time>", text)
        return re.sub(r"\b\d{1,7}\.\d{3,}\b|\b(?!\d*000\b)\d{4,7}\b", "<left>", text)

    def _name(self, kind, found, named):
        if not named:
            return f"<{kind}>"
        if found not in self._names:
            number = self._kinds[kind] = self._kinds.get(kind, 0) + 1
            self._names[found] = f"<{kind}-{number}>"
        return self._names[found]

    def text(self):
        """All of it."""
        return "\n".join(
            [
                *self.lines,
                "\n# by other threads, in no order",
                *sorted(self.elsewhere),
                "\n# connections, in no order",
                *sorted(self.connections),
                "",
            ]
        ).lstrip("\n")


def _anonymous(owner):
    known = {"pid": "<pid>", "thread": "<thread>", "command": "<command>", "birth": "<birth>"}
    if not isinstance(owner, dict):
        return owner
    return {key: known.get(key, value) for key, value in owner.items()}


def _first_command(data):
    """A command, and what follows it; (None, data) if it is not whole."""
    rows = data.split(b"\r\n", 1)
    if len(rows) < 2:
        return None, data
    assert rows[0][:1] == b"*", data[:100]
    words, left = [], rows[1]
    for _ in range(int(rows[0][1:])):
        size, found, rest = left.partition(b"\r\n")
        if not found or len(rest) < int(size[1:]) + 2:
            return None, data
        words.append(rest[: int(size[1:])])
        left = rest[int(size[1:]) + 2 :]
    return words, left


@contextmanager
def unheard():
    """Record nothing of what is sent within the block."""
    before = _unheard.set(True)
    try:
        yield
    finally:
        _unheard.reset(before)


@contextmanager
def recorded(servers, passed_over=()):
    """Record what all threads send within the block; see Recorder."""
    recorder = Recorder(servers, passed_over)

    def send(sock, data, *flags):
        number = SEND(sock, data, *flags)
        recorder.sent(sock, memoryview(data)[:number])
        return number

    def sendall(sock, data, *flags):
        recorder.sent(sock, data)  # Before, lest the answer is acted upon first.
        return SENDALL(sock, data, *flags)

    def sendmsg(sock, buffers, *more):
        buffers = [bytes(one) for one in buffers]
        number = SENDMSG(sock, buffers, *more)
        recorder.sent(sock, b"".join(buffers)[:number])
        return number

    def write(file, data):
        recorder.written(file, data)
        return WRITE(file, data)

    with (
        mock.patch.object(os, "write", write),
        mock.patch.object(socket.socket, "send", send, create=True),
        mock.patch.object(socket.socket, "sendall", sendall, create=True),
        mock.patch.object(socket.socket, "sendmsg", sendmsg, create=True),
    ):
        yield recorder


WRITE = os.write
SEND, SENDALL, SENDMSG = socket.socket.send, socket.socket.sendall, socket.socket.sendmsg
