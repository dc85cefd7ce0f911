"""leadership(): one leads at a time, and not for longer than it lives and says so."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest

from django_redislock import LockLost, LockMisuse, LockTimeout, held, leadership
from tests.support.matrix import MEMORY, places
from tests.support.others import waiters
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.support.ways import both_ways

# It is a lease, which other tests try in all places; and a max_hold that moves, tried here.
pytestmark = places(KIND, MEMORY)


@pytest.mark.parametrize("ends", [None, ValueError("of the body")], ids=["ends", "raises"])
@both_ways
async def test_one_leads_until_its_block_is_left_and_the_next_has_a_greater_fence(way, place, ends):
    async def lead(wait=HUNG):
        async with way.entered(leadership("scheduler", wait=wait)) as term:
            assert term.held
            return term.fence

    term = leadership("scheduler", ttl=timedelta(seconds=9))
    assert not term.held
    following = None
    with suppress(ValueError):
        async with way.entered(term) as entered_term:
            assert entered_term is term
            following = way.start(lead)
            await way.until(lambda: waiters("scheduler") == 1)
            assert term.held
            term.beat()
            fence = term.fence
            if ends is not None:
                raise ends
    assert await following.result() > fence
    assert not term.held
    with pytest.raises(LockLost, match="it was released"):
        term.beat()
    async with way.entered(term):  # One term may begin again.
        assert term.held
        assert term.fence > fence
        with pytest.raises(LockTimeout):
            await way.start(lambda: lead(wait=0)).result()


@both_ways
async def test_whose_term_is_lost_is_told_by_all_that_it_asks(way, place):
    told = []
    with pytest.raises(LockLost) as lost:  # noqa: PT012 - by leaving the block
        async with way.entered(leadership("scheduler", ttl=1)) as term:
            term.on_lost(told.append)
            found = held.get("scheduler")
            held.force_release("scheduler", found.id)
            await way.until(lambda: told)
            assert not term.held
            with pytest.raises(LockLost):
                term.beat()
    assert told == [term]
    assert lost.value.reason == "forced"


@both_ways
async def test_a_loss_does_not_hide_what_the_body_raises(way, place):
    with pytest.raises(ValueError, match="of the body"):  # noqa: PT012 - by leaving the block
        async with way.entered(leadership("scheduler", ttl=1)) as term:
            place.lose_data()
            await way.until(lambda: not term.held)
            raise ValueError("of the body")


@both_ways
async def test_who_has_lost_a_shared_term_does_not_take_the_next_for_its_own(way, place):
    term = leadership("scheduler", ttl=3)
    fences = []
    asked = []

    async def lead():
        async with way.entered(term):
            fences.append(term.fence)
            await way.until(lambda: asked)
            return term.held

    with pytest.raises(LockLost, match="released it by force"):  # noqa: PT012
        async with way.entered(term):
            fences.append(term.fence)
            following = way.start(lead)
            await way.until(lambda: waiters("scheduler") == 1)
            (leader,) = held.list()
            assert held.force_release("scheduler", leader.id)
            await way.until(lambda: len(fences) == 2)
            await way.until(lambda: not term.held)  # Its renewal is refused.
            with pytest.raises(LockLost):
                term.beat()
            asked.append(term.fence)
    assert asked == fences[:1]
    assert await following.result()


def test_before_its_block_there_is_no_term(place):
    term = leadership("scheduler")
    asks = (term.beat, lambda: term.fence, lambda: term.on_lost(print))
    for ask in asks:
        with pytest.raises(LockMisuse, match="its term begins with its block"):
            ask()
    assert repr(term) == "<Term of 'scheduler': not begun>"


@pytest.mark.parametrize("argument", ["ttl", "wait", "max_silence"])
def test_arguments_are_named_that_are_no_durations(argument):
    options = {argument: "soon"}
    with pytest.raises(ValueError, match=f"^{argument} must be"):
        leadership("scheduler", **options)


# --- a body that hangs ---------------------------------------------------------------------------


@pytest.mark.waits
@both_ways
async def test_after_too_long_a_silence_another_leads(way, place, caplog):
    async def lead():
        async with way.entered(leadership("scheduler", wait=HUNG)) as term:
            return term.held

    with pytest.raises(LockLost, match=r"its beat\(\) was not called for 2 s"):  # noqa: PT012
        async with way.entered(leadership("scheduler", ttl=0.5, max_silence=2)) as term:
            began = time.monotonic()
            following = way.start(lead)
            await way.until(lambda: not term.held)
            assert time.monotonic() - began > 1.8  # It was renewed until then.
            assert await following.result()
    # The watchdog may have noticed the loss first, and logs it just now.
    await way.until(lambda: "its beat() was not called for 2 s" in caplog.text)


@pytest.mark.waits
@places(KIND)
@pytest.mark.parametrize("ttl", [3, 30], ids="ttl {}".format)
@both_ways
async def test_who_beats_leads_on(way, place, ttl):
    """The last beat may come when the watchdog means to let the term end, and counts all the same.

    A ttl longer than max_silence changes nothing.
    """
    async with way.entered(leadership("scheduler", ttl=ttl, max_silence=4)) as term:
        for _ in range(2):
            await way.sleep(2.5)
            term.beat()
        await way.sleep(2)
        assert term.held
