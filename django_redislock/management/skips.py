"""A skipped run in a shell: one line on standard error."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django_redislock.humanize import duration, visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.jobs.skipped import Skipped


def line_of(skipped: Skipped) -> str:
    """What became of a run, for humans."""
    why, who = skipped["skipped"], skipped.get("holder") or skipped.get("by")
    state = {"busy": "is held by", "cooling": "cools down after"}.get(why, f"is {why}, by")
    ago = f", {duration(skipped['ago'])} ago" if "ago" in skipped else ""
    reason = f": {skipped['reason']}" if "reason" in skipped else ""
    return visible(f"Skipped: {skipped['lock']!r} {state} {who}{ago}{reason}")


@contextmanager
def no_second_line() -> Iterator[None]:
    """Without logging in a project, Python would print the log of a skip too. Prevent that."""
    nowhere = logging.NullHandler()
    logger = logging.getLogger("django_redislock.jobs")
    logger.addHandler(nowhere)
    try:
        yield
    finally:
        logger.removeHandler(nowhere)
