"""Workers that are killed again and again while they draw many lotteries."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import redis
from celery import current_app

from lottery.demo.servers import publish_to, worker_command
from lottery.models import Draw

if TYPE_CHECKING:
    from collections.abc import Iterable

    from celery.result import AsyncResult

    from lottery.demo.processes import Child
    from lottery.demo.servers import RedisServer
    from lottery.demo.stage import Stage

QUEUE = "celery"


class Worker:
    """A Celery worker that comes back after each death."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.deaths = 0
        self._stage = stage
        self._child = self._start()

    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        self._child.check()
        return " ready." in self._child.err()

    def kill(self) -> None:
        """Kill it, whatever it is doing, and start it anew."""
        self._child.kill()
        self.deaths += 1
        self._child = self._start()

    def _start(self) -> Child:
        command = worker_command(self.name, "--pool", "solo")
        settings = "example_project.chaos_settings"
        life = f"{self.name}-life-{self.deaths + 1}"
        return self._stage.start(life, command, DJANGO_SETTINGS_MODULE=settings)


class Killer:
    """Kills one of the workers now and then, never two within the same moment."""

    def __init__(self, workers: list[Worker], every: float) -> None:
        self._workers = workers
        self._every = every
        self._next = time.monotonic() + every

    def strike(self) -> Worker | None:
        """Kill a worker, if it is time; returns which."""
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._every * random.uniform(0.5, 1.5)
        victim = random.choice([worker for worker in self._workers if worker.is_ready()] or [None])
        if victim is not None:
            victim.kill()
        return victim


class Broker:
    """What is still to do, as the broker knows it."""

    def __init__(self, server: RedisServer) -> None:
        publish_to(server)
        self._redis = redis.Redis.from_url(server.url)
        self._published: dict[int, AsyncResult] = {}
        self._busy_at = time.monotonic()

    def publish(self, task: str, numbers: Iterable[int]) -> None:
        """Publish the task once for each number."""
        with current_app.producer_or_acquire() as producer:
            for number in numbers:
                sent = current_app.send_task(task, (number,), producer=producer)
                self._published[number] = sent
        self._busy_at = time.monotonic()

    def is_idle(self) -> bool:
        """Whether for a second no message has waited, and none has been worked on."""
        if self._redis.llen(QUEUE) or self._redis.hlen("unacked"):
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at > 1

    def swallowed(self) -> list[int]:
        """Lotteries whose message is gone without a word of what became of it.

        Celery takes a message off the queue in one step and notes that it has it in the next; one
        that dies in between takes the message along. No lock can help; publishing it again does.
        """
        return [number for number, sent in self._published.items() if not sent.ready()]


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
