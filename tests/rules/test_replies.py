"""What scripts are told and answer, by name: the names are in the order of the scripts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from django_redislock.rules import replies, scripts
from django_redislock.rules.scripts import Script


@pytest.mark.parametrize(
    ("script", "args"),
    [
        (scripts.ACQUIRE, replies.AcquireArgs),
        (scripts.CONCLUDE, replies.ConcludeArgs),
        (scripts.ANNOUNCE, replies.AnnounceArgs),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_arguments_have_the_names_that_the_script_gives_them(script: Script, args: Any) -> None:
    (names,) = re.findall(r"(?m)^local (.*) = unpack\(ARGV\)$", script.source.decode())
    assert list(args._fields) == names.removesuffix(", channel").split(", ")


@pytest.mark.parametrize(
    "reply", [[], [b"queued"], [b"busy", 1, b"", 2, 3], [b"idle"], [[b"busy"]], [7], b"7", 7, None]
)
def test_an_answer_to_a_try_that_is_not_ours_stays_as_it_is(reply: Any) -> None:
    assert replies.read_try(reply) is reply
    assert not replies.is_busy(reply)


@pytest.mark.parametrize("words", [[], ["granted", "id"], ["look"], ["idle", "id", "1"]])
def test_a_ring_that_is_not_ours_says_nothing(words: list[str]) -> None:
    assert replies.read_ring(words) is None


def test_a_lock_that_is_free_or_never_ends_has_no_seconds_left() -> None:
    free = replies.LookReply(b"", replies.FREE, 0, b"1000", b"", b"")
    assert (free.holding, free.expires_in) == (None, None)
    endless = free._replace(value=b"x", left_ms=replies.ENDLESS, id=b"1", strange=b"string 1")
    assert endless.holding is not None
    assert (endless.holding.strange, endless.expires_in) == ("a string of 1 byte", None)
    assert endless._replace(left_ms=1500).expires_in == 1.5
