"""Where only RESP2 is spoken, a connection that is rung can do nothing else.

The contract suite runs there too, see tests/support/backends.py.
"""

import re

import pytest

from django_redislock import LockUnavailable, distributed_lock, doctor
from django_redislock.backends.redis.shared_bell import SharedBell
from django_redislock.rules import scripts
from tests.conftest import Locks
from tests.support.faults import runs
from tests.support.matrix import RESP2
from tests.support.others import against_rival, rival
from tests.support.stored import NAME, is_left_clean
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking

OLD = {"protocol": 2}


@pytest.fixture
def bare(settings, shared_reached, key_prefix):
    """A server that knows no HELLO; nothing says yet that RESP2 is to be spoken."""
    locks = Locks(settings, shared_reached(RESP2), key_prefix)
    yield locks
    assert is_left_clean(locks)
    locks.redis.close()


@pytest.mark.parametrize(
    "answer", ["", b"*2\r\n+proto\r\n:2\r\n", b"$-1\r\n", b":1\r\n", b"+OK\r\n"]
)
def test_a_server_or_proxy_that_speaks_no_resp3_is_refused_with_the_option_that_helps(
    answer, caller, bare, make_proxy, server
):
    if answer:  # A proxy answers HELLO in a way of its own.
        proxy = make_proxy(server)
        proxy.rewrite("HELLO", lambda reply: answer)
        bare.configure(LOCATION=proxy.url)
    says = r"OPTIONS\['protocol'\] to 2"
    with pytest.raises(LockUnavailable, match=rf"not speak RESP3.*{says}"):
        caller.acquire(distributed_lock(NAME))
    failures = [one for one in doctor.examine("default") if one.level == "fail"]
    assert len(failures) == 1
    assert re.search(says, failures[0].says)
    bare.configure(OPTIONS=OLD)
    with caller.block(distributed_lock(NAME)) as lease:
        assert lease.held
    assert [one for one in doctor.examine("default") if one.level == "fail"] == []


def test_the_protocol_may_stand_in_the_url(caller, bare):
    bare.configure(LOCATION=f"{bare.server.url}?protocol=2")
    with caller.block(distributed_lock(NAME)) as lease:
        assert lease.held


@pytest.fixture
def proxied(locks, proxy, settings, monkeypatch):
    """The default alias speaks RESP2 through the proxy, the rival RESP3 straight to the server."""
    # A bell that nobody rings is tested, and given up if the server stands still.
    monkeypatch.setattr(SharedBell, "CHECK_EVERY", 10.0)
    locks.on(proxy, TTL=30, WAIT=HUNG, UNAVAILABLE_AFTER=HUNG)
    with against_rival(locks, settings):
        settings.REDISLOCK["default"]["OPTIONS"] = OLD
        yield proxy


def test_to_take_a_free_lock_opens_no_connection_to_be_rung_on(caller, proxied):
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    caller.release(lock)
    assert proxied.commands("SUBSCRIBE") == []
    assert len({command.link for command in proxied.commands("EVALSHA")}) == 1


def test_all_who_wait_are_rung_on_one_connection_that_does_nothing_else(
    caller, locks, proxied, if_rung
):
    mine = [distributed_lock(NAME) for _ in range(3)]
    with rival(ttl=60):
        waiters = [caller.begin_waiting(lock, locks) for lock in mine]
    for lock, waiter in zip(mine, waiters, strict=True):
        assert waiter.result(if_rung)
        caller.release(lock)
    (rung,) = {command.link for command in proxied.commands("SUBSCRIBE")}
    others = [one.name for one in proxied.log if one.link == rung and one.name != "SUBSCRIBE"]
    assert others == ["HELLO"]


def test_who_waits_keeps_its_place_when_that_connection_is_killed(caller, locks, proxied):
    first, second = distributed_lock(NAME), rival(wait=HUNG)
    with rival(ttl=60):
        front = caller.begin_waiting(first, locks)
        behind = Blocking().begin_waiting(second, locks)
        looks = len(runs(proxied, scripts.ACQUIRE))
        locks.redis.client_kill_filter(_type="pubsub")
        wait_until(lambda: len(runs(proxied, scripts.ACQUIRE)) > looks)
    assert front.result(HUNG)
    assert not behind.done()
    caller.release(first)
    assert behind.result(HUNG)
    second.release()


def test_that_it_is_half_open_is_noticed(caller, locks, proxied, monkeypatch):
    monkeypatch.setattr(SharedBell, "CHECK_EVERY", 1.0)
    with rival(ttl=60):
        waiter = caller.begin_waiting(distributed_lock(NAME, ttl=3), locks)
        proxied.rule("SUBSCRIBE", "hang_before")  # By which it is tested.
        wait_until(lambda: len(proxied.commands("SUBSCRIBE")) > 2)
        asked = proxied.commands("SUBSCRIBE")[2].time
        wait_until(lambda: runs(proxied, scripts.ACQUIRE)[-1].time > asked)
    assert waiter.result(HUNG)
