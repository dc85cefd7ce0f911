"""No name does harm, whatever it looks like."""

from enum import Enum, StrEnum
from uuid import uuid4

import pytest
from django.db import models
from django.utils.safestring import SafeString

from django_redislock import (
    InvalidLockName,
    Limit,
    LockTimeout,
    distributed_lock,
    held,
    leadership,
    single_instance,
)
from django_redislock.jobs import run_job
from tests.support.matrix import MEMORY, needs_scripts, on_servers, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.ways import both_ways

pytestmark = needs_scripts


def test_what_is_no_name_is_refused_before_any_server_is_asked():
    for use in (distributed_lock, held.get):
        with pytest.raises(InvalidLockName, match="it is empty"):
            use("")


@both_ways
async def test_equal_looking_names_exclude_each_other(way, place):
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


KINDS = {
    "(str, Enum)": lambda text: Enum("Name", {"ONE": text}, type=str)["ONE"],
    "StrEnum": lambda text: StrEnum("Name", {"ONE": text})["ONE"],
    "TextChoices": lambda text: models.TextChoices("Name", {"ONE": (text, "One")})["ONE"],
    "SafeString": SafeString,
    "str": str,
}


@places(KIND, MEMORY)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_name_of_any_class_of_strings_stands_for_its_text(place, kind):
    text = f"import-{uuid4().hex}"  # No cache knows it yet.
    name, template = kind(text), kind(f"{text}:{{source}}")

    def locked(source="a"):
        return sorted(one.name for one in held.list())

    with distributed_lock(name) as lease:
        assert locked() == [text]
        assert [type(lease.name), type(lease.template)] == [str, str]
    with distributed_lock("b", name) as lease:
        assert locked() == ["b", text]
        assert list(map(type, lease.names)) == [str, str]
    with distributed_lock(limits=[Limit(kind(f"limited-{text}"), 1)]):
        assert locked() == [f"limited-{text}"]
    with leadership(name):
        assert locked() == [text]
    with held_by_other(name), pytest.raises(LockTimeout) as refused:
        distributed_lock(name, wait=0).__enter__()
    assert type(refused.value.name) is str
    assert run_job("job", name, locked) == [text]
    assert distributed_lock(name)(locked)() == [text]
    assert distributed_lock(text)(locked)() == [text]
    assert distributed_lock(name, "b")(locked)() == ["b", text]
    assert single_instance(name)(locked)() == [text]
    for decorate in (distributed_lock(template), single_instance(template)):
        assert decorate(locked)() == [f"{text}:a"]
    limit = Limit(kind(f"limited-{text}:{{source}}"), 1)
    for decorate in (distributed_lock(limits=[limit]), single_instance(limits=[limit])):
        assert decorate(locked)() == [f"limited-{text}:a"]
    assert single_instance(template)(locked).lock_name() == f"{text}:a"


@pytest.mark.proves("R10")
@both_ways
async def test_braces_globs_and_the_like_are_harmless(way, place):
    for name in AWKWARD:
        async with way.entered(distributed_lock(name)) as lease:
            assert lease.name == name
            assert [one.name for one in held.list()] == [name]
            assert not await way.locked(distributed_lock("lottery"))
        assert held.list() == []


@on_servers
def test_awkward_names_are_different_locks(place):
    locks = [distributed_lock(name, wait=0) for name in AWKWARD]
    assert all(lock.acquire() for lock in locks)
    assert sorted(one.name for one in held.list()) == sorted(AWKWARD)
    for lock in locks:
        lock.release()
