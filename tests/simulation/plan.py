"""What clients do and what goes wrong: a list of steps, each at its time, that a seed decides."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

# What may befall a message, in words.
TROUBLES = {
    "lost": "is lost",
    "unanswered": "has its reply lost",
    "cut before": "is cut off before it arrives",
    "cut after": "is cut off before its reply",
    "late": "arrives late",
    "answered late": "has its reply late",
    "twice": "arrives twice",
    "interrupted": "is interrupted before its reply",
}


class Work(NamedTuple):
    """A client wants a lock."""

    when: float
    client: int
    thread: int
    name: str
    limit: int
    ttl: float
    wait: float
    body: float  # Seconds under the lock.
    end: str = "releases"  # Or "fails", "hands over", "never releases".
    renew: bool = True
    min_hold: float = 0.0
    once: float = 0.0
    max_hold: float | None = None
    inner: str = ""  # A lock that is wanted in the body too.

    def __str__(self):
        what = f"one of {self.limit} permits of " if self.limit > 1 else ""
        waits = "does not wait" if not self.wait else f"waits {self.wait:.3g} s"
        return f"client {self.client} wants {what}{self.name!r} for {self.body:.3g} s and {waits}"


class Fault(NamedTuple):
    """Something goes wrong, or an operator acts."""

    when: float
    kind: str
    client: int = 0
    seconds: float = 0.0
    name: str = ""
    back: float = 0.0  # Seconds until a client or a server is back.

    def __str__(self):
        return WORDS[self.kind].format(self)


WORDS = {
    **{
        kind: f"of client {{0.client}} the next command {words}" for kind, words in TROUBLES.items()
    },
    "no ring": "client {0.client} will miss a ring",
    "cut off": "client {0.client} is cut off from the server for {0.seconds:.3g} s",
    "slow": "the network of client {0.client} is slow for {0.seconds:.3g} s",
    "pause": "client {0.client} stands still for {0.seconds:.3g} s",
    "kill": "client {0.client} is killed",
    "unplug": "the machine of client {0.client} loses its power",
    "interrupt": "client {0.client} is interrupted",
    "crash": "the server crashes, and is back with all data in {0.back:.3g} s",
    "flush": "the server crashes, and is back without data in {0.back:.3g} s",
    "replica": "the replica hears no more from the server",
    "failover": "the server crashes, and the replica takes over in {0.back:.3g} s",
    "clock": "the clock of the server is set by {0.seconds:+.3g} s",
    "maintenance": "an operator pauses {0.name!r} for {0.seconds:.3g} s",
    "resume": "an operator ends the pause of {0.name!r}",
    "force": "an operator releases {0.name!r} by force",
}
OF_CLIENTS = (*TROUBLES, "no ring", "cut off", "slow", "pause", "kill", "unplug", "interrupt")
OF_SERVER = ("crash", "flush", "replica", "failover", "clock")
OF_OPERATORS = ("maintenance", "resume", "force")
KINDS = (*OF_CLIENTS, *OF_SERVER, *OF_OPERATORS)

Step = Work | Fault


class Setup(NamedTuple):
    """The world in which a plan is carried out."""

    seed: str  # Of all that is decided on the way: latencies and jitter.
    rates: tuple[float, ...]  # Of the clock of each client, the first the operator's.
    threads: int  # Of each client.
    limits: dict[str, int]  # By name.
    ttls: dict[str, float]
    seconds: float
    seconds_per_message: float


class Plan(NamedTuple):
    """A simulation to be run. All that it does follows from this."""

    setup: Setup
    steps: tuple[Step, ...]


class Bounds(NamedTuple):
    """From which a plan is chosen."""

    seconds: float = 1800.0
    clients: tuple[int, int] = (3, 12)
    names: tuple[int, int] = (1, 4)
    slowest: float = 0.9905  # Of the clocks; 1 % is promised, with rounding and latency within.
    kinds: tuple[str, ...] = KINDS
    swarm: bool = True  # Whether each run has some of these kinds only.
    every: tuple[float, ...] = (200.0, 40.0, 12.0)  # Seconds between faults, on average.
    pauses: tuple[float, ...] = (6.0, 20.0, 60.0)  # Of six threads between works, in seconds.
    limits: tuple[int, ...] = (1, 1, 1, 2, 3)
    threads: tuple[int, ...] = (1, 1, 1, 2, 3)
    loads: tuple[float, ...] = (0.2, 0.7, 1.5)  # How much of the time a lock is wanted.
    renews: tuple[float, ...] = (0.5, 1.0, 1.0)  # Which part of the leases is renewed.
    ends: tuple[str, ...] = ("releases",) * 12 + ("fails", "hands over", "never releases")


EVERYTHING = Bounds()


def plan_of(seed, bounds=EVERYTHING):
    """The plan that a seed decides."""
    chance = Random(f"plan {seed}")
    clients = chance.randint(*bounds.clients)
    names = "abcd"[: chance.randint(*bounds.names)]
    fastest = 2 - max(bounds.slowest, 0.99)
    extreme = [bounds.slowest, fastest, 1.0]
    setup = Setup(
        seed=str(seed),
        rates=tuple(
            chance.choice([*extreme, chance.uniform(bounds.slowest, fastest)])
            for _ in range(clients + 1)
        ),
        threads=chance.choice(bounds.threads),
        limits={name: chance.choice(bounds.limits) for name in names},
        ttls={name: chance.choice([1.5, 3.0, 6.0, 30.0]) for name in names},
        seconds=bounds.seconds,
        seconds_per_message=chance.choice([0.0005, 0.002, 0.01]),
    )
    works = list(_works(chance, setup, bounds))
    steps = [*works, *_faults(chance, setup, bounds, works)]
    return Plan(setup, tuple(sorted(steps, key=lambda step: step.when)))


def _works(chance, setup, bounds):
    works = []
    names, clients = list(setup.limits), len(setup.rates) - 1
    threads = clients * setup.threads
    load = chance.choice(bounds.loads)
    pause = chance.choice(bounds.pauses) * threads / 6
    places = sum(setup.limits.values())
    renews = chance.choice(bounds.renews)
    for client in range(1, clients + 1):
        for thread in range(setup.threads):
            when = chance.expovariate(1 / pause)
            while when < setup.seconds:
                name = chance.choice(names)
                ttl = setup.ttls[name]
                body = chance.expovariate(1 / (load * pause * places / threads))
                body = min(body, 20 * ttl)
                works.append(
                    Work(
                        when,
                        client,
                        thread,
                        name,
                        setup.limits[name] - (setup.limits[name] > 2 and client % 2),
                        ttl,
                        _wait(chance, ttl),
                        body=body,
                        end=chance.choice(bounds.ends),
                        renew=chance.random() < renews,
                        min_hold=min(body * 1.5, 2 * ttl) if chance.random() < 0.05 else 0.0,
                        once=min(body * 2 + 0.1, 2 * ttl) if chance.random() < 0.03 else 0.0,
                        max_hold=ttl * 1.7 if chance.random() < 0.05 else None,
                        inner=chance.choice(names) if chance.random() < 0.05 else "",
                    )
                )
                when += chance.expovariate(1 / pause)
    return works


def _wait(chance, ttl):
    return chance.choice([0.0, chance.expovariate(1 / ttl), 4 * ttl, math.inf])


def _faults(chance, setup, bounds, works):
    # In a swarm, what one kind would hide is seen where that is missing.
    kinds = [kind for kind in bounds.kinds if not bounds.swarm or chance.random() < 0.5]
    kinds = kinds or list(bounds.kinds)
    every = chance.choice(bounds.every)
    faults = []
    when = chance.expovariate(1 / every)
    while when < setup.seconds:
        kind = chance.choice(kinds)
        fault = _fault(chance, setup, when, kind)
        # Half of them befall somebody who has just begun to ask or to release, if all went well:
        # most of the time, most clients do nothing.
        if works and kind in OF_CLIENTS and chance.random() < 0.5:
            work = chance.choice(works)
            soon = work.when + chance.choice([0.0, work.body]) + chance.uniform(-0.001, 0.003)
            fault = fault._replace(client=work.client, when=max(soon, 0.0))
        faults.append(fault)
        when += chance.expovariate(1 / every)
    return faults


def _fault(chance, setup, when, kind):
    client = chance.randrange(1, len(setup.rates)) if kind in OF_CLIENTS else 0
    name = chance.choice(list(setup.limits))
    ttl = setup.ttls[name]
    seconds = chance.choice([0.05, 0.5, 1.2, ttl * 0.4, ttl * 1.1, ttl * 2])
    back = chance.choice([0.1, 1.0, ttl * 0.5, ttl * 1.5])
    if kind == "clock":
        seconds *= chance.choice([-1, 1])
    if kind == "maintenance":
        seconds = max(seconds, 1.0)
    return Fault(when, kind, client, seconds, name, back)
