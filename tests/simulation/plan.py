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
# The name of the lock that is also wanted together with a start under a rate.
BESIDE = "m"
NEWEST = "n"  # The name of the lock that a newer call takes from an older one.


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
    start: str = ""  # A rate of which a start is wanted; it is the name if nothing else is.
    comes_back: bool = False  # It reserves a start that is not due, and comes back for it.
    replace_within: float | None = None  # Seconds that it leaves to a run that it replaces.
    looks: bool = False  # Its body looks whether its run is replaced.

    def __str__(self):
        if self.start:
            beside = "" if self.name == self.start else f" and one of {self.limit} {self.name!r}"
            waits = f"waits {self.wait:.3g} s" if self.wait else "does not wait"
            waits = "comes back for it" if self.comes_back else waits
            return f"client {self.client} wants a start of {self.start!r}{beside} and {waits}"
        if self.replace_within is not None:
            return (
                f"client {self.client} wants {self.name!r} for {self.body:.3g} s, replaces older"
                f" calls, and leaves a run {self.replace_within:.3g} s"
            )
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


class Starts(NamedTuple):
    """A rate."""

    every: float  # Seconds between two starts.
    burst: int


class Setup(NamedTuple):
    """The world in which a plan is carried out."""

    seed: str  # Of all that is decided on the way: latencies and jitter.
    rates: tuple[float, ...]  # Of the clock of each client, the first the operator's.
    threads: int  # Of each client.
    limits: dict[str, int]  # By name.
    ttls: dict[str, float]
    seconds: float
    seconds_per_message: float
    starts: dict[str, Starts] = {}  # The rates, by name.


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
    rated: float = 0.5  # In which part of the worlds there are rates.
    replacing: float = 0.3  # And in which a newer call replaces older ones.


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
    weather = _weather(chance, bounds)
    steps = [*works, *_faults(chance, setup, weather, works)]
    # What came later has chances of its own, so that worlds without it stay as they were.
    for draws, share, more_works in (
        ("rates", bounds.rated, _works_with_starts),
        ("replace", bounds.replacing, _replacing_works),
    ):
        chance = Random(f"{draws} {seed}")
        if chance.random() < share:
            setup, theirs, names = more_works(chance, setup, bounds)
            steps += [*theirs, *_faults(chance, setup, weather, theirs, names)]
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


def _works_with_starts(chance, setup, bounds):
    """Works that want a start, alone or beside a lock: the setup with their names, and they."""
    rates = "rs"[: chance.randint(1, 2)]
    between = chance.choice(bounds.pauses) / 6  # Seconds between two works, of all clients.
    starts = {
        name: Starts(
            every=round(between * len(rates) * chance.choice([0.3, 0.8, 1.2]), 3),
            burst=chance.choice([1, 1, 2, 5]),
        )
        for name in rates
    }
    limit, ttl = chance.choice(bounds.limits), chance.choice([1.5, 3.0, 6.0])
    ttls = {name: chance.choice([1.5, 3.0, 6.0, 30.0]) for name in rates}
    setup = setup._replace(
        limits={**setup.limits, **dict.fromkeys(rates, 1), BESIDE: limit},
        ttls={**setup.ttls, **ttls, BESIDE: ttl},
        starts=starts,
    )
    works = []
    when = chance.expovariate(1 / between)
    while when < setup.seconds:
        start = chance.choice(rates)
        every = starts[start].every
        name = start if chance.random() < 0.7 else BESIDE
        comes_back = chance.random() < 0.2
        wait = chance.choice([0.0, chance.expovariate(1 / (3 * every)), 12 * every, math.inf])
        works.append(
            Work(
                when,
                *_worker(chance, setup),
                name,
                limit if name == BESIDE else 1,
                setup.ttls[name],
                0.0 if comes_back else wait,
                body=chance.expovariate(1 / between),
                end=chance.choice(["releases", "releases", "fails"]),
                start="" if name == BESIDE and chance.random() < 0.3 else start,
                comes_back=comes_back,
            )
        )
        when += chance.expovariate(1 / between)
    return setup, works, (*rates, BESIDE)


def _replacing_works(chance, setup, bounds):
    """Works of which the newest is to win: the setup with their name, and they."""
    ttl = chance.choice([1.5, 3.0, 6.0, 30.0])
    setup = setup._replace(limits={**setup.limits, NEWEST: 1}, ttls={**setup.ttls, NEWEST: ttl})
    between = ttl * chance.choice([0.3, 1.0, 3.0])
    within = chance.choice(times_to_end(ttl))  # They are calls of one job.
    works = []
    when = chance.expovariate(1 / between)
    while when < setup.seconds:
        body = min(chance.expovariate(1 / (2 * between)), 20 * ttl)
        work = Work(when, *_worker(chance, setup), NEWEST, 1, ttl, _wait(chance, ttl), body=body)
        if chance.random() < 0.8:  # Others wait their turn.
            work = work._replace(
                replace_within=within,
                looks=chance.random() < 0.5,
                end=chance.choice(["releases", "releases", "fails"]),
            )
        works.append(work)
        when += chance.expovariate(1 / between)
    if chance.random() < 0.3:  # A deploy has changed the job's option, say.
        works = [
            work._replace(replace_within=chance.choice(times_to_end(ttl)))
            if work.replace_within is not None
            else work
            for work in works
        ]
    return setup, works, (NEWEST,)


def times_to_end(ttl):
    """What newer calls may leave to a run that they replace, in seconds."""
    return 0.2, 1.0, ttl / 2, 1.5 * ttl


def _worker(chance, setup):
    """Some client, and one of its threads."""
    return chance.randrange(1, len(setup.rates)), chance.randrange(setup.threads)


class Weather(NamedTuple):
    """What goes wrong in a world, and how often."""

    kinds: list[str]
    every: float  # Seconds, on average.


def _weather(chance, bounds):
    # In a swarm, what one kind would hide is seen where that is missing.
    kinds = [kind for kind in bounds.kinds if not bounds.swarm or chance.random() < 0.5]
    return Weather(kinds or list(bounds.kinds), chance.choice(bounds.every))


def _faults(chance, setup, weather, works, names=()):
    kinds, every = weather
    faults = []
    when = chance.expovariate(1 / every)
    while when < setup.seconds:
        kind = chance.choice(kinds)
        fault = _fault(chance, setup, when, kind, names or tuple(setup.limits))
        # Half of them befall somebody who has just begun to ask or to release, if all went well:
        # most of the time, most clients do nothing.
        if works and kind in OF_CLIENTS and chance.random() < 0.5:
            work = chance.choice(works)
            soon = work.when + chance.choice([0.0, work.body]) + chance.uniform(-0.001, 0.003)
            fault = fault._replace(client=work.client, when=max(soon, 0.0))
        faults.append(fault)
        when += chance.expovariate(1 / every)
    return faults


def _fault(chance, setup, when, kind, names):
    client = chance.randrange(1, len(setup.rates)) if kind in OF_CLIENTS else 0
    name = chance.choice(names)
    ttl = setup.ttls[name]
    seconds = chance.choice([0.05, 0.5, 1.2, ttl * 0.4, ttl * 1.1, ttl * 2])
    back = chance.choice([0.1, 1.0, ttl * 0.5, ttl * 1.5])
    if kind == "clock":
        seconds *= chance.choice([-1, 1])
    if kind == "maintenance":
        seconds = max(seconds, 1.0)
    return Fault(when, kind, client, seconds, name, back)
