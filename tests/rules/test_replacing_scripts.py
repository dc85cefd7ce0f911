"""What the acquire by which the newest call wins answers; see test_lock_scripts.py."""

import pytest

from django_redislock.rules import scripts
from tests.support.keyspace import Keyspace, lease_id, token


@pytest.fixture
def server():
    return Keyspace()


def test_a_waiter_that_did_not_hear_that_it_is_replaced_does_not_run_after_the_newer_call(server):
    first = server.replace("a", within=1000)
    assert server.replace("b", within=1000)[0] == "queued"
    server.advance(10)
    assert server.replace("c", within=1000)[0] == "queued"
    # It looks while the lock is held, then free with nobody in the queue, then held again.
    word, by_newer = server.replace("b", within=1000)
    assert (word, '"by":"c"' in by_newer) == ("replaced", True)
    server.release("a")
    assert server.replace("c", within=1000) > first
    server.release("c")
    assert not server.lock
    assert server.replace("b", within=1000) == ["replaced", by_newer]
    assert server.replace("d", within=1000) > first
    assert server.replace("b", within=1000) == ["replaced", by_newer]


def test_a_call_that_is_not_replaced_gets_a_free_lock(server):
    server.replace("a", within=1000)
    server.replace("b", within=1000)
    server.replace("c", within=1000)
    server.advance(1000)
    server.replace("c", within=1000)
    server.release("c")
    assert server.replace("d", within=1000) > "0"


def time_to_end(server, who):
    """What the holder is told, in ms."""
    word, left, _by = server.run(scripts.STAND_BY, token(who), lease_id(who), 20_000, "queue", "")
    assert word == "replaced"
    return left


def test_a_holder_keeps_the_time_that_it_was_told_and_the_newest_call_waits_for_so_long(server):
    server.replace("a", within=1000)
    *_, waits_for = server.replace("b", within=5000)
    assert (waits_for, time_to_end(server, "a")) == (5000, 5000)
    server.advance(10)
    *_, waits_for = server.replace("c", within=1000)
    assert (waits_for, time_to_end(server, "a")) == (4990, 4990)
    server.advance(2000)
    server.renew("a", 1)
    assert server.replace("c", within=1000)[0] == "queued"
    server.advance(2990)
    assert server.replace("c", within=1000) > "0"


def test_a_clock_that_is_set_back_does_not_leave_a_replaced_holder_more_than_it_was_told(server):
    server.replace("a", within=1000)
    server.replace("b", within=5000)
    server.set_back(3_600_000_000)
    server.replace("b", within=5000)
    assert time_to_end(server, "a") == 5000


def test_a_waiter_that_was_replaced_when_its_turn_had_come_replaces_nobody(server):
    server.replace("a", within=1000)
    server.listen("b", "c", "d")
    server.replace("b", within=1000)
    server.release("a")  # The lock is handed to b, which does not hear it.
    assert server.replace("c", within=1000)[0] == "queued"
    assert server.replace("d", within=1000)[0] == "queued"
    server.advance(1001)
    assert server.replace("d", within=1000) > "0"
    assert server.replace("e", within=1000)[0] == "queued"
    word, by_newer = server.replace("b", within=1000)  # Its first reply was lost.
    assert (word, '"by":"c"' in by_newer) == ("replaced", True)
    server.release("d")
    assert server.replace("e", within=1000) > "0"
