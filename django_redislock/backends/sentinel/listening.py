"""Listens for the news that another server has become the master."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from redis import exceptions as redis_errors

from django_redislock import logs
from django_redislock.backends.redis.errors import described

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.sentinel.sentinels import Master, Sentinels

logger = logs.logger("django_redislock")


class Listener:
    """A thread that listens to one of the sentinels, and to the next if that one falls silent.

    A connection may be unused for a long time, or its user may wait for an answer that never comes.
    Such a user asks no sentinel. When the old master is back, the user would meet it again.
    """

    CHANNEL = "+switch-master"
    ASK_EVERY = 2.0  # Seconds without news after which it asks.
    PATIENCE = 1.0  # Seconds that a sentinel has for an answer.

    def __init__(
        self,
        sentinels: Sentinels,
        learn: Callable[[Master, float], object],
        is_needed: Callable[[Listener], bool],
    ) -> None:
        """Begin with start().

        Args:
            sentinels: They tell of a new master.
            learn: Called with the master, and the time of the question.
            is_needed: Whether to go on; called now and then.
        """
        self._sentinels = sentinels
        self._learn = learn
        self._is_needed = is_needed
        self._connection: Connection | None = None

    def start(self) -> bool:
        """Listen in a thread of its own, as long as it is needed.

        Returns:
            Whether the thread runs. There may be no more threads, or the interpreter shuts down.
        """
        thread = threading.Thread(target=self._run, name="redislock-sentinel", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        return True

    def abandon(self) -> None:
        """In a forked child: close its copy of the connection."""
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        while self._is_needed(self):
            for connection in self._sentinels.open_connections(self.PATIENCE):
                self._connection = connection
                try:
                    self._listen(connection)
                except Exception as error:  # noqa: BLE001 - nothing may end it but its own end
                    logger.debug("A sentinel was no longer listened to: %s", described(error))
                if not self._is_needed(self):
                    return
            time.sleep(self.PATIENCE)  # None of them answers.

    def _listen(self, connection: Connection) -> None:
        connection.subscribe(self.CHANNEL, self.PATIENCE)
        while self._is_needed(self):
            # After subscribing, and again: a message may be lost, and a connection half open.
            asked = time.monotonic()
            master = self._sentinels.master_named_on(connection, self.PATIENCE)
            with suppress(redis_errors.ConnectionError):  # The process has later news.
                # A failover; or this one was away, or told anew: REMOVE, MONITOR.
                if self._sentinels.contradicts_majority(master):
                    master = self._sentinels.master(self.PATIENCE)
                self._learn(master, asked)
            connection.next_ring(self.ASK_EVERY)
