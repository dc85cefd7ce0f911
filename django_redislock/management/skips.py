"""A skipped run in a shell: one line on standard error."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django_redislock.humanize import duration, visible
from django_redislock.jobs.skipped import Skipped
from django_redislock.management.terminal import moment

if TYPE_CHECKING:
    from collections.abc import Iterator


def line_of(skipped: Skipped) -> str:
    """What became of a run, for humans."""
    why, who = skipped["skipped"], skipped.get("holder") or skipped.get("by")
    state = {"busy": "is held by", "cooling": "cools down after"}.get(why, f"is {why}, by")
    ago = f", {duration(skipped['ago'])} ago" if "ago" in skipped else ""
    reason = f": {skipped['reason']}" if "reason" in skipped else ""
    left = skipped.get("expires_in")
    until = f", until {moment(time.time() + left)}" if left is not None else ""
    return visible(f"Skipped: {skipped['lock']!r} {state} {who}{ago}{until}{reason}")


@contextmanager
def no_second_line(job: str) -> Iterator[None]:
    """Without logging in a project, Python would print the log of a skip too. Prevent that.

    Args:
        job: The full name of the job whose skip has a line already.
    """
    logger = logging.getLogger("django_redislock.jobs")

    def is_wanted(record: logging.LogRecord) -> bool:
        is_ours = isinstance(getattr(record, "data", None), Skipped) and vars(record)["job"] == job
        return not is_ours or logger.hasHandlers()

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)
