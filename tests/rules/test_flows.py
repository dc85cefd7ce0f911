"""The rules without a server: what a flow asks for, and what it makes of each answer.

A flow is a generator, so a test is the performer: it looks at the step and says what happened.

    stage = Stage(flows.acquire(wanted(wait=0), now=0.0))
    assert stage.step.script is scripts.ACQUIRE
    stage.answers(b"7")
    assert stage.result.fence == 7
"""

import asyncio
import math

import pytest

from django_redislock.conf import Conf
from django_redislock.exceptions import LockLost, LockMisuse, LockUnavailable
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import (
    CIRCLE_AFTER,
    CONFIRM_WITHIN,
    LONGEST_PAUSE,
    LOOK_EVERY,
    SHORTEST_PAUSE,
    UNDO_WITHIN,
    Busy,
    Done,
    Finished,
    FirstInLine,
    Granted,
    RunMarker,
)
from django_redislock.rules.forms import Attempt, release
from django_redislock.rules.lease_state import Renewal, drift
from django_redislock.rules.options import Options, terms_of
from django_redislock.rules.replies import AcquireArgs
from django_redislock.rules.steps import (
    Answer,
    Bell,
    Call,
    Elsewhere,
    Listen,
    NotDone,
    NotOurs,
    Pause,
    Refused,
    Tell,
    Unanswered,
)
from django_redislock.rules.stored import DoneMarkers, Holding, Owner, rated, read_holding
from tests.support.attempts import attempt
from tests.support.others import release_form

NAME = "lottery"
TOKEN = "0123456789abcdef" * 2
ID = "fedcba9876543210"
OWNER = Owner(host="web-1", pid=7)
TTL = 10.0
OPERATION_TIMEOUT = 2.0
A_RUN = DoneMarkers(run="a-task")
VALUE = b"value"
BUSY = [b"busy", 9000, VALUE, 9000]
SPLIT = [b"split", 9000, VALUE, 9000]
EPOCH = 1_700_000_000  # What the server's clock shows when ours shows 0.

# An interrupt by whatever means: of a task, by Ctrl-C, by the end of the interpreter, by a bug.
interrupted_by = pytest.mark.parametrize(
    "interrupt", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, ValueError]
)


class Stage:
    """Performs a flow by hand, on a clock of its own."""

    def __init__(self, flow):
        self.flow = flow
        self.now = 0.0
        self.step = next(flow)
        self.result = None
        self.ended = False

    def answers(self, value, *, after=0.001, replicas=0):
        """The server answers *after* seconds."""
        assert isinstance(self.step, Call)
        sent = self.now
        self.now += after
        return self._resume(self.flow.send, Answer(value, sent, self.now, replicas))

    def is_silent(self, after=None):
        """The server does not answer; by default, until the flow gives that up."""
        sent = self.now
        self.now += self.step.within if after is None else after
        return self.raises(Unanswered("Timeout reading from socket", sent, self.now))

    def turns_away(self):
        """The server says that it is not the one to ask, such as a replica."""
        return self.raises(NotDone("READONLY", self.now, self.now))

    def refuses(self):
        """The server says no."""
        refused = Refused("NOPERM this user has no permissions")
        refused.__cause__ = OSError("the client's exception")
        return self.raises(refused)

    def rings(self, *words, after=0.0):
        """The bell rings; without words, it does not within the time."""
        assert isinstance(self.step, Listen)
        self.now += after if words else self.step.seconds
        return self._resume(self.flow.send, Bell([str(word) for word in words], self.now))

    def is_told(self):
        """The command is on its way."""
        assert isinstance(self.step, Tell)
        return self._resume(self.flow.send, None)

    def is_looked(self):
        """Nobody waits in a circle."""
        assert isinstance(self.step, Elsewhere)
        self.now += 0.1
        return self._resume(self.flow.send, None)

    def sleeps(self):
        """The pause is over."""
        assert isinstance(self.step, Pause)
        self.now += self.step.seconds
        return self._resume(self.flow.send, self.now)

    def raises(self, error):
        """The step ends with an exception."""
        return self._resume(self.flow.throw, error)

    def _resume(self, how, what):
        assert not self.ended
        try:
            self.step = how(what)
        except StopIteration as end:
            self.step, self.result, self.ended = None, end.value, True
        return self


class Looks:
    """A lookout that finds no circle, each time after a tenth of a second."""

    def __init__(self, again_after=math.inf):
        self.due = CIRCLE_AFTER
        self.tickets = []
        self._again_after = again_after

    def look(self, ticket, now):
        self.tickets.append(ticket)
        self.due = now + self._again_after
        assert (yield Elsewhere(None, None)) is None
        return now + 0.1


def wanted(**fields):
    terms = {"ttl": TTL, "wait": 5.0, "operation_timeout": OPERATION_TIMEOUT}
    return attempt(**{"name": NAME, "token": TOKEN, "id": ID, "owner": OWNER, **terms, **fields})


def acquiring(lookout=None, **fields):
    return Stage(flows.acquire(wanted(**fields), 0.0, lookout=lookout))


def queued(stage, ticket=100, left_ms=60000, newly=1, **kwargs):
    """The server has put us in the queue."""
    us = int((EPOCH + stage.now) * 1e6)
    return stage.answers([b"queued", b"%d" % ticket, left_ms, b"%d" % us, newly], **kwargs)


def rung(stage, granted=0.1, *, after=0.1):
    """The bell tells of a grant at that time of the server."""
    return stage.rings("granted", ID, 7, int((EPOCH + granted) * 1e6), after=after)


def interrupt(*_):
    raise KeyboardInterrupt


def asks(step):
    return isinstance(step, Call) and step.script.name == scripts.ACQUIRE.name


def undoes(step):
    return isinstance(step, Call) and step.script is scripts.LEAVE


def mode_and_ticket(step):
    args = AcquireArgs(*step.args[:8])
    return args.mode, args.ticket


# --- acquire: asking and being answered --------------------------------------------------------


def test_trying_once_asks_with_all_that_the_script_needs_and_for_no_bell():
    call = acquiring(
        wait=0.0, ttl=0.2501, markers=DoneMarkers(True, "a-task", "9000/10"), replicas=2
    ).step
    assert call == Call(
        scripts.ACQUIRE_MARKED,
        NAME,
        (TOKEN, ID, 251, "try", b"0", "19000/10|a-task", "-", OWNER.packed),
        within=0.75 * OPERATION_TIMEOUT,
        listening="",
        replicas=2,
    )


def test_waiting_asks_for_a_place_in_the_queue_and_for_the_bell():
    call = acquiring(wait=0.1).step
    assert mode_and_ticket(call) == ("queue", b"0")
    assert call.listening == ID
    assert not call.shielded


@pytest.mark.proves("R2")
def test_r2_the_deadline_counts_from_when_the_command_was_sent():
    granted = acquiring().answers(b"7", after=1.4).result
    assert granted == Granted(7, TTL - drift(TTL), 0.0, TTL - drift(TTL))


def busy(expires_in, holding=None):
    """What an acquire comes to at 9 by the clock of the server."""
    return Busy(holding or read_holding(VALUE), expires_in, 9.0, NAME)


@pytest.mark.parametrize(
    ("owner", "state", "since", "told"),
    [
        (OWNER, "held", 3.0, ("busy, held by web-1:7", 6.0, None)),
        (OWNER, "cooling", None, ("cooling, taken by web-1:7", None, None)),
        (
            Owner(operator="ada", reason="audit"),
            "held",
            3.0,
            ("paused by ada: audit", 6.0, "audit"),
        ),
        (Owner(operator="ada"), "held", 3.0, ("paused by ada", 6.0, "")),
    ],
)
def test_busy_tells_who_has_the_lock_and_since_when_and_why(owner, state, since, told):
    found = busy(1.5, Holding("", owner, state, since=since))
    assert (str(found), found.ago, found.reason) == told


@pytest.mark.proves("R4")
def test_r4_a_grant_is_taken_over_or_undone():
    taken = []
    stage = Stage(flows.acquire(wanted(), 0.0, taken.append)).answers(b"7")
    assert taken == [stage.result]
    stage = Stage(flows.acquire(wanted(), 0.0, interrupt)).answers(b"7")
    assert undoes(stage.step)
    with pytest.raises(KeyboardInterrupt):
        stage.answers(1)


def test_who_does_not_wait_asks_the_same_but_not_to_be_queued():
    call = acquiring().step
    assert flows.as_try(call) == acquiring(wait=0.0).step._replace(patience=call.patience)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ([b"busy", 1500, VALUE, 9000], busy(1.5)),
        ([b"done", b'5|{"host":"web-1","pid":7}', 3005], Done("web-1:7", 3.0)),
        ([b"done", b"anything|else", 3005], Done("unknown", None)),
    ],
    ids=["busy", "done by us", "done by a stranger"],
)
def test_what_keeps_a_lock_from_us_is_told_as_such(answer, outcome):
    assert acquiring(wait=0.0).answers(answer).result == outcome


@pytest.mark.proves("P8")
def test_p8_a_task_run_that_has_finished_already_is_told_as_such():
    assert acquiring(markers=A_RUN).answers([b"finished", 1500]).result == Finished(1.5)


def test_a_call_that_a_newer_one_has_replaced_is_told_by_whom():
    replaced = [b"replaced", OWNER.packed]
    assert acquiring(replace_within=1.0).answers(replaced).result == flows.Replaced("web-1:7")


EARLY = [b"early", 1500, OWNER.packed, 9000]


def test_a_start_that_is_not_due_is_told_as_such_at_once_if_the_wait_would_be_too_short():
    early = Busy(rated(OWNER.packed), 1.5, 9.0, NAME)
    assert acquiring(wait=0.0).answers(EARLY).result == early
    assert acquiring(wait=1.4).answers(EARLY).result == early
    assert str(early) == "a rate, and its next start is due in 1.5 s"
    error = early.timeout("default")
    assert (early.of_rate, error.rate, error.expires_in) == (True, True, 1.5)


@pytest.mark.parametrize(("due_in", "seconds"), [(1500, 1.5), (4000, LOOK_EVERY)])
def test_a_waiter_for_a_start_that_cannot_be_rung_asks_again_when_it_is_due(due_in, seconds):
    stage = acquiring(wait=5.0).answers([b"early", due_in, *EARLY[2:]])
    assert stage.step == Pause(seconds)


@pytest.mark.parametrize("answer", [[b"endless"], [b"what", b"ever"], 7, None], ids=repr)
def test_an_answer_that_cannot_be_waited_out_is_an_error_at_once(answer):
    with pytest.raises(LockUnavailable, match="'lottery'"):
        acquiring().answers(answer)


def releasing(**fields):
    deadline = fields.setdefault("deadline", 5.0)
    fields = {"ends": deadline, "operation_timeout": OPERATION_TIMEOUT, **fields}
    return Stage(release(release_form(NAME, TOKEN, ID, OWNER, **fields)))


def renewing(renewals=3):
    return Stage(flows.answer_to_renewal(Renewal(NAME, TOKEN, TTL, renewals), OPERATION_TIMEOUT))


def handing_over():
    return Stage(flows.hand_over(OVER))


def looking():
    return Stage(flows.result_of(Call(scripts.LOOK, NAME, (), within=1.0)))


@pytest.mark.proves("R13")
@pytest.mark.parametrize("begin", [acquiring, releasing, renewing, handing_over, looking])
def test_r13_a_refusal_is_an_error_at_once_and_keeps_its_cause(begin):
    with pytest.raises(LockUnavailable, match="NOPERM") as raised:
        begin().refuses()
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("begin", [releasing, renewing, handing_over, looking])
def test_what_is_unanswered_is_resent_once_and_then_unavailable(begin):
    stage = begin()
    first = stage.step
    assert stage.is_silent().step == first
    with pytest.raises(LockUnavailable, match="Timeout"):
        stage.is_silent()


@pytest.mark.proves("R4")
@pytest.mark.parametrize(
    "begin",
    [
        lambda: acquiring(replicas=1),  # It may be the WAIT behind the grant that is refused.
        lambda: acquiring().is_silent(),
        lambda: queued(acquiring()).rings(),
    ],
    ids=["replicas", "silent", "queued"],
)
def test_r4_a_refusal_is_undone_if_something_may_have_been_carried_out(begin):
    stage = begin().refuses()
    assert undoes(stage.step)
    with pytest.raises(LockUnavailable, match="NOPERM"):
        stage.answers(0)


@pytest.mark.proves("P10")
def test_p10_the_acquire_of_a_parent_is_not_undone_by_its_child():
    with pytest.raises(LockUnavailable, match="forked"):
        acquiring().is_silent().raises(NotOurs("it was forked"))


@pytest.mark.parametrize("why", ["forced", "taken", "expired"])
def test_a_lease_that_cannot_be_taken_up_any_more_is_lost_for_that_reason(why):
    with pytest.raises(LockLost, match="baton was taken up before") as raised:
        acquiring(script=scripts.TAKE_UP).answers([b"lost", why.encode()])
    assert raised.value.reason == why


# --- acquire: no answer ---------------------------------------------------------------------


@pytest.mark.proves("R1")
def test_r1_an_unanswered_command_is_resent_with_the_same_token():
    stage = acquiring(wait=0.0)
    first = stage.step
    assert stage.is_silent().step == first
    assert stage.answers(b"7").result.fence == 7


@pytest.mark.proves("R2")
def test_a_resend_counts_its_deadline_from_the_resend():
    stage = acquiring(wait=0.0).is_silent(after=1.0)
    assert stage.answers(b"7").result.deadline == 1.0 + TTL - drift(TTL)


def test_trying_once_resends_once_then_undoes_and_says_unavailable():
    stage = acquiring(wait=0.0).is_silent()
    assert asks(stage.step)
    assert undoes(stage.is_silent().step)
    with pytest.raises(LockUnavailable, match="Timeout"):
        stage.answers(1)
    assert stage.now < 2 * OPERATION_TIMEOUT


@pytest.mark.proves("R4")
@pytest.mark.parametrize(
    "says",
    [BUSY, [b"own", 9000, VALUE, 9000], [b"done", b"9000|web-2:11", 9500], [b"finished", b"500"]],
    ids=lambda says: says[0].decode(),
)
def test_r4_a_try_that_was_not_answered_is_undone_if_a_later_one_is_granted_nothing(says):
    def answered(stage):
        assert asks(stage.step)
        return stage.answers(says)

    outcome = answered(acquiring(wait=0.0)).result
    assert outcome
    undoing = answered(acquiring(wait=0.0).is_silent())
    assert undoes(undoing.step)
    assert undoing.answers(0).result == outcome
    # A connection that was refused has carried nothing, so nothing is to be undone.
    assert answered(acquiring(wait=0.0).turns_away()).result == outcome


@pytest.mark.proves("R5")
@pytest.mark.parametrize("after", [0.0, 0.4, 0.8, 1.2, 1.499])
@pytest.mark.parametrize("silent", [None, 0.01])
@pytest.mark.parametrize("breaks", [False, True])
def test_r5_a_late_answer_before_a_silence_does_not_prolong_a_call(after, silent, breaks):
    stage = queued(acquiring(wait=1.0))
    if breaks:
        stage.is_silent(after=0.999)  # The connection on which it listens.
    else:
        stage.rings("of a newer version", after=0.999)
    queued(stage, after=after)
    if isinstance(stage.step, Listen):
        stage.rings()
    tries = 0
    while asks(stage.step):
        tries += 1
        stage.is_silent(after=silent)
    assert 1 <= tries <= 2
    with pytest.raises(LockUnavailable, match="Timeout"):
        stage.is_silent().is_silent()
    assert stage.now <= 1.0 + 2 * OPERATION_TIMEOUT


@pytest.mark.proves("R5")
@pytest.mark.parametrize("still", [0.01, 0.5, 30.0])
def test_r5_the_time_in_which_a_process_stands_still_takes_no_try_away(still):
    whole = acquiring(wait=0.0).step.within
    stage = acquiring(wait=0.0).is_silent(after=whole + still)
    assert asks(stage.step)
    assert stage.step.within == pytest.approx(whole)
    stage = queued(acquiring(wait=1.0)).rings("of a newer version", after=1.0 + still)
    assert stage.step.within == whole
    assert asks(stage.is_silent(after=0.0).step)
    assert stage.step.within == whole


def test_what_ends_with_its_wait_is_not_tried_a_third_time():
    assert undoes(acquiring(wait=0.0).is_silent(after=0.0).is_silent(after=0.0).step)
    with pytest.raises(LockUnavailable, match="READONLY"):  # And there is nothing to undo.
        acquiring(wait=0.0).turns_away().turns_away()


@pytest.mark.proves("R5")
def test_r5_waiting_resends_after_growing_pauses_until_the_wait_is_over():
    wait, tries, pauses = 20.0, 1, []
    stage = acquiring(wait=wait)
    with pytest.raises(LockUnavailable):  # noqa: PT012
        while True:
            if isinstance(stage.step, Pause):
                pauses.append(stage.step.seconds)
                stage.sleeps()
                continue
            if undoes(stage.step):
                assert wait <= stage.now <= wait + 2 * OPERATION_TIMEOUT
                stage.answers(0)
            tries += 1
            stage.is_silent(after=0.01)
    bounds = [0.02 * 2 ** min(failures, 6) for failures in range(2, len(pauses) + 2)]
    assert all(
        bound / 2 <= pause <= bound for pause, bound in zip(pauses[:-1], bounds, strict=False)
    )
    assert bounds[-1] == 1.28
    assert pauses[-1] <= bounds[-1]  # Cut short by the end of the wait.
    assert tries == pytest.approx(20 / 1.28 + 6, rel=0.5)


@pytest.mark.proves("R5")
@pytest.mark.parametrize("unavailable_after", [0.0, 3.0])
def test_r5_a_server_that_is_silent_for_long_is_unavailable_whatever_the_wait(unavailable_after):
    stage, tries = acquiring(wait=math.inf, unavailable_after=unavailable_after), 0
    queued(stage, after=20.0).rings()  # What counts is the time since the last answer.
    asked = stage.now
    while not undoes(stage.step):
        if isinstance(stage.step, Pause):
            stage.sleeps()
        else:
            tries += 1
            stage.is_silent(after=0.01)
    assert asked + unavailable_after <= stage.now < asked + unavailable_after + 0.1
    assert tries >= 2
    with pytest.raises(LockUnavailable):
        stage.answers(0)


@pytest.mark.proves("R5")
def test_r5_a_server_that_answers_in_between_is_never_unavailable():
    stage = acquiring(wait=math.inf, unavailable_after=3.0)
    for _ in range(10):
        stage.is_silent(after=2.0)
        queued(stage).rings()


def test_an_answer_ends_the_count_of_unanswered_tries():
    stage = acquiring().is_silent()
    queued(stage)
    stage.rings()
    assert asks(stage.step)
    assert asks(stage.is_silent().step)  # Again the first: no pause.
    stage = acquiring().is_silent().answers(BUSY).sleeps()
    assert asks(stage.is_silent().step)


@pytest.mark.proves("P4")
def test_p4_no_answer_at_the_end_of_the_wait_is_never_called_busy():
    stage = queued(acquiring(wait=1.0)).rings()
    assert mode_and_ticket(stage.step)[0] == "last"
    stage.is_silent()
    assert mode_and_ticket(stage.step)[0] == "last"
    assert undoes(stage.is_silent().step)
    with pytest.raises(LockUnavailable):
        stage.answers(0)


# --- acquire: grants that are none ----------------------------------------------------------


no_grant = pytest.mark.parametrize(
    ("fields", "answer", "problem"),
    [
        pytest.param({"operation_timeout": 100.0}, {"after": TTL}, "later than the ttl", id="late"),
        pytest.param({"replicas": 2}, {"replicas": 1}, "1 of the 2 replicas", id="replicas"),
    ],
)


@pytest.mark.proves("R3", "R11")
@no_grant
def test_r3_a_grant_that_is_late_or_on_too_few_replicas_is_undone_and_asked_for_again(
    fields, answer, problem
):
    stage = acquiring(wait=0.0, **fields).answers(b"7", **answer)
    assert stage.step.args == (TOKEN, b"7")  # That grant alone: a late undo must not end the next.
    while undoes(stage.step):
        stage.answers(1)
    assert asks(stage.step)
    assert stage.step.args[0] == TOKEN
    assert stage.answers(b"8", replicas=2).result.fence == 8


@pytest.mark.proves("R3", "R11")
@no_grant
def test_r3_if_all_grants_are_so_the_lock_is_unavailable(fields, answer, problem):
    stage, undone = acquiring(wait=0.0, **fields), 0
    with pytest.raises(LockUnavailable, match=problem) as error:  # noqa: PT012
        while True:
            undone += undoes(stage.step)
            stage.answers(b"7", **(answer if asks(stage.step) else {}))
    assert undone
    assert (error.value.reason == "replicas") is ("replicas" in fields)


@pytest.mark.proves("R4")
@no_grant
@pytest.mark.parametrize("silent", [True, False])
def test_a_token_whose_undo_is_unanswered_is_not_granted_again(fields, answer, problem, silent):
    # That undo may still be on its way, and would end the new lease while it is relied on.
    stage = acquiring(wait=0.0, **fields).answers(b"7", **answer)
    assert undoes(stage.step)
    assert undoes(stage.is_silent().step)
    with pytest.raises(LockUnavailable):
        stage.is_silent() if silent else stage.answers(1)  # The first one may come after it.


def test_an_attempt_knows_who_had_the_lock_when_the_wait_began():
    asked = wanted(wait=60.0)
    stage = Stage(flows.acquire(asked, 0.0, lookout=Looks()))
    stage.answers([b"queued", b"100", 60_000, b"1", 1, b"first"])
    assert asked.blocked_by == b"first"
    stage.rings().is_looked().rings().answers([b"queued", b"100", 60_000, b"1", 0, b"second"])
    assert asked.blocked_by == b"first"


def test_an_attempt_knows_that_too_where_nobody_queues():
    asked = wanted(wait=60.0)
    stage = Stage(flows.acquire(asked, 0.0, lookout=Looks()))
    lease = f"{TOKEN}hr00000{ID}|41|0|10000|0||".encode()
    first, second = (lease + Owner(host).packed for host in ("web-1", "web-2"))
    stage.answers([b"split", 9000, second, 9000]).sleeps()
    assert asked.blocked_by is None  # Nobody has it.
    stage.answers([b"busy", 9000, first, 9000])
    assert asked.blocked_by == Owner("web-1").packed
    stage.sleeps().answers([b"busy", 9000, second, 9000])
    assert asked.blocked_by == Owner("web-1").packed


# --- acquire: waiting in the queue ----------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "wait", "seconds"),
    [
        pytest.param(0.5, 60.0, 0.501, id="until the current lease must have ended"),
        pytest.param(30.0, 60.0, LOOK_EVERY, id="in case the bell is missed"),
        pytest.param(30.0, 0.25, 0.249, id="until the wait is over"),
    ],
)
def test_a_waiter_sleeps_until_the_bell_or_until_it_is_time_to_look(left, wait, seconds):
    stage = queued(acquiring(wait=wait), left_ms=int(left * 1000), after=0.001)
    assert stage.step.id == ID
    assert stage.step.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(lambda stage: stage.rings(), id="nobody rings"),
        pytest.param(lambda stage: stage.is_silent(after=0.5), id="the connection is lost"),
        pytest.param(lambda stage: rung(stage, -0.1), id="rung before our last look"),
        pytest.param(lambda stage: rung(stage, 0.5, after=1.0), id="read half a claim too late"),
        pytest.param(lambda stage: rung(stage, after=3600.0), id="read after a long stop"),
        # What only a newer version can read.
        pytest.param(lambda stage: stage.rings("granted", ID, 7, 8, 1, "more"), id="granted"),
        pytest.param(lambda stage: stage.rings("look", ID), id="look"),
        pytest.param(lambda stage: stage.rings("what", ID), id="what"),
    ],
)
def test_a_waiter_that_is_not_told_of_a_grant_in_time_looks_with_its_ticket(happens):
    assert CONFIRM_WITHIN == 1.0
    stage = happens(queued(acquiring(wait=math.inf), ticket=100, after=0.0))
    assert mode_and_ticket(stage.step) == ("queue", b"100")
    assert stage.step.listening == ID
    assert isinstance(queued(stage, ticket=100, newly=0).step, Listen)


def test_the_place_of_a_waiter_who_comes_back_late_is_kept_once():
    stage = queued(acquiring(wait=60.0), ticket=100)
    assert mode_and_ticket(stage.rings().step)[1] == b"100"
    queued(stage, ticket=100, newly=1)  # It had been passed over, and has its old place again.
    assert mode_and_ticket(stage.rings().step)[1] == b"0"
    queued(stage, ticket=200, newly=1)
    assert mode_and_ticket(stage.rings().step)[1] == b"0"


def test_a_bell_that_says_look_moves_the_next_look():
    stage = queued(acquiring(wait=60.0))
    stage.rings("look", ID, 300, after=0.5)
    assert stage.step == Listen(ID, pytest.approx(0.301))
    assert asks(stage.rings().step)


def test_a_waiter_who_is_asked_whether_it_is_there_sleeps_on():
    stage = queued(acquiring(wait=60.0))
    asleep = stage.step
    stage.rings("alive", ID, after=0.5)
    assert stage.step == asleep._replace(seconds=pytest.approx(asleep.seconds - 0.5))


def test_a_waiter_looks_for_a_circle_after_a_second_and_again_between_its_own_looks():
    lookout = Looks(again_after=2.0)
    stage = acquiring(lookout, wait=60.0)
    queued(stage, after=0.0)
    assert stage.step == Listen(ID, pytest.approx(1.0))
    stage.rings().is_looked()
    assert stage.step == Listen(ID, pytest.approx(0.9))  # Until two seconds are over, as ever.
    queued(stage.rings(), after=0.0)
    assert stage.step == Listen(ID, pytest.approx(1.0))
    stage.rings().is_looked()
    assert lookout.tickets == [b"100", b"100"]


def test_a_wait_that_is_over_is_not_looked_at():
    looks = Looks()
    stage = acquiring(looks, wait=looks.due)
    queued(stage).rings()
    assert stage.now == looks.due
    assert mode_and_ticket(stage.step) == ("last", b"100")
    assert looks.tickets == []


def test_what_rings_while_a_waiter_looks_for_a_circle_is_heard_after_it():
    stage = acquiring(Looks(), wait=1.05)
    queued(stage, after=0.0).rings().is_looked()
    assert stage.step == Listen(ID, pytest.approx(-0.05))
    rung(stage, 1.0, after=0.0)
    assert stage.is_told().result.fence == 7


def test_a_waiter_in_a_circle_leaves_the_queue():
    stage = acquiring(Looks(), wait=60.0)
    queued(stage, after=0.0).rings()
    assert undoes(stage.raises(LockMisuse(NAME, "a circle")).step)
    with pytest.raises(LockMisuse, match="a circle"):
        stage.answers(0)


@pytest.mark.proves("R14")
def test_r14_a_handed_over_lease_is_ours_without_a_round_trip():
    stage = queued(acquiring(wait=60.0), after=0.01)
    rung(stage, 0.5, after=0.6)
    assert stage.step == Tell(scripts.RENEW, NAME, (TOKEN, 10_000, "-00000"))
    granted = stage.is_told().result
    assert granted.fence == 7
    # Granted 0.5 s after the look was sent, at the earliest; ours for the claim time only, until
    # the confirmation is known to have arrived.
    assert granted.at == pytest.approx(0.5)
    assert granted.deadline == pytest.approx(0.5 + CONFIRM_WITHIN - drift(CONFIRM_WITHIN + 0.5))
    assert granted.ends == pytest.approx(0.5 + TTL - drift(TTL + 0.5))


@pytest.mark.parametrize(
    "ring",
    [
        f"granted {{id}} 7 {int((EPOCH + 0.5) * 1e6)}",
        f"granted {{id}} 7 {int((EPOCH - 0.5) * 1e6)}",
        f"granted {ID} 7 {int((EPOCH + 0.5) * 1e6)}",
        "look {id} 300",
        "what {id}",
        "",
    ],
)
@pytest.mark.parametrize("after", [0.5, 1.9])
@pytest.mark.parametrize("options", [Options(), Options(ttl=0.4), Options(wait=1.5)])
def test_a_form_understands_a_ring_as_its_flow_does(options, after, ring):
    form = Attempt(NAME, OWNER, terms_of(options, Conf(alias="default")))
    form.reply = [b"queued", b"100", 60_000, b"%d" % int(EPOCH * 1e6), 1]
    form.now = 0.01
    listens = form.seconds_to_listen()
    granted = form.heard(ring.format(id=form.id).encode() or None, form.now + after)

    flow = flows.acquire(form, form.sent, lookout=Looks())
    next(flow)
    answer, bell = form.answers
    assert flow.send(answer) == Listen(form.id, pytest.approx(listens))
    step = flow.send(bell)
    assert isinstance(step, Tell) is (granted is not None)
    if granted is not None:
        form.granted = granted
        with pytest.raises(StopIteration) as end:
            flow.send(form.answers[2])
        assert end.value.value == granted


def test_a_short_lease_is_claimed_for_its_ttl_only():
    stage = queued(acquiring(ttl=0.4))
    rung(stage)
    assert stage.is_told().result.deadline == pytest.approx(0.1 + 0.4 - drift(0.5))


@pytest.mark.parametrize(("granted", "read"), [(0.0, 0.0), (0.5, 0.4 + CONFIRM_WITHIN / 2)])
def test_a_bell_is_believed_from_the_last_look_on_for_half_a_claim(granted, read):
    stage = queued(acquiring(wait=math.inf), after=0.0)
    rung(stage, granted, after=read)
    assert isinstance(stage.step, Tell)


@pytest.mark.parametrize("fields", [{"replicas": 1}, {"markers": A_RUN}, {}], ids=str)
def test_a_hand_over_that_cannot_be_confirmed_by_telling_is_by_asking(fields):
    stage = rung(queued(acquiring(**fields), after=0.0))
    if not fields:  # Else it needs more than a bell.
        assert isinstance(stage.step, Tell)
        stage.is_silent(after=0.0)  # It cannot be sent.
    assert asks(stage.step)
    granted = stage.answers(b"7", replicas=1).result
    assert granted.ends == granted.deadline


def test_a_wait_that_runs_out_ends_with_a_last_look_that_leaves_the_queue():
    stage = queued(acquiring(wait=1.0)).rings()
    assert stage.now == pytest.approx(1.0)
    assert mode_and_ticket(stage.step) == ("last", b"100")
    assert stage.step.listening == ""
    assert stage.answers([b"busy", 700, VALUE, 9000]).result == busy(0.7)
    assert queued(acquiring(wait=1.0)).rings().answers(b"7").result.fence == 7


@pytest.mark.proves("R5")
def test_r5_a_look_that_is_repeated_after_the_wait_is_the_last_one():
    stage = queued(acquiring(wait=1.0)).rings("look", ID, 1, after=0.9).rings()
    assert mode_and_ticket(stage.step) == ("queue", b"100")
    assert mode_and_ticket(stage.is_silent().step) == ("last", b"100")


def test_a_call_waits_for_a_run_that_was_told_of_more_time_and_two_seconds_longer():
    def looks_until(wait, *told):
        stage = acquiring(wait=wait, replace_within=1.0)
        while mode_and_ticket(stage.step)[0] == "queue":
            us = int((EPOCH + stage.now) * 1e6)
            left = [max(one - round(1000 * stage.now), 0) for one in told]
            stage.answers([b"queued", b"100", 60000, b"%d" % us, 1, b"", *left]).rings()
        return stage.now

    assert looks_until(3.0) == pytest.approx(3.0)
    assert looks_until(3.0, 800) == pytest.approx(3.0)
    assert looks_until(3.0, 9000) == pytest.approx(11.0, abs=0.1)


def test_an_endless_wait_never_looks_for_the_last_time():
    stage = acquiring(wait=math.inf)
    for _ in range(1000):
        queued(stage).rings()
        assert mode_and_ticket(stage.step)[0] == "queue"
    assert stage.now == pytest.approx(1000 * LOOK_EVERY, rel=0.01)


# --- acquire: waiting where there is no queue -----------------------------------------------


def pauses_after(stage, answer, after=0.001):
    """The pauses of an acquire that hears nothing else until it ends."""
    pauses = []
    while not stage.ended:
        if isinstance(stage.step, Pause):
            pauses.append(stage.step.seconds)
            stage.sleeps()
        else:
            stage.answers(answer, after=after)
    return pauses


def assert_growing_and_jittered(pauses):
    """Each pause is of a random length, between half of its bound and all of it."""
    bounds = [min(SHORTEST_PAUSE * 2**n, LONGEST_PAUSE) for n in range(len(pauses))]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert len({pause / bound for pause, bound in zip(pauses, bounds, strict=True)}) > 5


def test_3_without_scripting_a_waiter_polls_with_growing_jittered_bounded_pauses():
    stage = acquiring(wait=1.0)
    *pauses, last = pauses_after(stage, BUSY, after=0.0)
    assert stage.result == busy(9.0)
    assert stage.now == pytest.approx(1.0)
    assert_growing_and_jittered(pauses)
    assert 0 <= last <= LONGEST_PAUSE


def test_after_a_split_vote_it_asks_again_even_without_a_wait():
    for said, wait in ((SPLIT, 0.0), (BUSY, 5.0)):
        stage = acquiring(wait=wait).answers(said).sleeps()
        assert mode_and_ticket(stage.step)[0] == ("queue" if wait else "try")
        assert stage.answers(b"7").result.fence == 7
    # Once somebody has the lock, there is nothing to wait for.
    assert acquiring(wait=0.0).answers(SPLIT).sleeps().answers(BUSY).ended


def test_votes_that_stay_split_end_as_busy_after_a_few_tries_at_random_times():
    stage = acquiring(wait=0.0)
    pauses = pauses_after(stage, SPLIT)
    assert stage.result == busy(9.0)
    assert len(pauses) == 7
    assert_growing_and_jittered(pauses)


def test_the_last_try_after_a_wait_may_be_split_too():
    stage = acquiring(wait=1.0)
    while mode_and_ticket(stage.step)[0] == "queue":
        stage.answers(BUSY, after=0.0).sleeps()
    assert stage.now == pytest.approx(1.0)
    pauses = pauses_after(stage, SPLIT)
    assert len(pauses) == 7
    assert pauses[0] <= SHORTEST_PAUSE
    assert isinstance(stage.result, Busy)


@pytest.mark.proves("R5")
@pytest.mark.parametrize("timeout", [0.01, 0.04, 0.06, OPERATION_TIMEOUT])
def test_all_tries_after_split_votes_end_within_two_operation_timeouts(timeout):
    for seconds in (0.0, timeout / 9, timeout / 4, 0.7 * timeout):
        stage = acquiring(wait=0.0, operation_timeout=timeout)
        pauses_after(stage, SPLIT, after=seconds)
        assert isinstance(stage.result, Busy)
        assert stage.now <= 2 * timeout


def test_after_a_split_vote_that_awaited_a_silent_server_there_is_time_to_ask_again():
    stage = acquiring(wait=0.0).answers(SPLIT, after=0.75 * OPERATION_TIMEOUT).sleeps()
    assert asks(stage.step)
    assert stage.now + stage.step.within == pytest.approx(1.5 * OPERATION_TIMEOUT)


def test_after_a_split_vote_the_next_try_has_half_of_its_time_at_least():
    latest = (1.5 - 0.75 / 2) * OPERATION_TIMEOUT - SHORTEST_PAUSE
    stage = acquiring(wait=0.0).answers(SPLIT, after=latest).sleeps()
    assert asks(stage.step)
    assert stage.step.within >= 0.75 / 2 * OPERATION_TIMEOUT
    assert isinstance(acquiring(wait=0.0).answers(SPLIT, after=latest + 1e-9).result, Busy)


# --- acquire: interrupted -------------------------------------------------------------------


def waiting_for_the_bell():
    return queued(acquiring())


def pausing():
    return acquiring().is_silent().is_silent()


def confirming():
    return rung(queued(acquiring(), after=0.0))


INTERRUPTED = [acquiring, waiting_for_the_bell, pausing, confirming]


@pytest.mark.proves("R4")
@pytest.mark.parametrize("begin", INTERRUPTED)
@interrupted_by
def test_r4_an_interrupted_acquire_undoes_itself_before_the_exception_leaves(begin, interrupt):
    error = interrupt()
    stage = begin().raises(error)
    assert stage.step == Call(
        scripts.LEAVE,
        NAME,
        (TOKEN,),
        within=min(UNDO_WITHIN, OPERATION_TIMEOUT / 2) / 2,
        shielded=True,
    )
    with pytest.raises(interrupt) as raised:
        stage.answers(0)
    assert raised.value is error


@pytest.mark.proves("R4")
@pytest.mark.parametrize(
    # The first try may go to the dead connection that was waited on, so there is a second.
    "ending",
    [lambda stage: stage.is_silent().is_silent(), Stage.refuses],
    ids=["silent", "refused"],
)
@interrupted_by
def test_r4_an_undo_that_fails_does_not_mask_the_interrupt(ending, interrupt):
    error = interrupt()
    stage = acquiring().raises(error)
    with pytest.raises(interrupt) as raised:
        ending(stage)
    assert raised.value is error


@pytest.mark.proves("R4")
def test_r4_an_undo_takes_at_most_a_second():
    stage = acquiring(operation_timeout=60.0).raises(KeyboardInterrupt())
    within = stage.step.within
    assert within + stage.is_silent().step.within == UNDO_WITHIN


def test_an_undo_that_is_interrupted_itself_gives_up():
    with pytest.raises(SystemExit):
        acquiring().raises(KeyboardInterrupt()).raises(SystemExit(1))


@pytest.mark.parametrize("begin", [*INTERRUPTED, releasing])
def test_a_flow_that_nobody_performs_any_more_just_ends(begin):
    begin().flow.close()


@pytest.mark.proves("R4")
def test_r4_an_acquire_of_any_of_two_permits_says_of_how_many_and_so_does_its_undo():
    stage = acquiring(limit=2)
    assert stage.step.script is scripts.ACQUIRE_PERMIT
    assert stage.step.args[-1] == 2
    assert undoes(stage.is_silent().refuses().step)
    assert stage.step.args == (TOKEN, b"", 2)


def test_an_undo_and_a_confirmation_are_of_the_first_permit_unless_that_is_said():
    undo = next(flows.undo(NAME, TOKEN, OPERATION_TIMEOUT))
    assert isinstance(undo, Call)
    assert (undo.args, undo.permit) == ((TOKEN,), 1)
    assert flows.confirmation(NAME, TOKEN, TTL, True).permit == 1


def test_unavailable_is_told_although_the_undo_is_unanswered():
    stage = acquiring(wait=0.0).is_silent().is_silent().is_silent()
    with pytest.raises(LockUnavailable):
        stage.is_silent()


# --- release ------------------------------------------------------------------------------------


def test_a_release_says_whose_lease_it_is_and_what_shall_stay_behind():
    run = RunMarker(id="a-task", recognised_for=60.0)
    call = releasing(min_hold=0.5, once=86_400.0, ended="done", run=run, retention="9000/10").step
    args = (TOKEN, ID, 500, 86_400_000, OWNER.packed, "done", "a-task", 60_000, "9000/10")
    assert call == Call(scripts.CONCLUDE, NAME, args, within=0.75 * OPERATION_TIMEOUT)
    nothing = (TOKEN, ID, 0, 0, OWNER.packed, "failed", "", 0, "")
    assert releasing(ended="failed").step.args == nothing


def test_a_release_that_leaves_nothing_behind_says_no_more_than_whose_lease_it_is():
    assert releasing().step == Call(
        scripts.RELEASE, NAME, (TOKEN,), within=0.75 * OPERATION_TIMEOUT
    )


@pytest.mark.proves("R6")
@pytest.mark.parametrize(
    ("word", "reason", "after_a_resend"),
    [
        (b"released", None, None),
        (b"gone", "expired", None),
        (b"taken", "taken", None),
        (b"forced", "forced", "forced"),
    ],
)
def test_r6_a_release_tells_whether_the_lease_was_still_there(word, reason, after_a_resend):
    assert releasing().answers(word).result == reason
    # A first try that was not answered may have released what is missing now.
    assert releasing().is_silent().answers(word).result == after_a_resend


@pytest.mark.proves("P5", "R6")
@pytest.mark.parametrize(("word", "reason"), [(b"gone", "expired"), (b"taken", "taken")])
def test_r6_a_first_try_that_was_not_carried_out_or_came_too_late_proves_nothing(word, reason):
    assert releasing(deadline=0.0).is_silent().answers(word).result == reason
    assert releasing().turns_away().answers(word).result == reason
    # One that may have been is enough.
    assert releasing(insist=True).turns_away().is_silent().sleeps().answers(word).result is None


@pytest.mark.proves("R6")
def test_r6_it_is_enough_that_one_of_the_tries_was_in_time():
    stage = releasing(deadline=0.1, insist=True).is_silent(after=0.05).is_silent(after=0.01)
    assert isinstance(stage.step, Pause)
    stage.now = 0.2
    assert stage.sleeps().answers(b"gone").result is None


@pytest.mark.proves("R6")
@pytest.mark.parametrize("word", [b"gone", b"taken"])
@pytest.mark.parametrize(
    "left",
    [{"min_hold": 60.0}, {"once": 60.0}, {"ended": "done", "run": RunMarker("a-task", 60.0)}],
)
def test_r6_what_was_to_be_left_behind_is_not_taken_for_noted_once_the_lease_may_have_ended(
    left, word
):
    assert releasing(**left).step.script is scripts.CONCLUDE
    # A lease that is missing while it must still last was ended by one of the tries.
    assert releasing(**left).is_silent().answers(word).result is None
    # Later, it may have ended by itself before any try was carried out.
    with pytest.raises(LockUnavailable, match="before the lease must have ended"):
        releasing(**left).is_silent(after=1.0).answers(word, after=4.0)
    # That the server has noted it is certain, however late it says so.
    assert releasing(**left).is_silent().answers(b"released", after=4.0).result is None


@pytest.mark.proves("R6")
@pytest.mark.parametrize("left", [{}, {"ended": "failed"}])
def test_r6_a_late_answer_to_a_resend_is_a_success_if_nothing_but_a_listing_lacks_it(left):
    assert releasing(**left).is_silent().answers(b"gone", after=4.0).result is None


def test_leaving_a_block_insists_until_the_deadline():
    stage, tries, pauses = releasing(insist=True, deadline=60.0), 0, []
    with pytest.raises(LockUnavailable):  # noqa: PT012
        while True:
            if isinstance(stage.step, Pause):
                assert stage.now < 60.0
                pauses.append(stage.step.seconds)
                stage.sleeps()
            tries += 1
            stage.is_silent(after=0.01)
    assert 60.0 <= stage.now < 60.0 + OPERATION_TIMEOUT
    assert tries > 40
    assert 0 < pauses[0] < 0.1
    assert max(pauses) <= OPERATION_TIMEOUT
    with pytest.raises(LockUnavailable):
        releasing(insist=True, deadline=1.0).is_silent(after=0.5).is_silent(after=0.5)


def test_leaving_a_block_insists_until_the_end_that_a_confirmed_hand_over_has():
    stage = releasing(insist=True, deadline=0.5, ends=5.0).is_silent(after=0.4).is_silent(after=2.0)
    assert isinstance(stage.step, Pause)
    # Its first try was in time, so whatever the server says now, it was released.
    assert stage.sleeps().answers(b"gone").result is None


@pytest.mark.proves("R4")
@pytest.mark.parametrize(
    "ending", [lambda stage: stage.answers(b"released"), Stage.is_silent, Stage.refuses]
)
@interrupted_by
def test_r4_an_interrupted_release_is_sent_once_more_shielded(ending, interrupt):
    stage = releasing()
    args = stage.step.args
    error = interrupt()
    stage.raises(error)
    assert stage.step.shielded
    assert stage.step.args == args
    assert stage.step.within <= UNDO_WITHIN
    with pytest.raises(interrupt) as raised:
        ending(stage)
    assert raised.value is error


def test_a_release_interrupted_in_its_pause_is_sent_once_more_too():
    stage = releasing(insist=True).is_silent().is_silent()
    assert isinstance(stage.step, Pause)
    stage.raises(asyncio.CancelledError())
    assert isinstance(stage.step, Call)
    assert stage.step.shielded
    with pytest.raises(asyncio.CancelledError):
        stage.answers(b"released")


# --- renew --------------------------------------------------------------------------------------


def test_a_renewal_says_for_how_long_and_how_many_there_were():
    assert renewing().step == Call(
        scripts.RENEW, NAME, (TOKEN, 10_000, "-00003"), within=0.75 * OPERATION_TIMEOUT
    )


def test_the_count_of_renewals_keeps_its_five_digits():
    assert renewing(renewals=12_345_678).step.args[2] == "-99999"


def test_r2_a_renewal_is_resent_once_and_counts_from_the_resend():
    answer = renewing().is_silent(after=1.0).answers(b"renewed").result
    assert (answer.value, answer.sent) == (b"renewed", 1.0)


# --- a pause, and a hand-over --------------------------------------------------------------------


def test_a_pause_is_granted_or_first_in_line_until_the_lease_in_its_way_has_ended():
    pausing = flows.pause(wanted(wait=0.0, is_pause=True), now=0.0)
    stage = Stage(pausing)
    assert mode_and_ticket(stage.step)[0] == "pause"
    assert queued(stage, left_ms=1500).result == FirstInLine(1.5)
    pausing = flows.pause(wanted(wait=0.0, is_pause=True), now=0.0)
    assert Stage(pausing).answers(b"7").result.fence == 7


OVER = flows.HandOver(NAME, TOKEN, "n" * 32, ID, 3.0, OWNER, OPERATION_TIMEOUT, retention="1/2/3")


def test_a_lease_is_handed_over_to_the_id_that_is_taken_up():
    stage = handing_over()
    args = TOKEN, "n" * 32, ID, 3000, OWNER.packed, "1/2/3"
    assert stage.step == Call(scripts.HAND_OVER, NAME, args, within=0.75 * OPERATION_TIMEOUT)
    stage.answers(b"given")
    assert (stage.ended, stage.result) == (True, None)


@pytest.mark.parametrize(
    ("answer", "reason"), [(b"gone", "expired"), (b"taken", "taken"), (b"forced", "forced")]
)
def test_a_lease_that_was_lost_cannot_be_handed_over(answer, reason):
    assert handing_over().answers(answer).result == reason


@pytest.mark.proves("R4")
def test_r4_what_a_hand_over_may_have_done_is_undone_for_both_tokens():
    stage = Stage(flows.take_back(OVER))
    for token in (TOKEN, "n" * 32):
        assert undoes(stage.step)
        assert stage.step.args[0] == token
        stage.answers(0)
    assert stage.ended


def test_asking_returns_what_the_script_returned():
    assert looking().answers([b"", -2, 0]).result == [b"", -2, 0]


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.proves("R12")
@pytest.mark.parametrize(
    ("seconds", "ms"), [(0.01, 10), (0.0101, 11), (1.0, 1000), (0.0, 1), (-3.0, 1), (1e-9, 1)]
)
def test_r12_the_server_gets_whole_milliseconds_of_which_none_deletes(seconds, ms):
    assert flows.milliseconds(seconds) == ms
