"""How names and times are shown to humans, in the admin and in a terminal alike."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST = 100 * 365 * 86400  # Nobody means more than a hundred years.


def visible(text: str) -> str:
    r"""Write out unprintable characters of *text*, such as \u202e, which turns text around."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def duration(seconds: float | None) -> str:
    """A duration as two units at most: 4.2 s, 42 s, 12 min 05 s, 3 h 04 min, 2 d 5 h.

    static/django_redislock/held.js counts on in the same words.
    """
    if seconds is None:
        return "unknown"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def counted(number: int, thing: str) -> str:
    """1 lock, 2 locks."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def parse_duration(text: str) -> float:
    """Seconds from 90, 90s, 10m, 1h30m or 2d.

    Raises:
        ValueError: It is none of these, or longer than a hundred years.
    """
    if re.fullmatch(r"\d+(\.\d+)?", text):
        text += "s"
    elif not re.fullmatch(r"(\d+[smhd])+", text):
        raise ValueError(f"{text!r} is no duration; write 90s, 10m, 1h30m or 2d.")
    parts = re.findall(r"([\d.]+)([smhd])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if seconds > _LONGEST:
        raise ValueError("This duration is longer than a hundred years.")
    return seconds


def address(host: str, port: int) -> str:
    """The address of a server, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(url: str) -> str:
    """Where a URL leads: host and port, in small letters, or the path of a socket; "" if nowhere.

    Raises:
        ValueError: It is malformed.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 6379
    if parts.scheme == "unix":
        return parts.path
    return address(host, port) if host else ""
