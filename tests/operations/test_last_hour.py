"""The small pictures of the last hour of a lock: what they show, and what they say beside it."""

from dataclasses import replace

from django_redislock.admin import last_hour
from django_redislock.held import Detail, PastLease, Record, Waiter
from django_redislock.rules.stored import Owner

NOW = 1_000_000.0
EMPTY = Detail(name="lottery", alias="default", lock=None, waiters=[], past=[], server_time=NOW)
MOST = 40


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


def said(hour):
    return {picture.about: picture.says for picture in hour.pictures}


def marks(hour, about):
    (picture,) = (one for one in hour.pictures if one.about == about)
    return [(mark.x, mark.width, mark.kind) for mark in picture.marks]


def test_without_anything_within_the_hour_there_is_no_picture():
    old = Record(name="lottery", alias="default", skips=1, skipped_at=(NOW - 3601,))
    assert last_hour.draw(EMPTY, None, MOST) is None
    assert last_hour.draw(replace(EMPTY, past=[past(7200, 3601)]), old, MOST) is None


def test_runs_waits_skips_and_losses_are_where_they_were():
    waited = past(900, 0)
    waited = replace(waited, owner=replace(waited.owner, waited=450.0))
    lost = [past(5400, 2700, ended="forced"), past(1800, None, ended="expired")]
    waiter = Waiter(id="w", owner=Owner(host="a\u202eb"), waiting_for=90.0)
    detail = replace(EMPTY, past=[*lost, waited], waiters=[waiter])
    record = Record(name="lottery", alias="default", skipped_at=(NOW - 9000, NOW - 1800, NOW - 60))
    hour = last_hour.draw(detail, record, MOST)
    assert said(hour) == {
        "Runs": "3 leases, held for 45 min 00 s in all",
        "Waits": "1 of a second or longer, the longest 7 min 30 s; 1 waiting now, the first for"
        " 1 min 30 s",
        "Skips": "2, the last 1 min 00 s ago",
        "Losses": "1 by force, 1 expired",
    }
    # Of one that has begun before, the part within the hour. What expired reaches to the next.
    assert marks(hour, "Runs") == [
        ("0.00%", "25.00%", "forced"),
        ("50.00%", "25.00%", "expired"),
        ("75.00%", "25.00%", "done"),
    ]
    assert marks(hour, "Waits") == [("62.50%", "12.50%", "wait"), ("97.50%", "2.50%", "wait")]
    assert marks(hour, "Skips") == [("50.00%", "0.80%", "skip"), ("98.33%", "0.80%", "skip")]
    assert marks(hour, "Losses") == [("25.00%", "0.80%", "forced"), ("75.00%", "0.80%", "failed")]
    assert r"a\u202eb" in hour.pictures[1].marks[1].says
    assert hour.note == ""
    assert [tick.x for tick in hour.ticks][-1] == "100.00%"


def test_what_is_kept_may_be_less_than_an_hour():
    hour = last_hour.draw(replace(EMPTY, past=[past(30, 20), past(10, 5)]), None, 2)
    assert "2 earlier leases are kept" in hour.note
    whole = last_hour.draw(replace(EMPTY, past=[past(4000, 3000), past(10, 5)]), None, 2)
    assert whole.note == ""
