"""Hearing of it when another server becomes the master."""

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
    """A thread that listens to one of the sentinels, and to the next if that falls silent.

    A connection may be unused for a long time, or its user may wait for an answer that never comes.
    Such a user asks no sentinel, and would meet the old master again when that is back.
    """

    CHANNEL = "+switch-master"
    ASK_EVERY = 2.0  # Seconds after which it asks, though it was told nothing.
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
            learn: Is told the master, and when it was asked for.
            is_needed: Whether to go on; asked now and then.
        """
        self._sentinels = sentinels
        self._learn = learn
        self._is_needed = is_needed
        self._connection: Connection | None = None

    def start(self) -> bool:
        """Listen, in a thread of its own, which ends when it is not needed any more.

        Returns:
            Whether it runs: there may be no more threads, or the interpreter is shutting down.
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
            if not self._sentinels.is_behind(master):
                with suppress(redis_errors.ConnectionError):  # It became known in another way.
                    self._learn(master, asked)
            connection.next_ring(self.ASK_EVERY)
