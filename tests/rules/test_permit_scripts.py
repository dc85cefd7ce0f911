"""What the scripts of a lock with a limit write, answer and ring; see test_lock_scripts.py.

Whoever has a permit or waits for one is named by a letter. `holders(3)` tells who has the permits
of three, from the first on.
"""

import json

import pytest

from django_redislock.rules import scripts
from tests.support.keyspace import KEYS, TTL, Keyspace, bell, lease_id

CONFIRM = 1000  # ms for which a hand-over waits for its confirmation.
SECOND = KEYS.of_permit(2)


@pytest.fixture
def server():
    return Keyspace()


@pytest.fixture
def full(server):
    """Both permits of two are taken, by "a" for a while and by "b" for half of it."""
    assert server.acquire("a", limit=2)[-2:] == " 1"
    assert server.acquire("b", limit=2, ttl=TTL // 2)[-2:] == " 2"
    server.listen("c", "d", "e")
    return server


def wait(server, waiters, limit=2):
    """Let them stand in the queue, each a moment after the other."""
    for who in waiters:
        assert server.acquire(who, "queue", limit=limit)[0] == "queued"
        server.advance(1)


def drop(server, *numbers):
    """Let these permits have ended without a word."""
    for number in numbers:
        server.do("DEL", KEYS.of_permit(number).lock)


def asks(server, who, mode="queue", limit=2, **more):
    """Which permit somebody is granted; if none is, how the server calls that."""
    answer = server.acquire(who, mode, limit=limit, **more)
    return answer.split()[1] if isinstance(answer, str) else answer[0]


def heard(server):
    """Who was rung, and the first word of what each heard."""
    return [f"{channel[5]} {words.split()[0]}" for channel, words in server.rung]


def run_of(task_id):
    """The acquire of a run of a task."""
    owner = json.dumps({"host": "web", "task_id": task_id}, separators=(",", ":"))
    return {"owner": owner, "markers": f"0600000/100|{task_id}:1.0"}


# --- a grant --------------------------------------------------------------------------------


def test_the_permits_are_given_out_from_the_first_on(server):
    fences = [server.acquire(who, limit=3).split() for who in "abc"]
    assert [permit for _, permit in fences] == ["1", "2", "3"]
    assert [int(fence) for fence, _ in fences] == [server.us, server.us + 1, server.us + 2]
    assert server.holders(3) == "abc"
    assert server.scores(KEYS.held).keys() == {KEYS.of_permit(n).lock for n in (1, 2, 3)}
    assert server.acquire("d", limit=3)[:2] == ["busy", TTL]
    assert server.holders(4) == "abc."
    assert server.release("b", 2) == "released"
    assert server.holders(3) == "a.c"
    assert server.acquire("d", limit=3).split()[1] == "2"


def test_a_resend_is_answered_with_the_permit_that_it_has(full):
    again = full.acquire("b", limit=2)
    assert again.split()[1] == "2"
    full.release("a")
    assert full.acquire("b", limit=2) == again
    assert full.holders(2) == ".b"


def test_the_way_of_one_permit_is_that_of_a_lock_without_a_limit(server):
    server.acquire("a")
    assert server.acquire("b", limit=2).split()[1] == "2"
    assert server.acquire("c")[0] == "busy"
    assert server.acquire("c", limit=2)[0] == "busy"


def test_a_key_of_another_type_takes_a_place_and_no_more(server):
    server.do("RPUSH", KEYS.lock, "x")
    assert server.acquire("a", limit=2).split()[1] == "2"


def test_of_permits_that_end_at_the_same_time_the_first_is_told(server):
    for who in "ab":
        server.acquire(who, limit=2)
    assert server.acquire("c", limit=2)[2] == server.lock


def test_each_permit_has_a_timeline_of_its_own(full):
    def past():
        lists = (full.do("LRANGE", KEYS.of_permit(number).past, 0, -1) for number in (1, 2))
        return [[entry.rpartition("|")[2] for entry in entries] for entries in lists]

    full.advance(1500)
    assert full.acquire("c", limit=2)[0] == "busy"  # It meets the one that ends first.
    assert past() == [[], ["by-b"]]
    full.release("b", 2)
    full.acquire("d", limit=2)
    assert full.acquire("c", limit=2)[0] == "busy"
    assert past() == [["by-a"], ["by-b"]]


def test_a_permit_that_never_ends_takes_a_place_and_no_more(full):
    full.do("SET", KEYS.lock, "x")
    full.do("DEL", KEYS.held)
    assert full.acquire("c", limit=2)[:2] == ["busy", TTL // 2]
    # Operators find it, though an acquire asks for the other one.
    assert full.do("ZRANGE", KEYS.held, 0, -1) == [KEYS.lock]
    full.release("b", 2)
    full.do("SET", SECOND.lock, "x")
    assert full.acquire("c", limit=2) == ["endless"]


# --- in turn --------------------------------------------------------------------------------


@pytest.mark.proves("P6", "R14")
def test_whichever_permit_is_released_goes_to_the_first_waiter(full):
    wait(full, "cd")
    full.release("b", 2)
    assert (full.holders(2), full.queue) == ("ac", "d")
    assert full.rung[-1][1].split()[-1] == "2"
    full.release("a")
    assert (full.holders(2), full.queue) == ("dc", "")
    assert len(full.rung[-1][1].split()) == 4  # Of the first permit, as of a lock without a limit.


def test_a_waiter_is_told_the_soonest_end(full):
    assert full.acquire("c", "queue", limit=2)[2] == TTL // 2


@pytest.mark.proves("P6")
def test_a_permit_that_has_ended_by_itself_goes_to_the_first_waiter(full):
    wait(full, "cd")
    full.advance(TTL // 2)
    assert asks(full, "e") == "queued"
    assert (full.holders(2), full.queue) == ("ac", "de")
    assert full.acquire("d", "queue", limit=2)[2] == CONFIRM  # "c" may not confirm.


@pytest.mark.proves("P6")
def test_a_look_hands_out_all_permits_that_are_free(full):
    wait(full, "cde")
    drop(full, 1, 2)
    assert asks(full, "e") == "queued"
    assert (full.holders(2), full.queue) == ("cd", "e")


@pytest.mark.proves("P6")
def test_whoever_takes_the_first_of_several_has_the_next_waiter_look(full):
    wait(full, "cd")
    drop(full, 1, 2)
    assert asks(full, "c") == "1"
    assert full.rung == [(bell("d"), f"look {lease_id('d')} 0")]
    assert asks(full, "d") == "2"
    assert full.queue == ""


@pytest.mark.parametrize("number", [1, 2])
def test_whoever_takes_the_only_one_that_is_free_wakes_nobody(full, number):
    wait(full, "cd")
    drop(full, number)
    assert asks(full, "c") == str(number)
    assert full.rung == []


@pytest.mark.proves("P6")
def test_the_dead_are_passed_over(full):
    wait(full, "fc")
    full.release("b", 2)
    assert (full.holders(2), full.queue) == ("ac", "")


@pytest.mark.proves("P6", "R4")
@pytest.mark.parametrize("free", ["1", "2", "12"])
def test_a_waiter_that_looks_behind_a_dead_one_has_one_permit(full, free):
    wait(full, "fcd")
    drop(full, *map(int, free))
    assert asks(full, "c") == free[0]
    assert full.holders(2) == {"1": "cb", "2": "ac", "12": "c."}[free]
    assert full.queue == "d"
    assert heard(full) == (["d look"] if len(free) > 1 else [])


def test_a_waiter_that_does_not_confirm_gives_its_permit_to_the_next(full):
    wait(full, "cd")
    full.release("b", 2)
    full.advance(CONFIRM)
    assert asks(full, "d") == "2"
    assert full.holders(2) == "ad"


@pytest.mark.proves("P6")
def test_nobody_passes_a_first_waiter_with_a_lower_limit(full):
    wait(full, "c", limit=1)
    wait(full, "d")
    full.release("b", 2)
    assert (full.holders(2), full.queue) == ("a.", "cd")
    assert full.acquire("e", limit=2)[0] == "busy"
    assert asks(full, "d") == "queued"
    full.release("a")
    assert full.holders(2) == "c."
    assert asks(full, "d") == "2"


def test_a_dead_first_waiter_with_a_lower_limit_keeps_nothing_from_others(full):
    wait(full, "c", limit=1)
    full.release("b", 2)
    full.advance(6000)
    assert full.acquire("d", limit=2).split()[1] == "2"
    assert full.queue == ""


@pytest.mark.parametrize("strange", ["x", "x" * 40])
def test_what_is_not_ours_in_the_queue_keeps_nothing_from_others(full, strange):
    wait(full, "c")
    full.do("ZADD", KEYS.queue, 1, strange)
    drop(full, 2)
    assert full.acquire("d", limit=2)[0] == "busy"
    assert (full.holders(2), full.queue) == ("ac", "")


# --- an end, an undo ------------------------------------------------------------------------


@pytest.mark.proves("R4")
@pytest.mark.parametrize("number", [1, 2])
def test_an_undo_finds_the_permit_that_it_does_not_know(server, number):
    for who in "ab"[:number]:
        server.acquire(who, limit=2)
    who = "ab"[number - 1]
    assert server.leave(who, 2) == 1
    assert server.holders(2) == {1: "..", 2: "a."}[number]
    assert server.leave(who, 2) == 0


@pytest.mark.proves("R4")
def test_an_undo_hands_its_permit_to_the_first_waiter(full):
    wait(full, "cd")
    assert full.leave("b", 2) == 1
    assert (full.holders(2), full.queue) == ("ac", "d")
    assert full.leave("d", 2) == 0
    assert full.queue == ""


def test_a_permit_that_cools_down_is_no_other_delivery_and_no_resend(full):
    full.do("SETRANGE", SECOND.lock, 32, "k")
    assert full.acquire("b", limit=2)[0] == "busy"
    full.release("a")
    assert full.acquire("b", limit=2).split()[1] == "1"


@pytest.mark.proves("P9")
def test_each_permit_is_taken_by_force_alone(full):
    wait(full, "c")
    answer = full.run(scripts.FORCE_RELEASE, lease_id("b"), "r" * 16, permit=2)
    assert answer[0] == "released"
    assert full.holders(2) == "ac"
    assert full.run(scripts.RENEW, "b" * 32, TTL, "r00001", permit=2) == "forced"
    assert full.run(scripts.RENEW, "a" * 32, TTL, "r00001") == "renewed"


# --- a pause ---------------------------------------------------------------------------------


def test_a_hold_keeps_all_permits_from_everybody(server):
    server.pause("f")
    assert server.acquire("a", limit=2)[:2] == ["busy", TTL]
    server.listen("a", "b")
    wait(server, "ab")
    assert server.holders(2) == "f."
    server.run(scripts.RESUME)
    assert (server.holders(2), heard(server)) == ("a.", ["a granted", "b look"])
    assert asks(server, "b") == "2"


def test_a_permit_that_is_released_during_a_hold_goes_to_nobody(full):
    full.pause("f")
    full.release("a")
    wait(full, "c")
    full.release("b", 2)
    assert (full.holders(2), full.queue, full.rung) == ("f.", "c", [])


def test_before_a_hold_that_waits_nobody_is_granted_a_permit(full):
    wait(full, "c")
    assert full.pause("f")[0] == "queued"
    full.release("b", 2)
    assert asks(full, "c") == "queued"
    assert full.holders(2) == "a."
    full.release("a")
    assert full.holders(2) == "f."


def test_a_hold_that_is_taken_back_while_it_waits_lets_the_first_waiter_look(full):
    wait(full, "cd")
    full.pause("f")
    full.release("b", 2)
    del full.rung[:]
    assert full.run(scripts.RESUME) == "by-f"
    assert full.rung == [(bell("c"), f"look {lease_id('c')} 0")]
    assert asks(full, "c") == "2"


def test_a_waiter_is_told_when_a_hold_that_waits_ends_by_itself(full):
    full.pause("f", lasts=1000)
    assert full.acquire("c", "queue", limit=2)[2] == 1000
    full.release("b", 2)
    full.advance(999)
    assert full.acquire("c", "queue", limit=2)[2] == 1
    full.advance(1)
    assert asks(full, "c") == "2"


@pytest.mark.parametrize("limit", [1, 2])
def test_a_waiter_that_sleeps_is_told_of_a_hold_before_it_unless_it_wants_the_only_permit(
    full, limit
):
    wait(full, "c", limit=limit)
    full.pause("f", lasts=1000)
    assert full.rung == ([(bell("c"), f"look {lease_id('c')} 1000")] if limit == 2 else [])


def test_a_hold_that_outlasts_the_lease_before_it_is_not_what_a_waiter_is_told(full):
    full.pause("f", lasts=2 * TTL)
    assert full.acquire("c", "queue", limit=2)[2] == TTL  # It is on permit 1 that the pause waits.


# --- runs of tasks --------------------------------------------------------------------------


@pytest.mark.proves("P8")
@pytest.mark.parametrize("mode", ["try", "queue", "last"])
def test_another_delivery_of_a_run_that_has_a_permit_is_told_at_once(server, mode):
    server.acquire("a", limit=3, **run_of("id-1"))
    assert server.acquire("b", mode, limit=3, **run_of("id-1"))[:2] == ["own", TTL]
    assert (server.holders(3), server.queue) == ("a..", "")
    assert server.acquire("c", limit=3, **run_of("id-2")).split()[1] == "2"
    assert server.acquire("a", limit=3, **run_of("id-1")).split()[1] == "1"  # A resend.


def test_the_run_of_each_permit_is_noted_under_the_name(server):
    for who in "ab":
        server.acquire(who, limit=2, **run_of(f"id-{who}"))
    assert {"started", "started#2"} == server.fields(KEYS.runs).keys()
    assert server.scores(KEYS.ran).keys() == {KEYS.lock}
    ending = "b" * 32, lease_id("b"), 0, 0, "by-b", "done", "id-b:1.0", 60_000, "600000/100"
    assert server.run(scripts.CONCLUDE, *ending, permit=2) == "released"
    assert {"started", "success"} == server.fields(KEYS.runs).keys()
    assert server.acquire("c", limit=2, **run_of("id-b")) == ["finished", 0]
    assert server.leave("a", 2) == 1
    assert {"success"} == server.fields(KEYS.runs).keys()


def test_the_bell_of_a_permit_tells_which_one_it_is(full):
    wait(full, "c")
    full.release("b", 2)
    fence = full.do("GET", SECOND.lock).split("|")[1]
    assert full.rung == [(bell("c"), f"granted {lease_id('c')} {fence} {full.us} 2")]
