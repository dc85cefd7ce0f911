"""What a lock may be called, and the keys that are made of a name."""

from __future__ import annotations

import unicodedata
from datetime import datetime, timedelta
from enum import Enum
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_redislock import InvalidLockName
from django_redislock.rules.keys import (
    BUCKETS,
    IN_BUCKETS,
    bucket_of,
    channel,
    lock_keys,
    name_of,
    permit_of,
    prefix_in,
    prefix_of,
)
from django_redislock.rules.names import (
    Permit,
    Written,
    check_limited,
    check_name,
    checked_name,
    formatter,
    in_period,
    meant_by,
    several_names,
    signature_of,
)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "it is empty"),
        ("a\nb", "control characters"),
        ("a\x00b", "control characters"),
        ("a\x7f", "control characters"),
        ("a\x85b", "control characters"),
        ("a" * 201, "it has 201 bytes of UTF-8, at most 200 are allowed"),
        ("ä" * 101, "it has 202 bytes"),
        ("\ud800", "not valid Unicode"),
        (b"lottery", "it is bytes, not str"),
        (None, "it is NoneType, not str"),
        (7, "it is int, not str"),
        (["lottery"], r'it is list, not str; write several names one by one, \("a", "b"\), or \*'),
    ],
    ids=repr,
)
def test_what_is_no_name_is_refused_with_the_rule(name, rule):
    with pytest.raises(InvalidLockName, match=rule):
        check_name(name)


def test_the_member_of_an_enum_is_the_text_that_it_is_equal_to():
    name = Enum("Name", {"IMPORT": "an-import"}, type=str)["IMPORT"]
    for checked in (check_name(name), check_name("an-import"), Written(name)):
        assert str(checked) == "an-import"
    assert type(check_name("an-import")) is str


def test_the_message_shows_a_long_name_cut_short():
    with pytest.raises(InvalidLockName) as raised:
        check_name("x" * 5000)
    assert "xxx" in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("length", "shown"), [(78, 80), (79, 80), (5000, 80)])
def test_of_a_name_that_is_refused_eighty_characters_are_shown(length, shown):
    name = "\n" + "x" * (length - 2)  # As repr() writes it, it has quotes, and a backslash more.
    with pytest.raises(InvalidLockName) as raised:
        check_name(name)
    whole = repr(name)
    text = whole if len(whole) <= shown else whole[:77] + "..."
    assert raised.value.args[0] == text or text in str(raised.value)
    assert text + "x" not in str(raised.value)


def test_a_name_is_limited_although_a_template_is_not():
    assert check_name("x" * 201, template=True)
    with pytest.raises(InvalidLockName, match="201 bytes"):
        check_name("x" * 201)
    with pytest.raises(InvalidLockName, match="201 bytes"):
        checked_name("x" * 201)


def test_a_name_is_made_of_the_arguments_of_a_call():
    def draw(order, *, kind="weekly", **others): ...

    assert formatter("{order}-{kind}", draw)((7,), {}) == "7-weekly"
    assert formatter("{other}", draw)((7,), {"other": 8}) == "8"
    first = formatter("{kind}", partial(draw, 7, kind="daily"))
    assert first((), {}) == "daily"


def test_what_is_seen_stands_for_an_argument():
    def draw(order, note): ...

    seen = formatter("{order}", draw, see=lambda name, value: f"{name}={value}")
    assert seen((7, "x"), {}) == "order=7"
    seen = formatter("{order.imag}-{note}", draw, see=lambda name, value: value)
    assert seen((7, "x"), {}) == "0-x"


@pytest.mark.parametrize(
    ("value", "equal", "text"),
    [
        ({0, 8}, {8, 0}, "[0, 8]"),  # Sets list what collides in the order in which it came.
        (frozenset("ab"), {"b", "a"}, "['a', 'b']"),
        ({"a": 1, "b": {8, 0}}, {"b": {0, 8}, "a": 1}, "{'a': 1, 'b': [0, 8]}"),
        ((1, 2), [1, 2], "[1, 2]"),
        (Enum("Status", {"PAID": "paid"}, type=str)["PAID"], "paid", "paid"),
        (Enum("Size", {"BIG": 3}, type=int)["BIG"], 3, "3"),
    ],
    ids=["set", "frozenset", "dict", "tuple", "text of an enum", "number of an enum"],
)
@pytest.mark.parametrize("field", ["{order}", "{order!s}", "{note.order}", "{note.all[0]}"])
def test_equal_values_make_equal_names(field, value, equal, text):
    def draw(order, note): ...

    name_of = formatter(field, draw)
    for one in (value, equal):
        note = SimpleNamespace(order=one, all=[one])
        assert name_of((one, note), {}) == text


def test_a_name_that_cannot_be_made_says_why():
    def draw(order): ...

    for template in ("{order.pk}", "{order.pk.year[0]}"):
        with pytest.raises(InvalidLockName, match="cannot be formatted: AttributeError"):
            formatter(template, draw)((7,), {})


def test_a_name_without_fields_is_that_of_every_call():
    assert formatter("lottery", lambda order: None)((7,), {}) == "lottery"
    with pytest.raises(InvalidLockName, match="201 bytes"):
        formatter("x" * 201, lambda order: None)


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{order", "no format string over the names of arguments"),
        ("{}", "it uses the argument ''"),
        ("{other}", r"'other', which .*draw\(\) does not take; its arguments are: order.$"),
    ],
)
def test_a_template_that_never_makes_a_name_is_refused_at_once(template, rule):
    def draw(order): ...

    with pytest.raises(InvalidLockName, match=rule):
        formatter(template, draw)
    with pytest.raises(InvalidLockName, match="its arguments are: none"):
        formatter("{other}", lambda: None)


def test_an_argument_that_a_call_does_not_have_is_named():
    def draw(**others): ...

    name_of = formatter("{b}-{a}", draw)
    with pytest.raises(InvalidLockName, match=r"'a', which this call of .*; it has: c.$"):
        name_of((), {"c": 1})
    with pytest.raises(InvalidLockName, match="it has: none"):
        name_of((), {})


def test_a_name_that_no_other_process_arrives_at_is_refused():
    with pytest.raises(InvalidLockName, match="address in memory"):
        formatter("{order}", lambda order: None)((object(),), {})
    assert formatter("{order}", lambda order: None)((" at 0xy",), {}) == " at 0xy"


def test_the_arguments_of_a_method_are_those_that_its_caller_passes():
    class View:
        def post(self, order): ...

    bound = View().post

    @wraps(bound)
    def decorated(order: Any) -> None: ...

    def view(request): ...

    assert list(signature_of(bound).parameters) == ["order"]
    assert list(signature_of(wraps(View.post)(decorated)).parameters) == ["self", "order"]
    assert list(signature_of(partial(View.post, View())).parameters) == ["order"]
    view.view_class = View  # As as_view() does.
    view.__wrapped__ = View.post
    assert list(signature_of(view).parameters) == ["request"]


def test_several_names_are_taken_once_each_in_one_order():
    assert several_names(("b", "a", "b")) == ("a", "b")
    assert several_names(("{tenant}" + "x" * 200,))
    with pytest.raises(InvalidLockName, match="201 bytes"):
        several_names(("a", "x" * 201))
    with pytest.raises(TypeError, match="needs the name"):
        several_names(())


@pytest.mark.parametrize("name", ["gpu#2", "gpu#0", "#7", "a\u2028b#12"])
def test_a_lock_with_a_limit_is_not_called_as_one_of_its_permits(name):
    with pytest.raises(InvalidLockName, match="ends in # and a number"):
        check_limited(name)
    check_limited(name + "x")


@pytest.mark.parametrize("name", ["a", "a" * 200, "ä" * 100, "a b", " ", "🎲", "ﷺ"], ids=ascii)
def test_other_text_is_a_name(name):
    assert check_name(name) == unicodedata.normalize("NFC", name)


def test_names_are_normalised_so_that_equal_looking_ones_are_one_lock():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert check_name(decomposed) == composed
    # The length counts after it.
    assert check_name("e\u0301" * 100) == "\u00e9" * 100


def own_keys(name):
    """The keys of one lock; the fence and the indexes are common to all."""
    keys = lock_keys("prefix", name)._asdict()
    return set(keys.values()) - {keys["fence"], keys["held"], keys["ran"], keys["calls"]}


names = st.text(min_size=1, max_size=50).map(lambda text: unicodedata.normalize("NFC", text))


@settings(deadline=None)
@given(names)
def test_the_name_is_read_back_from_its_key(name):
    assert name_of("prefix", lock_keys("prefix", name).lock) == name


@settings(deadline=None)
@given(names, st.integers(1, 1000))
def test_the_permit_is_read_back_from_its_key(name, permit):
    first, keys = lock_keys("prefix", name), lock_keys("prefix", name, permit)
    assert permit_of("prefix", keys.lock) == (name, permit)
    assert name_of("prefix", keys.lock) == name
    own = {"lock", "forced", "past", "waits"} if permit > 1 else set()
    assert {key for key, its in keys._asdict().items() if its != getattr(first, key)} == own


@pytest.mark.parametrize("end", ["#1", "#0", "#02", "#", "#x", "#10000", "2", "#2 "])
def test_no_other_key_is_that_of_a_permit(end):
    assert permit_of("prefix", f"prefix:{{lottery}}:lock{end}") is None


@pytest.mark.proves("R10")
@settings(deadline=None)
@given(names)
def test_the_name_cannot_choose_its_slot_or_match_other_keys(name):
    own = own_keys(name)
    # One hash tag, the name itself, whatever braces it has; an empty one would be none.
    tags = {key[key.index("{") + 1 : key.index("}")] for key in own}
    assert len(tags) == 1
    assert tags != {""}
    assert all(key.count("{") == key.count("}") == 1 for key in own)
    assert not any(glob in key for key in own for glob in "*?[]\\^")


@settings(deadline=None)
@given(names, names)
def test_different_names_have_different_keys(one, other):
    if one != other:
        assert not own_keys(one) & own_keys(other)


@pytest.mark.proves("R10")
@settings(deadline=None)
@given(names)
def test_in_buckets_all_keys_of_a_name_have_the_tag_of_its_bucket(name):
    prefix = "prefix" + IN_BUCKETS
    keys = lock_keys(prefix, name)
    begin = f"prefix:{{{bucket_of(name)}}}:"
    assert all(key.startswith(begin) for key in keys)
    assert name_of(prefix, keys.lock) == name
    elsewhere = f"prefix:{{{(bucket_of(name) + 1) % BUCKETS}}}:"
    assert name_of(prefix, keys.lock.replace(begin, elsewhere, 1)) is None
    assert name_of("prefix", keys.lock) is None


@pytest.mark.parametrize("prefix", ["prefix", "prefix" + IN_BUCKETS])
def test_a_channel_tells_for_which_locks_it_is(prefix):
    begin = prefix_of(prefix, "lottery")
    assert prefix_in(channel(begin, "host:1", 7)) == begin


def test_the_bucket_of_a_name_is_the_same_for_ever():
    """Or processes of two versions would each give the same lock away, in different buckets."""
    assert {name: bucket_of(name) for name in ("lottery", "report:7", "é")} == {
        "lottery": 131,
        "report:7": 118,
        "é": 62,
    }
    used = {bucket_of(f"customer:{number}") for number in range(5000)}
    assert used == set(range(BUCKETS))


@pytest.mark.parametrize(
    ("label", "meant"),
    [
        ("gpu", [("gpu", 1)]),
        ("gpu#2", [("gpu", 2), ("gpu#2", 1)]),
        ("gpu#1000", [("gpu", 1000), ("gpu#1000", 1)]),
        ("a#2#3", [("a#2", 3), ("a#2#3", 1)]),
        ("x" * 199 + "#2", [("x" * 199, 2)]),
        *((one, [(one, 1)]) for one in ("gpu#1", "gpu#0", "gpu#02", "gpu#", "#2", "gpu#x", "g#2 ")),
        ("gpu#\u0662", [("gpu#\u0662", 1)]),
    ],
)
def test_a_label_means_a_permit_or_the_lock_that_is_called_just_so(label, meant):
    assert meant_by(label) == meant
    for name, number in meant:
        permit = Permit(name, number)
        assert permit.label == label
        assert Permit.labelled(label, number) == permit


@pytest.mark.parametrize("label", ["", "\n#2", "x" * 201, "x" * 201 + "#2", None])
def test_what_is_neither_is_refused(label):
    with pytest.raises(InvalidLockName):
        meant_by(label)


BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 1, 1, 12, tzinfo=BERLIN)
HALF_PAST_TWO = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)  # It comes twice in that night.


@pytest.mark.parametrize(
    ("every", "moment", "period"),
    [
        (timedelta(days=1), datetime(2026, 11, 28, 23, 59, tzinfo=BERLIN), "2026-11-28"),
        (timedelta(days=7), datetime(2026, 11, 29, 12, tzinfo=BERLIN), "2026-11-23"),  # A Monday.
        (timedelta(hours=1), HALF_PAST_TWO, "2026-10-25T02:00+02:00"),
        (timedelta(hours=1), HALF_PAST_TWO.replace(fold=1), "2026-10-25T02:00+01:00"),
        (timedelta(hours=6), HALF_PAST_TWO.replace(fold=1), "2026-10-25T00:00+02:00"),
        (
            timedelta(minutes=15),
            datetime(2026, 1, 1, 12, 44, tzinfo=BERLIN),
            "2026-01-01T12:30+01:00",
        ),
        (
            timedelta(seconds=10),
            datetime(2026, 1, 1, 0, 0, 9, tzinfo=BERLIN),
            "2026-01-01T00:00:00+01:00",
        ),
    ],
)
def test_a_name_tells_the_period_that_a_moment_lies_in(every, moment, period):
    assert in_period("lottery", every, moment) == f"lottery:{period}"


def test_a_name_that_is_too_long_with_its_period_is_refused():
    with pytest.raises(InvalidLockName, match="at most 200"):
        in_period("x" * 195, timedelta(days=1), HALF_PAST_TWO)
