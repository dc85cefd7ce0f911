"""Beats of which one leads, and what they have sent."""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections import Counter
from typing import TYPE_CHECKING

import redis

from lottery.demo.jobs import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lottery.demo.stage import Stage

QUEUE = "celery"


class Beat:
    """A `celery beat` on one server."""

    def __init__(self, server: str, stage: Stage) -> None:
        self.name = f"{server}-beat"
        self._child = stage.start(
            self.name,
            [
                *(sys.executable, "-m", "celery", "-A", "example_project", "beat"),
                *("-S", "django_redislock.celery.beat:LeaderScheduler", "--loglevel", "INFO"),
            ],
            DEMO_MACHINE=server,
            DJANGO_SETTINGS_MODULE=SETTINGS,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def stands_by(self) -> bool:
        """Whether it knows that another one leads."""
        self._child.check(may_end=False)
        return "stands by" in self._child.err()

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._child.kill()


class Beats:
    """Several, and what they have sent: nobody takes it from the broker."""

    leader: Beat
    standby: Beat

    def __init__(self, servers: Iterable[str], stage: Stage) -> None:
        self._beats = [Beat(server, stage) for server in servers]
        self._redis = redis.Redis.from_url(stage.redis.url)

    def __str__(self) -> str:
        return f"sent={len(self._sent())} sent_twice={len(self._twice())}"

    def have_roles(self) -> bool:
        """Whether one of them leads, and another one knows it."""
        for beat in self._beats:
            if beat.stands_by():
                self.standby = beat
            elif self.sent_by(beat):
                self.leader = beat
        return hasattr(self, "leader") and hasattr(self, "standby")

    def sent_by(self, beat: Beat) -> list[str]:
        """The due times for which this beat has sent the task, in order."""
        return [due for pid, due in self._sent() if pid == beat.pid]

    def contradictions(self) -> Iterator[str]:
        """Everything that is not as it should be."""
        for due in self._twice():
            yield f"What was due at {due} was sent twice."

    def _twice(self) -> list[str]:
        times = Counter(due for _, due in self._sent())
        return [due for due, count in times.items() if count > 1]

    def _sent(self) -> list[tuple[int, str]]:
        """Of each message: the pid of its sender, and its due time."""
        return [_read(message) for message in reversed(self._redis.lrange(QUEUE, 0, -1))]


def _read(raw: bytes) -> tuple[int, str]:
    message = json.loads(raw)
    (due,), *_ = json.loads(b64decode(message["body"]))
    # The sender is called gen<pid>@<host>.
    return int(message["headers"]["origin"].partition("@")[0].removeprefix("gen")), due
