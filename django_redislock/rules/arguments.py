"""Arguments and settings that must be durations, flags or texts: checked, with the name of each."""

from __future__ import annotations

import math
from datetime import timedelta

# Seconds. The watchdog renews a lease after a third of its ttl, if a renewal lengthens it by 1/64 s
# or more: see lease_state.WORTH_RENEWING. A lease with a shorter ttl would not be renewed in time.
SHORTEST_TTL = 0.05
DEFAULT_DATABASE = "default"  # Of DATABASES.
PERIODS = {"day": timedelta(days=1), "hour": timedelta(hours=1)}
LONGEST = 10 * 365 * 24 * 3600.0  # Ten years: no lock is meant to last longer.


def seconds(value: object, argument: str, *, least: float = 0.0, endless: bool = False) -> float:
    """Return a duration in seconds from an int, a float or a timedelta.

    Args:
        value: What the caller gave.
        argument: Its name, for the message.
        least: The smallest duration allowed.
        endless: Whether math.inf is allowed.

    Raises:
        ValueError: It is not a duration, or not in range.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{argument} must be a number of seconds or a timedelta, not {value!r}.")
    if endless and value == math.inf:
        return math.inf
    if not least <= value <= LONGEST:  # Also refuses nan.
        rule = f"at least {least:g} seconds" if least else "0 or more seconds"
        rest = ", or math.inf" if endless else f", at most {LONGEST:.0f}"
        raise ValueError(f"{argument} must be {rule}{rest}, not {value!r}.")
    return float(value)


def period(value: object, argument: str) -> timedelta:
    """Return the length of a period: whole days, or a part of a day without a remainder.

    Raises:
        ValueError: It is neither, nor "day" nor "hour".
    """
    every = PERIODS.get(value, value) if isinstance(value, str) else value
    day = PERIODS["day"]
    if (
        not isinstance(every, timedelta)
        or every < timedelta(seconds=1)
        or (every % day and day % every)
    ):
        raise ValueError(
            f'{argument} must be "day", "hour" or a timedelta of whole days or of a part of a day,'
            f" such as timedelta(minutes=15), not {value!r}."
        )
    return every


def flag(value: object, argument: str) -> bool:
    """Return a bool, or raise ValueError naming the argument."""
    if not isinstance(value, bool):
        raise ValueError(f"{argument} must be True or False, not {value!r}.")
    return value


def part(value: object, argument: str) -> float:
    """Return a number between 0 and 1, or raise ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{argument} must be more than 0 and less than 1, not {value!r}.")
    return float(value)


def number(value: object, argument: str, most: int) -> int:
    """Return an int from 1 to *most*, or raise ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{argument} must be an integer, 1 to {most}, not {value!r}.")
    return value


def database(value: object, argument: str) -> str | None:
    """Return the alias of a database: True means the default, False and None mean none."""
    if value is None or isinstance(value, bool):
        return DEFAULT_DATABASE if value else None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{argument} must be True or the alias of a database, not {value!r}.")
    return str.__str__(value)


def text(value: object, argument: str) -> str:
    """Return a non-empty, exact str, or raise ValueError naming the argument."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{argument} must be a non-empty string, not {value!r}.")
    return str.__str__(value)
