"""The promises hold in every interleaving of a few clients and a few faults; see tests/model.

Each setup is explored to its end: tens of thousands of states in a few seconds (pytest -s -rP
shows how many). The second half explores protocols with one rule left out, and must find what
breaks. A broken promise is reported with the shortest story that leads there.
"""

import math

import pytest

from tests.rules.model import naive
from tests.rules.model.search import Broken, explore
from tests.rules.model.world import TTL, Setup

INF = math.inf

# Once nothing fails any more, a waiter waits for what is left of a dead holder's lease, for a
# claim that nobody confirms, and until the next look.
SOON = TTL + 2.0

SETUPS = {
    "nothing fails": Setup(waits=(INF, INF, INF), horizon=2, faults=0),
    "three clients, one is stopped": Setup(
        waits=(INF, INF, INF), horizon=1, faults=1, kinds=frozenset({"stop"})
    ),
    "commands, replies and confirmations are lost": Setup(
        waits=(INF, INF), horizon=3, faults=2, kinds=frozenset({"cut"})
    ),
    "lost commands arrive late": Setup(
        waits=(INF, 0.0), horizon=6, faults=1, kinds=frozenset({"cut", "zombie", "slow"})
    ),
    "clients stand still": Setup(waits=(INF, 1.0), horizon=5, faults=1, kinds=frozenset({"pause"})),
    "bells are missed": Setup(waits=(INF, 1.0), horizon=6, faults=2, kinds=frozenset({"bell"})),
    "acquires are interrupted": Setup(
        waits=(INF, 1.0), horizon=5, faults=2, kinds=frozenset({"interrupt", "cut"})
    ),
    "clients die": Setup(waits=(INF, INF), horizon=6, faults=1, kinds=frozenset({"kill", "stop"})),
    "renewals meet slow commands": Setup(
        waits=(0.0, 0.0), horizon=4, faults=1, kinds=frozenset({"slow"}), renewals=1
    ),
    "the lock is wanted again": Setup(
        waits=(INF, 0.0), horizon=2, faults=1, kinds=frozenset({"cut"}), rounds=2
    ),
    "the server loses its data": Setup(
        waits=(0.0, 0.0), horizon=4, faults=1, kinds=frozenset({"flush"}), renewals=1
    ),
    "an operator holds the lock": Setup(
        waits=(INF, INF), horizon=3, faults=2, kinds=frozenset({"maintenance", "cut"})
    ),
    "a lease is handed over and taken up": Setup(
        waits=(0.0, 0.0, 0.0), horizon=1, faults=1, kinds=frozenset({"cut", "pause"}), batons=True
    ),
    "a hand-over is cut, cancelled or late": Setup(
        waits=(0.0, INF),
        horizon=3,
        faults=1,
        kinds=frozenset({"cut", "zombie", "interrupt"}),
        batons=True,
    ),
    "two permits of three clients": Setup(
        waits=(INF, 0.0, 0.0), horizon=1, faults=1, kinds=frozenset({"cut"}), limits=(2, 2, 2)
    ),
    "two permits, and a client stands still": Setup(
        waits=(0.0, INF, 0.0), horizon=2, faults=1, kinds=frozenset({"pause"}), limits=(2, 2, 2)
    ),
    "two permits, and clients die or are interrupted": Setup(
        waits=(INF, INF, INF),
        horizon=1,
        faults=1,
        kinds=frozenset({"stop", "interrupt"}),
        limits=(2, 2, 2),
    ),
    "two permits, and a pause": Setup(
        waits=(INF, INF, 0.0),
        horizon=1,
        faults=1,
        kinds=frozenset({"maintenance"}),
        limits=(2, 2, 2),
    ),
    "a deploy changes the limit from one to two": Setup(
        waits=(INF, INF, INF), horizon=2, faults=1, kinds=frozenset({"bell"}), limits=(1, 2, 2)
    ),
    "late undos": Setup(
        waits=(0.0, 0.0), horizon=3, faults=2, kinds=frozenset({"pause", "cut", "zombie"})
    ),
    "a fenced resource": Setup(
        waits=(INF, 0.0), horizon=5, faults=1, kinds=frozenset({"pause"}), writes="fenced"
    ),
    "a fenced resource, and data is lost": Setup(
        waits=(INF, 0.0), horizon=4, faults=1, kinds=frozenset({"flush"}), writes="fenced"
    ),
}


@pytest.mark.proves("P1", "P2", "P3", "P4", "R3", "R4")
@pytest.mark.slow
@pytest.mark.parametrize("title", SETUPS)
def test_every_promise_holds_when(title):
    report = explore(SETUPS[title], patience=SOON)
    print(f"{title}: {report}")
    assert report.states > 1000
    # Otherwise it would prove nothing: everybody has come to hold and to end, in some history.
    assert {"holding", "done", "acquiring", "releasing"} <= report.phases.keys()


NAIVE = {
    "the deadline counts from the reply": (
        "P1: ",
        Setup(waits=(0.0, 0.0), faults=1, kinds=frozenset({"pause"}), sent_at_reply=True),
    ),
    "each resend is taken for somebody else": (
        "P4: ",
        Setup(
            waits=(0.0,), faults=1, kinds=frozenset({"cut"}), instead=naive.RESENDS_ARE_STRANGERS
        ),
    ),
    "a release is not compared with the token": (
        "P3: ",
        Setup(
            waits=(0.0, 0.0),
            faults=1,
            kinds=frozenset({"slow"}),
            instead=naive.ANYBODY_RELEASES,
        ),
    ),
    "a resend is confirmed without restarting the ttl": (
        "P1: ",
        Setup(
            waits=(0.0, 0.0),
            faults=2,
            kinds=frozenset({"cut", "pause"}),
            instead=naive.RESENDS_ONLY_CONFIRM,
        ),
    ),
    "an acquire is not undone": (
        "R4: ",
        Setup(
            waits=(INF,),
            faults=1,
            kinds=frozenset({"interrupt"}),
            acquire=naive.acquire_without_undo,
        ),
    ),
    "a token is used again after an unanswered undo": (
        "P1: ",
        Setup(
            waits=(0.0, 0.0),
            faults=2,
            kinds=frozenset({"pause", "cut", "zombie"}),
            acquire=naive.acquire_trusting_its_undo,
        ),
    ),
    "a bell is believed however old": (
        "P1: ",
        Setup(
            waits=(INF, INF),
            faults=1,
            kinds=frozenset({"pause"}),
            acquire=naive.acquire_believing_old_bells,
        ),
    ),
    "a hand-over is confirmed by asking": (
        "R4: ",
        Setup(waits=(INF, INF), faults=1, acquire=naive.acquire_confirming_by_asking, horizon=2),
    ),
    "a hand-over needs no confirmation": (
        "P2: ",
        Setup(
            waits=(INF, INF),
            faults=1,
            kinds=frozenset({"stop"}),
            instead=naive.HAND_OVERS_ARE_GRANTS,
        ),
    ),
    "a renewal brings a lost lease back": (
        "R4: ",
        Setup(
            waits=(0.0, 0.0),
            faults=1,
            kinds=frozenset({"slow"}),
            renewals=1,
            instead=naive.RENEWALS_BRING_BACK,
        ),
    ),
    "a baton is good twice": (
        "P3: ",
        Setup(waits=(0.0, 0.0, 0.0), batons=True, instead=naive.BATONS_ARE_GOOD_TWICE),
    ),
    "a hand-over is not undone": (
        "R4: ",
        Setup(
            waits=(0.0,),
            faults=1,
            kinds=frozenset({"interrupt"}),
            batons=True,
            hand_over=naive.hand_over_without_undo,
        ),
    ),
    "a pause queues up at the end": (
        "was granted the lock during a pause",
        Setup(
            waits=(INF, INF),
            faults=1,
            kinds=frozenset({"maintenance"}),
            instead=naive.PAUSES_COME_LAST,
        ),
    ),
    "there is a permit more than the limit": (
        "P1: ",
        Setup(
            waits=(0.0, 0.0, 0.0),
            limits=(2, 2, 2),
            faults=0,
            instead=naive.ONE_PERMIT_TOO_MANY,
        ),
    ),
    "newcomers pass the waiters": (
        "P6: ",
        Setup(
            waits=(INF, INF, 0.0),
            limits=(1, 1, 2),
            faults=0,
            instead=naive.NEWCOMERS_PASS_WAITERS,
        ),
    ),
    "a waiter gets a permit beyond its own limit": (
        "P1: ",
        Setup(
            waits=(INF, INF, INF),
            limits=(1, 2, 2),
            faults=0,
            instead=naive.WAITERS_GET_ANY_PERMIT,
        ),
    ),
    "an undo looks at the first permit alone": (
        "R4: ",
        Setup(
            waits=(0.0, 0.0),
            limits=(2, 2),
            faults=1,
            kinds=frozenset({"interrupt"}),
            instead=naive.UNDOS_KNOW_ONE_PERMIT,
        ),
    ),
    "a resource is written without the fence": (
        "wrote after a later holder did",
        Setup(waits=(0.0, 0.0), faults=1, kinds=frozenset({"pause"}), writes="unfenced"),
    ),
}


def test_a_rule_cannot_be_left_out_where_it_does_not_stand():
    with pytest.raises(AssertionError, match="No script says 'if false then' any more"):
        naive.instead("if false then", "if true then")


@pytest.mark.proves("P1", "P2", "P3", "P4", "R4")
@pytest.mark.parametrize("title", NAIVE)
def test_the_model_finds_what_breaks_when(title):
    promise, setup = NAIVE[title]
    with pytest.raises(Broken) as found:
        explore(setup, patience=SOON)
    print(found.value)
    assert promise in found.value.promise
    assert found.value.story
