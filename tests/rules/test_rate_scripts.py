"""What the scripts of a rate write, answer and ring; see test_lock_scripts.py.

Unless a test says otherwise, one start comes each second, and whoever asks is named by a letter.
"""

import random
from itertools import pairwise

import pytest

from django_redislock.rules import scripts
from tests.support.keyspace import KEYS, Keyspace, lease_id, token

NOW = "0"  # What a start that may be made now is answered: a fence that says nothing.
KEPT_FOR = 5000  # ms for which a start is known after it is over.


@pytest.fixture
def server():
    return Keyspace()


def left(answer):
    """The ms until a start is due."""
    word, *rest = answer
    return rest[1] if word == "queued" else rest[0]


# --- a start ----------------------------------------------------------------------------------


def test_one_start_comes_each_so_many_ms(server):
    assert server.start("a") == NOW
    assert server.start("b") == ["early", 1000, "by-a", server.ms]
    server.advance(999)
    assert left(server.start("b")) == 1
    server.advance(1)
    assert server.start("b") == NOW
    assert left(server.start("c")) == 1000


def test_after_a_quiet_time_as_many_come_at_once_as_the_burst_says(server):
    answers = [server.start(who, burst=3) for who in "abcd"]
    assert answers[:3] == [NOW] * 3
    assert left(answers[3]) == 1000
    server.advance(2000)
    assert [server.start(who, burst=3) for who in "ef"] == [NOW] * 2
    assert left(server.start("g", burst=3)) == 1000


def test_what_is_not_granted_takes_no_start(server):
    server.start("a")
    for who in "bcdefgh":
        assert left(server.start(who)) == 1000
    server.advance(1000)
    assert server.start("z") == NOW


def test_a_resend_takes_no_second_start(server):
    assert server.start("a", burst=2) == server.start("a", burst=2) == NOW
    assert server.start("b", burst=2) == NOW
    assert left(server.start("c", burst=2)) == 1000
    server.advance(1000 + KEPT_FOR - 1)
    assert server.start("b", burst=2) == NOW
    assert server.start("c", burst=2) == NOW
    assert server.start("d", burst=2) == NOW


def test_one_key_keeps_it_all_and_ends_when_all_starts_are_over(server):
    for who in "abc":
        server.start(who, "queue", burst=2)
    assert {key.name for key in server._server.every_key()} == {
        KEYS.rate.encode(),
        KEYS.held.encode(),
    }
    assert int(server.do("PTTL", KEYS.rate)) == 3000 + KEPT_FOR
    assert server.scores(KEYS.held) == {KEYS.lock: server.ms + 3000}


def test_starts_that_are_over_are_forgotten(server):
    for _ in range(50):
        for who in "abcdefgh":
            server.start(who, every=10)
            server.advance(100)
    assert len(server.scores(KEYS.rate)) <= KEPT_FOR // 100 + 2


# --- waiters ----------------------------------------------------------------------------------


def test_each_waiter_is_told_its_own_time_and_none_is_overtaken(server):
    server.start("a")
    assert [left(server.start(who, "queue")) for who in "bcd"] == [1000, 2000, 3000]
    assert server.start("x")[0] == "early"
    server.advance(1000)
    assert left(server.start("x")) == 3000
    assert server.start("b", "queue") == NOW
    server.advance(1000)
    assert server.start("c", "queue") == NOW


def test_a_waiter_whose_wait_would_end_before_takes_no_start(server):
    server.start("a")
    assert server.start("b", "queue", patience=999) == ["early", 1000, "by-a", server.ms]
    assert server.start("c", "queue", patience=1000)[0] == "queued"


def three_wait(server):
    """Half a second after a start, three wait for theirs."""
    server.start("a")
    for who in "bcd":
        server.start(who, "queue")
    server.listen(*"bcd")
    server.advance(500)


@pytest.mark.parametrize("leaver", ["b", "c", "d"])
@pytest.mark.parametrize("how", ["leaves", "gives up", "comes during a pause"])
def test_behind_a_waiter_that_is_gone_all_are_due_earlier_and_are_rung(server, leaver, how):
    three_wait(server)
    if how == "leaves":
        assert server.give_back_start(leaver) == 1
    elif how == "gives up":
        assert server.start(leaver, "last")[0] == "early"
    else:  # Nobody starts during a pause, so whoever comes then waits no longer.
        server.pause("o", lasts=100)
        assert server.start(leaver, "queue")[0] == "own"
    others = [who for who in "bcd" if who != leaver]
    rung = [f"look {lease_id(who)} {500 + 1000 * at}" for at, who in enumerate(others)]
    assert [words for _, words in server.rung] == rung["bcd".index(leaver) :]
    server.advance(101)
    assert [left(server.start(who, "queue")) for who in others] == [399, 1399]
    assert left(server.start("x")) == 2399


def test_a_start_that_was_given_back_can_be_had_again_at_once(server):
    server.start("a")
    assert server.give_back_start("a") == 1
    assert server.give_back_start("a") == 0
    assert server.start("b") == NOW


def test_the_start_of_a_burst_that_is_given_back_counts_no_more(server):
    for who in "abc":
        server.start(who, burst=3)
    server.give_back_start("a")
    assert server.start("d", burst=3) == NOW
    assert left(server.start("e", burst=3)) == 1000


def test_the_room_of_a_start_that_is_undone_is_given_back_too(server):
    for who in "ab":
        server.start(who, burst=2)
    server.give_back_start("a")
    last = {one: over for one, over in server.scores(KEYS.rate).items() if len(one) > 32}
    made = server.us + 1_000_000
    assert last == {f"1000000|2|{server.ms}|{lease_id('b')}|{made}|by-b": 0}


def test_one_start_in_ten_drops_what_has_expired_a_minute_ago_from_the_index(server):
    server.do("ZADD", KEYS.held, server.ms - 60_000, "old", server.ms - 59_999, "young")
    server.start("a", burst=3)
    assert {"old", "young"} < server.scores(KEYS.held).keys()
    server.set_back(1)
    server.start("b", burst=3)
    assert server.scores(KEYS.held).keys() == {"young", KEYS.lock}


# --- a start that is reserved, for a run that goes back to its broker ---------------------------


def test_a_reserved_start_is_claimed_once_and_when_it_is_due(server):
    server.start("a")
    assert [left(server.start(who, "reserve")) for who in "bc"] == [1000, 2000]
    assert left(server.start("x", "reserve", claimed="c")) == 2000
    server.advance(2000)
    assert server.start("x", "reserve", claimed="c") == NOW
    assert left(server.start("y", "reserve", claimed="c")) == 1000
    assert server.start("z", "reserve", claimed="b") == NOW


def test_a_reserved_start_that_is_claimed_too_early_stays_reserved_however_often(server):
    server.start("a")
    server.start("b", "reserve")
    server.start("c", "queue")
    for claimed, who in ("bb", "bd", "dd", "de"):
        assert left(server.start(who, "reserve", claimed=claimed)) == 1000
    (last,) = [one for one, over in server.scores(KEYS.rate).items() if not over]
    assert last.split("|")[4] == f"{server.us + 1_000_000}"  # Nothing was undone.
    server.advance(1000)
    assert server.start("x", "try", claimed="e") == NOW


def test_a_late_start_is_known_to_its_resends_for_as_long_as_any(server):
    server.start("f", every=60_000)
    for who in "ab":
        server.start(who, "reserve", every=60_000)
    server.advance(60_000 + 60_000 + 9000)
    assert [server.start(who, every=60_000) for who in "ab"] == [NOW] * 2
    server.advance(KEPT_FOR - 1)
    assert [server.start(who, every=60_000) for who in "ab"] == [NOW] * 2


def test_a_waiter_that_is_less_than_two_intervals_late_keeps_its_start(server):
    server.start("f", every=60_000)
    for who in "ab":
        server.start(who, "reserve", every=60_000)
    server.advance(60_000 + 60_000 + 55_000)
    assert server.start("b", every=60_000) == NOW
    server.start("c", "queue", every=60_000)
    assert server.start("a", every=60_000) == NOW


def test_a_reserved_start_that_is_claimed_during_a_pause_delays_nobody(server):
    server.start("a")
    server.start("b", "reserve")
    assert left(server.start("c", "queue")) == 2000
    server.pause("o", lasts=100)
    assert server.start("x", "try", claimed="b")[0] == "own"
    server.advance(101)
    assert left(server.start("c", "queue")) == 899


def test_a_start_that_was_made_is_not_given_back_by_a_resend_during_a_pause(server):
    server.start("a")
    server.pause("o", lasts=100)
    assert server.start("a")[0] == "own"  # Its sender gives it back then.
    server.advance(101)
    assert left(server.start("b")) == 899


def test_starts_that_are_asked_for_late_are_made_together_but_not_those_of_long_ago(server):
    server.start("a")
    for who in "bc":
        server.start(who, "queue")
    server.start("d", "reserve")
    server.start("e", "queue")
    server.advance(3000)
    assert server.start("x", "try", claimed="d") == server.start("c", "queue") == NOW
    server.advance(KEPT_FOR)
    assert server.start("e", "queue") == NOW
    assert server.start("b", "queue") == NOW  # Anew, so it takes the start that is due now.
    assert left(server.start("z")) == 1000


def reserve_ten(server):
    """Ten a second, and ten starts are reserved, due each tenth from now."""
    server.start("f", every=100)
    assert left([server.start(who, "reserve", every=100) for who in "0123456789"][-1]) == 1000


def test_of_many_late_ones_as_many_start_as_are_due_in_a_quarter_of_a_second(server):
    reserve_ten(server)
    server.advance(2600)
    answers = [server.start(who, "queue", every=100) for who in "0123456789"]
    assert answers[:4] == [NOW] * 4  # One, and three more in a quarter of a second.
    assert [left(one) for one in answers[4:]] == [100, 200, 300, 400, 500, 600]
    for who in "456789":
        server.advance(100)
        assert server.start(who, "queue", every=100) == NOW


def test_a_late_one_without_room_queues_again_behind_all_others(server):
    reserve_ten(server)
    for who in "abcde":
        server.start(who, "queue", every=100)
    server.advance(1100)
    assert [server.start(who, "try", every=100) for who in "012"] == [NOW] * 3
    word, over, ms, _, is_new = server.start("3", "queue", every=100)
    assert (word, ms, is_new) == ("queued", 500, 1)
    overs = server.scores(KEYS.rate)
    assert float(over) == max(overs.values()) == overs[token("3")]


def test_what_is_late_is_measured_by_two_intervals_if_they_are_longer(server):
    server.start("f")
    for who in "0123456789":
        server.start(who, "reserve")
    server.advance(5000)
    assert server.start("4") == NOW
    assert server.start("0") == NOW  # One more has room, though it is four seconds late.
    assert server.start("2") == NOW  # It is on time, by two intervals.
    word, over, ms, _, is_new = server.start("1", "queue")
    assert (word, ms, is_new) == ("queued", 6000, 1)
    members = server.scores(KEYS.rate)
    assert [members[one] for one in members if one.startswith(token("1"))] == [float(over)] * 2


def test_late_ones_take_no_room_from_those_that_are_on_time(server):
    reserve_ten(server)
    server.advance(600)
    assert [server.start(who, "try", every=100) for who in "0123"] == [NOW] * 4
    server.advance(300)
    assert [server.start(who, "try", every=100) for who in "45678"] == [NOW] * 5
    server.advance(50)
    word, _, ms, _, is_new = server.start("9", "queue", every=100)
    assert (word, ms, is_new) == ("queued", 50, 0)  # As it was told at first.
    server.advance(50)
    assert server.start("9", "queue", every=100) == NOW


def test_whoever_waits_for_a_reserved_start_keeps_its_time(server):
    server.start("a")
    server.start("b", "reserve")
    server.start("c", "reserve")
    assert left(server.start("x", "queue", claimed="b")) == 1000
    assert left(server.start("d")) == 3000


# --- operators, clocks ------------------------------------------------------------------------


def test_nobody_starts_during_a_pause(server):
    fence = server.pause("o", lasts=3000)
    assert fence != NOW
    word, lasts, value, _ = server.start("a")
    assert (word, lasts, value[:4]) == ("own", 3000, "hold")
    server.advance(3001)
    assert server.start("a") == NOW


def test_a_clock_that_is_set_back_gives_no_burst_and_keeps_nobody_out(server):
    for who in "abc":
        server.start(who, burst=3)
    server.set_back(3_600_000_000)
    assert 0 < left(server.start("d", burst=3)) <= 5000
    server.advance(5000)
    assert server.start("d", burst=3) == NOW


def test_waiters_are_told_if_a_clock_that_is_set_back_moves_their_starts(server):
    server.start("a", burst=2)
    for who in "bcd":
        server.start(who, "queue", burst=2)
    server.start("e", "reserve", burst=2)
    server.listen(*"bcd")
    server.set_back(3_600_000_000)
    assert left(server.start("f", burst=2)) == 4000
    assert [words for _, words in server.rung] == [
        f"look {lease_id(who)} {ms}" for who, ms in zip("cd", (1000, 2000), strict=True)
    ]


def test_after_a_clock_was_set_back_the_room_for_late_ones_counts_as_used(server):
    server.start("a")
    server.set_back(3_600_000_000)
    server.advance(left(server.start("b")))
    assert server.start("b") == NOW
    (last,) = [one for one, over in server.scores(KEYS.rate).items() if not over]
    assert last.split("|")[4] == f"{server.us + 3_000_000}"


def test_a_clock_that_is_set_back_by_a_ms_lets_no_more_start(server):
    server.start("f", every=100)
    for who in "0123456789":
        server.start(who, "reserve", every=100)
    server.advance(1000)
    answers = [server.start(who, every=100) for who in "987654x"]
    server.set_back(2000)
    server.advance(1)
    answers += [server.start(who, every=100) for who in "9876543210yz"]
    assert answers.count(NOW) == 12  # Six, which are resent.


def test_a_start_of_an_older_process_is_known_though_it_says_less(server):
    server.start("a", burst=2)
    (last,) = [one for one, over in server.scores(KEYS.rate).items() if not over]
    every, burst, at, who, _, owner = last.split("|")
    server.do("ZREM", KEYS.rate, last)
    server.do("ZADD", KEYS.rate, "0", f"{every}|{burst}|{at}|{who}|{owner}")
    *_, rate = server.look()
    assert rate == f"1|0|1000000|2|{server.ms}|{who}|by-a"
    assert server.start("b", burst=2) == NOW
    assert server.start("c", burst=2) == ["early", 1000, "by-b", server.ms]


def test_a_rate_that_is_made_faster_counts_at_once(server):
    server.start("a", every=3_600_000)
    assert left(server.start("b", every=1000)) <= 3000


def test_lists_are_told_of_the_starts_left_the_next_one_and_the_waiters(server):
    server.start("a", burst=3)
    *_, rate = server.look()
    assert rate == f"2|0|1000000|3|{server.ms}|{lease_id('a')}|by-a"
    for who in "bcde":
        server.start(who, "queue", burst=3)
    _, free, waiting, *_, rate = server.look()
    assert (free, waiting) == (-2, 2)
    assert rate.startswith(f"0|3000|1000000|3|{server.ms}|{lease_id('c')}|")
    _, waiters, _ = server.run(scripts.INSPECT, 10)
    assert waiters == [[str(server.us), lease_id(who), f"by-{who}"] for who in "de"]


# --- any order of everything -------------------------------------------------------------------


class Clients:
    """Clients that ask at random, come when they are told to, and leave at random.

    Their clock goes on evenly, and that of the server is set back now and then.
    """

    def __init__(self, server, seed, *, jumps=False, late=0):
        self.server, self.random, self.now, self.jumps = server, random.Random(seed), 0, jumps
        self.late = late  # They come up to so many ms late.
        self.every, self.burst = self.random.choice([1, 7, 100]), self.random.choice([1, 2, 5])
        self.how = {"every": self.every, "burst": self.burst}
        self.free = list("0123456789abcdef")  # Ids are hexadecimal.
        self.due = {}  # Who waits, until when.
        self.started = {}  # Who has started: when.
        self.starts = []

    def ask(self, who, mode):
        answer = self.server.start(who, mode, **self.how)
        if answer == NOW:
            self.started[who] = self.now
            self.starts.append((self.now, who))
        elif answer[0] == "queued":
            self.due[who] = self.now + left(answer) + self.random.randint(0, self.late)
        else:
            self.free.append(who)
        self.hear()

    def step(self):
        what = ["try", "queue", "queue", "leave", "undo", "resend", "advance"]
        what = self.random.choice(what + ["set back"] * self.jumps)
        if what in {"try", "queue"} and self.free:
            who = self.free.pop(0)
            self.server.listen(who)
            self.ask(who, what)
        elif what == "leave" and self.due:
            who = self.random.choice(sorted(self.due))
            del self.due[who]
            self.server.give_back_start(who, self.every)
            self.free.append(who)
        elif what == "undo" and self.started:
            who = self.random.choice(sorted(self.started))
            self.server.give_back_start(who, self.every)
            self.starts.remove((self.started.pop(who), who))
            self.free.append(who)
        elif what == "resend" and self.started:
            who = self.random.choice(sorted(self.started))
            if self.server.do("ZSCORE", KEYS.rate, token(who)):
                assert self.server.start(who, **self.how) == NOW
        elif what == "set back":
            self.server.set_back(1000 * self.random.choice([1, 50, 3_600_000]))
        elif what == "advance":
            self.advance(self.random.choice([1, self.every, 3 * self.every]))
        self.hear()

    def hear(self):
        for channel, words in self.server.rung:
            if (who := channel[5]) in self.due:
                self.due[who] = self.now + int(words.split()[2])
        self.server.rung.clear()

    def wait(self, ms):
        self.now += ms
        self.server.advance(ms)

    def advance(self, ms):
        until = self.now + ms
        while self.due and min(self.due.values()) <= until:
            who = min(self.due, key=self.due.get)
            self.wait(max(self.due.pop(who) - self.now, 0))
            self.ask(who, "queue")
            if not (self.jumps or self.late):
                assert who in self.started, "its start was due, and it has none"
        self.wait(max(until - self.now, 0))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("jumps", [False, True], ids=["clock goes on", "clock is set back"])
def test_in_any_time_there_are_no_more_starts_than_the_rate_and_its_burst(server, seed, jumps):
    clients = Clients(server, seed, jumps=jumps)
    for _ in range(300):
        clients.step()
    # In any time there are no more starts than the rate and its burst.
    times = sorted(at for at, _ in clients.starts)
    for first, begin in enumerate(times):
        for last, end in enumerate(times[first:], 1):
            assert last <= clients.burst + (end - begin) / clients.every
    if not jumps:
        # What was given back or not granted has taken nothing: whoever waits now waits no longer
        # than all others that wait, and those that have started.
        waiting = sorted(clients.due.values())
        assert all(b - a <= clients.every for a, b in pairwise(waiting))
        return
    answers = [server.start(who, "queue", **clients.how) for who in clients.due]
    members = len(server.scores(KEYS.rate))
    assert all(one == NOW or left(one) <= clients.every * members for one in answers)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("late", [200, 3000])
def test_late_ones_add_no_more_than_what_is_due_in_half_a_second(server, seed, late):
    clients = Clients(server, seed, late=late)
    for _ in range(300):
        clients.step()
    most = clients.burst + max(2, 500 / clients.every)
    times = sorted(at for at, _ in clients.starts)
    for first, begin in enumerate(times):
        for last, end in enumerate(times[first:], 1):
            assert last <= most + (end - begin) / clients.every
    clients.late = 0
    waiters = set(clients.due)
    clients.advance(10_000)
    assert waiters <= set(clients.started)
