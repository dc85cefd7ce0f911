"""What each script of a lock writes, answers and rings, in lua/, at a time that stands still."""

import json

import pytest

from django_redislock.backends.memory.interpreter import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.stored import FORCED_VALUE_AT
from tests.support.keyspace import KEYS, TTL, Keyspace, bell, lease_id, token, value

CONFIRM = 1000  # ms for which a hand-over waits for its confirmation.
QUIET = 6000  # ms after which a waiter that has not looked is gone.
EXACT = 2**53
REQUEST = "r" * 16
RUN = "09000/10|task:1.0"  # Markers: records are kept so long, and this run asks.


@pytest.fixture
def server():
    return Keyspace()


@pytest.fixture
def wanted(server):
    """A lock that "a" has, and "b" waits for."""
    server.listen("b", "c", "d")
    server.acquire("a")
    server.acquire("b", "queue")
    return server


def granted(who, fence, us):
    """The ring that tells somebody of a hand-over."""
    return bell(who), f"granted {lease_id(who)} {fence} {us}"


def has(server, who, state="c"):
    """Whether somebody has the lock: it was handed over, unless another state is named."""
    return server.lock.startswith(token(who) + state)


def conclude(server, who="a", *, min_hold=0, once=0, ended="", run="", known_for=0, timeline=40):
    named = token(who), lease_id(who)
    ends = min_hold, once, f"by-{who}", ended, run, known_for, f"9000/10/{timeline}"
    return server.run(scripts.CONCLUDE, *named, *ends)


def force(server, id, *kept):  # noqa: A002
    """Release the lease of that id by force."""
    return server.run(scripts.FORCE_RELEASE, id, REQUEST, *kept)


# --- a grant --------------------------------------------------------------------------------


def test_a_free_lock_is_granted_with_the_clock_as_its_fence(server):
    assert server.acquire("a") == str(server.us)
    assert server.lock == value("a", fence=server.us, since=server.ms)
    assert server.left == TTL
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + TTL}
    assert server.scores(KEYS.fence) == {"last": server.us}
    assert (server.past, server.queue, server.rung) == ([], "", [])


@pytest.mark.proves("R9")
@pytest.mark.parametrize("ahead", [0, 5])
def test_a_fence_grows_although_the_clock_was_set_back(server, ahead):
    mark = server.us + ahead
    server.do("ZADD", KEYS.fence, mark, "last")
    assert server.acquire("a") == str(mark + 1)
    assert server.scores(KEYS.fence) == {"last": mark + 1}


def test_a_mark_that_no_longer_counts_exactly_is_no_fence(server):
    server.do("ZADD", KEYS.fence, EXACT - 1, "last")
    assert server.acquire("a") == str(EXACT)
    server.release("a")
    assert server.acquire("b") == str(server.us)


def test_a_clock_is_written_with_all_its_digits(server):
    server.us = 1_000_000_000
    assert server.acquire("a") == "1000000000"


def test_one_grant_in_ten_drops_what_has_expired_a_minute_ago_from_the_index(server):
    server.do("ZADD", KEYS.held, server.ms - 60_000, "old", server.ms - 59_999, "young")
    server.acquire("a")
    assert {"old", "young"} < server.scores(KEYS.held).keys()
    server.release("a")
    server.set_back(1)
    server.acquire("a")
    assert server.scores(KEYS.held).keys() == {"young", KEYS.lock}


def test_a_lock_that_somebody_has_is_busy_and_stays_as_it_is(server):
    server.acquire("a")
    before, listed = server.lock, server.scores(KEYS.held)
    server.advance(100)
    assert server.acquire("b") == ["busy", TTL - 100, before, server.ms]
    assert (server.lock, server.left, server.queue) == (before, TTL - 100, "")
    assert server.scores(KEYS.held) == listed


def test_of_what_is_not_ours_no_more_is_answered_than_may_be_seen(server):
    server.do("SET", KEYS.lock, "x" * 9000, "PX", 500)
    assert server.acquire("b") == ["busy", 500, "x" * 8192, server.ms]
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + 500}


@pytest.mark.parametrize("key", ["of another type", "without an end"])
def test_what_never_ends_is_told_and_listed(server, key):
    if key == "without an end":
        server.do("SET", KEYS.lock, "x")
        assert server.acquire("b") == ["endless"]
    else:
        server.do("RPUSH", KEYS.lock, "x")
        with pytest.raises(ReplyError, match="WRONGTYPE"):
            server.acquire("a")
    assert server.scores(KEYS.held) == {KEYS.lock: float("inf")}


@pytest.mark.proves("R1")
@pytest.mark.parametrize(("again", "left"), [(TTL, TTL), (2 * TTL, 2 * TTL), (100, TTL - 50)])
def test_r1_a_resend_is_granted_the_same_and_makes_nothing_shorter(server, again, left):
    fence = server.acquire("a")
    server.advance(50)
    before = server.lock
    assert server.acquire("a", ttl=again) == fence
    assert (server.lock, server.left) == (before, left)
    assert server.scores(KEYS.held) == {KEYS.lock: max(server.ms + again, server.ms - 50 + TTL)}


# --- the queue ------------------------------------------------------------------------------


def test_a_waiter_is_queued_once_and_keeps_its_ticket(server):
    server.acquire("a")
    ticket = str(server.us)
    assert server.acquire("b", "queue", ttl=500) == ["queued", ticket, TTL, ticket, 1, "by-a"]
    record = f"{token('b')}|{server.ms + QUIET}|{bell('b')}|500|r|{lease_id('b')}|by-b"
    assert server.scores(KEYS.queue) == {token("b"): server.us, record: server.us}
    assert server.do("PTTL", KEYS.queue) == QUIET
    server.advance(10)
    assert server.acquire("b", "queue") == ["queued", ticket, TTL - 10, str(server.us), 0, "by-a"]
    assert server.do("ZCARD", KEYS.queue) == 2
    assert server.do("PTTL", KEYS.queue) == QUIET


@pytest.mark.parametrize("behind", [0, 7])
def test_who_comes_later_waits_longer_although_the_clock_was_set_back(wanted, behind):
    last = wanted.us
    wanted.set_back(behind)
    assert wanted.acquire("c", "queue")[1] == str(last + 1)
    assert wanted.queue == "bc"


def test_a_waiter_goes_back_to_the_place_that_it_had(wanted):
    assert wanted.acquire("c", "queue", ticket=wanted.us - 3)[1] == str(wanted.us - 3)
    assert wanted.queue == "cb"


def test_a_try_leaves_the_queue_alone_and_a_last_look_leaves_it(wanted):
    wanted.acquire("c", "queue")
    assert wanted.acquire("b")[0] == "busy"
    assert wanted.queue == "bc"
    assert wanted.acquire("b", "last")[0] == "busy"
    assert wanted.queue == "c"


@pytest.mark.proves("R14")
@pytest.mark.parametrize("ttl", [TTL, 300])
def test_r14_a_release_hands_the_lock_to_the_first_waiter_and_rings_it(server, ttl):
    server.listen("b", "c")
    first = int(server.acquire("a"))
    server.acquire("b", "queue", ttl=ttl)
    server.acquire("c", "queue")
    assert server.release("a") == "released"
    confirm_by = server.ms + min(CONFIRM, ttl)
    handed = {"fence": first + 1, "since": server.ms, "ttl": ttl, "channel": bell("b")}
    assert server.lock == value("b", "cr00000", confirm_by=confirm_by, **handed)
    assert server.left == ttl + CONFIRM
    assert server.rung == [granted("b", first + 1, server.us)]
    assert server.queue == "c"
    assert server.scores(KEYS.fence) == {"last": first + 1}
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + ttl + CONFIRM}


@pytest.mark.proves("R9")
@pytest.mark.parametrize("ahead", [0, 100])
def test_a_fence_grows_at_a_hand_over_although_the_mark_was_lost(server, ahead):
    server.listen("b")
    if ahead:
        server.do("ZADD", KEYS.fence, server.us + ahead, "last")
    fence = int(server.acquire("a"))
    server.acquire("b", "queue")
    server.do("DEL", KEYS.fence)
    server.release("a")
    assert server.lock.split("|")[1] == str(fence + 1)


def test_a_lock_that_nobody_waits_for_is_gone_after_its_release(server):
    server.acquire("a")
    assert server.release("a") == "released"
    assert (server.lock, server.scores(KEYS.held), server.rung) == ("", {}, [])
    assert server.release("a") == "gone"
    server.acquire("b")
    assert server.release("a") == "taken"


def test_who_cannot_be_rung_is_passed_over(server):
    server.listen("c")
    server.acquire("a")
    server.acquire("b", "queue")
    server.acquire("c", "queue")
    server.release("a")
    assert has(server, "c")
    assert [channel for channel, _ in server.rung] == [bell("c")]
    server.release("c")
    assert (server.lock, server.scores(KEYS.held), server.queue) == ("", {}, "")


@pytest.mark.parametrize(("after", "who"), [(QUIET - 1, "b"), (QUIET, "c")])
def test_a_waiter_that_has_not_looked_for_six_seconds_is_passed_over(wanted, after, who):
    wanted.advance(after)
    wanted.acquire("c", "queue")
    assert wanted.look()[2] == (2 if who == "b" else 1)
    wanted.release("a")
    assert has(wanted, who)


def test_on_a_cluster_a_waiter_is_rung_in_the_slot_of_its_lock(server):
    server.listen("{7}")
    server.acquire("a")
    server.acquire("b", "queue", process="{7}")
    server.release("a")
    assert [channel for channel, _ in server.rung] == [bell("{7}")]


def test_a_hand_over_is_confirmed_by_asking_again_with_the_whole_ttl(wanted):
    wanted.release("a")
    wanted.advance(CONFIRM - 1)
    assert wanted.acquire("b", "queue") == wanted.lock.split("|")[1]
    assert has(wanted, "b", "h")
    assert wanted.left == TTL
    assert wanted.scores(KEYS.held) == {KEYS.lock: wanted.ms + TTL + 1}  # As before.


@pytest.fixture
def unconfirmed(wanted):
    """The lock was handed over to b; c and f, of the same process, and d still wait."""
    for who, process in {"c": "b", "d": "", "f": "b"}.items():
        wanted.acquire(who, "queue", process=process)
    wanted.release("a")
    return wanted


def test_until_a_hand_over_lapses_the_others_wait_for_that(unconfirmed):
    server = unconfirmed
    server.advance(CONFIRM - 1)
    assert server.acquire("d", "queue")[2] == 1
    assert server.acquire("e")[:2] == ["busy", TTL + CONFIRM - 999 - CONFIRM]
    assert server.look()[1] == TTL + CONFIRM - 999 - CONFIRM
    assert server.past == []
    server.advance(1)
    assert server.look()[:2] == ["", -2]
    server.advance(server.left)
    assert server.look()[:2] == ["", -2]


def test_a_lease_that_is_handed_over_is_busy_for_a_ms_at_least(server):
    server.listen("b")
    server.acquire("a")
    server.acquire("b", "queue", ttl=300)
    server.release("a")
    server.advance(299)
    assert (server.acquire("e")[1], server.look()[1]) == (1, 1)


def test_a_process_that_lets_a_hand_over_lapse_is_passed_over_with_all_its_waiters(unconfirmed):
    server = unconfirmed
    fence = int(server.lock.split("|")[1])
    server.advance(CONFIRM)
    # To e, which comes last, d is the next: of c nothing is left.
    assert server.acquire("e", "queue")[2] == CONFIRM
    assert (server.queue, has(server, "d")) == ("e", True)
    assert server.rung[-1] == granted("d", max(fence + 1, server.us), server.us)
    (noted,) = server.past
    assert noted.startswith(lease_id("b"))
    assert noted.endswith("|||by-b")


def test_a_process_that_asks_itself_keeps_its_waiters(unconfirmed):
    unconfirmed.advance(CONFIRM)
    assert int(unconfirmed.acquire("c", "queue", process="b")) == unconfirmed.us
    assert unconfirmed.queue == "df"


def test_who_is_first_and_asks_has_the_lock_without_being_rung(wanted):
    wanted.acquire("c", "queue")
    wanted.do("DEL", KEYS.lock)
    assert wanted.acquire("b", "queue") == str(wanted.us + 1)
    assert (has(wanted, "b", "h"), wanted.queue, wanted.rung) == (True, "c", [])
    assert wanted.scores(KEYS.fence) == {"last": wanted.us + 1}


def test_a_newcomer_does_not_barge_in(wanted):
    wanted.do("DEL", KEYS.lock)
    assert wanted.acquire("c", "queue")[:3] == ["queued", str(wanted.us), CONFIRM]
    assert has(wanted, "b")


def test_a_try_that_hands_the_lock_on_tells_of_its_lease(server):
    server.listen("b")
    server.acquire("a")
    server.acquire("b", "queue", ttl=300)
    server.do("DEL", KEYS.lock)
    assert server.acquire("c") == ["busy", 300, server.lock, server.ms]


# --- leave ----------------------------------------------------------------------------------


def test_who_leaves_forgets_its_place_or_hands_on_what_it_was_granted(wanted):
    wanted.acquire("c", "queue")
    assert (wanted.leave("c"), wanted.queue) == (0, "b")
    assert (wanted.leave("a"), has(wanted, "b")) == (1, True)
    assert (wanted.leave("b"), wanted.lock) == (1, "")
    assert wanted.leave("b") == 0


def test_who_leaves_one_grant_keeps_the_next_one_to_the_same_token(server):
    first = server.acquire("a")
    assert server.leave("a", fence=first) == 1
    server.advance(1)
    second = server.acquire("a")
    assert (server.leave("a", fence=first), has(server, "a", "h")) == (0, True)
    assert (server.leave("a", fence=second), server.lock) == (1, "")


def test_who_leaves_does_not_end_its_cooling(server):
    server.acquire("a")
    conclude(server, min_hold=500)
    assert (server.leave("a"), server.left) == (0, 500)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_run_that_has_never_begun_is_forgotten(server, renewed):
    server.acquire("a", markers="09000/10|run")
    if renewed:
        server.renew("a", "r00001")
    assert server.leave("a") == 1
    assert ("started" in server.fields(KEYS.runs)) is renewed


# --- renew ----------------------------------------------------------------------------------


def test_a_renewal_restarts_the_ttl_and_is_counted(server):
    server.acquire("a")
    before = server.lock
    server.advance(4000)
    assert server.renew("a", "-00003") == "renewed"
    assert server.lock == before.replace("hr00000", "h-00003")
    assert server.left == TTL
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + TTL}
    assert server.past == []


def test_a_renewal_by_a_shorter_ttl_shortens_the_lease_unless_a_later_one_has_overtaken_it(server):
    server.acquire("a", ttl=300)
    for count, ttl, left, noted in [
        ("r00002", 500, 500, "hr00002"),
        ("r00001", 400, 500, "hr00002"),
        ("r00002", 400, 500, "hr00002"),
        ("r00001", 700, 700, "hr00002"),
    ]:
        server.renew("a", count, ttl)
        assert (server.left, server.lock[32:39]) == (left, noted)
        assert server.scores(KEYS.held) == {KEYS.lock: server.ms + left}
    server.renew("a", "r00003", 300)
    assert (server.left, server.lock[32:39]) == (300, "hr00003")


@pytest.mark.parametrize(("ttl", "noted"), [(TTL - 1, TTL), (TTL, TTL), (123_456, 123_456)])
def test_a_lease_that_is_made_longer_says_so(server, ttl, noted):
    fence = int(server.acquire("a"))
    server.renew("a", "r00002", ttl)
    assert server.lock == value("a", "hr00002", fence=fence, since=server.ms, ttl=noted)


def test_the_first_renewal_notes_the_lease_for_the_timeline_once(server):
    entry = f"{lease_id('a')}|{server.acquire('a')}|{server.ms}|||by-a"
    server.advance(10)
    for _ in range(2):
        server.renew("a", "r00001")
        assert server.past == [entry]
    assert server.do("PTTL", KEYS.past) == 2 * 86_400_000


def test_a_confirmation_is_no_renewal(wanted):
    wanted.release("a")
    index = wanted.scores(KEYS.held)
    wanted.advance(10)
    assert wanted.renew("b", "r00000") == "renewed"
    assert (wanted.lock[32:39], wanted.left) == ("hr00000", TTL)
    assert (wanted.scores(KEYS.held), wanted.past) == (index, [])


def test_why_a_lease_cannot_be_renewed_is_said(server):
    assert server.renew("a", "r00001") == "gone"
    server.acquire("b")
    assert server.renew("a", "r00001") == "taken"
    assert force(server, lease_id("b"))[0] == "released"
    assert server.renew("b", "r00001") == "forced"
    assert server.renew("a", "r00001") == "gone"


# --- conclude -------------------------------------------------------------------------------


def test_a_lock_cools_until_min_hold_after_its_grant_and_the_first_waiter_is_told(wanted):
    wanted.advance(100)
    assert conclude(wanted, min_hold=500) == "released"
    assert (wanted.lock[32], wanted.left) == ("k", 400)
    assert wanted.scores(KEYS.held) == {KEYS.lock: wanted.ms + 400}
    assert wanted.rung == [(bell("b"), f"look {lease_id('b')} 400")]
    assert conclude(wanted, min_hold=500) == wanted.release("a") == "released"
    assert wanted.renew("a", "r00001") == "gone"
    assert (wanted.lock[32], wanted.left, len(wanted.rung)) == ("k", 400, 1)
    assert wanted.acquire("a")[:2] == ["busy", 400]


def test_a_lock_cools_no_longer_than_min_hold_although_the_clock_was_set_back(server):
    server.acquire("a")
    server.set_back(300_000)
    conclude(server, min_hold=500)
    assert server.left == 500


def test_a_lock_cools_for_a_last_ms_and_then_goes_to_the_next_waiter(wanted):
    wanted.advance(499)
    conclude(wanted, min_hold=500)
    assert (wanted.lock[32:33], wanted.left) == ("k", 1)
    wanted.advance(2)
    wanted.leave("b")
    wanted.acquire("a")
    wanted.acquire("b", "queue")
    wanted.advance(500)
    assert conclude(wanted, min_hold=500) == "released"
    assert has(wanted, "b")


def test_a_once_says_when_it_was_done_and_by_whom(server):
    server.acquire("a")
    assert conclude(server, once=700) == "released"
    assert server.do("GET", KEYS.done) == f"{server.ms}|by-a"
    assert server.do("PTTL", KEYS.done) == 700
    assert server.past == []


def test_a_resend_is_released_if_the_timeline_has_the_end_of_the_lease(server):
    server.acquire("a")
    assert conclude(server, ended="done") == "released"
    assert server.past[0].split("|")[3:] == [str(server.ms), "done", "by-a"]
    assert conclude(server, ended="done") == "released"
    assert conclude(server, ended="failed") == conclude(server) == "gone"
    assert conclude(server, "b", ended="done") == "gone"


@pytest.mark.parametrize(("ended", "what"), [("done", "success"), ("failed", "failure")])
def test_a_run_ends_with_its_lease(server, ended, what):
    server.acquire("a", markers=RUN)
    server.advance(250)
    conclude(server, ended=ended, run="task:1.0", known_for=800)
    assert server.fields(KEYS.runs) == {what: f"{server.ms}|250||by-a"}
    assert server.scores(KEYS.finished) == ({"task": server.ms} if ended == "done" else {})


@pytest.mark.parametrize("nameless", [{"known_for": 800}, {"run": "task"}])
def test_a_run_without_an_id_or_a_time_is_not_recognised(server, nameless):
    server.acquire("a")
    conclude(server, ended="done", **nameless)
    assert server.scores(KEYS.finished) == {}


# --- done markers ---------------------------------------------------------------------------


def test_what_was_done_is_not_wanted_again(server):
    server.acquire("a")
    conclude(server, once=700)
    marker = f"{server.ms}|by-a"
    server.advance(1)
    assert server.acquire("b", markers="1|") == ["done", marker, server.ms]
    assert server.lock == ""
    assert server.acquire("b", markers="0|") == str(server.us)
    assert server.acquire("c", "queue", markers="1|") == ["done", marker, server.ms]
    assert (server.queue, server.lock[:1]) == ("", "b")


def test_who_learns_that_it_is_done_gives_back_a_hand_over(wanted):
    for waiter in "cd":
        wanted.acquire(waiter, "queue")
    wanted.do("SET", KEYS.done, "1|x")
    assert wanted.acquire("c", "queue", markers="1|")[0] == "done"
    wanted.release("a")
    assert has(wanted, "b")
    assert wanted.acquire("b", markers="1|")[0] == "done"
    assert has(wanted, "d")


def test_a_lease_in_use_stays_although_others_have_done_the_work(server):
    fence = server.acquire("a")
    server.do("SET", KEYS.done, "1|x")
    assert server.acquire("a", markers="1|") == fence
    assert has(server, "a", "h")


def test_what_cools_is_not_given_back_by_a_resend(server):
    server.acquire("a")
    conclude(server, min_hold=500, once=700)
    assert server.acquire("a", markers="1|")[0] == "done"
    assert (server.lock[32], server.left) == ("k", 500)


@pytest.mark.parametrize("known", ["task", "task:1.0"])
def test_a_run_that_has_finished_is_not_run_again(server, known):
    server.do("ZADD", KEYS.finished, server.ms - 30, known)
    assert server.acquire("a", markers=RUN) == ["finished", 30]
    assert server.acquire("a", markers="09000/10|other:1.0") == str(server.us)


def test_a_run_begins_with_its_lease_however_that_is_granted(server):
    markers = "09000/10|task"
    note = {"started": f"{server.ms}|0|{lease_id('a')}|by-a"}
    server.acquire("a", markers=markers)
    assert server.fields(KEYS.runs) == note
    server.advance(5)
    for forgotten in (False, True):  # Resends.
        if forgotten:
            server.do("DEL", KEYS.runs)
        server.acquire("a", markers=markers)
        assert server.fields(KEYS.runs) == note
    server.acquire("b", "queue", markers=markers)
    server.do("DEL", KEYS.lock)
    server.acquire("b", "queue", markers=markers)
    assert server.fields(KEYS.runs)["started"] == f"{server.ms}|0|{lease_id('b')}|by-b"
    server.do("DEL", KEYS.lock)
    server.do("DEL", KEYS.runs)
    server.acquire("c", markers="1|")
    assert server.fields(KEYS.runs) == {}


# --- the timeline ---------------------------------------------------------------------------


@pytest.mark.parametrize("meets", ["acquire", "look"])
@pytest.mark.parametrize("age", [1499, 1500])
def test_a_lease_that_another_client_meets_is_noted_once_it_lasts(server, age, meets):
    entry = f"{lease_id('a')}|{server.acquire('a')}|{server.ms}|||by-a"
    server.advance(age)
    server.acquire("b") if meets == "acquire" else server.look()
    assert server.past == ([entry] if age == 1500 else [])
    server.renew("a", "r00002")
    server.do("DEL", KEYS.past)
    server.look()
    assert server.past == []  # Its own renewal has noted it.


def test_the_end_of_a_lease_replaces_its_entry(server):
    begun = f"{lease_id('a')}|{server.acquire('a')}|{server.ms}"
    server.renew("a", "r00001")
    server.advance(20)
    conclude(server, ended="failed")
    assert server.past == [f"{begun}|{server.ms}|failed|by-a"]


def lasted(server, letters, *, renewed=(), ends=True, **ended):
    """Each of them has the lock for a while, one after the other; who does not end it, expires."""
    for who in letters:
        server.acquire(who)
        if who in renewed:
            server.renew(who, "r00001")
        if ends:
            conclude(server, who, **{"ended": "done", **ended})
        else:
            server.advance(2 * TTL)


def test_the_timeline_has_the_last_forty_leases(server):
    lasted(server, "abcd" * 11)
    assert len(server.past) == 40
    assert [entry[0] for entry in server.past[-4:]] == [*"abcd"]


def test_the_timeline_has_as_many_leases_as_the_settings_say(server):
    for number, who in enumerate("abcdef" * 10):
        lasted(server, who, renewed="bdf", timeline=50)
        assert len(server.past) == min(number + 1, 50)
    lasted(server, "a", renewed="a", ended="failed", timeline=10)
    assert len(server.past) == 10
    server.acquire("b")
    assert force(server, lease_id("b"), "1/2/20")[0] == "released"
    assert len(server.past) == 11


def test_leases_that_only_expire_do_not_let_the_timeline_grow(server):
    lasted(server, "abcd" * 11, renewed="abcd", ends=False)
    assert len(server.past) == 40
    lasted(server, "abcd" * 11, timeline=60)
    lasted(server, "abcd", renewed="abcd", ends=False)
    assert len(server.past) == 61  # One more than before.


@pytest.mark.parametrize("waited", [999, 1000, 4200])
def test_a_lease_that_was_queued_for_a_second_says_for_how_long(server, waited):
    server.listen("b")
    server.acquire("a")
    server.acquire("b", "queue", owner='{"host":"web-1"}')
    server.acquire("c", "queue", owner='{"host":"web-2"}')
    server.advance(waited)
    server.release("a")
    said = {"waited": waited / 1000} if waited >= 1000 else {}
    assert json.loads(server.lock.rpartition("|")[2]) == {**said, "host": "web-1"}
    server.advance(CONFIRM)
    server.acquire("c", "queue", owner='{"host":"web-2"}')  # It looks by itself.
    said = {"waited": (waited + CONFIRM) / 1000}
    assert json.loads(server.lock.rpartition("|")[2]) == {**said, "host": "web-2"}


# --- force release --------------------------------------------------------------------------


@pytest.mark.proves("P9")
def test_p9_exactly_the_lease_that_was_seen_is_released_by_force(wanted):
    before = wanted.lock
    assert force(wanted, lease_id("c")) == ["taken", before]
    assert wanted.lock == before
    wanted.advance(10)
    assert force(wanted, lease_id("a")) == ["released", before]
    assert has(wanted, "b")
    assert wanted.do("GET", KEYS.forced) == REQUEST + before
    assert wanted.do("GET", KEYS.forced)[FORCED_VALUE_AT:] == before
    assert wanted.do("PTTL", KEYS.forced) == TTL - 10 + 60_000
    assert wanted.past[0].split("|")[3:] == [str(wanted.ms), "forced", "by-a"]
    # A resend does not end the lease of b.
    assert force(wanted, lease_id("a")) == ["released", before]
    assert has(wanted, "b")


def test_a_resend_of_a_force_release_shows_as_much_as_the_first(server):
    server.do("SET", KEYS.lock, "x" * 9000)
    shown, *_, id, _, _ = server.look()  # noqa: A001
    assert shown == "x" * 8192
    for _ in range(2):
        assert force(server, id) == ["released", shown]


def test_nothing_is_released_by_force_where_nothing_is(server):
    assert force(server, lease_id("a")) == ["gone", ""]
    assert server.do("EXISTS", KEYS.forced) == 0


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("SET", "x"), "string 1"),
        (("RPUSH", "x", "y"), "list 2"),
        (("HSET", "x", "y"), "hash 1"),
        (("ZADD", 1, "x", 2, "y", 3, "z"), "zset 3"),
    ],
)
def test_what_is_not_ours_is_described_and_released_by_the_id_of_that(server, command, told):
    server.do(command[0], KEYS.lock, *command[1:])
    shown, left, waiters, _, id, strange, _ = server.look()  # noqa: A001
    assert (shown, left, waiters, strange) == ("x" if told == "string 1" else "", -1, 0, told)
    assert len(id) == 16
    assert force(server, id) == ["released", shown]
    assert server.look()[1] == -2
    assert server.do("PTTL", KEYS.forced) == 60_000
    assert server.past == []


# --- a lease of a newer format ----------------------------------------------------------------


def newer(who="a", state="2"):
    """What a version after this one may write: see lua/_lease.lua."""
    return token(who) + state + "??????" + lease_id(who) + "|its own|by-" + who


@pytest.fixture
def ahead(server):
    """A lock that a newer version has."""
    server.do("SET", KEYS.lock, newer(), "PX", 500)
    return server


@pytest.mark.parametrize(
    ("shown", "is_newer"),
    [
        (newer(state="2"), True),
        (newer(state="9"), True),
        (newer(state="1"), False),
        (newer(state="x"), False),
        (newer().replace("aaa|", "aa||"), False),
    ],
)
def test_a_lease_of_a_newer_format_is_known_by_its_id(server, shown, is_newer):
    server.do("SET", KEYS.lock, shown, "PX", 500)
    assert server.look()[:2] == [shown, 500]
    id, size, wait = server.look()[4:]  # noqa: A001
    assert (id == lease_id("a"), size, wait) == (is_newer, f"string {len(shown)}", "")


def test_only_an_operator_ends_a_lease_of_a_newer_format(ahead):
    assert force(ahead, lease_id("b")) == ["taken", newer()]
    assert ahead.lock == newer()
    assert force(ahead, lease_id("a")) == ["released", newer()]
    assert (ahead.lock, ahead.past) == ("", [])  # Of what cannot be read, nothing is noted.
    # Its owner is told: the token is where it always was.
    assert ahead.do("GET", KEYS.forced)[FORCED_VALUE_AT:].startswith(token("a"))


def cannot_end(server, me, id, word):  # noqa: A002
    """Nobody ends the lease, or takes it up, with that token and id."""
    concludes = me, id, 50, 9, "o", "done", "", 0, ""
    assert server.run(scripts.CONCLUDE, *concludes) == word
    takes_up = me, id, TTL, "try", 0, "", "r", "o", bell("b")
    assert server.run(scripts.TAKE_UP, *takes_up) == ["lost", "taken"]
    assert server.run(scripts.HAND_OVER, me, token("c"), id, 500, "o", "") == word


@pytest.mark.parametrize("begin", [token("a"), "hold" + "a" * 28], ids=["lease", "pause"])
def test_no_script_of_a_client_changes_a_lease_of_a_newer_format(server, begin):
    before = begin + newer()[32:]
    server.do("SET", KEYS.lock, before, "PX", 500)
    busy = ["busy", 500, before, server.ms]
    assert server.acquire("b") == server.acquire("b", "last") == busy
    assert server.acquire("b", markers="1|run") == busy
    assert server.acquire("b", "queue")[:3] == ["queued", str(server.us), 500]
    assert server.pause("c")[0] == ("queued" if begin == token("a") else "busy")
    assert server.renew("b", "r00001") == server.release("b") == "taken"
    for who in "ab":
        cannot_end(server, token("b"), lease_id(who), "taken")
    assert server.leave("b") == server.leave("b", 2) == 0
    server.run(scripts.RESUME, "")
    assert server.look()[0] == server.lock == before
    assert (server.left, server.past) == (500, [])


def test_a_lease_of_a_newer_format_is_not_changed_by_the_one_that_was_granted_it(ahead):
    """A version two steps ahead has handed the lock to a waiter that cannot read the grant."""
    assert ahead.renew("a", "r00000") == ahead.renew("a", "r00001") == "gone"
    assert ahead.acquire("a") == ["busy", 500, newer(), ahead.ms]
    assert ahead.acquire("a", limit=2) == ["busy", 500, newer(), ahead.ms]
    assert ahead.acquire("a", "queue")[:3] == ["queued", str(ahead.us), 500]
    cannot_end(ahead, token("a"), lease_id("a"), "gone")
    assert (ahead.lock, ahead.left, ahead.past) == (newer(), 500, [])


@pytest.mark.parametrize("end", [Keyspace.release, Keyspace.leave])
def test_what_was_granted_in_a_newer_format_ends_with_its_token(ahead, end):
    ahead.acquire("b", "queue")
    ahead.listen("b")
    assert end(ahead, "a") in ("released", 1)
    assert has(ahead, "b")


@pytest.mark.parametrize("record", ["2|?", ""], ids=["a newer format", "no record"])
@pytest.mark.parametrize("first", [token("n"), "hold" + "n" * 28], ids=["waiter", "pause"])
def test_what_cannot_be_read_in_the_queue_delays_nobody(server, record, first):
    queued = (1, first, 1, f"{first}|{record}") if record else (1, first)
    server.acquire("a")
    server.do("ZADD", KEYS.queue, *queued)
    assert server.run(scripts.INSPECT, 9, 9)[1] == []
    assert server.look()[2] == 0
    assert server.run(scripts.RESUME, "") == ""
    server.do("ZADD", KEYS.queue, *queued)
    assert server.pause("c")[0] == "queued"
    assert server.run(scripts.RESUME, "") != ""
    server.do("ZADD", KEYS.queue, *queued)
    server.acquire("b", "queue")
    server.release("a")
    assert server.acquire("b", "queue").isdigit()
    server.release("b")
    assert (server.lock, server.queue) == ("", "")


def test_a_waiter_has_the_lock_once_a_lease_of_a_newer_format_is_over(ahead):
    ahead.acquire("b", "queue")
    ahead.advance(501)
    assert ahead.acquire("b", "queue") == str(ahead.us)


def test_the_other_permits_are_free_beside_a_lease_of_a_newer_format(ahead):
    assert ahead.acquire("b", limit=2) == f"{ahead.us} 2"
    assert ahead.acquire("c", limit=2) == ["busy", 500, newer(), ahead.ms]
    assert ahead.lock == newer()


def test_a_lease_that_is_longer_than_ours_can_be_is_not_ours(server):
    server.acquire("a")
    ours = server.lock
    server.do("SET", KEYS.lock, ours + "x" * (8191 - len(ours)))
    assert server.look()[4:6] == [lease_id("a"), ""]
    server.do("SET", KEYS.lock, ours + "x" * (8192 - len(ours)))
    assert server.look()[5] == "string 8192"


# --- look, inspect and names ----------------------------------------------------------------


def test_a_look_tells_of_a_lease_what_is_left_and_who_waits(server):
    assert server.look() == ["", -2, 0, str(server.ms), "", "", ""]
    server.acquire("a")
    server.acquire("b", "queue")
    server.advance(5)
    before = server.lock
    assert server.look() == [before, TTL - 5, 1, str(server.ms), lease_id("a"), "", ""]
    assert (server.lock, server.left) == (before, TTL - 5)


def test_members_of_a_queue_that_are_not_ours_are_no_waiters(server):
    server.do("ZADD", KEYS.queue, 1, "x", 1, "y")
    assert server.look()[2] == 0


def test_a_queue_that_is_too_long_to_be_read_is_counted_only(server):
    server.acquire("a")
    for number in range(2000):
        server.do("ZADD", KEYS.queue, number, f"of somebody else {number}")
    assert server.look()[2] == 0
    server.do("ZADD", KEYS.queue, 2000, "x", 2000, "y")
    assert server.look()[2] == 1001


def test_a_key_without_an_end_leaves_the_index_once_it_is_seen_to_have_gone(server):
    for score, left in (("+inf", {}), (5, {KEYS.lock: 5})):
        server.do("ZADD", KEYS.held, score, KEYS.lock)
        server.look()
        assert server.scores(KEYS.held) == left


def inspect(server, *most):
    """When, who waits, and the past: no more than so many of each."""
    return server.run(scripts.INSPECT, *most)


def test_the_waiters_are_named_in_their_order_with_the_past(server):
    assert inspect(server, 10) == [str(server.ms), [], []]
    server.acquire("a")
    server.renew("a", "r00001")
    tickets = [server.acquire(who, "queue")[1] for who in "bcd"]
    named = [[tickets[i], lease_id(who), f"by-{who}"] for i, who in enumerate("bcd")]
    assert inspect(server, 10) == [str(server.ms), named, server.past]
    assert inspect(server, 2)[1] == named[:2]
    server.advance(QUIET - 1)
    assert len(inspect(server, 10)[1]) == 3
    server.acquire("d", "queue")
    server.advance(1)
    assert inspect(server, 10)[1] == named[2:]


def test_of_strange_queues_and_pasts_there_is_nothing_to_tell(server):
    server.do("SET", KEYS.queue, "x")
    server.do("RPUSH", KEYS.past, "y" * 9000)
    assert inspect(server, 10)[1:] == [[], ["y" * 8192]]
    server.do("SET", KEYS.past, "x")
    assert inspect(server, 10)[1:] == [[], []]


def test_as_many_of_the_past_are_told_as_are_asked_for(server):
    server.do("RPUSH", KEYS.past, "x", "y", "z")
    assert inspect(server, 10, 2)[2] == ["y", "z"]


def test_an_index_is_read_by_pages_in_both_orders(server):
    now = server.ms
    server.do("ZADD", KEYS.held, now - 1, "over", now, "a", now + 1, "b", now + 2, "c")
    server.do("ZADD", KEYS.ran, 1, "x", 2, "y")
    a, b, c = (["a", str(now)], ["b", str(now + 1)], ["c", str(now + 2)])
    for page, told in {
        ("held", 0, 2, 0): [3, a + b],
        ("held", 1, 5, 0): [3, b + c],
        ("held", 0, 2, 1): [3, c + b],
        ("ran", 0, 5, 1): [2, ["y", "2", "x", "1"]],
        ("ran", 0, 5, 0): [2, ["x", "1", "y", "2"]],
    }.items():
        assert server.run(scripts.NAMES, *page) == told
    server.do("ZADD", KEYS.ran, 3, "z" * 2048, 4, "z" * 2049)
    assert server.run(scripts.NAMES, "ran", 2, 5, 0) == [4, ["z" * 2048, "3"]]


# --- what a holder waits for ----------------------------------------------------------------


def note_wait(server, who, wait="its wait", waiter="w"):
    """Note what the holder of a lease waits for."""
    return server.run(scripts.NOTE_WAIT, lease_id(who), lease_id(waiter), wait)


def test_a_wait_is_noted_at_the_current_lease_for_as_long_as_a_waiter_is_quiet(server):
    assert note_wait(server, "a") == 0
    server.acquire("a")
    assert note_wait(server, "b") == 0
    assert server.do("GET", KEYS.waits) is None
    assert note_wait(server, "a") == 1
    note = f"{lease_id('a')}|{lease_id('w')}|its wait"
    assert (server.do("GET", KEYS.waits), server.do("PTTL", KEYS.waits)) == (note, QUIET)
    assert server.look()[6] == note


def test_only_the_waiter_itself_takes_its_note_back(server):
    server.acquire("a")
    note_wait(server, "a")
    note_wait(server, "a", "", waiter="x")
    note_wait(server, "b", "")
    assert server.do("EXISTS", KEYS.waits) == 1
    assert note_wait(server, "a", "") == 0
    assert server.do("EXISTS", KEYS.waits) == 0


def test_a_look_shows_no_wait_of_an_earlier_lease_or_of_one_that_is_over(server):
    server.acquire("a")
    note_wait(server, "a")
    conclude(server, min_hold=50)
    assert (server.look()[1], server.look()[6]) == (50, "")  # It cools down.
    server.advance(51)
    server.acquire("b")
    assert server.look()[6] == ""
    server.do("DEL", KEYS.waits)
    server.do("RPUSH", KEYS.waits, "x")
    assert server.look()[6] == ""


def followed(server, who, ticket, *, rings=0):
    """Whether somebody waits there; the lease, and what its holder waits for."""
    return server.run(scripts.FOLLOW_WAIT, lease_id(who), ticket, rings)


def test_a_wait_is_followed_to_the_lease_and_the_wait_of_its_holder(server):
    server.acquire("a")
    ticket = server.acquire("b", "queue")[1]
    assert followed(server, "b", ticket) == [1, server.lock, ""]
    note_wait(server, "a")
    assert followed(server, "b", ticket) == [1, server.lock, server.do("GET", KEYS.waits)]
    # Of another waiter, or at another place, nothing is known.
    assert followed(server, "c", ticket)[0] == followed(server, "b", int(ticket) + 1)[0] == 0
    server.advance(QUIET - 1)
    assert followed(server, "b", ticket)[0] == 1
    server.advance(1)
    assert followed(server, "b", ticket)[0] == 0
    server.release("a")
    server.leave("b")
    assert followed(server, "b", ticket)[:2] == [0, ""]


def test_of_a_wait_no_more_is_told_than_may_be_seen(server):
    server.do("SET", KEYS.lock, "x" * 9000)
    server.do("SET", KEYS.waits, "y" * 9000)
    assert followed(server, "b", 1) == [0, "x" * 8192, "y" * 8192]


def test_a_waiter_that_hears_no_ring_waits_no_more(server):
    server.acquire("a")
    ticket = server.acquire("b", "queue")[1]
    assert followed(server, "b", ticket, rings=1)[0] == 0
    server.listen("b")
    assert followed(server, "b", ticket, rings=1)[0] == 1
    assert server.rung == [(bell("b"), f"alive {lease_id('b')}")]
    assert server.queue == "b"


# --- a baton --------------------------------------------------------------------------------


def hand_over(server, who="a", *, within=3000):
    """Hand the lease on to whoever knows the id of e."""
    named = token(who), token("d"), lease_id("e")
    return server.run(scripts.HAND_OVER, *named, within, f"for-{who}")


def take_up(server, who="f", markers=""):
    named = token(who), lease_id("e")
    return server.run(scripts.TAKE_UP, *named, TTL, "try", 0, markers, "r", f"by-{who}", bell(who))


def test_a_lease_is_handed_to_whoever_takes_it_up_by_its_id(server):
    server.listen("b")
    first = int(server.acquire("a"))
    server.acquire("b", "queue")
    assert hand_over(server) == "given"
    head = f"{token('d')}c-00000{lease_id('e')}|{first + 1}|{server.ms}|3000|{server.ms + 3000}"
    assert server.lock == f"{head}|baton:|for-a"
    assert server.left == 3000 + CONFIRM
    assert server.rung == [(bell("b"), f"look {lease_id('b')} 3000")]
    assert server.past[0].split("|")[3:] == [str(server.ms), "done", "by-a"]
    assert server.scores(KEYS.fence) == {"last": first + 1}
    assert hand_over(server) == "given"
    server.advance(2999)
    assert take_up(server) == str(first + 1)
    head = f"{token('f')}hr00000{lease_id('e')}|{first + 1}|{server.ms}|{TTL}|0|"
    assert server.lock == f"{head}|by-f"
    assert server.left == TTL


def test_a_baton_is_taken_up_once_and_in_time(server):
    fence = int(server.acquire("a")) + 1
    assert take_up(server) == ["lost", "taken"]
    hand_over(server)
    assert take_up(server) == str(fence)
    server.advance(100)
    assert take_up(server) == str(fence)  # A resend.
    assert server.left == TTL
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + TTL}
    assert take_up(server, "b") == ["lost", "taken"]
    server.release("f")
    assert take_up(server) == ["lost", "gone"]
    server.acquire("a")
    hand_over(server)
    server.advance(3000)
    assert take_up(server) == ["lost", "gone"]


def test_a_baton_that_was_released_by_force_is_lost_by_that(server):
    server.acquire("a")
    hand_over(server)
    force(server, lease_id("e"))
    assert take_up(server) == ["lost", "forced"]
    assert server.do("PTTL", KEYS.forced) == 3000 + CONFIRM + 60_000


def test_a_run_that_is_done_hands_the_baton_to_the_next_waiter(wanted):
    hand_over(wanted)
    wanted.do("ZADD", KEYS.finished, wanted.ms, "task")
    assert take_up(wanted, markers=RUN) == ["finished", 0]
    assert has(wanted, "b")


def test_a_run_begins_with_the_baton_that_it_takes_up(server):
    server.acquire("a")
    hand_over(server)
    server.advance(5)
    note = {"started": f"{server.ms}|0|{lease_id('e')}|by-f"}
    for markers, noted in [(RUN, note), (RUN, note), ("1|", {})]:
        take_up(server, markers=markers)
        assert server.fields(KEYS.runs) == noted
        server.do("DEL", KEYS.runs)
        server.advance(10)


def test_what_was_handed_to_a_waiter_is_no_baton(wanted):
    wanted.release("a")
    assert take_up(wanted) == ["lost", "taken"]
    assert has(wanted, "b")


def test_only_who_holds_the_lock_hands_it_over(server):
    assert hand_over(server) == "gone"
    server.acquire("b")
    assert hand_over(server) == "taken"
    conclude(server, "b", min_hold=500)
    assert hand_over(server, "b") == "gone"
    assert server.left == 500


# --- a pause ---------------------------------------------------------------------------------


def resume(server):
    """End the pause. Returns whose it was."""
    return server.run(scripts.RESUME)


def test_an_operator_holds_a_free_lock_for_as_long_as_it_says(server):
    assert server.pause("a", lasts=5000) == str(server.us)
    assert (server.lock[:4], server.left) == ("hold", 5000)
    assert server.acquire("b")[0] == "busy"
    assert server.pause("c")[:2] == ["busy", 5000]
    assert (resume(server), server.lock) == ("by-a", "")
    assert server.past[0].split("|")[4:] == ["done", "by-a"]
    assert resume(server) == ""


def test_a_hold_comes_before_all_waiters_and_is_confirmed_by_nobody(wanted):
    wanted.advance(10)
    ticket = f"-{wanted.us}"
    assert wanted.pause("c", lasts=8000) == ["queued", ticket, TTL - 10, str(wanted.us), 1, "by-a"]
    assert wanted.do("PTTL", KEYS.queue) == 8000
    assert inspect(wanted, 5)[1][0] == [ticket, lease_id("c"), "by-c"]
    wanted.advance(1000)
    wanted.release("a")
    assert wanted.lock[:33] == "hold" + "c" * 28 + "h"
    assert wanted.lock.split("|")[3:] == ["7000", "0", "", "by-c"]
    assert (wanted.left, wanted.queue, wanted.rung) == (7000, "b", [])
    assert wanted.acquire("b", "queue")[2] == 7000
    assert resume(wanted) == "by-c"
    assert has(wanted, "b")


@pytest.mark.parametrize("left", [1, 0, -2])
def test_a_hold_that_is_ended_before_it_begins_stays_in_no_index(server, left):
    server.acquire("a")
    server.pause("c", lasts=60_000)
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + 60_000}
    server.advance(TTL - left if left >= 0 else TTL + 1)
    assert server.left == left
    assert resume(server) == "by-c"
    assert server.scores(KEYS.held) == ({KEYS.lock: server.ms + left} if left >= 0 else {})


def test_there_is_one_hold_at_a_time(server):
    server.acquire("a")
    server.pause("b", lasts=8000)
    server.advance(10)
    _, left, seen, _ = server.pause("c")
    assert left == 7990
    assert seen == f"hold{'b' * 28}h-00000{lease_id('b')}|0|{server.ms}|8000|0||by-b"
    assert server.queue == "b"
    assert server.pause("b", lasts=9000)[4] == 0  # A resend.
    server.renew("a", "r00001", 60_000)
    server.advance(8999)
    server.acquire("d", "queue")
    assert server.pause("c")[1] == 1
    server.advance(1)
    assert server.pause("c")[0] == "queued"
    assert server.queue == "cd"


@pytest.mark.parametrize("left", [1, 0])
def test_a_hold_that_is_over_before_its_turn_is_passed_over(server, left):
    server.acquire("a")
    server.pause("b", lasts=5000)
    server.advance(5000 - left)
    server.acquire("c", "queue")
    server.release("a")
    assert (server.lock[:4], server.left) == (("hold", 1) if left else ("", -2))


def test_who_waits_for_the_only_permit_is_not_told_of_a_hold_that_is_taken_back(wanted):
    wanted.pause("f")
    assert resume(wanted) == "by-f"
    assert (wanted.queue, wanted.rung) == ("b", [])


@pytest.mark.parametrize("left", [TTL, 1])
def test_after_a_hold_that_is_taken_back_the_lease_is_listed_to_its_own_end(server, left):
    server.acquire("a")
    server.advance(TTL - left)
    server.pause("f", lasts=2 * TTL)
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + 2 * TTL}
    assert resume(server) == "by-f"
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + left}
    server.pause("f", lasts=2 * TTL)
    server.do("DEL", KEYS.lock)
    assert resume(server) == "by-f"
    assert server.scores(KEYS.held) == {}


def test_a_hold_that_waits_is_taken_back(wanted):
    assert resume(wanted) == ""
    for lasts, whose in ((5001, "by-c"), (5000, "")):
        wanted.pause("c", lasts=lasts)
        wanted.advance(5000)
        assert (resume(wanted), wanted.queue) == (whose, "b")


def test_a_hold_is_granted_by_a_look_once_the_lease_in_its_way_has_ended(server):
    server.acquire("a", ttl=100)
    server.pause("b")
    server.advance(200)
    shown, left, _, _, id, *_ = server.look()  # noqa: A001
    assert (shown[:4], left, id) == ("hold", TTL - 200, lease_id("b"))
    resume(server)
    server.acquire("a", ttl=100)
    server.acquire("c", "queue")
    server.advance(200)
    assert server.look()[1] == -2
    assert server.queue == "c"


def test_of_a_hold_that_came_between_who_asks_learns_the_end(server):
    server.acquire("a", ttl=100)
    server.pause("b")
    server.advance(200)
    assert server.acquire("c", "queue")[2] == TTL - 200
