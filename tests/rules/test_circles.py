"""A search for a circle of waits, over what a server might say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_redislock.rules import circles
from django_redislock.rules.replies import WaitReply
from django_redislock.rules.stored import LockValue, Owner, Wait, read_wait


class World:
    """Holders who wait, or go on, told as ``("ann", holds, wants)``: "gpu#2" is a permit."""

    def __init__(self, *holders, limits=None):
        self.limits = limits or {}
        self.waits = {
            who: self.wait(who, wants, number) for number, (who, _, wants) in enumerate(holders)
        }
        self.leases = {lease: who for who, holds, _ in holders for lease in holds.split()}
        self.gone = set()  # Whose waits are over.
        self.read = []
        # What the server says that differs from this.
        self.states = {}
        self.stale = set()  # Leases of which the note is that of an earlier one.

    def wait(self, who, wants, number):
        return Wait("default", wants, who, 1_000 + number, self.limits.get(wants, 1))

    def reply(self, read):
        lease = read.wait.name if read.permit == 1 else f"{read.wait.name}#{read.permit}"
        self.read.append(lease)
        who = self.leases.get(lease)
        goes_on = int(read.wait.id not in self.gone)
        if who is None:
            return WaitReply(goes_on, b"", b"")
        lease_id = f"{sum(lease.encode()):016x}"
        value = LockValue(
            token=b"t" * 32,
            state=self.states.get(lease, b"h"),
            renewals=b"r00000",
            id=lease_id.encode(),
            fence=b"1",
            since=b"1",
            ttl=b"1",
            owner=Owner(host=who, pid=1).packed,
        )
        note, wait = b"", self.waits[who]
        if wait.name:
            noted_at = "0" * 16 if lease in self.stale else lease_id
            note = f"{noted_at}|{wait.id}|{wait.packed}".encode()
        return WaitReply(goes_on, value.packed, note)

    def search(self, who):
        self.read.clear()
        search = circles.search(self.waits[who])
        try:
            read = next(search)
            while True:
                read = search.send(self.reply(read))
        except StopIteration as end:
            return end.value


def youngest(circle):
    return circle.youngest.id


def test_two_who_wait_for_each_other_are_a_circle_and_agree_who_gives_up():
    world = World(("ann", "1", "2"), ("bob", "2", "1"))
    assert [youngest(world.search(who)) for who in ("ann", "bob")] == ["bob", "bob"]
    assert world.read == ["1", "2"]


def test_three_in_a_circle():
    world = World(("ann", "1", "2"), ("cid", "3", "1"), ("bob", "2", "3"))
    assert {youngest(world.search(who)) for who in ("ann", "bob", "cid")} == {"bob"}
    circle = world.search("bob")
    assert circle.wanted == {"2": 1, "3": 1}


def test_one_who_holds_the_lock_under_another_alias_is_a_circle_of_one():
    assert youngest(World(("ann", "1", "1")).search("ann")) == "ann"


def test_waits_that_converge_are_no_circle():
    holders = [("ann", "1", ""), ("bob", "2", "1"), ("cid", "3", "1"), ("dan", "4", "2")]
    world = World(*holders)
    assert not any(world.search(who) for who in ("bob", "cid", "dan"))


def test_who_only_waits_for_those_in_a_circle_is_not_in_it():
    world = World(("ann", "1", "2"), ("bob", "2", "1"), ("cid", "3", "1"), ("dan", "4", "3"))
    assert world.search("cid") is None
    assert world.search("dan") is None
    assert youngest(world.search("ann")) == "bob"


def test_one_of_several_locks_of_a_holder_closes_a_circle():
    # As one who takes several together, and has got some of them.
    world = World(("ann", "1 2 3", "5"), ("bob", "4 5", "2"))
    assert youngest(world.search("ann")) == "bob"
    assert youngest(world.search("bob")) == "bob"


def test_a_wait_for_a_permit_is_in_a_circle_only_if_all_holders_are():
    holders = [("ann", "gpu", "a"), ("bob", "gpu#2", "a"), ("cid", "a", "gpu")]
    limits = {"gpu": 2}
    world = World(*holders, limits=limits)
    assert {youngest(world.search(who)) for who in ("ann", "bob", "cid")} == {"cid"}

    goes_on = World(holders[0], ("bob", "gpu#2", ""), holders[2], limits=limits)
    assert not any(goes_on.search(who) for who in ("ann", "cid"))
    waits_for_one_who_goes_on = World(
        holders[0], ("bob", "gpu#2", "b"), holders[2], ("dan", "b", ""), limits=limits
    )
    assert not any(waits_for_one_who_goes_on.search(who) for who in ("ann", "bob", "cid"))
    free = World(holders[0], holders[2], limits=limits)
    assert not any(free.search(who) for who in ("ann", "cid"))


def test_a_circle_that_one_holder_of_a_permit_only_leads_to_is_not_his():
    # Bob's permit never comes back, as ann and cid never end. Dan is not in their way.
    limits = {"gpu": 2}
    world = World(
        ("ann", "a", "c"), ("cid", "c gpu", "a"), ("bob", "gpu#2", "a"), ("dan", "d", "gpu"),
        limits=limits,
    )  # fmt: skip
    assert world.search("dan") is None
    assert world.search("bob") is None
    assert youngest(world.search("ann")) == "cid"


@st.composite
def worlds(draw):
    """Holders of some permits of five locks, of whom some wait for a lock."""
    limits = {name: draw(st.integers(1, 3)) for name in "abcde"}
    permits = [f"{name}#{number}" for name in limits for number in range(1, limits[name] + 1)]
    leases = draw(st.lists(st.sampled_from(permits), unique=True, min_size=4))
    who = draw(st.lists(st.integers(0, 5), min_size=len(leases), max_size=len(leases)))
    holders = [
        (
            f"h{number}",
            " ".join(
                one.removesuffix("#1")
                for one, has in zip(leases, who, strict=True)
                if has == number
            ),
            draw(st.sampled_from(["", *limits, *limits])),
        )
        for number in range(6)
    ]
    return World(*holders, limits=limits)


@given(worlds())
@settings(max_examples=300, deadline=None)
def test_whoever_is_told_could_not_go_on_whatever_the_others_do(world):
    # Who does not wait goes on and releases; so does who then gets a permit; and so on.
    leases, stuck = dict(world.leases), {who for who, wait in world.waits.items() if wait.name}

    def is_free(name):
        numbers = range(1, world.limits[name] + 1)
        held = [leases.get(name if one == 1 else f"{name}#{one}") for one in numbers]
        return any(who not in stuck for who in held)

    while goes_on := {who for who in stuck if is_free(world.waits[who].name)}:
        stuck -= goes_on
    waits = [who for who, wait in world.waits.items() if wait.name]
    found = {who: circle for who in waits if (circle := world.search(who))}
    assert found.keys() <= stuck
    # And if anybody is stuck, somebody is told, who is in that circle.
    assert bool(found) is bool(stuck)
    for who, circle in found.items():
        assert circle.youngest.id in found
        assert found[circle.youngest.id].youngest.id == circle.youngest.id, who


@pytest.mark.parametrize("over", ["ann", "bob"])
def test_a_wait_that_is_over_is_in_no_circle(over):
    world = World(("ann", "1", "2"), ("bob", "2", "1"))
    world.gone.add(over)
    assert not any(world.search(who) for who in ("ann", "bob"))


@pytest.mark.parametrize("state", [b"c", b"k"])
def test_a_lease_that_nobody_relies_on_holds_up_nobody(state):
    world = World(("ann", "1", "2"), ("bob", "2", "1"))
    world.states["2"] = state
    assert not any(world.search(who) for who in ("ann", "bob"))


def test_what_was_noted_at_an_earlier_lease_does_not_count():
    world = World(("ann", "1", "2"), ("bob", "2", "1"))
    world.stale.add("2")
    assert not any(world.search(who) for who in ("ann", "bob"))


def test_a_long_chain_is_read_up_to_a_bound():
    def ring(length):
        holders = [(f"h{n}", f"l{n}", f"l{(n + 1) % length}") for n in range(length)]
        return World(*holders)

    assert youngest(ring(circles.MOST_READ).search("h0")) == f"h{circles.MOST_READ - 1}"
    world = ring(circles.MOST_READ + 1)
    assert world.search("h0") is None
    assert len(world.read) == circles.MOST_READ


def test_each_wait_is_followed_once_however_many_ways_lead_to_it():
    limits = {"gpu": 3}
    world = World(
        ("ann", "gpu", "a"), ("bob", "gpu#2", "a"), ("cid", "gpu#3", "a"), ("dan", "a", "gpu"),
        limits=limits,
    )  # fmt: skip
    assert world.search("dan")
    # That is, one read for each wait and lease: is the wait still there?
    assert sorted(world.read) == ["a", "a", "a", "gpu", "gpu#2", "gpu#3"]


def test_a_circle_in_words():
    circle = World(("ann", "1", "2"), ("bob", "2", "1")).search("bob")
    assert circle.told("this thread") == (
        "'1' is held by ann:1, which waits for '2'; '2' is held by this thread, which waits for '1'"
    )
    assert circle.wanted == {"1": 1, "2": 1}


def test_a_circle_of_permits_in_words():
    limits = {"gpu": 2}
    world = World(("ann", "gpu", "a"), ("bob", "gpu#2", "a"), ("cid", "a", "gpu"), limits=limits)
    circle = world.search("cid")
    assert circle.told("this thread").startswith(
        "permit 1 of 'gpu' is held by ann:1, which waits for 'a'; permit 2 of 'gpu' is held by"
    )
    # Two wait for it, and it is told once.
    assert circle.told("this thread").count("'a' is held by this thread") == 1
    assert list(circle.wanted.items()) == [("a", 1), ("gpu", 2)]  # The narrowest first.


def test_a_circle_over_several_aliases_in_words():
    world = World(("ann", "1", "2"), ("bob", "2", "1"))
    world.waits["ann"] = world.waits["ann"]._replace(alias="other")
    circle = world.search("bob")
    assert circle.told("me") == (
        "'1' of 'default' is held by ann:1, which waits for '2' of 'other';"
        " '2' of 'other' is held by me, which waits for '1' of 'default'"
    )
    assert circle.wanted == {}


def test_a_large_circle_is_told_in_part():
    holders = [(f"h{n}", f"l{n}", f"l{(n + 1) % 10}") for n in range(10)]
    circle = World(*holders).search("h0")
    assert circle.told("me").endswith("; and so on, with 2 more")


WAIT = Wait("default", "a|{b}", "fedcba9876543210", 1_700_000_000_000_000, 4)


@pytest.mark.parametrize("wait", [WAIT, WAIT._replace(alias="a|b c"), WAIT._replace(name="é")])
def test_a_wait_is_read_as_it_was_written(wait):
    assert read_wait(f"0123456789abcdef|{wait.id}|{wait.packed}".encode()) == (
        "0123456789abcdef",
        wait,
    )
    assert Wait("default", "a", "id", 7).limit == 1


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"x",
        b"\xff" * 9,
        b"id|id|x|1|default|b",
        b"id|id|7|x|default|b",
        b"id|id|7|0|default|b",
        b"id|id|7|10000|default|b",
        b"id|id|" + b"7" * 20 + b"|1|default|b",
    ],
)
def test_what_somebody_else_has_written_is_no_wait(note):
    assert read_wait(note) is None
