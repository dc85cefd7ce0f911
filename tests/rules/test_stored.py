"""What servers keep is read as it was written, and whatever else is there as nothing of ours."""

import json
from dataclasses import fields, replace

import pytest

from django_redislock.held_lock import limit_of
from django_redislock.rules.stored import (
    LONGEST_FIELD,
    DoneMarkers,
    Holding,
    LockValue,
    NotedLease,
    NotedRun,
    Owner,
    confirmation_of,
    fence_in,
    is_number,
    noted_at,
    noted_lease_id,
    read_holding,
    read_lock_value,
    read_noted_lease,
    read_noted_run,
    read_renewal_count,
    read_skips,
    read_started_run,
    renewal_count,
    retention_of,
    started_lease_id,
    token_in,
)

TOKEN = b"0123456789abcdef" * 2
DRAW = Owner("web-1", 7, task="shop.draw", task_id="abc")


LOCK = LockValue(
    token=TOKEN,
    state=b"h",
    renewals=b"r00003",
    id=b"fedcba9876543210",
    fence=b"7",
    since=b"1500000",
    ttl=b"30000",
    channel=b"bell",
    owner=DRAW.packed,
)


def test_what_a_lock_key_holds_is_read_as_it_was_written():
    assert read_lock_value(LOCK.packed) == LOCK
    held = Holding("fedcba9876543210", DRAW, "held", 7, 1500.0, 30.0, 3, renews=True)
    assert read_holding(LOCK.packed) == held
    assert read_holding(LOCK.packed, "made") == replace(held, id="made")
    last = LOCK._replace(renewals=b"-00003")
    assert read_holding(last.packed) == replace(held, renews=False)


def test_a_lock_value_is_one_line_of_parts():
    parts = b"|".join([b"7", b"1500000", b"30000", b"0", b"bell", DRAW.packed])
    assert LOCK.packed == TOKEN + b"hr00003fedcba9876543210|" + parts


@pytest.mark.parametrize(
    ("state", "channel", "is_baton"),
    [(b"c", b"baton:", True), (b"c", b"bell", False), (b"h", b"baton:", False)],
)
def test_a_baton_waits_for_whoever_takes_it_up(state, channel, is_baton):
    value = LOCK._replace(state=state, channel=channel, confirm_by=b"2000").packed
    assert read_holding(value).is_baton is is_baton
    confirms = state == b"c" and not is_baton
    assert (confirmation_of(value) is not None) is confirms


def test_what_somebody_else_has_written_into_a_lock_key_is_foreign():
    foreign = read_holding(b"x", "made")
    assert (foreign.id, foreign.state, foreign.strange) == ("made", "foreign", "a string")
    assert (foreign.fence, foreign.renewals, foreign.renews) == (None, 0, False)


# What a version after this one may write: see lua/_lease.lua.
NEWER = TOKEN + b"2r00003fedcba9876543210|its|own|{parts}|" + DRAW.packed


@pytest.mark.parametrize("id", ["", "made"])
def test_a_lease_of_a_newer_format_is_held_by_an_owner_who_is_known(id):  # noqa: A002
    newer = read_holding(NEWER, id, "string 200")
    assert newer == Holding("fedcba9876543210", DRAW, "held", newer_format=2)
    assert newer == read_holding(NEWER)
    assert newer.holder == (
        "web-1:7 abc, which runs a newer version of django_redislock (update this one too)"
    )
    assert read_lock_value(NEWER) is None
    assert (fence_in(NEWER), confirmation_of(NEWER)) == (0, None)


@pytest.mark.parametrize("number", b"23456789")
def test_a_newer_format_has_a_digit_where_the_state_was(number):
    value = LOCK.packed[:32] + bytes([number]) + LOCK.packed[33:]
    assert read_holding(value).newer_format == int(chr(number))


def test_the_owner_of_a_newer_format_is_its_last_part_whatever_stands_in_it():
    piped = replace(DRAW, command='a|{"b"')
    head = NEWER[: -len(DRAW.packed)]
    assert read_holding(head + piped.packed).owner == piped
    assert read_holding(head[:56] + piped.packed).owner == piped
    assert read_holding(head[:56]).owner == read_holding(head + b"?").owner == Owner()


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(NEWER[:32] + b"1" + NEWER[33:], id="this format has letters"),
        pytest.param(NEWER[:32] + b"x" + NEWER[33:], id="no number"),
        pytest.param(NEWER[1:], id="a shorter token"),
        pytest.param(NEWER.replace(b"fedcba9876543210|", b"fedcba987654321|"), id="a shorter id"),
        pytest.param(NEWER.replace(b"fedcba", b"fedxyz"), id="no id"),
        pytest.param(NEWER[:55], id="nothing after the id"),
    ],
)
def test_what_only_looks_like_a_newer_format_is_foreign(value):
    assert read_holding(value, "made", "string 9").state == "foreign"


def test_the_holder_of_a_lease_that_can_be_read_is_its_owner():
    assert read_holding(LOCK.packed).holder == str(DRAW)


def test_an_acquire_says_which_done_markers_count_and_how_records_are_kept():
    assert DoneMarkers().packed == ""
    assert DoneMarkers(once=True).packed == "1|"
    assert DoneMarkers(run="", retention=retention_of(9.0, 10, 40)).packed == "09000/10/40|"
    assert DoneMarkers(once=True, run="a-task").packed == "1|a-task"


def test_a_time_has_no_more_digits_than_a_calendar_knows():
    assert is_number("9" * 14)
    assert not is_number("9" * 15)


@pytest.mark.parametrize("text", ["0", "7", "12345"])
def test_a_number_is_digits_and_as_many_as_it_may_have(text):
    assert is_number(text, 5)
    assert not any(is_number(other, 5) for other in ("", "123456", "-1", "1.5", "\u0663", "\u00b2"))


@pytest.mark.proves("R14")
@pytest.mark.parametrize("renews", [b"r", b"-"])
def test_an_unconfirmed_lease_is_confirmed_with_its_ttl_as_its_first_renewal(renews):
    value = TOKEN + b"c" + renews + b"00000fedcba9876543210|7|1000|30000|2000|host:1|web-1 7"
    assert confirmation_of(value) == (TOKEN, b"30000", renews + b"00000")
    assert confirmation_of(value.replace(b"c" + renews, b"h" + renews)) is None
    assert token_in(value) == TOKEN
    assert fence_in(value) == 7
    assert fence_in(b"of somebody else") == 0


def test_an_owner_has_waited_for_a_year_at_most():
    year = 366 * 86_400.0
    for seconds, read in ((0.5, 0.5), (year, year), (year + 1, 0.0), (-0.5, 0.0), (7, 0.0)):
        assert Owner.unpack(json.dumps({"waited": seconds})).waited == read


def test_the_last_skips_are_times():
    assert read_skips(b"1500,9,,x,2000,") == (1.5, 0.009, 2.0)
    assert read_skips(b"") == ()


def test_a_run_that_has_begun_is_read_with_its_permit():
    note = b"5000|250|fedcba|" + DRAW.packed
    run = NotedRun(5.0, 0.25, "fedcba", DRAW)
    assert read_noted_run(note) == run
    assert noted_at(note) == 5000
    assert noted_lease_id(note) == started_lease_id(b"#2|" + note) == "fedcba"
    assert read_started_run(b"#2|" + note) == (2, run)
    for first in (b"|", b"#x|", b"#10000|"):
        assert read_started_run(first + note) == (1, run)


@pytest.mark.parametrize("note", [b"", b"x", b"x|250|a|{}", b"5000|x|a|{}"])
def test_of_what_is_no_note_there_is_no_run(note):
    assert read_noted_run(note) is None
    assert read_started_run(b"#2|" + note) is None
    assert noted_at(note) == (5000 if note.startswith(b"5000|") else 0)


def test_an_entry_of_the_timeline_is_read_with_or_without_its_end():
    lease = NotedLease("fedcba", 7, 5.0, 6.5, "done", DRAW)
    piped = replace(DRAW, command="a|b|c")
    entry = b"fedcba|7|5000|6500|done|" + piped.packed
    assert read_noted_lease(entry) == lease._replace(owner=piped)
    assert read_noted_lease(entry.replace(b"|7|", b"|" + b"7" * 20 + b"|")) is None
    assert read_noted_lease(b"fedcba|7|5000|6500|done|" + DRAW.packed) == lease
    assert read_noted_lease(b"fedcba|7|5000||done|" + DRAW.packed) == lease._replace(until=None)
    for other in (b"", b"fedcba|x|5000|6500|done|{}", b"fedcba|7|x|6500|done|{}"):
        assert read_noted_lease(other) is None


def test_an_owner_is_what_was_packed():
    assert Owner.unpack(DRAW.packed.decode()) == DRAW
    assert b"path" not in DRAW.packed  # It has none.
    for other in ("", "[]", "7", "[" * 100_000):
        assert Owner.unpack(other) == Owner()
    assert Owner.unpack('{"pid": true, "host": 7}') == Owner(host="7")
    assert Owner.unpack('{"waited":4.200,"host":"web-1"}') == Owner(host="web-1", waited=4.2)
    for other in ("7", "NaN", "-1.0", "1e99", '"4.2"'):
        assert Owner.unpack(f'{{"waited":{other}}}') == Owner()


def test_a_task_is_known_by_an_id_that_is_too_long_to_be_kept():
    longest = "x" * LONGEST_FIELD
    assert Owner(task_id=longest).packed.endswith(f'"{longest}"}}'.encode())
    for task_id in (longest + "1", "\U0001f512" * 100):
        kept = Owner.unpack(Owner(task_id=task_id).packed.decode())
        assert len(kept.task_id) < LONGEST_FIELD
        assert kept.is_task(task_id)
        assert not kept.is_task(task_id + "2")


def test_an_owner_is_packed_into_four_kilobytes():
    wide = "\U0001f512"  # Twelve bytes as JSON.
    fields = {"task": wide * 100, "path": wide * 100, "command": "y" * 4000}
    owner = Owner(host="x" * 4000, **fields)
    assert Owner.unpack(owner.packed.decode()).host == "x" * 200
    fits = replace(owner, thread=wide * 95)
    spare = 4096 - len(fits.packed)
    assert Owner.unpack(replace(fits, reason="z" * (spare - 12)).packed.decode()).host == "x" * 200
    for more in (replace(fits, reason="z" * (spare - 11)), replace(owner, reason=wide * 200)):
        assert len(more.packed) <= 4096
        assert 40 < len(Owner.unpack(more.packed.decode()).host) < 60  # By how many fields it has.


def test_an_owner_fits_however_many_of_its_fields_are_full():
    wide = "\U0001f512" * 4000
    texts = {field.name: wide for field in fields(Owner) if field.type == "str"}
    full = Owner(pid=4194304, limit=1024, waited=1234567.891, **texts)
    assert len(full.packed) <= 4096
    assert len(Owner.unpack(full.packed.decode()).host) > 10


@pytest.mark.parametrize(("length", "is_whole"), [(28, True), (29, False)])
def test_a_task_id_is_kept_whole_if_it_has_no_more_than_960_bytes(length, is_whole):
    task_id = "\u00e9" * 155 + "x" * length  # Six bytes and one as JSON, and two quotes.
    kept = Owner.unpack(Owner(task_id=task_id).packed.decode()).task_id
    assert (kept == task_id) is is_whole


@pytest.mark.parametrize(("limit", "read"), [("5", 5), ('"5"', 0), ("true", 0), ("null", 0)])
def test_an_owner_tells_of_how_many_permits_it_has_one(limit, read):
    assert Owner.unpack(f'{{"limit":{limit}}}').limit == read
    assert Owner.unpack(Owner(limit=read).packed.decode()).limit == read


@pytest.mark.parametrize(("limits", "found"), [([], 1), ([0], 1), ([-3, 2, 4], 4), ([10**9], 1000)])
def test_a_limit_that_anybody_may_have_written_is_bounded(limits, found):
    assert limit_of(Owner(limit=limit) for limit in limits) == found


@pytest.mark.parametrize(("count", "text"), [(0, "r00000"), (12_345, "r12345"), (10**6, "r99999")])
def test_renewals_are_counted_in_five_digits(count, text):
    assert renewal_count(True, count) == text
    assert read_renewal_count(text.encode()) == min(count, 99_999)


@pytest.mark.parametrize(
    ("owner", "place", "text"),
    [
        (DRAW, "web-1:7", "web-1:7 abc"),
        (Owner("web-1", command="manage.py draw"), "web-1", "web-1 manage.py draw"),
        (Owner(pid=7, path="/draw/"), "unknown:7", "unknown:7 /draw/"),
        (Owner(), "", "unknown"),
        (Owner("web-1", 7, operator="ada"), "ada", "ada"),
        (Owner("web-1", 7, path="/a\nb\u202e\u2028"), "web-1:7", r"web-1:7 /a\nb\u202e\u2028"),
        (Owner("web\r-1", 7, task="a\x1b[2J"), r"web\r-1:7", r"web\r-1:7 a\x1b[2J"),
        (Owner(host="web\n-1"), r"web\n-1", r"web\n-1"),
        (Owner(operator="ada\n"), r"ada\n", r"ada\n"),
    ],
)
def test_an_owner_is_shown_by_where_and_what_it_is(owner, place, text):
    assert (owner.place, str(owner)) == (place, text)
