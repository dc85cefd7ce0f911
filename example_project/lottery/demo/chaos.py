"""Workers that draw many lotteries, and what goes wrong meanwhile."""

from __future__ import annotations

import random
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

import redis
from celery import current_app

from lottery.demo.pauses import STOPPED
from lottery.demo.servers import publish_to, worker_command
from lottery.models import Draw

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from celery.result import AsyncResult

    from lottery.demo.processes import Child
    from lottery.demo.servers import RedisServer
    from lottery.demo.stage import Stage

QUEUE = "celery"


class Worker:
    """A Celery worker that comes back after each death."""

    def __init__(self, name: str, stage: Stage, settings: str) -> None:
        self.name = name
        self._lives = 0
        self._stage = stage
        self._settings = settings
        self._child = self._start()

    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        self._child.check()
        return " ready." in self._child.err()

    def kill(self) -> None:
        """Kill it, whatever it is doing, and start it anew."""
        self._child.kill()
        self._child = self._start()

    def stops(self) -> list[int]:
        """The lotteries that it was about to draw when it was stopped, see pauses.py."""
        return [
            int(number) for number in re.findall(rf"{STOPPED}lottery:(\d+)\n", self._child.err())
        ]

    def go_on(self) -> None:
        """Let it go on where it was stopped."""
        self._child.go_on()

    def _start(self) -> Child:
        self._lives += 1
        return self._stage.start(
            f"{self.name}-life-{self._lives}",
            worker_command(self.name, "--pool", "solo"),
            DJANGO_SETTINGS_MODULE=f"example_project.{self._settings}",
            BROKER_URL=broker_url(self._stage.redis),
        )


class Fault(ABC):
    """What goes wrong, again and again."""

    deed: ClassVar[str]
    settings: ClassVar[str] = "chaos_settings"  # Of the workers.
    copies: ClassVar[int] = 1  # How many servers start each lottery.

    def __init__(self, workers: list[Worker], stage: Stage) -> None:
        self.workers = workers

    @abstractmethod
    def strike(self) -> str:
        """Do it, if it is time; returns what was done."""

    def is_over(self) -> bool:
        """Whether all goes well again."""
        return True


class Kill(Fault):
    """Kills one of the workers now and then, never two within the same moment."""

    deed = "kills them"
    every = 2.0  # seconds, on average

    def __init__(self, workers: list[Worker], stage: Stage) -> None:
        super().__init__(workers, stage)
        self._next = time.monotonic() + self.every / 2

    def strike(self) -> str:
        """Kill a worker."""
        if time.monotonic() < self._next:
            return ""
        self._next = time.monotonic() + self.every * random.uniform(0.5, 1.5)
        victim = random.choice([worker for worker in self.workers if worker.is_ready()] or [None])
        if victim is None:
            return ""
        victim.kill()
        return f"killed {victim.name}"


class Pause(Fault):
    """Has winners stopped, see pauses.py, until somebody else has drawn their lottery."""

    deed = "stops winners beyond their leases"
    settings = "pause_settings"
    longest, shortest = 10.0, 0.5  # seconds
    most = 2  # at a time: somebody must be left to draw

    def __init__(self, workers: list[Worker], stage: Stage) -> None:
        super().__init__(workers, stage)
        self._known = dict.fromkeys(workers, 0)
        self._stopped: dict[Worker, tuple[int, float]] = {}
        self._over_at = 0.0

    def strike(self) -> str:
        """See who was stopped, and let go on who has been for long enough."""
        now = time.monotonic()
        for worker, known in self._known.items():
            for number in worker.stops()[known:]:
                self._known[worker] += 1
                lasts = self.longest if len(self._stopped) < self.most else self.shortest
                self._stopped[worker] = number, now + lasts
                return f"stopped {worker.name} before it drew lottery {number}"
        for worker, (number, until) in self._stopped.items():
            if now > until or Draw.objects.filter(number=number).exists():
                del self._stopped[worker]
                self._over_at = now + 1
                worker.go_on()
                return f"{worker.name} goes on with lottery {number}"
        return ""

    def is_over(self) -> bool:
        """Whether nobody is stopped, and the last one had time to do what it was about to."""
        return not self._stopped and time.monotonic() > self._over_at


class Flush(Fault):
    """Empties the Redis of the locks now and then, as `cache.clear()` would."""

    deed = "empties their Redis"
    # What has been forgotten is only missed by those who come later.
    copies = 2
    every = 10  # lotteries

    def __init__(self, workers: list[Worker], stage: Stage) -> None:
        super().__init__(workers, stage)
        self._redis = redis.Redis.from_url(stage.redis.url)
        self._next = self.every

    def strike(self) -> str:
        """Forget all."""
        if Draw.objects.count() < self._next:
            return ""
        self._next += self.every
        self._redis.flushdb()
        return "FLUSHDB"


FAULTS: Mapping[str, type[Fault]] = {"kill": Kill, "pause": Pause, "flush": Flush}


def broker_url(server: RedisServer) -> str:
    """Beside the locks, so that these can be lost alone."""
    return server.url.removesuffix("/0") + "/1"


class Broker:
    """What is still to do, as the broker knows it."""

    def __init__(self, server: RedisServer) -> None:
        publish_to(broker_url(server))
        self._redis = redis.Redis.from_url(broker_url(server))
        self._published: list[tuple[int, AsyncResult]] = []
        self._busy_at = time.monotonic()

    def publish(self, task: str, numbers: Iterable[int]) -> None:
        """Publish the task once for each number."""
        with current_app.producer_or_acquire() as producer:
            for number in numbers:
                sent = current_app.send_task(task, (number,), producer=producer)
                self._published.append((number, sent))
        self._busy_at = time.monotonic()

    def is_idle(self) -> bool:
        """Whether for a second no message has waited, and none has been worked on."""
        if self._redis.llen(QUEUE) or self._redis.hlen("unacked"):
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at > 1

    def failed(self) -> list[int]:
        """Lotteries to publish again, of those that were published since this was asked last.

        Some runs have lost their lease, and say so. Of others there is not a word: Celery takes a
        message off the queue in one step and notes that it has it in the next; one that dies in
        between takes the message along. No lock can help; publishing it again does.
        """
        published, self._published = self._published, []
        return sorted({number for number, sent in published if not sent.successful()})


class Outcome:
    """How often each lottery was drawn, as the database knows it."""

    def __init__(self, lotteries: int) -> None:
        self._lotteries = lotteries
        draws = Counter(Draw.objects.values_list("number", flat=True))
        self.drawn = len(draws)
        self._twice = sum(count > 1 for count in draws.values())

    def __str__(self) -> str:
        return (
            f"RESULT lotteries={self._lotteries} drawn_once={self.drawn - self._twice}"
            f" drawn_twice={self._twice} lost={self._lotteries - self.drawn}"
        )

    def is_perfect(self) -> bool:
        """Whether every lottery was drawn exactly once."""
        return self.drawn == self._lotteries and not self._twice
