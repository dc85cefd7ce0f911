"""What each script of tasks writes and answers, in lua/, at a time that stands still."""

import pytest

from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from tests.support.keyspace import KEYS, TTL, Keyspace, bell, lease_id, token

DAY = 86_400_000
LASTED = 250  # ms
KEPT = "9000/3"  # Records: for so many ms, and of so many locks.


@pytest.fixture
def server():
    return Keyspace()


# --- one call waits for many ----------------------------------------------------------------


def announce(server, call, *terms, ttl=5000):
    """With terms: ms until it may run, until its message expires, its arguments, its task, way."""
    return server.run(scripts.ANNOUNCE, call, ttl, *terms)


def announce_of(server, call, task, way=""):
    """A call of that task, which goes that way."""
    return announce(server, call, 0, "", "", task, *([way] if way else []))


def requeue(server, call, ttl=5000):
    return server.run(scripts.REQUEUE, call, ttl)


def retract(server, call, *kept_for):
    """The call comes to run: it is told the arguments of the last one."""
    return server.run(scripts.RETRACT, call, *kept_for)


def test_the_first_call_is_published_and_stands_for_those_after_it(server):
    now = server.ms
    assert announce(server, "a") == ""
    assert server.fields(KEYS.runs) == {"queued": f"{now + 5000}|a", "terms": f"{now}|"}
    assert server.do("PTTL", KEYS.runs) == 5000
    server.advance(10)
    assert announce(server, "b") == "a"
    asked = {"queued": f"{now + 5000}|a", "terms": f"{now}|", "asked": str(now + 10)}
    assert server.fields(KEYS.runs) == asked
    assert announce(server, "a") == ""
    assert "asked" not in server.fields(KEYS.runs)


def test_a_call_stands_for_others_until_its_announcement_ends(server):
    announce(server, "a")
    server.run(scripts.SKIP, "skip", "busy", "o", KEPT)  # So that the key itself stays.
    server.advance(4999)
    assert announce(server, "b") == "a"
    server.advance(1)
    assert announce(server, "b", 7, 9, ttl=400) == ""
    fields = server.fields(KEYS.runs)
    assert fields["queued"] == f"{server.ms + 400}|b"
    assert fields["terms"] == f"{server.ms + 7}|{server.ms + 9}"
    assert server.do("PTTL", KEYS.runs) == 4000


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        (("5000",), ("4000",), True),
        (("5000",), ("3999",), False),
        (("0", "3000"), ("0", "4000"), True),
        (("0", "3000"), ("0", "4001"), False),
        (("0", "3000"), ("0",), False),
        (("0",), ("0", "4001"), True),
        (("0", "", "x"), ("0", "", "-"), False),
        (("0", "", "x"), ("0", "", ""), True),
    ],
)
def test_a_call_stands_for_another_that_may_not_run_sooner_or_be_dropped_later(
    server, first, second, stands
):
    announce(server, "a", *first)
    assert announce(server, "b", *second) == ("a" if stands else "")


def test_a_call_stands_for_none_of_another_task_and_makes_way_for_none(server):
    announce_of(server, "a", "bill")
    announced = server.fields(KEYS.runs)
    assert announced["task"] == "a|bill"
    assert announce(server, "b", 0, "", "its arguments", "export") == ""
    assert server.fields(KEYS.runs) == announced
    assert announce_of(server, "c", "bill") == "a"
    requeue(server, "a")
    assert announce_of(server, "d", "export") == ""
    assert announce_of(server, "e", "bill") == "a"
    retract(server, "a")
    assert server.fields(KEYS.runs) == {}
    assert announce(server, "f", 7, 900, "", "export") == ""
    assert server.fields(KEYS.runs)["task"] == "f|export"


def test_a_call_of_which_an_older_version_names_no_task_stands_for_every_call(server):
    announce(server, "a")
    assert announce_of(server, "b", "bill") == "a"
    # It also leaves the name of an earlier call there.
    server.do("HSET", KEYS.runs, "task", "earlier|export")
    assert announce_of(server, "b", "bill") == "a"
    retract(server, "a")
    announce_of(server, "c", "bill")
    assert announce(server, "d") == "c"


def test_an_announcement_without_terms_stands_for_every_call_and_is_kept_without_an_end(server):
    server.do("HSET", KEYS.runs, "queued", f"{server.ms + 10}|a")
    assert announce(server, "b") == announce_of(server, "b", "task") == "a"
    server.do("HDEL", KEYS.runs, "asked")
    assert requeue(server, "a") == -1
    assert server.fields(KEYS.runs)["terms"] == "0|"


def test_the_waiting_run_is_given_the_arguments_of_the_last_call(server):
    announce(server, "a")
    server.advance(1000)
    assert announce(server, "b", 0, "", "one") == "a"
    until = server.ms + 4000 + DAY
    fields = server.fields(KEYS.runs)
    assert (fields["last:a"], fields["last"]) == (f"{until}|one", f"{until}|")
    assert server.do("PTTL", KEYS.runs) == 4000 + DAY
    announce(server, "c", 0, "", "two")
    announce(server, "d", 0, "", "")
    assert retract(server, "b", 0) == ""
    assert "queued" in server.fields(KEYS.runs)
    assert retract(server, "a", 0) == "two"
    assert server.fields(KEYS.runs) == {"last": f"{until}|"}
    assert retract(server, "a", 0) == ""


def test_arguments_are_kept_for_a_run_that_may_be_delivered_again(server):
    announce(server, "a")
    announce(server, "b", 0, "", "one")
    until = server.ms + 5000 + DAY
    server.advance(10)
    assert retract(server, "a", 700) == "one"
    fields = server.fields(KEYS.runs)
    # The latest of all such ends is kept, and so is the key until then.
    assert fields == {"last:a": f"{server.ms + 700}|one", "last": f"{until}|"}
    assert server.do("PTTL", KEYS.runs) == until - server.ms
    assert retract(server, "a", 1) == "one"
    assert retract(server, "a") == "one"
    assert server.fields(KEYS.runs) == {"last": f"{until}|"}


def test_arguments_of_tasks_that_never_came_are_dropped_by_the_next_announcement(server):
    for task, ends in ("b", server.ms + 1), ("a", server.ms):
        server.do("HSET", KEYS.runs, f"last:{task}", f"{ends}|x")
    server.do("HSET", KEYS.runs, "last", f"{server.ms}|")
    announce(server, "c")
    assert {"last:a", "last:b"} < server.fields(KEYS.runs).keys()
    announce(server, "c", 0, "", "y")
    fields = server.fields(KEYS.runs)
    assert ("last:a" in fields, "last:b" in fields, "last" in fields) == (False, True, True)


def test_arguments_are_kept_until_a_day_after_the_run_is_due(server):
    announce(server, "a", 3 * DAY)
    server.advance(10)
    assert announce(server, "b", 3 * DAY, "", "one") == "a"
    assert server.fields(KEYS.runs)["last:a"] == f"{server.ms - 10 + 4 * DAY}|one"
    server.advance(3 * DAY + 1000)
    assert retract(server, "a") == "one"


def test_a_run_that_goes_back_into_the_queue_stays_announced(server):
    announce(server, "a", "100", "3000")
    ends = server.ms + 3000
    assert requeue(server, "b") == requeue(server, "a") == -1
    assert server.fields(KEYS.runs)["terms"] == f"0|{ends}"
    announce(server, "c", "100", "3000")
    server.advance(40)
    assert requeue(server, "a", 6000) == 40
    assert server.fields(KEYS.runs)["queued"] == f"{server.ms + 6000}|a"
    assert server.do("PTTL", KEYS.runs) == 6000
    assert requeue(server, "a", 100) == 40
    assert server.do("PTTL", KEYS.runs) == 6000


def test_a_run_that_goes_back_into_the_queue_keeps_its_arguments(server):
    announce(server, "a")
    announce(server, "b", 0, "", "one")
    retract(server, "a", 10)
    assert requeue(server, "a", 7 * DAY) == -1
    assert server.fields(KEYS.runs)["last:a"] == f"{server.ms + 8 * DAY}|one"
    assert server.fields(KEYS.runs)["last"] == f"{server.ms + 8 * DAY}|"
    assert requeue(server, "b", 10) == -1
    assert "last:b" not in server.fields(KEYS.runs)


def test_what_a_newer_version_has_added_to_an_announcement_is_passed_over(server):
    announce(server, "a")
    server.do("HSET", KEYS.runs, "terms", f"{server.ms}|{server.ms + 900}|more")
    assert announce(server, "b", 0, 5000) == ""  # It may be dropped later than a.
    assert server.fields(KEYS.runs)["queued"].endswith("|b")
    server.do("HSET", KEYS.runs, "terms", f"{server.ms}|{server.ms + 900}|more")
    assert announce(server, "c", 0, 900) == "b"
    requeue(server, "b")
    assert server.fields(KEYS.runs)["terms"] == f"0|{server.ms + 900}"


def test_of_what_a_newer_version_announces_in_another_way_one_call_more_is_published(server):
    announce(server, "a", 0, "", "its")
    server.do("HSET", KEYS.runs, "terms", "x", "last", "y")
    assert announce(server, "b", 0, "", "own") == ""
    server.do("HSET", KEYS.runs, "terms", "x", "last", "y", "queued", "z")
    assert announce(server, "c", 0, "", "own") == ""
    assert announce(server, "d", 0, "", "own") == "c"


def test_a_call_stands_for_none_that_goes_another_way(server):
    assert announce_of(server, "a", "bill", "slow") == ""
    assert announce_of(server, "b", "bill", "fast") == ""
    assert announce_of(server, "c", "bill", "fast") == "b"
    assert requeue(server, "b") == 0
    assert announce_of(server, "d", "bill", "fast") == "b"
    assert announce_of(server, "e", "bill", "slow") == ""
    server.do("HSET", KEYS.runs, "queued", f"{server.ms + 10}|f")  # By an older version.
    assert announce_of(server, "g", "bill", "fast") == "f"
    retract(server, "f")
    assert not {"way", "task"} & server.fields(KEYS.runs).keys()


def test_locks_with_an_announced_call_are_listed_until_it_is_over(server):
    server.do("ZADD", KEYS.calls, server.ms, "over", server.ms + 1, "another")
    announce(server, "a")
    assert server.scores(KEYS.calls) == {"another": server.ms + 1, KEYS.lock: server.ms + 5000}
    assert server.do("PTTL", KEYS.calls) == 5000
    requeue(server, "a", 7000)
    assert server.run(scripts.NAMES, "calls", 0, 9, 0) == [
        2,
        ["another", str(server.ms + 1), KEYS.lock, str(server.ms + 7000)],
    ]
    retract(server, "b", 0)
    assert KEYS.lock in server.scores(KEYS.calls)
    retract(server, "a", 0)
    assert server.scores(KEYS.calls) == {"another": server.ms + 1}


def test_trouble_with_that_list_fails_no_announcement(server):
    server.do("SET", KEYS.calls, "of somebody else")
    assert announce(server, "a") == ""
    assert announce(server, "b") == "a"
    assert requeue(server, "a") == 0
    assert retract(server, "a", 0) == ""


# --- starts that have not ended -------------------------------------------------------------


def count_start(server, who, run, recognised_for=800):
    return server.run(scripts.COUNT_START, lease_id(who), run, recognised_for)


def test_starts_of_the_same_run_that_have_not_ended_are_counted(server):
    assert count_start(server, "a", "task:0.0") == 0
    assert count_start(server, "a", "task:0.0") == 0  # A resend.
    assert count_start(server, "b", "task:0.0") == 1
    assert count_start(server, "c", "task:0.1") == 0  # A retry: the first try has published it.
    assert count_start(server, "d", "other:0.0") == 0
    assert server.scores(KEYS.starts)[lease_id("b") + "task:0.0"] == server.ms
    assert server.do("PTTL", KEYS.starts) == 800
    assert server.run(scripts.UNCOUNT_START, lease_id("a"), "task:0.0") == 1
    assert server.run(scripts.UNCOUNT_START, lease_id("a"), "task:0.0") == 0
    assert count_start(server, "e", "task:0.0") == 1


@pytest.mark.parametrize(("after", "counted"), [(799, 1), (800, 0)])
def test_a_start_counts_for_as_long_as_a_duplicate_is_recognised(server, after, counted):
    count_start(server, "a", "task")
    server.do("PEXPIRE", KEYS.starts, 9000)
    server.advance(after)
    assert count_start(server, "b", "task") == counted


def test_of_starts_no_more_than_a_thousand_are_kept(server):
    for number in range(1000):
        server.do("ZADD", KEYS.starts, number + server.ms - 1000, f"{number}")
    count_start(server, "a", "task", 5000)
    assert server.do("ZCARD", KEYS.starts) == 1000
    assert "0" not in server.scores(KEYS.starts)


# --- what became of runs --------------------------------------------------------------------


def start(server, who, permit=1, *, run="", kept=KEPT):
    named = token(who), lease_id(who)
    rest = TTL, "try", 0, f"0{kept}|{run}", "r", f"by-{who}", bell(who)
    return server.run(scripts.ACQUIRE_MARKED, *named, *rest, permit=permit)


def end(server, who, what, permit=1, *, run="", kept=KEPT):
    ended = {"success": "done", "failure": "failed"}[what]
    args = token(who), lease_id(who), 0, 0, "o", ended, run, 800, kept
    return server.run(scripts.CONCLUDE, *args, permit=permit)


def finish(server, what, *, run="", kept=KEPT):
    """A run begins, and ends."""
    start(server, "a", run=run, kept=kept)
    server.advance(LASTED)
    end(server, "a", what, run=run, kept=kept)


def test_a_run_under_a_permit_begins_and_ends(server):
    start(server, "a", 2)
    noted = {"started#2": f"{server.ms}|0|{lease_id('a')}|by-a"}
    assert server.fields(KEYS.runs) == noted
    assert server.do("PTTL", KEYS.runs) == 9000
    server.advance(10)
    start(server, "a", 2)  # A resend.
    assert server.fields(KEYS.runs) == noted
    end(server, "b", "success", 2)
    assert "started#2" in server.fields(KEYS.runs)
    assert end(server, "a", "success", 2, run="task:0.0") == "released"
    assert server.fields(KEYS.runs) == {"success": f"{server.ms}|10||o"}
    assert server.scores(KEYS.finished) == {"task": server.ms}
    assert server.do("PTTL", KEYS.finished) == 800
    assert server.scores(KEYS.ran) == {KEYS.lock: server.ms}


def test_a_run_that_begins_where_another_has_not_ended_tells_of_that(server):
    start(server, "a", 2)
    first = server.fields(KEYS.runs)["started#2"]
    server.do("DEL", lock_keys("test", "lottery", 2).lock)
    server.advance(10)
    start(server, "b")
    assert "unended" not in server.fields(KEYS.runs)
    start(server, "c", 2)
    assert server.fields(KEYS.runs)["unended"] == first
    assert server.fields(KEYS.runs)["started#2"] == f"{server.ms}|0|{lease_id('c')}|by-c"


def test_a_run_that_has_not_begun_is_forgotten_under_its_permit_alone(server):
    start(server, "a", 2)
    noted = server.fields(KEYS.runs)
    assert server.run(scripts.FORGET_START, lease_id("a")) == 1
    assert server.run(scripts.FORGET_START, lease_id("b"), permit=2) == 1
    assert server.fields(KEYS.runs) == noted
    assert server.run(scripts.FORGET_START, lease_id("a"), permit=2) == 1
    assert server.fields(KEYS.runs) == {}


def finished(server, run):
    """What the server says of it to the same run that comes again."""
    answer = start(server, "d", run=run)
    server.leave("d")
    return answer


def test_a_failure_may_run_again_and_a_retry_has_itself_finished(server):
    finish(server, "failure", run="task:0.0")
    assert server.fields(KEYS.runs) == {"failure": f"{server.ms}|250||o"}
    assert server.scores(KEYS.finished) == {}
    assert server.run(scripts.FINISH, "task:0.0", 800) == 1
    assert server.fields(KEYS.runs).keys() == {"failure"}
    assert server.scores(KEYS.finished) == {"task:0.0": server.ms}
    finish(server, "success")
    assert len(server.scores(KEYS.finished)) == 1
    assert finished(server, "task:0.0") == ["finished", 250]
    assert finished(server, "task:0.1") == str(server.us)


def test_what_has_finished_is_recognised_for_a_while_and_by_so_many_runs(server):
    ends = server.ms + 250
    for name, at in {"gone": ends - 800, "stays": ends - 799}.items():
        server.do("ZADD", KEYS.finished, at, name)
    finish(server, "success", run="task")
    assert server.scores(KEYS.finished).keys() == {"stays", "task"}
    server.advance(7)
    assert finished(server, "task:4.0") == ["finished", 7]
    assert finished(server, "gone") == str(server.us)
    for number in range(100):
        hundred = [f"{number:02}-{i:02}" for i in range(100 if number else 99)]
        server.do("ZADD", KEYS.finished, *(part for one in hundred for part in (server.ms, one)))
    finish(server, "success", run="last")
    assert server.do("ZCARD", KEYS.finished) == 10_000
    assert "task" not in server.scores(KEYS.finished)


def test_skips_are_counted_until_a_success(server):
    def skip(what, why):
        return server.run(scripts.SKIP, what, why, "o", KEPT)

    assert skip("skip", "busy") == 1
    assert skip("skip", "busy") == 2
    assert skip("skip", "duplicate") == 2
    assert server.run(scripts.RUNS)[6] == 2
    assert skip("abandoned", "busy") == 2
    assert server.fields(KEYS.runs)["abandoned"] == f"{server.ms}|0|busy|o"
    finish(server, "failure")
    assert skip("skip", "duplicate") == 2
    finish(server, "success")
    assert skip("skip", "duplicate") == 0
    assert server.fields(KEYS.runs)["skipped"] == f"{server.ms - 500}," * 2
    for _ in range(100):
        server.advance(1)
        skip("skip", "busy")
    times = server.run(scripts.RUNS)[8].split(",")
    assert times == [*(str(server.ms - ago) for ago in range(29, -1, -1)), ""]


def test_all_that_is_known_of_runs_is_told(server):
    assert server.run(scripts.RUNS) == [str(server.ms), "", "", "", "", [], 0, "", "", []]
    finish(server, "success")
    finish(server, "failure")
    ended = [f"{server.ms - ago}|250||o" for ago in (250, 0)]
    start(server, "a", 2)
    start(server, "b")
    server.do("DEL", KEYS.lock)
    start(server, "c")
    server.run(scripts.SKIP, "skip", "busy", "x" * 9000, KEPT)
    server.run(scripts.SKIP, "abandoned", "late", "o", KEPT)
    server.do("HSET", KEYS.runs, "skips", "x")
    head = f"{server.ms}|0|"
    assert server.run(scripts.RUNS) == [
        str(server.ms),
        *ended,
        f"{head}busy|{'x' * 9000}"[:8192],
        f"{head}{lease_id('b')}|by-b",
        [f"#2|{head}{lease_id('a')}|by-a", f"|{head}{lease_id('c')}|by-c"],
        0,
        f"{head}late|o",
        f"{server.ms},",
        [f"|1|{server.ms},"],
    ]


# --- how long records are kept --------------------------------------------------------------


def other(number, key):
    """A key of another lock."""
    return f"test:{{other-{number}}}:{key}"


def locks_before(server, *ages):
    """Locks that tasks have run under, so many ms ago, with all their records."""
    for number, age in enumerate(ages):
        server.do("ZADD", KEYS.ran, server.ms - age, other(number, "lock"))
        server.do("RPUSH", other(number, "past"), "x")
        server.do("HSET", other(number, "runs"), "success", "1|2||o")


def recorded(server):
    """Which of these still have records, and stand in the index."""
    index = server.scores(KEYS.ran)
    found = [number for number in range(20) if server.do("EXISTS", other(number, "runs"))]
    assert found == [number for number in range(20) if other(number, "lock") in index]
    assert found == [number for number in range(20) if server.do("EXISTS", other(number, "past"))]
    return found


@pytest.mark.parametrize(
    ("ages", "kept", "stay"),
    [
        ((9001, 9000, 8999), "9000/99", [2]),  # Too old.
        ((5, 4, 3), "9000/4", [0, 1, 2]),
        ((5, 4, 3), "9000/3", [1, 2]),  # Too many.
        (range(20, 8, -1), "9000/1", [8, 9, 10, 11]),  # No more than eight at once.
    ],
)
def test_a_lock_that_is_new_drops_records_that_are_too_old_or_too_many(server, ages, kept, stay):
    locks_before(server, *ages)
    for it_keeps in (kept, "9000/1"):  # It is new no more.
        finish(server, "success", kept=it_keeps)
        assert recorded(server) == stay
    assert server.scores(KEYS.ran)[KEYS.lock] == server.ms


def test_who_waits_stays_when_records_are_dropped(server):
    locks_before(server, 9000)
    runs = other(0, "runs")
    waits, lasts = server.ms + 300, server.ms + 500
    stays = {
        "queued": f"{waits}|a",
        "asked": "1",
        "terms": "2|",
        "last": f"{lasts}|",
        "last:a": f"{lasts}|x",
    }
    for field, entry in {**stays, "skips": "3", "last:b": f"{server.ms}|y"}.items():
        server.do("HSET", runs, field, entry)
    finish(server, "success")
    assert server.fields(runs) == stays
    assert server.do("PTTL", runs) == 500 - LASTED


def test_of_a_call_that_waits_no_more_nothing_stays(server):
    locks_before(server, 9000)
    server.do("HSET", other(0, "runs"), "queued", f"{server.ms}|a")
    server.do("ZADD", KEYS.ran, 1, "of somebody else")
    finish(server, "success")
    assert server.do("EXISTS", other(0, "runs")) == 0
    assert server.scores(KEYS.ran).keys() == {KEYS.lock}


def test_records_are_kept_as_long_as_a_call_waits(server):
    announce(server, "a", ttl=20_000)
    finish(server, "failure")
    assert server.do("PTTL", KEYS.runs) == 20_000 - LASTED
    announce(server, "b", 0, "", "x")
    finish(server, "failure")
    assert server.do("PTTL", KEYS.runs) == 20_000 + DAY - 2 * LASTED


# --- the line of deferred runs --------------------------------------------------------------


def stand(server, task, *, ticket=0, held_for=0, left=10000, state="held", spacing=0, permits=1):
    """Returns its ticket, how many are before it, and the ms until its turn."""
    args = task, ticket, server.ms - held_for, left, state, spacing, permits
    found, before, turn = server.run(scripts.STAND_IN_LINE, *args)
    return int(found), before, int(turn)


def test_a_deferred_run_has_a_place_and_keeps_it(server):
    first = server.us
    assert stand(server, "a") == (first, 0, 500)
    assert server.scores(KEYS.line) == {"a": first}
    assert server.scores(KEYS.due) == {"a": server.ms + 500 + 3000}
    assert server.do("PTTL", KEYS.line) == server.do("PTTL", KEYS.due) == 66_000
    assert stand(server, "b") == (first + 1, 1, 1000)
    server.advance(10)
    assert stand(server, "a")[:2] == (first, 0)
    assert stand(server, "b", ticket=first + 1)[:2] == (first + 1, 1)
    assert stand(server, "c")[:2] == (server.us, 2)
    assert server.run(scripts.LEAVE_LINE, "b") == 1
    assert server.run(scripts.LEAVE_LINE, "b") == 0
    assert server.scores(KEYS.line).keys() == server.scores(KEYS.due).keys() == {"a", "c"}
    last = server.us
    server.set_back(5)
    assert stand(server, "d")[0] == last + 1  # Behind, although the clock was set back.


@pytest.mark.parametrize(("after", "before"), [(3499, 1), (3500, 0)])
def test_a_run_that_does_not_come_back_is_given_up(server, after, before):
    stand(server, "a")
    server.advance(after)
    assert stand(server, "b")[1] == before
    assert ("a" in server.scores(KEYS.due)) is bool(before)


def test_no_more_than_a_hundred_are_given_up_at_once(server):
    for number in range(101):
        server.do("ZADD", KEYS.line, number, f"{number}")
        server.do("ZADD", KEYS.due, number, f"{number}")
    assert stand(server, "a")[1] == 1


def test_a_run_stays_away_for_a_minute_at_most(server):
    assert stand(server, "a", left=999_999, state="cooling")[2] == 999_999
    assert server.scores(KEYS.due) == {"a": server.ms + 63_000}


@pytest.mark.parametrize(
    ("lease", "turn"),
    [
        ({"left": 300}, 300),
        ({"left": 9000, "held_for": 100}, 400),
        ({"left": 9000, "held_for": 2000}, 200),
        ({"left": 9000, "spacing": 4000}, 4000),
        ({"left": 9000, "state": "cooling"}, 9000),
        ({"left": 9000, "spacing": 4000, "permits": 4}, 1000),
        ({"left": 700, "spacing": 4000, "permits": 4}, 700),
        ({"left": 9000, "spacing": 4000, "permits": 4, "state": "cooling"}, 9000),
        ({"left": 9000, "held_for": -50}, 500),
    ],
)
def test_a_turn_comes_when_the_lease_that_is_in_its_way_may_have_ended(server, lease, turn):
    assert stand(server, "a", **lease)[2] == turn


@pytest.mark.parametrize(
    ("spacing", "each"), [(600, 600), (1000, 1000), (4000, 1000), (30_000, 3000)]
)
def test_the_next_ones_come_back_in_short_intervals(server, spacing, each):
    for number, task in enumerate("abc"):
        turn = stand(server, task, left=100, state="cooling", spacing=spacing)[2]
        assert turn == 100 + number * each


def ended(server, what, lasted):
    server.do("HSET", KEYS.runs, what, f"{server.ms}|{lasted}||o")


def test_runs_are_expected_to_last_as_the_last_ones_did(server):
    ended(server, "success", 2000)
    assert stand(server, "a")[2] == 2000
    assert server.fields(KEYS.runs)["pace"] == f"{server.ms}|2000"
    server.advance(5)
    assert stand(server, "a")[2] == 2000
    ended(server, "failure", 4000)
    assert stand(server, "a")[2] == 2500
    assert server.fields(KEYS.runs)["pace"] == f"{server.ms}|2500"
    server.advance(5)
    assert stand(server, "a")[2] == 2500  # A run counts once.
    ended(server, "success", 2500)
    assert stand(server, "a")[2] == 2500
    assert server.fields(KEYS.runs)["pace"] == f"{server.ms}|2500"
    ended(server, "failure", 9000)  # In the same ms, the success has been counted.
    assert stand(server, "a")[2] == 2500
    server.advance(5)
    ended(server, "success", 2500)
    ended(server, "failure", 9000)
    assert stand(server, "a")[2] == 2500


# --- calls that have no lease ---------------------------------------------------------------


def calls(server, task="", most=2):
    """What is told of them, without the time and the name of the task."""
    now, *told, queued_task = server.run(scripts.CALLS, task, most)
    assert now == str(server.ms)
    assert queued_task == server.fields(KEYS.runs).get("task", "")
    return list(told)


def test_a_call_is_known_by_where_it_waits_or_how_it_ended(server):
    assert calls(server) == calls(server, "a") == ["", "", "", "", []]
    announce(server, "a", 7, "", "", "bill")
    assert calls(server) == [f"{server.ms + 5000}|a", str(server.ms + 7), "", "", []]
    server.do("DEL", KEYS.runs)
    server.do("SET", KEYS.done, "x" * 9000, "PX", 500)
    assert calls(server) == ["", "", f"{server.ms + 500}|{'x' * 8192}", "", []]
    server.do("DEL", KEYS.done)
    finish(server, "success", run="a/:0.0")
    assert calls(server, "a") == ["", "", "", str(server.ms), []]
    assert calls(server) == calls(server, "b") == ["", "", "", "", []]


def test_of_the_line_the_first_calls_are_told_or_the_one_that_is_meant(server):
    ticket = server.us
    line = []
    for before, task in enumerate("abc"):
        stand(server, task)
        due = int(server.scores(KEYS.due)[task])
        line.append([str(ticket + before), task, str(due), before])
    assert calls(server)[-1] == line[:2]
    assert calls(server, most=9)[-1] == line
    assert calls(server, "b")[-1] == [line[1]]
    server.do("ZREM", KEYS.line, "a")
    server.do("ZREM", KEYS.due, "c")
    for gone in "acx":
        assert calls(server, gone)[-1] == []
