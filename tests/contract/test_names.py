"""No name does harm, whatever it looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_redislock import InvalidLockName, distributed_lock, held
from tests.support.matrix import needs_scripts, on_servers
from tests.support.others import held_by_other
from tests.support.ways import both_ways

if TYPE_CHECKING:
    from tests.support.backends import Place, ServerPlace
    from tests.support.ways import Way

pytestmark = needs_scripts


def test_what_is_no_name_is_refused_before_any_server_is_asked() -> None:
    for use in (distributed_lock, held.get):
        with pytest.raises(InvalidLockName, match="it is empty"):
            use("")


@both_ways
async def test_equal_looking_names_exclude_each_other(way: Way, place: Place) -> None:
    with held_by_other("caf\u00e9"):
        assert not await way.acquire(distributed_lock("cafe\u0301", wait=0))
        assert held.get("cafe\u0301") is not None


AWKWARD = [
    "{lottery}",
    "a}b{c",
    "{}",
    "*",
    "?",
    "[a-z]",
    "a\\*",
    "a:b:lock",
    "a|b|c",
    "100%",
    "%7B",
    " spaced ",
    '"quoted"',
    "🎲 lottery",
]


@pytest.mark.proves("R10")
@both_ways
async def test_braces_globs_and_the_like_are_harmless(way: Way, place: Place) -> None:
    for name in AWKWARD:
        async with way.entered(distributed_lock(name)) as lease:
            assert lease.name == name
            assert [one.name for one in held.list()] == [name]
            assert not await way.locked(distributed_lock("lottery"))
        assert held.list() == []


@on_servers
def test_awkward_names_are_different_locks(place: ServerPlace) -> None:
    locks = [distributed_lock(name, wait=0) for name in AWKWARD]
    assert all(lock.acquire() for lock in locks)
    assert sorted(one.name for one in held.list()) == sorted(AWKWARD)
    for lock in locks:
        lock.release()
