"""Negative controls: variants with one rule left out. The simulation must find what each breaks.

Those of the scripts and flows are those of the exhaustive model, in tests/rules/model/naive.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

from django_redislock import handle, lease
from django_redislock.jobs import replaced
from django_redislock.rules import flows, lease_state
from django_redislock.rules.flows import Granted
from django_redislock.rules.scripts import Script
from tests.rules.model import naive
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


# --- the same flows with a rule left out ---------------------------------------------------------


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
NEW_FENCE = "local function new_fence(us, of_lease)"
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
        "P4", naive.RESENDS_ARE_STRANGERS, bounds=storm("unanswered", "cut after")
    ),
    "a release is not compared with the token": Control(
        "P3",
        naive.ANYBODY_RELEASES,
        bounds=storm("pause", "twice", "late", "unanswered"),
        seeds=(5,),
    ),
    "a resend is confirmed without restarting the ttl": Control(
        "P1",
        naive.RESENDS_ONLY_CONFIRM,
        bounds=storm("unanswered", "cut after", **UNRENEWED),
        seeds=(3,),
    ),
    "an acquire is not undone": Control(
        "R4",
        patched=lambda: acquiring_by(naive.acquire_without_undo),
        bounds=storm("interrupted"),
    ),
    "a token is used again after an unanswered undo": Control(
        "P1",
        patched=lambda: acquiring_by(naive.acquire_trusting_its_undo),
        bounds=storm("pause", "late", every=(0.3,), limits=(1,), clients=(2, 3)),
        seeds=(2,),
    ),
    "a bell is believed however old": Control(
        "P1",
        patched=lambda: acquiring_by(naive.acquire_believing_old_bells),
        bounds=storm("pause", every=(2.0,), **CROWDED),
        seeds=(2,),
    ),
    "a hand-over is confirmed by asking": Control(
        "R4",
        patched=lambda: acquiring_by(naive.acquire_confirming_by_asking),
        bounds=storm("late", every=(0.7,), limits=(1,), threads=(2,)),
        seeds=(5,),
    ),
    "a hand-over needs no confirmation": Control("P2", naive.HAND_OVERS_ARE_GRANTS),
    "a renewal brings a lost lease back": Control(
        "R4", naive.RENEWALS_BRING_BACK, bounds=storm("pause", "late", "cut off"), seeds=(7,)
    ),
    "a baton is good twice": Control(
        "P3", naive.BATONS_ARE_GOOD_TWICE, bounds=STORM._replace(ends=("hands over",))
    ),
    "a try that comes late is left behind": Control(
        "R4",
        patched=lambda: acquiring_by(naive.acquire_leaving_its_late_try),
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
        "", naive.PAUSES_COME_LAST, bounds=storm("maintenance")
    ),
    "there is a permit more than the limit": Control(
        "P1", naive.ONE_PERMIT_TOO_MANY, bounds=STORM._replace(limits=(2, 3))
    ),
    "newcomers pass the waiters for permits": Control(
        "P6", naive.NEWCOMERS_PASS_WAITERS, bounds=STORM._replace(limits=(2, 3)), seeds=(2,)
    ),
    "a waiter gets a permit beyond its own limit": Control(
        "P1",
        naive.WAITERS_GET_ANY_PERMIT,
        bounds=STORM._replace(limits=(3,)),
        seeds=(2,),
    ),
    "an undo looks at the first permit alone": Control(
        "R4", naive.UNDOS_KNOW_ONE_PERMIT, bounds=storm("interrupted", limits=(2, 3))
    ),
    "an undo ends the next grant to its token": Control(
        "P1",
        naive.instead("and (not fence or fence == '' or read(value) == fence) then", "then"),
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
        "P6",
        naive.instead("or popped) and call('EXISTS', QUEUE) == 0 then", "or popped) then"),
    ),
    "a fence is a counter, which is lost with the data": Control(
        "R9",
        naive.instead(
            "local function new_fence(us, of_lease)",
            "local function new_fence(us, of_lease)\n  us = '1'",
        ),
        bounds=storm("flush", "failover", "replica"),
    ),
    "a lease has no expiry": Control(
        "P2", naive.instead("'|' .. owner, 'PX', px)", "'|' .. owner)")
    ),
    "a waiter never looks by itself": Control(
        "P6", patched=never_looking, bounds=storm("no ring", "kill", "pause")
    ),
    "only the waiter that does not answer is passed over, not its process": Control(
        "P6",
        naive.instead("if process ~= string.match(channel, '^(.*):') then", "if false then"),
        bounds=storm("unplug", every=(40.0,), seconds=300.0, threads=(4,), **CROWDED),
        seeds=(4,),
    ),
    "force release ends whatever lease there is": Control(
        "P3",
        naive.instead("if id ~= wanted then", "if false then"),
        bounds=storm("force"),
        seeds=(4,),
    ),
    "more starts come at once than the burst": Control(
        "RATE",
        naive.instead("over - burst * every - now", "over - (burst + 1) * every - now"),
        bounds=storm("late", **RATED),
    ),
    "a resend takes a second start": Control(
        "P6",
        naive.instead(
            "local known, over = token, call('ZSCORE', RATE, token)",
            "local known, over = token, call('ZSCORE', RATE, token)\n"
            "if over and not is_waited_for(token, over) then over = false end",
        ),
        bounds=storm("unanswered", "cut after", **RATED),
    ),
    "an undo gives no start back": Control(
        "R4",
        naive.instead("call('ZREM', RATE, token)\nif not over then", "if true then"),
        bounds=storm("interrupted", **RATED),
    ),
    "an undo of a start moves nobody up": Control(
        "R4",
        naive.instead("  if over <= now then\n", "  if true then\n"),
        bounds=storm("interrupted", **RATED),
    ),
    "an undo of a start moves others up too far": Control(
        "RATE",
        naive.instead("local before = over - every", "local before = over - 3 * every"),
        bounds=storm("interrupted", **RATED),
        seeds=(2,),
    ),
    "a waiter that gives up its start moves nobody up": Control(
        "R4",
        naive.instead("give_back(known, over, every)", "drop(known, digits(over))"),
        bounds=storm("late", **RATED),
        seeds=(37,),
    ),
    "a waiter that comes during a pause keeps its start": Control(
        "R4",
        naive.instead("if its_over and is_waited_for(one, digits(its_over)) then", "if false then"),
        bounds=storm("maintenance", **RATED),
    ),
    "nobody hears that a start is due earlier": Control(
        "P6",
        naive.instead(
            "if id and channel ~= '' and its_over - burst", "if false and its_over - burst"
        ),
        bounds=storm("interrupted", every=(20.0,), **RATED),
        seeds=(5,),
    ),
    "a newcomer passes those who wait for a start": Control(
        "P6",
        naive.instead(
            "or math.max(busy_until, now) + every",
            "or (busy_until > now + burst * every and now or math.max(busy_until, now)) + every",
        ),
        bounds=storm("late", **RATED),
    ),
    "starts are made during a pause": Control(
        "P6",
        naive.instead("if type(pause) == 'string' and", "if false and"),
        bounds=storm("maintenance", **RATED),
    ),
    "a replaced run has no end": Control(
        "NEWEST",
        naive.instead("if its_end and its_end <= ms then", "if false then"),
        bounds=storm("kill", every=(60.0,), seconds=300.0, **REPLACING),
        seeds=(2,),
    ),
    "a replaced run is ended at once": Control(
        "P3",
        naive.instead("its_end = ms + within", "its_end = ms"),
        bounds=storm("late", **REPLACING),
        seeds=(2,),
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
        naive.instead(" or (not found and call('HGET', REPLACED, id)) then", " then"),
        bounds=storm("no ring", "pause", "cut off", every=(1.0,), **REPLACING),
        seeds=(27,),
    ),
    "a waiter that was replaced goes on": Control(
        "NEWEST",
        naive.instead("if newer and not is_mine and", "if false and"),
        bounds=storm("late", **REPLACING),
        seeds=(2,),
    ),
}
