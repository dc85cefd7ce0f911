"""The picture of who held a lock recently: where its bars are."""

from __future__ import annotations

import pytest

from django_redislock.admin import timeline
from django_redislock.held import Detail, HeldLock, PastLease
from django_redislock.rules.stored import Owner

NOW = 1_000_000.0


def past(since, until, host="web-1", ended="done"):
    """A lease, in seconds before now."""
    return PastLease(
        id=f"{since}",
        owner=Owner(host=host, pid=1),
        fence=1,
        since=NOW - since,
        until=None if until is None else NOW - until,
        ended=ended,
    )


def drawn(*leases, held_for=None):
    lock = held_for and HeldLock(
        name="lottery",
        alias="default",
        state="held",
        id="now",
        owner=Owner(host="web-1", pid=1),
        fence=1,
        held_for=held_for,
        expires_in=10,
        waiters=0,
        renewals=0,
    )
    picture = timeline.draw(
        Detail(
            name="lottery",
            alias="default",
            lock=lock or None,
            waiters=[],
            past=sorted(leases, key=lambda lease: lease.since),
            server_time=NOW,
        )
    )
    assert picture is not None
    return picture


def bars(picture):
    return sorted((bar.x, bar.width, bar.ended) for lane in picture.lanes for bar in lane.bars)


def test_without_a_lease_there_is_no_picture():
    nothing = Detail(
        name="lottery", alias="default", lock=None, waiters=[], past=[], server_time=NOW
    )
    assert timeline.draw(nothing) is None


def test_bars_are_where_the_leases_were():
    picture = drawn(past(100, 50), past(25, 0, ended="failed"))
    assert bars(picture) == [("0.00%", "50.00%", "done"), ("75.00%", "25.00%", "failed")]


def test_the_current_lease_reaches_to_now():
    assert bars(drawn(past(100, 50), held_for=20))[-1] == ("80.00%", "20.00%", "held")


def test_an_expired_lease_reaches_to_the_next_at_most():
    picture = drawn(past(100, None, ended="expired"), past(40, 20))
    assert bars(picture)[0] == ("0.00%", "60.00%", "expired")
    assert "at most" in picture.lanes[0].bars[-1].says


def test_the_shortest_lease_is_seen_and_none_leaves_the_picture():
    for x, width, _ in bars(drawn(past(100_000, 99_999.9), past(0.1, 0))):
        assert float(width[:-1]) >= timeline.THINNEST
        assert float(x[:-1]) + float(width[:-1]) <= 100


def test_each_host_has_a_lane_up_to_a_bound():
    two = drawn(past(30, 20, "web-2"), past(20, 10, "web-1"), past(10, 0, "web-2"))
    assert [(lane.host, len(lane.bars)) for lane in two.lanes] == [("web-1", 1), ("web-2", 2)]
    many = drawn(*(past(30 - n, 29 - n, f"web-{n:02}") for n in range(20)))
    assert len(many.lanes) == timeline.MOST_LANES
    assert "other hosts" in [lane.host for lane in many.lanes]
    assert sum(len(lane.bars) for lane in many.lanes) == 20


def test_the_legend_names_what_is_there():
    picture = drawn(past(30, 20, ended="forced"), past(20, 10), held_for=5)
    assert picture.legend == ["held", "done", "forced"]


def test_a_host_cannot_write_what_is_not_seen():
    (lane,) = drawn(past(30, 20, "a\u202eb")).lanes
    assert lane.host == r"a\u202eb"
    assert r"a\u202eb" in lane.bars[0].says


@pytest.mark.parametrize("length", [10, 7200, 200_000])
def test_ticks_fit_the_length(length):
    ticks = drawn(past(length, 0)).ticks
    assert [tick.x for tick in ticks] == ["0.00%", "25.00%", "50.00%", "75.00%", "100.00%"]
    assert len({tick.label for tick in ticks}) == len(ticks)
