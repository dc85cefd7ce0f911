"""What scripts are told and answer, by name: the names are in the order of the scripts."""

import re

import pytest

from django_redislock.rules import replies, scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.stored import Wait


@pytest.mark.parametrize(
    ("script", "args"),
    [(scripts.ACQUIRE, replies.AcquireArgs), (scripts.ANNOUNCE, replies.AnnounceArgs)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_arguments_have_the_names_that_the_script_gives_them(script, args):
    (names,) = re.findall(r"(?m)^local (.*) = unpack\(ARGV\)$", script.source.decode())
    assert list(args._fields) == names.removesuffix(", channel").split(", ")


@pytest.mark.parametrize(
    "reply", [[], [b"queued"], [b"busy", 1, b"", 2, 3], [b"idle"], [[b"busy"]], [7], b"7", 7, None]
)
def test_an_answer_to_a_try_that_is_not_ours_stays_as_it_is(reply):
    assert replies.read_try(reply) is reply
    assert not replies.is_busy(reply)


@pytest.mark.parametrize("words", [[], ["granted", "id"], ["look"], ["idle", "id", "1"]])
def test_a_ring_that_is_not_ours_says_nothing(words):
    assert replies.read_ring(words) is None


def test_a_lock_that_is_free_or_never_ends_has_no_seconds_left():
    free = replies.LookReply(b"", replies.FREE, 0, b"1000", b"", b"")
    assert (free.left_ms, free.is_free) == (-2, True)  # As lua/look.lua says it.
    assert (free.holding, free.expires_in) == (None, None)
    endless = free._replace(value=b"x", left_ms=replies.ENDLESS, id=b"1", strange=b"string 1")
    assert (endless.holding.strange, endless.expires_in) == ("a string of 1 byte", None)
    assert endless._replace(left_ms=1500).expires_in == 1.5


LOCK = b"0123456789abcdef" * 2 + b"hr00003fedcba9876543210|7|1000|30000|0|bell|{}"


def test_busy_tells_whose_lease_it_is():
    reply = [b"busy", 1500, LOCK, 9000]
    assert replies.is_busy(reply)
    assert replies.read_try(reply).token == LOCK[:32]
    assert replies.read_try(reply).owner == b"{}"
    assert replies.read_try([b"busy", 1500, b"of somebody else", 9000]).owner == b""


def test_a_look_tells_the_fence_and_the_time():
    look = replies.LookReply(LOCK, 0, 0, b"1500", b"", b"")
    assert (look.fence, look.server_time, look.expires_in) == (7, 1.5, 0.0)


def test_a_look_tells_what_the_holder_waits_for():
    wait = Wait("default", "report", "0123456789abcdef", 1_700_000_000_000_000, 1)
    look = replies.LookReply(LOCK, 0, 0, b"1500", b"", b"")
    assert look.wait is None
    assert look._replace(note=f"fedcba9876543210|{wait.id}|{wait.packed}".encode()).wait == wait


def test_the_waiters_and_the_past_of_a_lock_are_told_apart():
    past = [b"early|6|1000|2000|done|{}", b"late|7|5000|6000|done|{}"]
    found = replies.InspectReply(b"9000", [[b"2500000", b"id", b"{}"]], past)
    (waiter,) = found.queue
    assert (waiter.id, waiter.since) == (b"id", 2.5)
    assert waiter._replace(ticket=b"-2500000").since == 2.5  # That of a pause.
    assert found.last_since == 5.0
    assert found._replace(past=[]).last_since == 0.0


def test_a_page_of_an_index_has_keys_with_their_scores():
    page = replies.NamesReply(3, [b"a", b"1", b"b", b"2", b"c", b"3"])
    assert page.keys == [b"a", b"b", b"c"]
    assert page.scores == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]
    with pytest.raises(ValueError, match="shorter"):
        _ = page._replace(found=page.found[:-1]).scores


def test_the_line_of_calls_is_read_entry_by_entry():
    entry = [b"2500000", b"a-task", b"9000", 1]
    calls = replies.CallsReply(b"9000", b"", b"", b"", b"", [entry])
    assert [(*call, call.since) for call in calls.line] == [(*entry, 2.5)]


def test_runs_are_known_by_their_leases():
    started = [b"#2|5000|0|second|{}", b"|6000|0|third|{}"]
    runs = replies.RunsReply(b"9000", b"", b"", b"", b"1000|0|first|{}", started, 0, b"", b"")
    assert runs.unended_lease_id == "first"
    assert runs.started_by_lease_id == {"second": started[0], "third": started[1]}


def test_a_script_is_given_the_keys_and_told_the_channel_that_it_takes():
    keys = lock_keys("prefix", "lottery")
    given = [keys.lock, keys.queue, keys.fence, keys.past, keys.held]
    assert scripts.ACQUIRE.given(keys) == given
    assert scripts.ACQUIRE_MARKED.given(keys)[:5] == given
    assert scripts.ACQUIRE_PERMIT.given(keys) == given
    assert scripts.ACQUIRE_PERMIT_MARKED.given(keys) == scripts.ACQUIRE_MARKED.given(keys)
    assert scripts.ACQUIRE.told(("token",), "bell") == ("token", "bell")
    assert scripts.RELEASE.told(("token",), "bell") == ("token",)
