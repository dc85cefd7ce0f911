"""Negative controls: variants with one rule left out. The simulation must find what each breaks.

Those of the scripts and flows are those of the exhaustive model, in tests/rules/model/py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from django_redislock import handle, lease
from django_redislock.exceptions import LockUnavailable
from django_redislock.jobs import replaced
from django_redislock.rules import flows, lease_state, scripts
from django_redislock.rules.flows import Granted
from django_redislock.rules.replies import is_busy
from django_redislock.rules.scripts import Script
from django_redislock.rules.steps import Answer, Call, Listen, Refused, Tell, Unanswered
from tests.simulation.plan import EVERYTHING, Bounds
from tests.simulation.process import SimulatedBackend
from tests.simulation.world import World

# Short and stormy, with few names: what breaks, breaks soon.
STORM = EVERYTHING._replace(
    seconds=120.0,
    clients=(2, 5),
    names=(1, 1),
    every=(3.0,),
    pauses=(3.0, 10.0),
    rated=0.0,
    replacing=0.0,
)


@contextmanager
def nothing():
    yield


class Control(NamedTuple):
    """One variant."""

    promise: str  # With which what is found begins.
    instead: Mapping[Script, Script] = {}
    patched: Callable[[], AbstractContextManager[object]] = nothing
    bounds: Bounds = STORM
    seeds: tuple[int, ...] = (1,)  # Of which one finds it; those of the ordinary tests.

    @property
    def is_variant(self):
        """Whether the code is another, not only the world."""
        return bool(self.instead) or self.patched is not nothing

    def world(self, plan, **options):
        """A world of a plan, with this variant's scripts."""
        return World(plan, instead=self.instead, **options)


SHIPPED = Control("", bounds=EVERYTHING)


def storm(*kinds, **bounds):
    """A storm of these faults."""
    return STORM._replace(kinds=kinds, swarm=False, **bounds)


# --- the same scripts and flows with a rule left out ---------------------------------------------


def instead(text, by, *more):
    """The scripts that have *text* among their lines, each with what stands there *by* it.

    *more* are other texts in the same scripts, and what stands there.
    """
    changed = {}
    for script in vars(scripts).values():
        if isinstance(script, Script) and text.encode() in script.source:
            source = script.source.replace(text.encode(), by.encode())
            for other, there in zip(more[::2], more[1::2], strict=True):
                assert other.encode() in source
                source = source.replace(other.encode(), there.encode())
            sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()
            changed[script] = replace(script, source=source, sha=sha)
    assert changed, f"No script says {text!r} any more."
    return changed


def changed(
    flow,
    step_of=lambda step: step,
    answer_of=lambda step, answer: answer,
    error_of=lambda step, error: None,
):
    """A flow whose steps and answers are changed on the way; an error may become an answer."""
    step = next(flow)
    while True:
        asked = step_of(step)  # Its own errors are none of the flow's.
        try:
            answer = answer_of(step, (yield asked))
        except GeneratorExit:
            raise
        except BaseException as error:
            answer = error_of(step, error)
            try:
                step = flow.throw(error) if answer is None else flow.send(answer)
            except StopIteration as end:
                return end.value
            continue
        try:
            step = flow.send(answer)
        except StopIteration as end:
            return end.value


def acquire_without_undo(attempt, now):
    """Without R4: an acquire that was interrupted or not answered just ends."""
    try:
        return (yield from flows._acquire(attempt, now))
    except (Unanswered, Refused) as error:
        raise LockUnavailable(attempt.name, error.problem) from error


def acquire_trusting_its_undo(attempt, now):
    """A token is used again although nobody knows whether its undo is still on its way.

    And the undo does not say which grant it is to end.
    """

    def undoes(step):
        return isinstance(step, Call) and step.script is scripts.LEAVE

    def step_of(step):
        return step._replace(args=(step.args[0], b"", *step.args[2:])) if undoes(step) else step

    def error_of(step, error):
        if undoes(step) and isinstance(error, Unanswered):
            return Answer(0, error.sent, error.now)
        return None

    return changed(flows.acquire(attempt, now), step_of, error_of=error_of)


def acquire_believing_old_bells(attempt, now):
    """Without R2 for hand-overs: a bell is a grant from when it is heard."""
    flow = flows.acquire(attempt, now)
    step = next(flow)
    while True:
        try:
            answer = yield step
            if isinstance(step, Listen) and tuple(answer.words[:1]) == ("granted",):
                deadline = answer.now + flows.CONFIRM_WITHIN
                flow.close()
                ends = answer.now + attempt.terms.first_ttl
                return Granted(int(answer.words[2]), deadline, answer.now, ends)
            step = flow.send(answer)
        except StopIteration as end:
            return end.value
        except (Unanswered, Refused) as error:
            step = flow.throw(error)


def acquire_leaving_its_late_try(attempt, now):
    """Without R4 for a try that was not answered, if a later one finds that the lock is taken."""
    flow, is_over = flows.acquire(attempt, now), False
    step, answer = next(flow), None
    while True:
        resume = flow.send
        try:
            # Instead of an undo, whose answer says nothing, it goes on with the answer before.
            if not (is_over and isinstance(step, Call) and step.script is scripts.LEAVE):
                answer = yield step
                is_over = isinstance(step, Call) and is_busy(answer.value)
        except (Unanswered, Refused) as error:
            resume, answer = flow.throw, error
        try:
            step = resume(answer)
        except StopIteration as end:
            return end.value


def acquire_confirming_by_asking(attempt, now):
    """A hand-over is confirmed by a command that also grants, and may arrive after the release."""

    def step_of(step):
        if isinstance(step, Tell):
            return Tell(*attempt.call("try", b"0", 0.0, 1.0)[:3])
        return step

    return changed(flows.acquire(attempt, now), step_of)


@contextmanager
def acquiring_by(naively):
    """Have handles acquire by another flow, from its first step on."""

    def acquire(request, now, take_over, lookout):
        outcome = yield from naively(request, now)
        if isinstance(outcome, Granted):
            take_over(outcome)
        return outcome

    variant = SimpleNamespace(**{**vars(flows), "acquire": acquire})
    with (
        patch.object(handle, "flows", variant),
        patch.object(SimulatedBackend, "begin", lambda self, form: None),
    ):
        yield


@contextmanager
def handing_over_without_undo():
    def take_back(over):
        yield from ()

    variant = SimpleNamespace(**{**vars(flows), "take_back": take_back})
    with patch.object(lease, "flows", variant):
        yield


@contextmanager
def ending_its_own_permit_alone():
    def clear_up(self, hold, reason):
        assert hold.lease is not None
        lease, timeout = hold.lease, hold.terms.operation_timeout
        yield from flows.undo(self.name, lease._token, timeout, lease.permit_number)

    with patch.object(handle.Handle, "_clear_up", clear_up):
        yield


@contextmanager
def without_drift():
    with (
        patch.object(lease_state, "drift", lambda seconds: 0.0),
        patch.object(flows, "drift", lambda seconds: 0.0),
    ):
        yield


@contextmanager
def counting_from_the_reply():
    def granted_by(value, sent, now, certain):
        return lease_state.granted_by(value, now, now, certain)

    with (
        patch.object(handle, "granted_by", granted_by),
        patch.object(flows, "granted_by", granted_by),
    ):
        yield


@contextmanager
def renewals_counting_from_the_reply():
    answered = lease_state.LeaseState.answered

    def late(self, renewal, answer, now):
        answered(self, renewal, answer._replace(sent=now), now)

    with patch.object(lease_state.LeaseState, "answered", late):
        yield


def never_looking():
    return patch.object(flows, "listens_until", lambda now, left, give_up, *every: give_up)


def losing_silently():
    return patch.object(flows, "lost_because", lambda word: None)


@contextmanager
def counting_the_time_to_end_from_the_reply():
    def answer_to(call):
        answer = yield from flows.answer_to(call)
        return answer._replace(sent=answer.now)

    with patch.object(replaced, "answer_to", answer_to):
        yield


# --- all of them ---------------------------------------------------------------------------------

# Leases that end by themselves, under bodies that last longer.
UNRENEWED = {"renews": (0.0,), "loads": (6.0,)}
# Newer calls replace older ones; starts are wanted under a rate.
REPLACING, RATED = {"replacing": 1.0}, {"rated": 1.0}
# Many want one lock at once.
CROWDED = {"limits": (1,), "loads": (4.0,), "clients": (2, 3)}
CONTROLS = {
    "a deadline has no room for the drift of clocks": Control(
        "P1", patched=without_drift, bounds=storm("lost", "cut off", **UNRENEWED)
    ),
    "clocks drift more than is promised": Control(
        "P1", bounds=storm("lost", "cut off", slowest=0.97, **UNRENEWED)
    ),
    "a grant counts from its reply": Control(
        "P1",
        patched=counting_from_the_reply,
        bounds=storm("pause", "answered late", "slow"),
        seeds=(4,),
    ),
    "a renewal counts from its reply": Control(
        "P1",
        patched=renewals_counting_from_the_reply,
        bounds=storm("pause", "lost", "cut off"),
        seeds=(3,),
    ),
    "each resend is taken for somebody else": Control(
        "P4",
        instead("if fence and is_of(value, token) and state ~= 'k' then", "if false then"),
        bounds=storm("unanswered", "cut after"),
    ),
    "a release is not compared with the token": Control(
        "P3",
        instead("if value and string.sub(value, 1, 33) == token .. 'h' then", "if value then"),
        bounds=storm("pause", "twice", "late", "unanswered"),
        seeds=(5,),
    ),
    "a resend is confirmed without restarting the ttl": Control(
        "P1",
        instead("call('PEXPIRE', LOCK, ttl, 'GT') -- ", "-- "),
        bounds=storm("unanswered", "cut after", **UNRENEWED),
        seeds=(3,),
    ),
    "an acquire is not undone": Control(
        "R4", patched=lambda: acquiring_by(acquire_without_undo), bounds=storm("interrupted")
    ),
    "a token is used again after an unanswered undo": Control(
        "P1",
        patched=lambda: acquiring_by(acquire_trusting_its_undo),
        bounds=storm("pause", "late", every=(0.3,), limits=(1,), clients=(2, 3)),
        seeds=(2,),
    ),
    "a bell is believed however old": Control(
        "P1",
        patched=lambda: acquiring_by(acquire_believing_old_bells),
        bounds=storm("pause", every=(2.0,), **CROWDED),
        seeds=(2,),
    ),
    "a hand-over is confirmed by asking": Control(
        "R4",
        patched=lambda: acquiring_by(acquire_confirming_by_asking),
        bounds=storm("late", every=(0.7,), limits=(1,), threads=(2,)),
        seeds=(5,),
    ),
    "a hand-over needs no confirmation": Control(
        "P2",
        instead(
            "state, confirm_by, px = 'c', digits(ms + math.min(within or CONFIRM_WITHIN, ttl)),"
            " ttl + CONFIRM_WITHIN",
            "px = 60000",
        ),
    ),
    "a renewal brings a lost lease back": Control(
        "R4",
        instead(
            "local renewals = string.sub(count, 2)\nlocal value = call('GET', LOCK)",
            """local renewals = string.sub(count, 2)
local value = call('GET', LOCK)
if not value then
  value = token .. 'h-00000' .. string.sub(token, 1, 16) .. '|' .. digits(clock() + 1) .. '|0|0|0||'
  call('SET', LOCK, value, 'PX', ttl)
end""",
        ),
        bounds=storm("pause", "late", "cut off"),
        seeds=(7,),
    ),
    "a baton is good twice": Control(
        "P3",
        instead("(not is_baton or tonumber(confirm_by) <= ms)", "value == ''"),
        bounds=STORM._replace(ends=("hands over",)),
    ),
    "a try that comes late is left behind": Control(
        "R4",
        patched=lambda: acquiring_by(acquire_leaving_its_late_try),
        bounds=storm("late", "answered late", limits=(1,), every=(0.5,)),
        seeds=(20,),
    ),
    "a hand-over is not undone": Control(
        "R4",
        patched=handing_over_without_undo,
        bounds=storm("interrupted", ends=("hands over",)),
        seeds=(5,),
    ),
    "a pause queues up at the end": Control(
        "", instead("ticket = '-' .. us", "ticket = us"), bounds=storm("maintenance")
    ),
    "there is a permit more than the limit": Control(
        "P1",
        instead("local permits = tonumber(limit)", "local permits = tonumber(limit) + 1"),
        bounds=STORM._replace(limits=(2, 3)),
    ),
    "newcomers pass the waiters for permits": Control(
        "P6",
        instead(
            "not chosen or call('EXISTS', QUEUE) == 1",
            "not chosen",
            "and call('EXISTS', QUEUE) == 0",
            "",
        ),
        bounds=STORM._replace(limits=(2, 3)),
        seeds=(2,),
    ),
    "a waiter gets a permit beyond its own limit": Control(
        "P1",
        instead(" or limit_of(record) < tonumber(permit)) then", ") then"),
        bounds=STORM._replace(limits=(3,)),
        seeds=(2,),
    ),
    "an undo looks at the first permit alone": Control(
        "R4",
        instead("for number = 2, tonumber(limit or 1) do", "for number = 2, 1 do"),
        bounds=storm("interrupted", limits=(2, 3)),
    ),
    "an undo ends the next grant to its token": Control(
        "P1",
        instead("and (not fence or fence == '' or read(value) == fence) then", "then"),
        bounds=storm("twice", "pause", limits=(1, 2), every=(0.7,)),
        seeds=(4,),
    ),
    "the end of a lost lease looks at its own permit alone": Control(
        "R4",
        patched=ending_its_own_permit_alone,
        bounds=storm("twice", "pause", limits=(2, 3), every=(0.7,)),
        seeds=(67,),
    ),
    "newcomers pass the waiters": Control(
        "P6", instead("or popped) and call('EXISTS', QUEUE) == 0 then", "or popped) then")
    ),
    "a fence is a counter, which is lost with the data": Control(
        "R9",
        instead(
            "local function new_fence(us, of_lease)",
            "local function new_fence(us, of_lease)\n  us = '1'",
        ),
        bounds=storm("flush", "failover", "replica"),
    ),
    "a lease has no expiry": Control("P2", instead("'|' .. owner, 'PX', px)", "'|' .. owner)")),
    "a waiter never looks by itself": Control(
        "P6", patched=never_looking, bounds=storm("no ring", "kill", "pause")
    ),
    "only the waiter that does not answer is passed over, not its process": Control(
        "P6",
        instead("if process ~= string.match(channel, '^(.*):') then", "if false then"),
        bounds=storm("unplug", every=(40.0,), seconds=300.0, threads=(4,), **CROWDED),
        seeds=(4,),
    ),
    "force release ends whatever lease there is": Control(
        "P3", instead("if id ~= wanted then", "if false then"), bounds=storm("force"), seeds=(4,)
    ),
    "more starts come at once than the burst": Control(
        "RATE",
        instead("over - burst * every - now", "over - (burst + 1) * every - now"),
        bounds=storm("late", **RATED),
    ),
    "a resend takes a second start": Control(
        "P6",
        instead(
            "local known, over = token, call('ZSCORE', RATE, token)",
            "local known, over = token, call('ZSCORE', RATE, token)\n"
            "if over and not is_waited_for(token, over) then over = false end",
        ),
        bounds=storm("unanswered", "cut after", **RATED),
    ),
    "an undo gives no start back": Control(
        "R4",
        instead("call('ZREM', RATE, token)\nif not over then", "if true then"),
        bounds=storm("interrupted", **RATED),
    ),
    "an undo of a start moves nobody up": Control(
        "R4",
        instead("  if over <= now then\n", "  if true then\n"),
        bounds=storm("interrupted", **RATED),
    ),
    "an undo of a start moves others up too far": Control(
        "RATE",
        instead("local before = over - every", "local before = over - 3 * every"),
        bounds=storm("interrupted", **RATED),
        seeds=(2,),
    ),
    "a waiter that gives up its start moves nobody up": Control(
        "R4",
        instead("give_back(known, over, every)", "drop(known, digits(over))"),
        bounds=storm("late", **RATED),
        seeds=(67,),
    ),
    "a waiter that comes during a pause keeps its start": Control(
        "R4",
        instead("if its_over and is_waited_for(one, digits(its_over)) then", "if false then"),
        bounds=storm("maintenance", **RATED),
    ),
    "nobody hears that a start is due earlier": Control(
        "P6",
        instead("if id and channel ~= '' and its_over - burst", "if false and its_over - burst"),
        bounds=storm("interrupted", every=(20.0,), **RATED),
        seeds=(5,),
    ),
    "a newcomer passes those who wait for a start": Control(
        "P6",
        instead(
            "or math.max(busy_until, now) + every",
            "or (busy_until > now + burst * every and now or math.max(busy_until, now)) + every",
        ),
        bounds=storm("late", **RATED),
    ),
    "late ones start together": Control(
        "RATE",
        instead(
            "room_in > -may_be_late / 2",
            "false",
            "over - burst * every - now, room_in",
            "over - burst * every - now",
        ),
        bounds=storm("no ring", "pause", **RATED),
        seeds=(38,),
    ),
    "starts are made during a pause": Control(
        "P6",
        instead("if type(pause) == 'string' and", "if false and"),
        bounds=storm("maintenance", **RATED),
    ),
    "a replaced run has no end": Control(
        "NEWEST",
        instead("if its_end and its_end <= ms then", "if false then"),
        bounds=storm("kill", every=(60.0,), seconds=300.0, **REPLACING),
        seeds=(2,),
    ),
    "a replaced run is ended at once": Control(
        "P3",
        instead("its_end = ms + told", "its_end = ms"),
        bounds=storm("late", **REPLACING),
        seeds=(2,),
    ),
    "a newer call leaves a replaced run less than it was told": Control(
        "P3",
        instead("told = told or", "told ="),
        bounds=storm("late", **REPLACING),
        seeds=(7,),
    ),
    "a call waits no longer than it leaves a run": Control(
        "NEWEST",
        instead(", its_owner, pause_left }", ", its_owner }"),
        bounds=storm("late", **REPLACING),
        seeds=(138,),
    ),
    "a replaced run counts its time from the reply": Control(
        "P1",
        patched=counting_the_time_to_end_from_the_reply,
        bounds=storm("answered late", every=(0.7,), **REPLACING),
        seeds=(4,),
    ),
    "a replaced run has no room for the drift of clocks": Control(
        "P1",
        patched=lambda: patch.object(replaced, "drift", lambda seconds: 0.0),
        bounds=storm("late", **REPLACING),
        seeds=(2,),
    ),
    "a waiter that did not hear that it is replaced gets a free lock": Control(
        "NEWEST",
        instead(" or (not found and call('HGET', REPLACED, id)) then", " then"),
        bounds=storm("no ring", "pause", "cut off", every=(1.0,), **REPLACING),
        seeds=(54,),
    ),
    "a waiter that was replaced goes on": Control(
        "NEWEST",
        instead("if newer and not is_mine and", "if false and"),
        bounds=storm("late", **REPLACING),
        seeds=(2,),
    ),
}
