"""Claims about a lock that are claims about a permit too.

A test that is marked ``as_permit`` runs twice; with ``--permits`` every test runs as a permit. Then
each lock of the test process has two permits, and a bystander, whom nobody disturbs, has the second
one; lists leave it out. So one is left, for which all must be as for a lock without a limit. Child
processes take the lock without a limit, which is the first permit, and list the bystander too. A
test that is marked ``no_permit`` is left out; its mark says why.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from django_redislock.backends.base import Backend
from django_redislock.backends.registry import backends
from django_redislock.rules import scripts
from django_redislock.rules.forms import FirstTry
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.steps import Call
from tests.support.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from django_redislock.backends.base import Indexed
    from django_redislock.rules.options import Terms
    from django_redislock.rules.stored import Owner

BYSTANDER = "bystander".ljust(32, "0")
ARGS = BYSTANDER, "b" * 16, 600_000, "try", b"0", "", "-", b"{}", ""  # And no channel.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--permits", action="store_true", help="every lock is one of two permits")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked twice."""
    test = metafunc.definition
    if "permits" not in metafunc.fixturenames:
        return
    if test.config.getoption("permits"):
        metafunc.parametrize("permits", [True], ids=["permit"], indirect=True)
    elif test.get_closest_marker("as_permit") and not test.config.getoption("quick"):
        metafunc.parametrize("permits", [False, True], ids=["lock", "permit"], indirect=True)


@pytest.fixture(autouse=True)
def permits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have each lock of the test be a permit, if it is to be."""
    if not getattr(request, "param", False):
        yield
        return
    for mark in request.node.iter_markers("no_permit"):
        pytest.skip(f"not as a permit: {mark.args[0]}")
    init, seen, one_at_a_time = FirstTry.__init__, set(), threading.Lock()

    def of_permit(form: FirstTry, name: str, owner: Owner, terms: Terms, *more: Any) -> None:
        with one_at_a_time:  # The bystander is there before anybody asks.
            if name not in seen and terms.limit == 1:
                stand_by(request, name)
                seen.add(name)
        init(form, name, owner, terms._replace(limit=max(terms.limit, 2)), *more)

    def without_bystanders(backend: Backend, *args: Any, **how: Any) -> Indexed:
        found = listed(backend, *args, **how)
        permits = [one for one in found.permits if one.number != 2 or one.name not in seen]
        return found._replace(permits=permits, total=max(found.total - len(seen), len(permits)))

    listed = Backend.held_permits
    monkeypatch.setattr(Backend, "held_permits", without_bystanders)
    monkeypatch.setattr(FirstTry, "__init__", of_permit)
    rule = Proxy.rule_for_script
    sent = {scripts.ACQUIRE.sha: scripts.ACQUIRE_PERMIT.sha}
    monkeypatch.setattr(
        Proxy,
        "rule_for_script",
        lambda proxy, sha, action, **how: rule(proxy, sent.get(sha, sha), action, **how),
    )
    yield


def stand_by(request: pytest.FixtureRequest, name: str) -> None:
    """Give the second permit to the bystander, past any proxy."""
    wanted = request.fixturenames
    locks: Any = []
    if "place" in wanted:
        locks = getattr(request.getfixturevalue("place"), "locks", [])
    elif "locks" in wanted:
        locks = request.getfixturevalue("locks")
    keys = scripts.ACQUIRE.given(lock_keys(backends["default"].prefix, name, 2))
    for one in locks if isinstance(locks, list) else [locks]:
        one.redis.eval(scripts.ACQUIRE.source, len(keys), *keys, *ARGS)
    if not locks:
        backends["default"].call_many([Call(scripts.ACQUIRE, name, ARGS[:-1], 5.0, permit=2)])
