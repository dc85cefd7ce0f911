"""The states of a lease, without a server and without a clock: what may follow what."""

import math
import threading
from weakref import ref

import pytest

from django_redislock import LockLost, process
from django_redislock.backends.watchdog import GRAIN
from django_redislock.rules.arguments import SHORTEST_TTL
from django_redislock.rules.lease_state import (
    STANDARD_ALARM,
    WORTH_RENEWING,
    Alarm,
    Granted,
    LeaseState,
    drift,
    granted_by,
    will_renew,
)
from django_redislock.rules.steps import Answer
from django_redislock.rules.stored import Owner
from tests.support.attempts import attempt

TTL = 10.0
END = TTL - drift(TTL)


class Holder:
    """Stands for a thread or an asyncio task."""


me = Holder()


def state(of=LeaseState, **fields):
    """Granted at 0 for ten seconds, without a bound; *fields* are attributes of it."""
    name = fields.get("name", "lottery")
    wanted = attempt(name, "0123456789abcdef" * 2, "f" * 16, Owner(), ttl=TTL, renews=True)
    made = of(wanted, Granted(7, END, 0.0, END), ref(me))
    vars(made).update(fields)
    return made


def claimed(**fields):
    """Handed over at 0: one second of it is certain."""
    return state(**{"deadline": 1.0, **fields})


def is_renewed(one, *, sent, word=b"renewed", now=0.0):
    """A renewal that was sent at *sent* is answered."""
    one.answered(one.renewal(sent), Answer(word, sent, now or sent), now or sent)


@pytest.mark.proves("P1")
def test_p1_it_is_held_until_its_deadline_and_not_a_moment_longer():
    one = state()
    assert one.is_held(END - 0.001)
    assert not one.is_held(END)
    assert one.loss_reason(END - 0.001) is None
    assert one.loss_reason(END) == "expired"


def test_it_is_of_the_first_permit_unless_that_is_said():
    assert (state().permit_number, state().renewal(1.0).permit) == (1, 1)
    assert state(permit_number=2).renewal(1.0).permit == 2


@pytest.mark.proves("R2")
def test_r2_a_renewal_counts_from_when_it_was_sent_unless_a_later_one_has_overtaken_it():
    one = state()
    is_renewed(one, sent=3.0, now=5.0)
    assert one.deadline == one.ends == 3.0 + END
    assert one.renewals == 1
    early = one.renewal(4.0)
    is_renewed(one, sent=6.0)
    one.answered(early, Answer(b"renewed", 4.0, 7.0), 7.0)
    assert one.deadline == 6.0 + END


def test_a_hand_over_is_certain_for_its_claim_and_in_doubt_until_its_end():
    one = claimed()
    assert one.is_unconfirmed
    assert one.is_held(0.9)
    assert not one.is_held(1.0)
    assert [one.is_in_doubt(now) for now in (0.9, 1.0, END)] == [False, True, False]
    assert one.may_be_held(END - 0.001)
    assert one.loss_reason(2.0) is None
    assert one.loss_reason(END) == "expired"
    is_renewed(one, sent=4.0)  # An answer confirms it also after its claim.
    assert not one.is_unconfirmed
    assert one.is_held(5.0)


@pytest.mark.parametrize(
    ("word", "now", "reason"),
    [
        (b"gone", 3.0, "expired"),
        (b"taken", 3.0, "taken"),
        (b"forced", 3.0, "forced"),
        pytest.param(b"renewed", END, "expired", marks=pytest.mark.proves("R3")),  # Too late.
    ],
)
def test_r3_what_the_server_says_or_that_it_says_it_too_late_is_why_it_is_lost(word, now, reason):
    one = state()
    with pytest.raises(LockLost, match="'lottery'") as raised:
        is_renewed(one, sent=3.0, word=word, now=now)
    assert raised.value.reason == reason
    assert not one.is_held(END)
    assert one.renewals == 0


def test_lost_stays_lost_whatever_is_answered_later_and_is_not_renewed():
    one = state()
    renewal = one.renewal(3.0)
    assert one.lose("forced")
    with pytest.raises(LockLost) as raised:
        one.answered(renewal, Answer(b"renewed", 3.0, 3.1), 3.1)
    assert raised.value.reason == "forced"
    assert not one.is_held(3.2)
    with pytest.raises(LockLost):
        one.renewal(1.0)
    one.unnest()  # Nor does its end hide that it was lost before.
    assert (one.is_lost, one.loss_reason(1.0)) == (True, "forced")


def test_a_loss_is_told_to_one_caller_only():
    one, told = state(), []
    threads = [threading.Thread(target=lambda: told.append(one.lose("taken"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False] * 7 + [True]


def test_the_answer_to_a_renewal_that_the_release_overtook_is_no_loss():
    one = state()
    one.unnest()
    assert not one.lose("taken")
    assert one.loss_reason(1.0) is None
    assert one.lose("taken", at_release=True)  # But the release's own answer may be one.


@pytest.mark.proves("P5")
def test_r8_a_forked_child_notes_no_loss_of_its_parent(monkeypatch):
    one = state()
    monkeypatch.setattr(process, "current", process.Process())
    assert not one.lose("taken")
    monkeypatch.undo()
    assert one.is_held(1.0)


def test_the_shortest_lease_is_renewed_when_the_watchdog_looks_at_it():
    end = SHORTEST_TTL - drift(SHORTEST_TTL)
    for due in SHORTEST_TTL / 3, SHORTEST_TTL / 3 + GRAIN:  # At the beginning or end of a grain.
        assert due < end
        assert state(ttl=SHORTEST_TTL, deadline=end, ends=end).renewal_due(due) is not None


def test_a_server_that_does_not_answer_makes_it_unreachable_when_it_ends():
    one = state()
    assert one.unanswered()
    assert not one.unanswered()  # Only the first of them is news.
    assert one.is_held(END - 0.001)
    assert one.loss_reason(END) == "unreachable"
    is_renewed(one, sent=5.0)  # One answer makes up for that.
    assert one.loss_reason(5.0 + END) == "expired"


@pytest.mark.parametrize(("hold_until", "at", "ttl"), [(12.0, 3.0, 9.0), (5.0, 4.5, 0.5)])
def test_the_last_renewal_is_shortened_to_end_at_max_hold(hold_until, at, ttl):
    one = state(hold_until=hold_until)
    assert one.renewal(at).ttl == ttl
    assert not one.renewal(at).renews
    with pytest.raises(LockLost):
        one.renewal(hold_until)


@pytest.mark.parametrize(
    ("fields", "at", "is_due"),
    [
        ({"hold_until": TTL}, WORTH_RENEWING / 2, False),  # It would hardly lengthen it.
        ({"deadline": END - WORTH_RENEWING}, 0.0, True),
        ({"deadline": END - WORTH_RENEWING, "ends": END - WORTH_RENEWING}, 0.0, True),
        (
            {"deadline": END - WORTH_RENEWING, "ends": END - WORTH_RENEWING},
            -WORTH_RENEWING / 2,
            False,
        ),
        # A little late for max_hold.
        ({"hold_until": END - 1}, END - 1, False),
        ({"hold_until": END - 1}, END - 0.5, False),
        ({"auto_renew": False}, 3.0, False),
    ],
)
def test_a_renewal_is_due_if_it_lengthens_the_lease_just_enough(fields, at, is_due):
    one = state(**fields)
    assert (one.renewal_due(at) is not None) is is_due
    assert one.is_held(at)


def test_without_renewal_only_a_hand_over_is_confirmed_which_does_not_count():
    late = claimed(auto_renew=False).renewal_due(1.0)  # The server notes until when it lasts now.
    assert (late.renewals, late.renews) == (1, False)
    one = claimed(auto_renew=False)
    confirmation = one.renewal_due(0.5)
    assert (confirmation.renewals, confirmation.renews) == (0, False)
    one.answered(confirmation, Answer(b"renewed", 0.5, 0.6), 0.6)
    assert (one.is_unconfirmed, one.renewals) == (False, 0)


def test_a_longer_ttl_is_that_of_the_lease_from_its_answer_on():
    one = state()
    longer = one.renewal(1.0, 60.0)
    assert one.ttl == TTL
    one.answered(longer, Answer(b"renewed", 1.0, 1.1), 1.1)
    assert one.ttl == one.renewal(2.0).ttl == 60.0


@pytest.mark.proves("P1")
def test_a_renewal_asks_for_the_longest_ttl_that_one_before_it_asked_for_answered_or_not():
    one = state()
    longer = one.renewal(1.0, 60.0)
    is_renewed(one, sent=2.0)  # It has the same count: the server keeps the longer ttl.
    assert one.renewal(3.0).renewals == 2
    assert one.renewal(3.0).ttl == 60.0  # The server goes by this, even if it is the shorter one.
    one.answered(longer, Answer(b"renewed", 1.0, 4.0), 4.0)
    assert one.renewal(5.0, 20.0).ttl == 60.0


@pytest.mark.proves("P1")
def test_a_renewal_that_is_sent_late_outlasts_no_max_hold():
    one = state(hold_until=12.0)
    early = one.renewal(4.0)
    one.answered(early, Answer(b"renewed", 6.0, 6.1), 6.1)  # A second try.
    # A later one ends it on the server at 12, and lasts 6 s at most.
    assert one.deadline == one.ends == 12.0 - drift(6.0)


UNTIL = END + drift(TTL) + WORTH_RENEWING  # A renewal would not have been worth it.


@pytest.mark.parametrize(
    ("fields", "at", "over"),
    [
        ({"auto_renew": False}, END, "renew is False, and its ttl of 10 s was over"),
        ({"hold_until": TTL}, END, "its max_hold of 10 s was over"),
        ({"hold_until": UNTIL}, END, "its max_hold of 10.0156 s was over"),
        ({"hold_until": UNTIL + 0.001}, END, ""),
        ({}, 1.0, ""),
    ],
)
def test_an_error_names_the_setting_that_was_over(fields, at, over):
    assert state(**fields).loss(at).over == over


def test_an_error_tells_a_release_from_a_loss_before_it():
    one, lost = state(), state()
    lost.lose("expired")
    for each in one, lost:
        each.unnest()
    assert (one.loss(1.0).over, lost.loss(1.0).over) == ("it was released", "")


def test_it_is_ended_with_the_last_of_its_acquires():
    one = state(caller=me)
    one.nest()
    assert (one.unnest(), one.is_ended) == (1, False)
    assert (one.unnest(), one.is_ended) == (0, True)
    assert one.caller is me
    assert [state().is_of_run, state(is_of_run=True).is_of_run] == [False, True]


def test_what_was_handed_over_is_ended_and_the_release_of_its_holder_is_not_the_last():
    one = state()
    one.end_by_hand_over()
    assert (one.is_handed_over, one.is_ended, one.unnest()) == (True, True, 1)
    assert one.loss(1.0).over == "it was handed over"


def test_transactions_hold_it_beyond_its_block():
    one = state()
    assert one.hold_for_transactions()
    assert not one.is_held_by_transactions_only
    assert one.unnest() == 1
    assert one.is_held_by_transactions_only
    assert one.hold_for_transactions()
    assert (one.unnest(), one.is_ended) == (1, False)
    one.transactions_are_over()
    assert one.is_held_by_transactions_only
    assert (one.unnest(), one.is_ended) == (0, True)
    one.transactions_are_over()
    assert one.transactions == 0
    assert not one.is_held_by_transactions_only


@pytest.mark.proves("R3")
def test_r3_a_try_is_granted_until_its_end_and_only_before_it():
    assert granted_by(b"7", 1.0, 3.9, certain=3.0) == (7, 4.0, 1.0, 4.0, 1)
    assert granted_by(b"7 3", 1.0, 3.9, certain=3.0) == (7, 4.0, 1.0, 4.0, 3)  # The third permit.
    assert granted_by(b"7", 1.0, 4.0, certain=3.0) is None
    assert granted_by([b"busy"], 1.0, 3.9, certain=3.0) is None


class Task(Holder):
    is_done = False

    def done(self):
        return self.is_done


@pytest.mark.parametrize("how", ["is gone", "is done though something refers to it"])
def test_a_holder_that_ends_without_a_release_is_news_once(how):
    holder = Task()
    one = state(holder=ref(holder))
    assert not one.newly_abandoned()
    if how == "is gone":
        del holder
    else:
        holder.is_done = True
    assert [one.newly_abandoned(), one.newly_abandoned()] == [True, False]


def test_a_lease_will_be_renewed_if_that_is_worth_it():
    assert will_renew(True, 30.0, 30.0 + WORTH_RENEWING)
    assert not will_renew(True, 30.0, 30.0 + WORTH_RENEWING / 2)
    assert not will_renew(False, 30.0, math.inf)


# --- a max_hold that is counted from the last word of the owner -----------------------------------


def test_one_that_goes_on_is_renewed_up_to_max_silence_after_its_last_word():
    one = state(ttl=3.0, deadline=3.0, ends=3.0, hold_until=4.0)
    assert not one.allow_silence(0.0, 4.0)  # The watchdog has time.
    is_renewed(one, sent=1.0)
    assert one.deadline == pytest.approx(4.0, abs=0.05)
    assert one.renewal_due(2.0) is None  # That would hardly lengthen it.
    assert one.allow_silence(3.9, 4.0)
    is_renewed(one, sent=3.9)
    assert not one.allow_silence(3.91, 4.0)
    assert one.deadline == pytest.approx(6.9, abs=0.05)
    is_renewed(one, sent=6.0)
    assert "beat() was not called for 4 s" in one.loss(8.0).over


def test_while_others_are_awaited_it_has_no_bound():
    one = state(hold_until=TTL, auto_renew=False)
    assert one.await_others()
    assert one.renewal_due(5.0) == ("lottery", one._token, TTL, 1, True, TTL, 1)
    is_renewed(one, sent=5.0)
    assert one.is_held(5.0 + END - 0.001)
    assert not one.await_others()


def test_a_max_hold_that_is_less_than_the_drift_of_the_ttl_can_begin():
    one = state(ttl=1000.0, deadline=989.0, ends=989.0)
    late = one.renewal(5.0)
    one.begin(6.0, 5.0, renew=True)
    assert one.is_held(10.9)
    one.answered(late, Answer(b"renewed", 5.0, 7.0), 7.0)
    assert one.is_held(10.8)
    assert not one.is_held(11.0)


@pytest.mark.parametrize("max_hold", [3.0, 60.0])
def test_max_hold_begins_when_all_are_held(max_hold):
    one = state(hold_until=TTL, auto_renew=False)
    one.await_others()
    late = one.renewal(5.0)
    one.begin(6.0, max_hold, renew=True)
    ends = min(END, 6.0 + max_hold - drift(min(TTL, max_hold)))
    assert (one.deadline, one.ends) == (ends, ends)
    assert one.renewal(6.0).ttl == min(TTL, max_hold)
    # The answer to one that was sent before, and without a bound.
    one.answered(late, Answer(b"renewed", 7.0, 7.0), 7.0)
    assert one.ends == min(7.0 + END, 6.0 + max_hold - drift(max_hold - 1.0))
    assert f"its max_hold of {max_hold:g} s was over" in str(one.loss(one.hold_until)) or (
        max_hold > TTL
    )


def test_who_does_not_renew_stops_when_all_are_held():
    one = state(auto_renew=False)
    one.await_others()
    one.begin(6.0, math.inf, renew=False)
    assert one.renewal_due(6.0) is None
    assert (one.ends, one.hold_until) == (END, math.inf)
    assert "renew is False, and its ttl of 10 s was over" in str(one.loss(END))


def test_an_answer_that_was_taken_in_during_begin_outlasts_no_max_hold():
    class Slow(LeaseState):
        """Another thread calls begin() after the bound was read, before the end is set."""

        def __setattr__(self, name, value):
            if name == "ends" and self.renewals == 0 and value > END:
                vars(self)["renewals"] = 1
                self.begin(6.0, 3.0, renew=True)
            super().__setattr__(name, value)

    one = state(Slow)
    one.await_others()
    one.answered(one.renewal(5.0), Answer(b"renewed", 5.0, 6.0), 6.0)
    assert one.ends <= 9.0 - drift(TTL)
    assert one.deadline <= one.ends


@pytest.mark.parametrize(
    ("at", "max_silence", "is_called"),
    [
        # Half of the shorter one counts, of ttl and max_silence.
        *((4.0, 60.0, False), (4.1, 60.0, True), (4.1, 4.0, False)),
        *((5.9, 4.0, False), (6.1, 4.0, True)),
        (8.0, 60.0, False),  # It is lost already.
    ],
)
def test_who_says_that_it_goes_on_calls_the_watchdog_when_less_than_half_is_left(
    at, max_silence, is_called
):
    one = state(ttl=8.0, deadline=8.0, ends=8.0)
    assert one.allow_silence(at, max_silence) is is_called
    assert one.loss_reason(at) == ("expired" if at == 8.0 else None)


def test_the_watchdog_is_not_called_while_it_tries_to_renew_already():
    unanswered, unconfirmed = state(), claimed()
    unanswered.unanswered()
    assert not unanswered.allow_silence(END - 1, 60.0)
    assert not unconfirmed.allow_silence(0.9, 60.0)


# --- danger: a renewal is unanswered, and the end is near ----------------------------------------


def test_a_lease_is_endangered_while_a_renewal_is_unanswered_and_half_of_its_ttl_is_left():
    one, half = state(), END - TTL / 2
    assert one.alarm_at(STANDARD_ALARM) == math.inf
    assert not one.must_raise(STANDARD_ALARM, half)  # No renewal is unanswered.
    assert one.unanswered()
    assert not one.unanswered()  # Not the first one.
    assert one.alarm_at(STANDARD_ALARM) == half
    assert not one.must_raise(STANDARD_ALARM, half - 0.001)
    assert one.must_raise(STANDARD_ALARM, half) is True
    assert one.must_raise(STANDARD_ALARM, half) is False  # Somebody has raised it.
    for at, is_held in ((END - 0.001, True), (END, False)):
        other = state()
        other.unanswered()
        assert other.must_raise(STANDARD_ALARM, at) is is_held


def test_an_answer_ends_the_danger_and_the_next_danger_raises_the_alarm_again():
    one = state()
    one.unanswered()
    assert one.must_raise(STANDARD_ALARM, 6.0)
    is_renewed(one, sent=6.0)
    assert not one.must_raise(STANDARD_ALARM, 15.0)
    one.unanswered()
    assert one.must_raise(STANDARD_ALARM, 15.0)


def test_each_alarm_has_its_own_time_and_callback():
    one, callback = state(), print
    quarter = Alarm(0.25, callback)
    assert quarter.callback is callback
    one.warn(quarter)
    assert [*one.alarms] == [STANDARD_ALARM, quarter]
    assert [*state().alarms] == [STANDARD_ALARM]  # Those of other leases stay as they are.
    one.unanswered()
    assert one.alarm_at(quarter) == END - TTL / 4
    assert [one.must_raise(alarm, 6.0) for alarm in one.alarms] == [True, False]
    assert [one.must_raise(alarm, 8.0) for alarm in one.alarms] == [False, True]


@pytest.mark.parametrize(
    ("attribute", "value"), [("auto_renew", False), ("lost", "taken"), ("is_ended", True)]
)
def test_a_lease_that_is_not_renewed_or_is_over_is_not_endangered(attribute, value):
    one = state()
    one.unanswered()
    setattr(one, attribute, value)
    assert one.alarm_at(STANDARD_ALARM) == math.inf
    assert not one.must_raise(STANDARD_ALARM, 6.0)
