"""Claims about a lock that are claims about a permit too.

A test that is marked ``as_permit`` runs twice; with ``--permits`` every test runs as a permit. Then
each lock has two permits, and a bystander, whom nobody disturbs, has one of them. So one is left,
for which all must be as for a lock without a limit.

In ``contract`` and ``faults`` the second one is left, in child processes too. Tests look at it:
``lock_keys()`` has its keys, ``held`` finds it by the name of the lock, and ``held.list()`` leaves
out the bystander. Elsewhere the first one is left, which operators see under the name of the lock;
lists leave out the bystander. Child processes take the lock without a limit there, which is the
first permit, and list the bystander too.

A test that is marked ``no_permit`` is left out; its mark says why.
"""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import redis
from django.conf import settings

from django_redislock import LockUnavailable, held
from django_redislock.backends.base import Backend
from django_redislock.backends.registry import backends
from django_redislock.rules import scripts
from django_redislock.rules.forms import Attempt
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.steps import Call
from tests.support.processes import PERMIT_LEFT
from tests.support.proxy import Proxy
from tests.support.stored import NAME

FIRST, SECOND = 1, 2
BYSTANDER = "bystander".ljust(32, "0")
BYSTANDER_ID = "b" * 16
ARGS = BYSTANDER, BYSTANDER_ID, 600_000, "try", b"0", "", "-", b"{}", ""  # And no channel.


def pytest_addoption(parser):
    parser.addoption("--permits", action="store_true", help="every lock is one of two permits")


def pytest_generate_tests(metafunc):
    test = metafunc.definition
    if "permits" not in metafunc.fixturenames:
        return
    left = SECOND if test.path.parent.name in {"contract", "faults"} else FIRST
    if test.config.getoption("permits"):
        metafunc.parametrize("permits", [left], ids=["permit"], indirect=True)
    elif test.get_closest_marker("as_permit") and not test.config.getoption("quick"):
        metafunc.parametrize("permits", [None, left], ids=["lock", "permit"], indirect=True)


@pytest.fixture(autouse=True)
def permits(request, monkeypatch):
    """Have each lock of the test be a permit, if it is to be."""
    left = getattr(request, "param", None)
    if not left:
        yield
        return
    for mark in request.node.iter_markers("no_permit"):
        pytest.skip(f"not as a permit: {mark.args[0]}")
    seen = set()
    _have_permits(left, seen, partial(_stand_by, request, left), monkeypatch.setattr)
    rule = Proxy.rule_for_script
    sent = {scripts.ACQUIRE.sha: scripts.ACQUIRE_PERMIT.sha}
    monkeypatch.setattr(
        Proxy,
        "rule_for_script",
        lambda proxy, sha, action, **how: rule(proxy, sent.get(sha, sha), action, **how),
    )
    if left == SECOND:
        monkeypatch.setenv(PERMIT_LEFT, str(left))
        _stand_by_early(request, seen, monkeypatch)
    else:
        _leave_bystanders_out(seen, monkeypatch)
    yield


def _leave_bystanders_out(seen, monkeypatch):
    listed = Backend.held_permits

    def without_bystanders(backend, *args, **how):
        found = listed(backend, *args, **how)
        permits = [one for one in found.permits if one.number != 2 or one.name not in seen]
        return found._replace(permits=permits, total=max(found.total - len(seen), len(permits)))

    monkeypatch.setattr(Backend, "held_permits", without_bystanders)


def _stand_by_early(request, seen, monkeypatch):
    """Have the bystander come as soon as the server is known, and again if its data is lost."""
    from tests.conftest import Locks

    apply = Locks._apply

    def early(locks, default):  # A test may break the server next.
        apply(locks, default)
        seen.discard(NAME)
        if "BACKEND" not in default:  # Else it is there when a lock is asked for.
            with suppress(redis.RedisError):
                _stand_on(locks.redis, locks.prefix, NAME, SECOND)
                seen.add(NAME)

    monkeypatch.setattr(Locks, "_apply", early)
    place = request.getfixturevalue("place") if "place" in request.fixturenames else None
    if place is not None:
        lose = place.lose_data

        def lose_data():
            lose()
            _stand_by(request, SECOND, NAME)

        monkeypatch.setattr(place, "lose_data", lose_data)


def in_child():
    """In a child process of a test: have each lock be a permit, if those of the test are."""
    if left := int(os.environ.get(PERMIT_LEFT, "0")):
        # On one server the test has seen to it, for the name that most have.
        seen = set() if "BACKEND" in settings.REDISLOCK["default"] else {NAME}
        _have_permits(left, seen, partial(_stand_by_itself, left), setattr)


def _have_permits(left, seen, stand_by, patch):
    init = Attempt.__init__

    def of_permit(form, name, owner, terms, *more, **named):
        # The bystander is there before anybody asks. Without a lock, which a fork or the handler of
        # a signal could find taken: to ask twice does no harm.
        if name not in seen and terms.limit == 1:
            stand_by(name)
            seen.add(name)
        init(form, name, owner, replace(terms, limit=max(terms.limit, 2)), *more, **named)

    taken = Backend.is_taken

    def is_taken(backend, wanted):
        return taken(backend, [(name, max(limit or 1, 2)) for name, limit in wanted])

    patch(Attempt, "__init__", of_permit)
    patch(Backend, "is_taken", is_taken)
    if left == FIRST:
        return
    for module in [one for name, one in [*sys.modules.items()] if name.startswith("tests.")]:
        if module.__name__ != __name__ and getattr(module, "lock_keys", None) is lock_keys:
            patch(module, "lock_keys", _keys_of_the_second)
    every = held.list

    def of_tests(**how):
        found = every(**how)
        rows = [_without_number(one) for one in found if one.id != BYSTANDER_ID]
        found.total -= len(found) - len(rows)
        found[:] = rows
        return found

    look = held.get

    def get(name, **how):
        found = look(name, **{"permit": SECOND, **how})
        return found and _without_number(found)

    patch(held, "list", of_tests)
    patch(held, "get", get)
    for function in held.detail, held.force_release, held.why_not_released:
        patch(held, function.__name__, partial(function, permit=SECOND))


def _without_number(row):
    return replace(row, name=row.key.name)


def _keys_of_the_second(prefix, name, permit=SECOND):
    return lock_keys(prefix, name, permit)


def _stand_by(request, left, name):
    """Give the other permit to the bystander, past any proxy."""
    wanted = request.fixturenames
    locks = []
    if "place" in wanted:
        locks = getattr(request.getfixturevalue("place"), "locks", [])
    elif "locks" in wanted:
        locks = request.getfixturevalue("locks")
    for one in locks if isinstance(locks, list) else [locks]:
        with suppress(redis.RedisError):  # It may be broken, on purpose.
            _stand_on(one.redis, backends["default"].prefix, name, left)
    if not locks:
        _stand_by_itself(left, name)


def _stand_by_itself(left, name):
    call = Call(scripts.ACQUIRE, name, ARGS[:-1], 5.0, permit=SECOND + FIRST - left)
    with suppress(LockUnavailable):  # There may be no server at all, on purpose.
        backends["default"].call_many([call])


def _stand_on(server, prefix, name, left):
    keys = scripts.ACQUIRE.given(lock_keys(prefix, name, SECOND + FIRST - left))
    server.eval(scripts.ACQUIRE.source, len(keys), *keys, *ARGS)
