"""A soak: many threads in several processes want one lock, and much goes wrong.

The network cuts connections, delays and swallows replies; processes are stopped, continued and
killed. All that happened is then read from logs, by one clock for all processes, and counted.

    python -m tests.support.soak --seconds 60 --processes 6

``--lock redis-py`` does the same to the Lock of redis-py, as a control: a soak that finds nothing
wrong there would prove nothing here. With ``--upgrade`` every other process has the minor version
before this one.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import redis

from tests.support.processes import Child
from tests.support.proxy import Proxy
from tests.support.servers import KIND, KINDS, Server
from tests.support.waiting import HUNG, wait_until
from tests.support.wheels import VERSIONS, unpacked

NAME = "soak"
PREFIX = "soak"
OVER = "over"  # A file that tells the processes to end.
WAITS = (0.3, 5.0)  # Half of the threads are impatient, so that they are told busy now and then.
# What goes wrong on the way to or from the server, and in which share of all commands.
FAULTS = {"cut_after": 0.05, "cut_before": 0.03, "delayreply:0.2": 0.02, "hang_after": 0.005}

clock = time.monotonic  # One for all processes of a machine.


# --- in the child processes ---------------------------------------------------------------------


class Log:
    """Lines that survive a SIGKILL: time, who, what, and more."""

    def __init__(self, path, who):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = who

    def note(self, what, *more, at=None):
        line = " ".join(map(str, (clock() if at is None else at, self._who, what, *more)))
        os.write(self._file, f"{line}\n".encode())


class Ours:
    """distributed_lock, as a thread of the soak uses it."""

    def __init__(self, ttl, wait, url, straight):
        from django_redislock import distributed_lock
        from django_redislock.rules.keys import lock_keys

        self._lock = distributed_lock(NAME, ttl=ttl, wait=wait)
        self._straight = redis.Redis.from_url(straight)
        self._key = lock_keys(PREFIX, NAME).lock
        self._asked = 0.0  # Server time of the last acquire.

    def acquire(self):
        self._asked = time.time()
        return self._lock.acquire()

    @property
    def lease(self):
        return self._lock.lease.id, self._lock.lease.fence

    def held(self):
        return self._lock.lease is not None and self._lock.lease.held

    def release(self):
        self._lock.release()

    def is_mine_on_the_server(self):
        """Whether this acquire holds the lock; not an earlier one whose release was unanswered."""
        from django_redislock.rules.stored import read_holding

        value = self._straight.get(self._key)
        if value is None:
            return False
        holding = read_holding(value)
        me = (os.getpid(), threading.current_thread().name)
        is_of_now = holding.since is not None and holding.since >= self._asked - 0.001
        return is_of_now and (holding.owner.pid, holding.owner.thread) == me


class OfRedisPy:
    """redis-py's own Lock, by default settings but for a short socket timeout."""

    def __init__(self, ttl, wait, url, straight):
        # Made by address, since from_url() would leave out the retries that are its default.
        client = redis.Redis(**redis.connection.parse_url(url), socket_timeout=ttl / 3)
        self._lock = client.lock(NAME, timeout=ttl, blocking_timeout=wait, thread_local=False)
        self._straight = redis.Redis.from_url(straight)
        self._token = ""
        self._count = 0

    def acquire(self):
        self._count += 1
        self._token = f"{os.getpid()}:{threading.current_thread().name}:{self._count}"
        return self._lock.acquire(token=self._token)

    @property
    def lease(self):
        return self._token, 0

    def held(self):
        return True  # Nothing tells otherwise before the release.

    def release(self):
        self._lock.release()

    def is_mine_on_the_server(self):
        return self._straight.get(NAME) == self._token.encode()


LOCKS = {"ours": Ours, "redis-py": OfRedisPy}


def work(which, ttl, url, straight, folder, threads):
    """In a child: let some threads use the lock until it is over."""
    from django_redislock import LockError

    expected = (LockError, redis.RedisError, OSError)
    over = Path(folder) / OVER

    def use(wait):
        name = threading.current_thread().name
        lock = LOCKS[which](ttl, wait, url, straight)
        log = Log(f"{folder}/{os.getpid()}.log", f"{os.getpid()}:{name}")
        counter = os.open(f"{folder}/counter", os.O_RDWR)
        dice = random.Random(f"{os.getpid()}{name}")
        while not over.exists():
            log.note("ask")
            try:
                granted = lock.acquire()
            except expected as error:
                log.note("error", type(error).__name__)
                continue
            if not granted:
                log.note("false-busy" if lock.is_mine_on_the_server() else "busy")
                continue
            lease = lock.lease
            log.note("granted", *lease)
            _hold(lock, lease[0], log, counter, dice.uniform(0, 0.03))
            log.note("end", lease[0])
            with suppress(*expected):
                lock.release()

    workers = [
        threading.Thread(target=use, args=(WAITS[number % 2],), name=f"t{number}")
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _hold(lock, id_, log, counter, seconds):
    """Add 1 to the counter, slowly, and note until when the lock was held."""
    number = int(os.pread(counter, 20, 0) or b"0")
    begin = clock()
    while True:
        # Read before it is looked at: at that time it was held for sure.
        now = clock()
        if not lock.held():
            log.note("lost", id_)
            return
        log.note("held", id_, at=now)
        if now - begin >= seconds:
            break
        time.sleep(0.004)
    os.pwrite(counter, b"%020d" % (number + 1), 0)
    log.note("wrote", id_)


# --- what happened --------------------------------------------------------------------------------


@dataclass
class Belief:
    """A lease, as its holder knew it."""

    id: str
    fence: int
    start: float  # When it was held for the first time: after its acquire, which may be late.
    last: float  # When it was held for the last time.
    end: float | None = None  # When its holder relied on it no more, lost or not.


@dataclass
class Findings:
    """What the soak found."""

    grants: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    overlaps: int = 0
    false_busy: int = 0
    lost_updates: int = 0
    fences_out_of_order: int = 0
    longest_orphan: float = 0.0  # Seconds that a lease outlived the belief in it.
    orphan: str = "none"  # What happened to that one.
    longest_gap: float = 0.0  # Seconds that somebody waited and nobody held.
    faults: Counter[str] = field(default_factory=Counter)
    stops: int = 0
    kills: int = 0

    def __str__(self):
        return (
            f"{self.grants} grants; overlaps {self.overlaps}, false busy {self.false_busy},"
            f" lost updates {self.lost_updates}, fences out of order {self.fences_out_of_order};"
            f" longest orphan {self.longest_orphan:.2f} s, longest gap {self.longest_gap:.2f} s;"
            f" injected {dict(self.faults)}, {self.stops} stops, {self.kills} kills;"
            f" outcomes {dict(self.outcomes)}; longest orphan: {self.orphan}"
        )


Seen = dict[str, tuple[float, float, str]]
Stops = list[tuple[str, float, float]]


def find(folder, seen, ended, stops):
    """Read the logs.

    Args:
        folder: Where they are.
        seen: When each lease was on the server, first and last, and whose it was.
        ended: When each process that was killed was, by pid.
        stops: Which process was stopped, from when, and until when.
    """
    findings = Findings(stops=len(stops), kills=len(ended))
    beliefs = {}
    asking = {}
    asks = {}
    wrote = 0
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            at, who, what, *more = line.split()
            now = float(at)
            if what == "ask":
                asking[who] = now
            elif what == "held":
                told = beliefs[more[0]]
                told.start, told.last = min(told.start, now), now
            elif what == "wrote":
                wrote += 1
            elif what in {"granted", "busy", "false-busy", "error"}:
                asks.setdefault(who, []).append((asking.pop(who), now))
                findings.outcomes[f"{what} {more[0]}" if what == "error" else what] += 1
                if what == "granted":
                    beliefs[more[0]] = Belief(more[0], int(more[1]), math.inf, now)
            elif what == "lost":
                findings.outcomes[what] += 1
            elif what == "end":
                beliefs[more[0]].end = now
    for who, begin in asking.items():  # It was killed while it asked.
        asks.setdefault(who, []).append((begin, ended.get(who.partition(":")[0], math.inf)))
    findings.grants = len(beliefs)
    findings.false_busy = findings.outcomes["false-busy"]
    findings.lost_updates = max(0, wrote - int((folder / "counter").read_text() or 0))
    held_until, fence = math.inf, -1
    held = [one for one in beliefs.values() if one.start < math.inf]
    for one in sorted(held, key=lambda one: one.start):
        if held_until < math.inf:
            findings.overlaps += one.start < held_until
            # The threads ask again at once, so there is always somebody who waits.
            findings.longest_gap = max(findings.longest_gap, one.start - held_until)
            findings.fences_out_of_order += one.fence < fence
            held_until = max(held_until, one.last)
        else:
            held_until = one.last
        fence = max(fence, one.fence)
    for id_, (first, last, who) in seen.items():
        pid = who.partition(":")[0]
        told = beliefs.get(id_)
        if told is None:  # Nobody was told. It is nobody's from when the one who asked gave up.
            ends = [end for begin, end in asks.get(who, []) if begin <= first <= end]
            relied_on = ends[0] if ends else first
        else:
            # Not until its last look: the thread may stand still after that while the watchdog of
            # its process goes on. Without an end, the process was killed.
            relied_on = ended.get(pid, told.last) if told.end is None else told.end
        if last - relied_on > findings.longest_orphan:
            findings.longest_orphan = last - relied_on
            findings.orphan = (
                f"{id_} of {who}, seen from {first:.2f} to {last:.2f}, relied on until"
                f" {relied_on:.2f}, {told}; killed at {ended.get(pid)}, stopped"
                f" {[(begin, end) for stopped, begin, end in stops if stopped == pid]}"
            )
    return findings


# --- the soak ---------------------------------------------------------------------------------


def soak(
    server,
    *,
    which="ours",
    seconds=20.0,
    processes=3,
    threads=2,
    ttl=1.0,
    chaos=True,
    seed=0,
    packages=("",),
    leases=0,
):
    """Run it, and return what was found.

    Args:
        seconds: How long, from when all processes are at work. With *chaos* it lasts until one was
            stopped and one was killed.
        packages: The processes have them by turns.
        leases: It lasts until so many were seen on the server, whatever the machine is busy with.
    """
    dice, package = random.Random(seed), cycle(packages)
    children = []
    with tempfile.TemporaryDirectory() as name, Proxy(server, seed=seed) as proxy:
        folder = Path(name)
        (folder / "counter").touch()
        setting = {"default": {"LOCATION": proxy.url, "KEY_PREFIX": PREFIX}}
        for action, share in FAULTS.items():
            proxy.rule("*", action, times=None, probability=share)

        def start():
            arguments = (which, ttl, proxy.url, server.url, name, threads)
            how = {"redislock": setting, "package": next(package)}
            return Child("tests.support.soak:work", *arguments, **how)

        stops = []
        ended = {}
        try:
            children += [start() for _ in range(processes)]
            with _watching(server, which) as seen:
                wait_until(lambda: len([*folder.glob("*.log")]) == processes)
                begun = clock()
                next_kill = begun + 3.0

                def is_over():
                    has_suffered = bool(stops and ended) or not chaos
                    return clock() >= begun + seconds and has_suffered and len(seen) >= leases

                while not is_over():
                    time.sleep(dice.uniform(0.3, 1.0))
                    victim = dice.choice(children)
                    if not chaos:
                        continue
                    if clock() > next_kill:
                        next_kill = clock() + 4.0
                        children.remove(victim)
                        victim.close()
                        ended[str(victim.pid)] = clock()
                        children.append(start())
                    else:
                        begin = clock()
                        victim.stop()
                        time.sleep(dice.uniform(0.2, 1.6) * ttl)
                        victim.cont()
                        stops.append((str(victim.pid), begin, clock()))
                (folder / OVER).touch()
                for child in children:
                    assert child.wait(HUNG) == 0, child.stderr
        finally:
            for child in children:
                child.close()
        findings = find(folder, seen, ended, stops)
        findings.faults.update(
            {f"{rule.action}": rule.hits for rule in proxy._rules}  # The proxy has no such list.
        )
    return findings


class _watching:  # noqa: N801 - used as a statement
    """Looks at the lock, past the proxy, and notes when each lease was there."""

    def __init__(self, server, which):
        from django_redislock.rules.keys import lock_keys

        self._key = lock_keys(PREFIX, NAME).lock if which == "ours" else NAME
        self._read = self._read_ours if which == "ours" else self._read_other
        self._client = server.client()
        self._seen = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self._seen

    def __exit__(self, *exc_info):
        self._over.set()
        self._thread.join(HUNG)

    def _watch(self):
        while not self._over.wait(0.01):
            before, value = clock(), self._client.get(self._key)
            if value is not None:
                id_, who = self._read(value)
                first = self._seen[id_][0] if id_ in self._seen else clock()
                self._seen[id_] = (first, before, who)

    def _read_ours(self, value):
        from django_redislock.rules.stored import read_holding

        holding = read_holding(value)
        return holding.id, f"{holding.owner.pid}:{holding.owner.thread}"

    def _read_other(self, value):
        token = value.decode()
        return token, token.rpartition(":")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--ttl", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lock", choices=LOCKS, default="ours")
    parser.add_argument("--server", choices=KINDS, default=KIND)
    parser.add_argument("--upgrade", action="store_true", help="two versions by turns")
    options = vars(parser.parse_args())
    if options.pop("upgrade"):
        options["packages"] = [unpacked(version) for version in VERSIONS]
    with Server(options.pop("server")) as server:
        print(soak(server, which=options.pop("lock"), **options))


if __name__ == "__main__":
    main()
