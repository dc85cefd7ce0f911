"""How the answers of three servers become one: what each of them says is fed in, without I/O."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from django_redislock.backends.quorum.servers import Fences
from django_redislock.backends.quorum.voting import NoMajority, Voting
from django_redislock.backends.redis.calling import Caller
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.steps import Call, NotDone, Refused, Trouble, Unanswered

TOKEN = "t" * 32
LEASE = b"t" * 32 + b"hr000000123456789abcdef|7|0|1|0||owner"
BUSY = [b"busy", 900, LEASE, 7000]
SILENT = Unanswered("silent", 0.0, 0.0)
UNREACHED = NotDone("unreachable", 0.0, 0.0)
FORBIDDEN = Refused("NOPERM")
NOSCRIPT = ReplyError("NOSCRIPT No matching script")


class Named(NamedTuple):
    name: str


SERVERS = [Named(letter) for letter in "abcde"]


def voting(servers=3):
    """The votes of one flow, whose fences need no time of the servers."""
    fences = Fences("prefix")
    fences.question()
    return Voting(Caller("default", "prefix", "process"), SERVERS[:servers], fences)


ASKED = (TOKEN, "id", 30000, "queue", "0", "", "r", b"owner")


def acquire():
    return Call(scripts.ACQUIRE, "lottery", ASKED, 1.0)


def acquire_permit():
    args = (*ASKED, 2)
    return Call(scripts.ACQUIRE_PERMIT, "lottery", args, 1.0)


def call(script, *args):
    return Call(script, "lottery", args, 1.0)


def look(id, left, fence=7, *, by=b"t", owner=b"owner"):  # noqa: A002
    """What a server says of a lock that it keeps; of one that it does not, left is -2."""
    value = b"" if left == -2 else by * 32 + b"hr00000" + id + b"|%d|0|1|0||%b" % (fence, owner)
    return [value, left, 0, b"1000", b"" if left == -2 else id, b""]


class Poll:
    """A vote that goes on, and what it has asked."""

    def __init__(self, vote):
        self._vote = vote
        self.value = None
        self.question = next(vote)

    def hears(self, *answers):
        """Let the servers answer what they are asked: each with one reply, or with trouble.

        A tuple has the replies to several scripts.
        """
        said = {
            server: answer
            if isinstance(answer, Trouble)
            else [*answer]
            if isinstance(answer, tuple)
            else [answer]
            for server, answer in zip(self.question.among, answers, strict=True)
        }
        try:
            self.question = self._vote.send(said)
        except StopIteration as end:
            self.question, self.value = None, end.value
        return self

    def asks(self, script):
        """The servers that are asked to run that script."""
        assert self.question.scripts == {script}
        return self.asked

    @property
    def asked(self):
        """The servers that are asked something."""
        return "".join(server.name for server in self.question.among)


def decided(asked, said):
    """Whether what some servers have said is enough."""
    question = Poll(voting().answer(asked)).question
    assert question.is_enough is not None
    return question.is_enough(
        {SERVERS[s]: one if isinstance(one, Trouble) else [one] for s, one in said.items()}
    )


# --- acquire -------------------------------------------------------------------------------------


@pytest.mark.parametrize("third", [b"7", BUSY, SILENT, UNREACHED, FORBIDDEN])
def test_two_of_three_grant_a_lock(third):
    assert Poll(voting().answer(acquire())).hears(b"7", b"7", third).value == b"7"


def test_the_greatest_fence_is_given_out_when_a_majority_knows_it():
    poll = Poll(voting().answer(acquire())).hears(b"7", b"9", b"8")
    assert poll.asked == "ac"
    assert all(word in poll.question.commands[0] for word in (b"ZADD", b"GT", b"\r\n9\r\n"))
    assert poll.hears(SILENT, 0).value == b"9"


def test_a_fence_that_too_few_know_grants_nothing():
    poll = Poll(voting().answer(acquire())).hears(b"7", b"9", UNREACHED)
    with pytest.raises(NoMajority, match="1 of 3 servers noted the fence, and 2 are needed"):
        poll.hears(SILENT)


def test_a_fence_that_a_majority_has_given_out_is_not_noted_again():
    assert Poll(voting().answer(acquire())).hears(b"9", b"9", b"8").value == b"9"


def test_what_a_minority_has_granted_is_given_back_before_the_lock_counts_as_busy():
    poll = Poll(voting().answer(acquire())).hears(BUSY, b"7", BUSY)
    assert poll.asks(scripts.LEAVE) == "b"
    assert poll.hears(1).value == BUSY


def test_a_server_that_may_have_granted_it_is_told_too_and_one_that_was_not_asked_is_not():
    poll = Poll(voting().answer(acquire())).hears(BUSY, SILENT, BUSY)
    assert poll.asks(scripts.LEAVE) == "b"
    assert Poll(voting().answer(acquire())).hears(BUSY, UNREACHED, BUSY).value == BUSY


@pytest.mark.proves("R4")
def test_a_server_that_did_not_answer_the_undo_does_not_count_for_that_token():
    votes = voting()
    Poll(votes.answer(acquire())).hears(BUSY, SILENT, BUSY).hears(SILENT)
    poll = Poll(votes.answer(acquire())).hears(BUSY, b"7", b"7")
    assert poll.asks(scripts.LEAVE) == "bc"
    poll.hears(SILENT, SILENT)
    with pytest.raises(NoMajority, match="b: may still undo what it grants") as raised:
        Poll(votes.answer(acquire())).hears(b"7", b"7", b"7")
    assert isinstance(raised.value.as_trouble(0.0), Unanswered)
    # It counts for any other token.
    assert Poll(voting().answer(acquire())).hears(BUSY, b"7", b"7").value == b"7"


def test_a_grant_that_does_not_count_does_not_end_the_round_before_one_that_does():
    votes = voting()
    Poll(votes.answer(acquire())).hears(BUSY, BUSY, SILENT).hears(SILENT)
    question = Poll(votes.answer(acquire())).question
    assert question.is_enough is not None
    a, b, c = SERVERS[:3]
    assert not question.is_enough({a: [b"7"], c: [b"7"]})
    assert question.is_enough({a: [b"7"], b: [b"7"]})


@pytest.mark.parametrize(
    ("answers", "is_transient"),
    [
        ((SILENT, UNREACHED, b"7"), True),
        ((SILENT, UNREACHED, BUSY), True),
        ((SILENT, FORBIDDEN, b"7"), True),
        ((FORBIDDEN, FORBIDDEN, BUSY), False),
    ],
)
def test_without_a_majority_of_answers_the_flow_decides(answers, is_transient):
    with pytest.raises(NoMajority) as raised:
        Poll(voting().answer(acquire())).hears(*answers)
    assert isinstance(raised.value.as_trouble(0.0), Unanswered if is_transient else Refused)
    assert "1 of 3 servers answered, and 2 are needed (a: " in raised.value.as_trouble(0.0).problem


@pytest.mark.proves("R4")
@pytest.mark.parametrize("third", [b"7", SILENT])
def test_what_a_minority_may_have_granted_is_given_back_if_a_majority_refuses(third):
    # A flow that is refused tries no more, and has nothing to undo if it was its first try.
    poll = Poll(voting().answer(acquire())).hears(FORBIDDEN, FORBIDDEN, third)
    assert poll.asked == "c"
    with pytest.raises(NoMajority) as raised:
        poll.hears(1)
    assert isinstance(raised.value.as_trouble(0.0), Refused)


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((UNREACHED, UNREACHED, UNREACHED), NotDone),
        ((UNREACHED, UNREACHED, SILENT), Unanswered),
        ((UNREACHED, UNREACHED, b"released"), Unanswered),
    ],
)
def test_what_any_server_may_have_done_may_be_done(answers, kind):
    with pytest.raises(NoMajority) as raised:
        Poll(voting().answer(call(scripts.RELEASE, TOKEN))).hears(*answers)
    assert type(raised.value.as_trouble(0.0)) is kind


def test_a_lock_is_free_when_as_many_servers_are_as_a_majority_needs():
    """Who has it, and since when, is told by one server, whose clock need not be the others'."""
    mine = [b"busy", 100, b"m" + LEASE[1:], 3000]
    answers = [b"busy", 900, LEASE, 7000], mine, [b"busy", 500, LEASE, 5000]
    assert Poll(voting().answer(acquire())).hears(*answers).value == [b"busy", 500, LEASE, 7000]


def test_a_vote_is_split_if_nobody_may_have_a_majority():
    mine, third = ([b"busy", 100, by + LEASE[1:], 3000] for by in (b"m", b"n"))
    split = [b"split", *BUSY[1:]]
    poll = Poll(voting().answer(acquire())).hears(BUSY, mine, b"7")
    assert poll.hears(1).value[:2] == [b"split", 100]
    poll = Poll(voting().answer(acquire())).hears(BUSY, UNREACHED, b"7")
    assert poll.hears(1).value == split
    poll = Poll(voting(5).answer(acquire())).hears(BUSY, mine, third, UNREACHED, BUSY)
    assert poll.value[0] == b"split"
    poll = Poll(voting(5).answer(acquire())).hears(BUSY, BUSY, mine, UNREACHED, BUSY)
    assert poll.value[0] == b"busy"


def test_a_key_without_expiry_on_a_minority_hinders_nobody():
    assert Poll(voting().answer(acquire())).hears([b"endless"], b"7", b"7").value == b"7"
    poll = Poll(voting().answer(acquire())).hears([b"endless"], [b"endless"], b"7").hears(1)
    assert poll.value == [b"endless"]


def test_nobody_queues_up():
    question = Poll(voting().answer(acquire())).question
    assert b"queue\r\n" not in question.commands[-1].partition(b"owner")[0][-200:]
    assert b"$3\r\ntry\r\n" in question.commands[-1]


# --- an acquire of any permit ---------------------------------------------------------------------


def permits(first, second):
    """What each of three servers says of two permits."""
    return [(first, second)] * 3


def taken(left=900, by=b"o"):
    return look(b"a" * 16, left, by=by)


PAUSE = [b"hold" + taken()[0][4:], *taken()[1:]]
NO_LEASE = look(b"", -2)


def test_the_refusal_is_that_of_the_permit_that_is_free_first():
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(taken(), taken(500)))
    assert poll.value[:2] == [b"busy", 500]


def test_a_vote_for_a_permit_is_split_though_the_others_are_taken():
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(taken(500), NO_LEASE))
    poll = poll.hears(BUSY, [b"busy", 900, b"m" + LEASE[1:], 7000], b"7")
    assert poll.hears(1).value[:2] == [b"split", 900]


@pytest.mark.proves("R4")
def test_a_permit_that_a_try_may_have_got_is_given_back_if_a_pause_keeps_all_others():
    votes = voting()
    poll = Poll(votes.answer(acquire_permit())).hears(*permits(taken(), NO_LEASE))
    with pytest.raises(NoMajority):
        poll.hears(b"7", SILENT, SILENT)
    poll = Poll(votes.answer(acquire_permit())).hears(*permits(PAUSE, taken(by=b"t")))
    assert poll.asks(scripts.LEAVE) == "abc"
    assert b":lock#2\r\n" in poll.question.commands[0]
    assert poll.hears(1, 1, 0).value[:2] == [b"busy", 900]


@pytest.mark.proves("R1")
def test_a_permit_is_given_back_if_a_pause_came_between_look_and_grant():
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(taken(), NO_LEASE))
    assert poll.hears(b"7", b"7", b"7").asks(scripts.LOOK) == "abc"
    assert poll.hears(PAUSE, PAUSE, NO_LEASE).asks(scripts.LEAVE) == "abc"
    assert b":lock#2\r\n" in poll.question.commands[0]
    assert poll.hears(1, 1, 1).value[:2] == [b"busy", 900]


@pytest.mark.proves("R4")
@pytest.mark.parametrize("trouble", [UNREACHED, FORBIDDEN])
def test_a_permit_whose_second_look_fails_is_asked_for_again_or_undone(trouble):
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(taken(), NO_LEASE))
    poll = poll.hears(b"7", b"7", b"7")
    with pytest.raises(NoMajority) as caught:
        poll.hears(trouble, trouble, trouble)
    answered = caught.value.as_trouble(0.0)
    assert isinstance(answered, Unanswered)
    assert not isinstance(answered, NotDone)


@pytest.mark.proves("R1")
def test_after_a_grant_of_a_permit_only_the_one_that_a_pause_has_is_looked_at():
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(NO_LEASE, taken()))
    assert poll.hears(b"7", b"7", b"7").value == b"7 1"
    poll = Poll(voting().answer(acquire_permit())).hears(*permits(taken(), NO_LEASE))
    assert poll.hears(b"7", b"7", b"7").asks(scripts.LOOK) == "abc"
    assert poll.hears(taken(), taken(), taken()).value == b"7 2"


# --- when an answer is enough --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "is_enough"),
    [
        ({0: b"7"}, False),
        ({0: b"7", 2: b"9"}, True),
        ({0: b"7", 1: BUSY}, False),
        ({0: BUSY, 1: BUSY}, True),
        ({0: SILENT, 1: SILENT}, False),  # The last one is told to give back what it grants.
        ({0: b"7", 1: NOSCRIPT}, False),
    ],
)
def test_an_acquire_is_decided_when_a_majority_agrees(said, is_enough):
    assert decided(acquire(), said) is is_enough


@pytest.mark.parametrize(
    ("said", "is_enough"),
    [
        ({0: b"renewed"}, False),
        ({0: b"renewed", 1: b"gone"}, False),
        ({0: b"gone", 1: SILENT, 2: b"gone"}, True),
        ({0: b"renewed", 1: b"renewed"}, True),
    ],
)
def test_a_renewal_is_decided_when_a_majority_says_the_same(said, is_enough):
    assert decided(call(scripts.RENEW), said) is is_enough


# --- other scripts -------------------------------------------------------------------------------


def merged(script, *answers):
    """What the answers of the servers come to."""
    return Poll(voting(len(answers)).answer(call(script, TOKEN))).hears(*answers).value


@pytest.mark.parametrize(
    ("answers", "word"),
    [
        ((b"renewed", b"renewed", b"gone"), b"renewed"),
        ((b"renewed", b"renewed", SILENT), b"renewed"),
        ((b"gone", b"taken", b"taken"), b"taken"),
        ((b"gone", b"forced", b"gone"), b"forced"),
        ((b"gone", b"gone", SILENT), b"gone"),
    ],
)
def test_a_lease_is_what_a_majority_says_of_it(answers, word):
    assert merged(scripts.RENEW, *answers) == word


def test_a_lease_is_not_lost_while_those_who_are_silent_may_know_it():
    with pytest.raises(NoMajority):
        merged(scripts.RENEW, b"renewed", b"gone", SILENT)


def test_a_script_that_a_server_lacks_is_sent_to_it_in_full():
    poll = Poll(voting().answer(call(scripts.RENEW, TOKEN, 1000, "r00001")))
    poll.hears(b"renewed", NOSCRIPT, NOSCRIPT)
    assert poll.asked == "bc"
    assert b"EVAL\r\n" in poll.question.commands[0]
    assert poll.hears(b"renewed", SILENT).value == b"renewed"


A, B = b"a" * 16, b"b" * 16


def test_a_look_sees_the_lease_of_the_majority_for_as_long_as_that_has_it():
    seen = merged(scripts.LOOK, look(A, 300, 7), look(A, 900, 9), look(A, 500, 8))
    assert (seen[0].split(b"|")[1], seen[1], seen[4], seen[-1]) == (b"9", 500, A, "3 of 3")
    seen = merged(scripts.LOOK, look(A, 300), look(B, 900), look(A, 500))
    assert (seen[1], seen[4], seen[-1]) == (300, A, "2 of 3")
    seen = merged(scripts.LOOK, look(A, -1), look(B, -2), look(A, 500))
    assert (seen[1], seen[-1]) == (500, "2 of 3")


def test_what_only_a_minority_keeps_is_free_unless_the_silent_may_keep_it_too():
    seen = merged(scripts.LOOK, look(A, 300), look(A, -2), look(B, 900))
    assert (seen[0], seen[1], seen[4]) == (b"", -2, b"")
    seen = merged(scripts.LOOK, look(A, 300), look(A, -2), SILENT)
    assert (seen[4], seen[-1]) == (A, "1 of 3")


def test_a_release_by_force_is_one_of_a_lease_that_a_look_would_have_shown():
    released, gone, taken = [b"released", LEASE], [b"gone", b""], [b"taken", LEASE]
    assert merged(scripts.FORCE_RELEASE, gone, released, released) == released
    assert merged(scripts.FORCE_RELEASE, gone, released, SILENT) == released
    assert merged(scripts.FORCE_RELEASE, gone, taken, taken) == taken
    # A server that is slow to hear of the holder's own release has the rest of its lease.
    assert merged(scripts.FORCE_RELEASE, released, gone, gone) == gone
    assert merged(scripts.FORCE_RELEASE, released, gone, taken) == gone


def test_a_page_of_names_has_all_that_any_server_knows_with_the_greatest_scores():
    first, second = [2, [b"x", b"1", b"y", b"2"]], [2, [b"y", b"3", b"z", b"4"]]
    every = [3, [b"x", b"1", b"y", b"3", b"z", b"4"]]
    assert merged(scripts.NAMES, first, second, [0, []]) == every


def test_the_past_is_that_of_the_server_that_has_noted_the_last_lease():
    past = (
        [b"1", [], [b"id|7|100|200|done|owner"]],
        [b"1", [], []],
        [b"1", [], [b"id|8|150|||owner"]],
    )
    assert merged(scripts.INSPECT, *past) == past[2]
