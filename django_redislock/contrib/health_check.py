"""A check for django-health-check: whether locks can be had; see docs/monitoring.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

from django.core.exceptions import ImproperlyConfigured
from health_check.base import HealthCheck
from health_check.exceptions import ServiceUnavailable

from django_redislock import held
from django_redislock.conf import aliases, conf
from django_redislock.humanize import visible
from django_redislock.lock import distributed_lock
from django_redislock.rules.arguments import SHORTEST_TTL, seconds, text

PROBE = "django_redislock:health-check"


@dataclass
class Locks(HealthCheck):  # type: ignore[misc] # the package has no types
    """Take a lock of each alias and release it.

    If another process is checking the same lock, that counts as an answer.

    Args:
        alias: The alias in REDISLOCK; all of them by default.
        timeout: How long each alias may take, as a timedelta or in seconds. They are asked at the
            same time.

    Raises:
        ValueError: Names the argument that is of a wrong type or not in range.
    """

    alias: str | None = None
    timeout: timedelta = field(default=timedelta(seconds=5), repr=False)

    def __post_init__(self) -> None:
        """Refuse wrong arguments where the URL is written, not at the first request."""
        if self.alias is not None:
            text(self.alias, "alias")
        self.timeout = timedelta(seconds=seconds(self.timeout, "timeout", least=SHORTEST_TTL))

    async def run(self) -> None:
        """Raises ServiceUnavailable, which says of each alias what is wrong, without secrets."""
        try:
            chosen = aliases() if self.alias is None else [self.alias]
        except ImproperlyConfigured as error:
            raise ServiceUnavailable(str(error)) from error
        problems = await asyncio.gather(*map(self._problem, chosen))
        if any(problems):
            raise ServiceUnavailable(" ".join(filter(None, problems)))

    async def _problem(self, alias: str) -> str:
        """The problem of one alias, as a sentence; "" if there is none."""
        most = self.timeout.total_seconds()
        asked = asyncio.ensure_future(self._ask(alias, most))
        if (await asyncio.wait({asked}, timeout=most))[0]:
            return asked.result()
        asked.cancel()  # It takes up to a second to undo what may have been done.
        server = " ".join(filter(None, [conf(alias).address, f"({alias})"]))
        return visible(f"The server {server} did not answer within {most:g} s.")

    async def _ask(self, alias: str, most: float) -> str:
        # At most two operation timeouts, each ttl/3, unless OPTIONS have a socket_timeout.
        ttl = max(1.2 * most, SHORTEST_TTL)
        try:
            lock = distributed_lock(PROBE, ttl=ttl, wait=0, renew=False, using=alias)
            if await lock.aacquire():
                await lock.arelease()
        except held.PROBLEMS as error:
            return held.problem(error, alias)
        return ""
