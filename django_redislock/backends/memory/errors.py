"""The error that a script may end with."""

from __future__ import annotations


class ReplyError(Exception):
    """A server's error reply."""
