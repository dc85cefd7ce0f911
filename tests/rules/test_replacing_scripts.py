"""What the acquire by which the newest call wins writes and answers; see test_lock_scripts.py."""

import pytest

from django_redislock.rules import scripts
from tests.support.keyspace import KEYS, TTL, Keyspace, bell, lease_id, token


@pytest.fixture
def server():
    return Keyspace()


def stand_by(server, who, mode="queue", lasts=20_000):
    """The run asks to be rung when a newer call replaces it, and is told if one has."""
    return server.run(scripts.STAND_BY, token(who), lease_id(who), lasts, mode, bell(who))


def time_to_end(server, who):
    """What the holder is told, in ms."""
    word, left, _by = stand_by(server, who)
    assert word == "replaced"
    return left


def is_replaced(answer, by):
    return answer[0] == "replaced" and f'"by":"{by}"' in answer[1]


# --- holders ---------------------------------------------------------------------------------


def test_a_holder_is_rung_and_has_its_time_to_end_before_its_lease_does(server):
    server.listen("a")
    first = server.replace("a")
    assert stand_by(server, "a") == ""
    held = server.lock
    word, _, left, _, newly, owner, waits_for = server.replace("b")
    assert (word, left, newly, waits_for) == ("queued", 1000, 1, 1000)
    assert '"by":"a"' in owner
    assert server.rung == [(bell("a"), f"replaced {lease_id('a')}")]
    assert is_replaced([*stand_by(server, "a")[::2]], "b")
    assert server.lock == held
    server.advance(999)
    assert server.replace("b")[0] == "queued"
    assert server.rung[1:] == []  # It is told once.
    server.advance(1)
    assert server.replace("b") > first
    assert server.queue == ""
    assert server.do("PTTL", KEYS.forced) == TTL - 1000 + 60_000
    assert server.renew("a", 1) == "replaced"
    assert '"by":"a"' in server.past[-1]
    assert "replaced" in server.past[-1]


def test_a_holder_that_ends_in_time_hands_over(server):
    server.listen("a", "b")
    server.replace("a")
    server.replace("b")
    server.advance(10)
    server.release("a")
    assert server.lock[:32] == token("b")
    assert server.replace("b") > "0"


def test_a_holder_keeps_the_time_that_it_was_told_and_the_newest_call_waits_for_so_long(server):
    server.replace("a")
    *_, waits_for = server.replace("b", within=5000)
    assert (waits_for, time_to_end(server, "a")) == (5000, 5000)
    server.advance(10)
    *_, waits_for = server.replace("c")
    assert (waits_for, time_to_end(server, "a")) == (4990, 4990)
    server.advance(2000)
    server.renew("a", 1)
    assert server.replace("c")[0] == "queued"
    server.advance(2990)
    assert server.replace("c") > "0"


def test_a_clock_that_is_set_back_does_not_leave_a_replaced_holder_more_than_it_was_told(server):
    server.replace("a")
    server.replace("b", within=5000)
    server.set_back(3_600_000_000)
    server.replace("b", within=5000)
    assert time_to_end(server, "a") == 5000


def test_a_holder_that_does_not_say_when_it_was_called_is_not_replaced(server):
    server.acquire("a")
    server.listen("a")
    word, _, left, *_, owner = server.replace("b")
    assert (word, left, owner) == ("queued", TTL, "by-a")
    assert server.rung == []
    server.advance(1001)
    assert server.replace("b")[0] == "queued"
    assert server.lock[:32] == token("a")


def test_the_key_of_a_stranger_is_left_alone(server):
    server.do("SET", KEYS.lock, 'theirs "called":"1"', "PX", 5000)
    word, _, left, *_ = server.replace("b")
    assert (word, left) == ("queued", 5000)


def test_a_lock_that_cools_down_is_waited_for(server):
    server.replace("a")
    server.do("SETRANGE", KEYS.lock, 32, "k")
    word, _, left, *_ = server.replace("b")
    assert (word, left) == ("queued", TTL)
    assert stand_by(server, "a") == ""


def test_only_a_call_that_waits_replaces(server):
    server.replace("a")
    assert server.replace("b", "try")[0] == "busy"
    assert server.replace("b", "last")[0] == "busy"
    assert stand_by(server, "a") == ""


def test_a_holder_that_cannot_be_rung_is_told_so_and_looks(server):
    server.replace("a")
    assert stand_by(server, "a", "try") == ["busy", 0, "", 0]
    server.replace("b")
    assert server.rung == []
    assert time_to_end(server, "a") == 1000
    assert stand_by(server, "z") == ""  # It has no lease: nothing is kept of it.
    assert list(server.fields(KEYS.replaced)) == [lease_id("a")]


# --- waiters -------------------------------------------------------------------------------------


def test_older_calls_that_wait_leave_the_queue_and_others_keep_their_place(server):
    server.listen("b", "c", "d")
    server.acquire("a")
    server.replace("b")
    server.acquire("c", "queue")
    server.replace("d")
    assert server.queue == "cd"
    assert server.rung == [(bell("b"), f"replaced {lease_id('b')}")]
    assert is_replaced(server.replace("b"), by="d")
    ticket = server.replace("d")[1]
    server.replace("d", ticket=ticket)  # A look replaces nobody, and least of all itself.
    assert server.queue == "cd"
    server.replace("e")
    assert server.queue == "ce"
    server.replace("d", ticket=ticket)
    assert server.queue == "ce"


def test_a_waiter_that_did_not_hear_that_it_is_replaced_does_not_run_after_the_newer_call(server):
    first = server.replace("a")
    assert server.replace("b")[0] == "queued"
    server.advance(10)
    assert server.replace("c")[0] == "queued"
    # It looks while the lock is held, then free with nobody in the queue, then held again.
    assert is_replaced(server.replace("b"), by="c")
    server.release("a")
    assert server.replace("c") > first
    server.release("c")
    assert not server.lock
    assert is_replaced(server.replace("b"), by="c")
    assert server.replace("d") > first
    assert is_replaced(server.replace("b"), by="c")


def test_a_waiter_that_was_replaced_when_its_turn_had_come_replaces_nobody(server):
    server.replace("a")
    server.listen("b", "c", "d")
    server.replace("b")
    server.release("a")  # The lock is handed to b, which does not hear it.
    assert server.replace("c")[0] == "queued"
    assert server.replace("d")[0] == "queued"
    server.advance(1001)
    assert server.replace("d") > "0"
    assert server.replace("e")[0] == "queued"
    assert is_replaced(server.replace("b"), by="c")  # Its first reply was lost.
    server.release("d")
    assert server.replace("e") > "0"


def test_a_call_that_is_not_replaced_gets_a_free_lock(server):
    server.replace("a")
    server.replace("b")
    server.replace("c")
    server.advance(1000)
    server.replace("c")
    server.release("c")
    assert server.replace("d") > "0"


def test_a_lock_whose_holder_has_died_goes_to_the_newest_call_and_not_to_an_older_one(server):
    server.acquire("a", ttl=1000)
    server.replace("b")
    server.advance(1001)
    assert server.replace("c") > "0"
    assert server.queue == ""
    assert is_replaced(server.replace("b"), by="c")


def test_a_waiter_that_stood_still_does_not_replace_what_was_granted_meanwhile(server):
    server.acquire("a")
    ticket = server.replace("b")[1]
    server.advance(TTL + 1)
    server.replace("c")
    assert is_replaced(server.replace("b", ticket=ticket), by="c")
    assert stand_by(server, "c") == ""
    assert server.replace("d")[0] == "queued"
    assert time_to_end(server, "c") == 1000


# --- calls that come back ------------------------------------------------------------------------


def test_a_call_that_comes_back_ends_if_the_holder_or_a_waiter_was_called_later(server):
    called = server.ms
    server.advance(5)
    server.replace("a")
    assert is_replaced(server.replace("b", called=called, at=called), by="a")
    assert stand_by(server, "a") == ""
    server.release("a")
    server.acquire("c")
    server.replace("d")
    assert is_replaced(server.replace("b", called=called, at=called), by="d")
    assert server.queue == "d"


def test_a_call_that_comes_back_replaces_what_was_called_before_or_with_it(server):
    called = server.ms
    server.replace("a")
    assert server.replace("b", called=called)[0] == "queued"
    assert time_to_end(server, "a") == 1000
    server.replace("c", called=called)
    assert server.queue == "c"


def test_it_finds_its_own_grant_though_another_was_called_later(server):
    called = server.ms
    fence = server.replace("a", called=called)
    server.advance(5)
    server.replace("b")
    assert server.replace("a", called=called, at=called) == fence
    assert time_to_end(server, "a") == 1000


def test_another_delivery_of_the_same_run_is_its_own_and_is_not_replaced(server):
    server.replace("a", run="id-1/:0.0")
    word, left, sight, _ = server.replace("b", run="id-1/:0.0")
    assert (word, left) == ("own", TTL)
    assert sight.startswith(token("a"))
    assert server.queue == ""
    assert stand_by(server, "a") == ""
    assert server.replace("c", run="id-12/:0.0")[0] == "queued"
    assert server.replace("d", run="id-12/:0.0")[0] == "queued"
    assert server.queue == "cd"


def test_what_is_replaced_counts_as_finished_and_its_start_is_forgotten(server):
    server.replace("a", run="id-1/:0.0")
    server.replace("b", run="id-2/:0.0")
    server.replace("c", run="id-3/:0.0")
    finished = server.scores(KEYS.finished)
    assert finished == {"id-1/": server.ms, "id-2/": server.ms}
    assert server.do("PTTL", KEYS.finished) == 86_400_000
    assert is_replaced(server.replace("b", run="id-2/:0.0"), by="c")
    server.advance(1000)
    assert "started" in server.fields(KEYS.runs)
    assert server.replace("c", run="id-3/:0.0") > "0"
    assert lease_id("c") in server.fields(KEYS.runs)["started"]
    assert "unended" not in server.fields(KEYS.runs)
    assert server.replace("d", run="id-1/:0.1") == ["finished", 1000]
    assert stand_by(server, "c") == ""  # What is done replaces nobody.


# --- what is kept of it --------------------------------------------------------------------------


def test_who_was_replaced_is_known_for_a_minute_longer_than_it_has_to_end(server):
    server.replace("a")
    server.replace("b", within=5000)
    (kept,) = server.fields(KEYS.replaced).values()
    assert kept.startswith(f"{server.ms + 65_000}|{server.ms + 5000}|5000|")
    assert server.do("PTTL", KEYS.replaced) == 65_000
    server.replace("c", within=200)
    assert server.do("PTTL", KEYS.replaced) == 65_000
    kept = server.fields(KEYS.replaced)[lease_id("b")]
    assert kept.startswith(f"{server.ms + 60_000}|0|0|")


def test_of_many_only_those_are_dropped_whose_time_is_over(server):
    for number in range(200):
        ends = server.ms + (1 if number % 2 else 90_000)
        server.do("HSET", KEYS.replaced, f"{number:016x}", f"{ends}|0|0|x")
    server.replace("a")
    server.replace("b")
    assert len(server.fields(KEYS.replaced)) == 201
    server.advance(2)
    server.replace("c")
    assert len(server.fields(KEYS.replaced)) == 102
