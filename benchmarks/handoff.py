"""Hand-off: from the start of a release to the return of the next acquire, while others wait.

The clients run a relay: whoever gets the lock keeps it for a moment and releases it, and stands in
line again only when the next one has it, so that every acquire measured is that of a waiter.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.contenders import PYTHON_REDIS_LOCK, REDIS_PY, WAITING, Contender, contender
from benchmarks.crew import PATIENCE, PROCESSES, Crew, Processes, Threads
from benchmarks.figures import (
    Chart,
    Row,
    Table,
    Target,
    at_most,
    ours,
    ours_to,
    percentile,
    times,
)
from benchmarks.placement import ALL_CORES, confine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.synchronize import Semaphore

    from benchmarks.bench import Bench

NAME = "bench:hand-off"
HOLD = 0.002  # Seconds a lease is kept: time for the one before to be back in line.
SETTLE = 0.15  # Seconds for all to be in line before the first release.
CROWDS: list[tuple[type[Threads | Processes], int]] = [
    (Threads, 1),
    (Threads, 8),
    (Threads, 64),
    (Processes, 8),
]
LIMITED_BY = (
    "both locks pay for a release, a switch to the waiter, and the waiter's Python, cold by then;"
    " the queue and the fence take the server longer than a list does"
)
COUNTED_WAITERS = (1, 64)
COUNTED_HAND_OFFS = 64
COUNTED_SECONDS = 1  # For those who need long for so many.


class Relay:
    """What the runners share, be they threads or processes.

    Only the one who holds the lock writes the values, so they need no lock of their own.
    """

    def __init__(self) -> None:
        self.left = PROCESSES.RawValue("i")  # Hand-offs to go.
        self.until = PROCESSES.RawValue("d")  # When to stop, also with hand-offs to go.
        self.released_at = PROCESSES.RawValue("d")  # perf_counter() is the same in all processes.
        self.over = PROCESSES.RawValue("b")
        self.arrived = PROCESSES.Semaphore(0)  # A runner is about to stand in line.
        self.start = PROCESSES.Semaphore(0)  # All are in line: the first holder may go on.
        self.taken = PROCESSES.Semaphore(0)  # A waiter has the lock: the one before may queue.
        self.finish = PROCESSES.Semaphore(0)  # The last hand-off is done, its runner holds.
        self.home = PROCESSES.Semaphore(0)  # That runner may release, and all go home.


@dataclass(slots=True)
class Seen:
    """What runners have seen: one in one relay, or all in all of them."""

    latencies: list[float] = field(default_factory=list)  # Seconds that each hand-off took.
    client_cpu: list[float] = field(default_factory=list)  # Seconds, from one lease to the next.
    server_cpu: float = 0.0


def measure(bench: Bench) -> list[Table]:
    """Latency with crowds of threads and of processes, then the commands a hand-off costs."""
    latencies = [row for kind, waiters in CROWDS for row in _latencies(bench, kind, waiters)]
    commands = [row for waiters in COUNTED_WAITERS for row in _commands(bench, waiters)]
    crowd = _crowd(*CROWDS[-1])
    ratio = ours_to(latencies, "p50 µs", PYTHON_REDIS_LOCK, waiters=crowd)
    gain = (
        f"From a release to the next of {crowd} it takes {times(ratio)} as long as with"
        f" {PYTHON_REDIS_LOCK}; waiters of {REDIS_PY} ask every 100 ms."
    )
    return [
        Table(
            "Hand-off",
            latencies,
            list(_latency_targets(latencies)),
            Chart("hand-off", "p50 µs", "shorter", group="waiters"),
            gain if ratio else "",
        ),
        Table("Commands per hand-off", commands, list(_command_targets(commands))),
    ]


def _latencies(bench: Bench, kind: type[Threads | Processes], waiters: int) -> list[Row]:
    tallies: dict[tuple[str, str], Seen] = {}
    relay = Relay()
    with kind(waiters + 1, relay) as crew:  # One holds, the others wait.
        for turn in bench.turns(WAITING):
            tally = tallies.setdefault((turn.placement, turn.name), Seen())
            with _lined_up(relay, crew, turn.name, bench.server.port, turn.cores):
                server_cpu = bench.server.cpu_seconds()
                _race(relay, crew, bench.effort.hand_offs, bench.effort.relay_seconds)
                tally.server_cpu += bench.server.cpu_seconds() - server_cpu
            for seen in crew.results():
                tally.latencies += seen.latencies
                tally.client_cpu += seen.client_cpu
    rows: list[Row] = [
        {
            "waiters": _crowd(kind, waiters),
            "lock": name,
            "cores": cores,
            "p50 µs": percentile(seen.latencies, 0.50) * 1e6,
            "p99 µs": percentile(seen.latencies, 0.99) * 1e6,
            "max µs": max(seen.latencies) * 1e6,
            "client CPU µs": fmean(seen.client_cpu) * 1e6 if seen.client_cpu else "",
            "server CPU µs": seen.server_cpu / len(seen.latencies) * 1e6,
            "hand-offs": len(seen.latencies),
        }
        for (cores, name), seen in tallies.items()
    ]
    return sorted(rows, key=lambda row: row["cores"], reverse=True)


def _latency_targets(rows: list[Row]) -> Iterator[Target]:
    for kind, waiters in CROWDS:
        crowd = _crowd(kind, waiters)
        for column, bound, moonshot in (("p50 µs", 0.75, 0.65), ("p99 µs", 2, None)):
            claim = f"hand-off, {crowd} waiting: {column[:3]}, of {PYTHON_REDIS_LOCK}'s"
            ratio = ours_to(rows, column, PYTHON_REDIS_LOCK, waiters=crowd)
            yield from at_most(claim, bound, ratio, moonshot, LIMITED_BY)


def _crowd(kind: type[Threads | Processes], waiters: int) -> str:
    one, many = ("process", "processes") if kind is Processes else ("thread", "threads")
    return f"{waiters} {one if waiters == 1 else many}"


def _commands(bench: Bench, waiters: int) -> list[Row]:
    rows: list[Row] = []
    relay = Relay()
    with Threads(waiters + 1, relay) as crew:
        for name in bench.among(WAITING):
            with (
                _lined_up(relay, crew, name, bench.server.port, bench.placements[ALL_CORES]),
                bench.server.counting() as traffic,
            ):
                _race(relay, crew, COUNTED_HAND_OFFS, COUNTED_SECONDS)
            hand_offs = sum(len(seen.latencies) for seen in crew.results())
            rows.append(
                {
                    "waiters": waiters,
                    "lock": name,
                    "requests": traffic.requests / hand_offs,
                    "in scripts": traffic.scripted / hand_offs,
                }
            )
    return rows


def _command_targets(rows: list[Row]) -> Iterator[Target]:
    for waiters in COUNTED_WAITERS:
        crowd = f"hand-off, {_crowd(Threads, waiters)} waiting"
        yield from at_most(f"{crowd}: client requests", 3, ours(rows, "requests", waiters=waiters))
        scripted = ours(rows, "in scripts", waiters=waiters)
        yield from at_most(f"{crowd}: commands in scripts", 18, scripted, moonshot=16)


@contextmanager
def _lined_up(relay: Relay, crew: Crew, name: str, port: int, cores: set[int]) -> Iterator[None]:
    """One runner holds the lock and all others wait; after the block they go home."""
    relay.over.value = False
    relay.released_at.value = 0
    crew.begin(_take_turns, name, port, cores)
    try:
        for _ in range(crew.size):
            _expect(relay.arrived, crew)
        time.sleep(SETTLE)
        yield
        relay.home.release()
    except BaseException:
        # Nobody may be left waiting for a signal that does not come.
        relay.over.value = True
        for signal in (relay.start, relay.taken, relay.home):
            for _ in range(crew.size):
                signal.release()
        raise


def _race(relay: Relay, crew: Crew, hand_offs: int, seconds: float) -> None:
    """Let a lined-up crew hand the lock on, so often or so long."""
    relay.left.value = hand_offs
    relay.until.value = time.perf_counter() + seconds
    relay.start.release()
    _expect(relay.finish, crew)


def _expect(signal: Semaphore, crew: Crew) -> None:
    patience = time.monotonic() + PATIENCE
    while not signal.acquire(timeout=1):
        crew.check()
        if time.monotonic() > patience:
            raise RuntimeError("The relay hangs.")


def _take_turns(relay: Relay, name: str, port: int, cores: set[int]) -> Seen:
    """Run one relay."""
    confine(os.getpid(), cores)
    runner: Contender = contender(name, port)
    seen = Seen()
    cpu_before = 0.0
    relay.arrived.release()
    while True:
        with runner.lock(NAME):
            taken_at = time.perf_counter()
            cpu = time.thread_time()
            if relay.over.value:
                return seen
            if relay.released_at.value:
                seen.latencies.append(taken_at - relay.released_at.value)
                if cpu_before:
                    seen.client_cpu.append(cpu - cpu_before)
                relay.taken.release()
            else:  # The first holder.
                relay.start.acquire()
            cpu_before = cpu
            time.sleep(HOLD)
            if relay.left.value == 0 or taken_at > relay.until.value:
                relay.over.value = True
                relay.finish.release()
                relay.home.acquire()
                return seen
            relay.left.value -= 1
            relay.released_at.value = time.perf_counter()
        relay.taken.acquire()
