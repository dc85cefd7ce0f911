"""What the acquire by which the newest call wins answers; see test_lock_scripts.py."""

import pytest

from tests.support.keyspace import Keyspace


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
