"""The first steps of an acquire or a release as a form: what is sent, and what the flow is told."""

from dataclasses import replace

import pytest

from django_redislock import process
from django_redislock.rules import scripts
from django_redislock.rules.flows import listens_until, take_up
from django_redislock.rules.forms import Attempt, Form
from django_redislock.rules.options import Terms
from django_redislock.rules.replies import GrantedRing, QueuedReply
from django_redislock.rules.steps import Answer, Bell, Call
from django_redislock.rules.stored import DoneMarkers, Owner
from tests.support.others import release_form

OWNER = Owner(host="web-1", pid=7)
TERMS = Terms(
    ttl=10.0,
    wait=5.0,
    renew=True,
    max_hold=60.0,
    operation_timeout=2.0,
    unavailable_after=3.0,
    release_before_commit="warn",
)
MARKERS = DoneMarkers(once=True)


def queued_form(**fields):
    """It was sent at 1 and the server has queued it, which was read soon after."""
    form = Attempt("lottery", OWNER, TERMS, **fields)
    form.reply, form.sent, form.now = [b"queued", b"100", 800, b"5000000", 1], 1.0, 1.05
    return form


def test_an_acquire_says_what_it_wants_and_belongs_to_this_process():
    form = Attempt("lottery", OWNER, TERMS, 2)
    assert (form.name, form.owner, form.terms, form.replicas) == ("lottery", OWNER, TERMS, 2)
    assert form.made_in is process.current
    assert (form.script, form.args) == (scripts.ACQUIRE, 9)
    assert (form.answers, form.granted, form.is_told) == ([], None, False)
    asked = Attempt("lottery", OWNER, TERMS, 0, MARKERS)
    assert (asked.script, asked.markers, asked.replicas) == (scripts.ACQUIRE_MARKED, MARKERS, 0)
    assert Attempt("lottery", OWNER, TERMS).replicas == 0


def test_an_acquire_that_replicas_acknowledge_is_more_than_one_command():
    assert Attempt("lottery", OWNER, TERMS).is_plain
    assert not Attempt("lottery", OWNER, TERMS, 1).is_plain
    assert not Form.is_plain  # Nor is that of several locks.


def test_an_acquire_of_any_of_two_permits_says_of_how_many():
    two = replace(TERMS, limit=2)
    form, marked = Attempt("lottery", OWNER, two), Attempt("lottery", OWNER, two, 0, MARKERS)
    assert (form.script, form.args, form.limit) == (scripts.ACQUIRE_PERMIT, 10, 2)
    assert (marked.script, marked.args) == (scripts.ACQUIRE_PERMIT_MARKED, 10)
    assert (form.limit, form.permit) == (2, 1)
    form.take_up("an-id", 2)
    assert (form.script, form.args) == (scripts.TAKE_UP, 9)
    assert (form.limit, form.permit) == (1, 2)
    marked.take_up("an-id")
    assert marked.permit == 1


@pytest.mark.proves("R1")
def test_r1_each_acquire_has_a_token_and_an_id_that_nobody_can_guess():
    forms = [Attempt("lottery", OWNER, TERMS) for _ in range(2)]
    for form in forms:
        assert (len(form.token), len(form.id)) == (32, 16)
        assert int(form.token, 16) >= 0
        assert form.id not in form.token
    assert forms[0].token != forms[1].token


@pytest.mark.parametrize(("wait", "waits"), [(0.0, False), (0.1, True), (5.0, True)])
def test_only_who_waits_must_be_rung(wait, waits):
    assert Attempt("lottery", OWNER, replace(TERMS, wait=wait)).waits is waits
    release = release_form("lottery", "token", "id", OWNER)
    assert (release.waits, release.replicas, release.is_told) == (False, 0, False)


def test_it_makes_the_call_of_its_flow():
    form = Attempt("lottery", OWNER, TERMS, 2, MARKERS)
    call = form.call(form.mode, b"0", 5.0, 1.5)
    args = form.token, form.id, 10_000, "queue", b"0", "1|", "r", OWNER.packed
    assert call == Call(scripts.ACQUIRE_MARKED, "lottery", args, 1.5, form.id, 2, patience=5.0)
    form.queues = False
    assert form.mode == "try"
    form.take_up("an-id")
    assert (form.id, form.script, form.call("try", b"0", 0.0, 1.5).listening) == (
        *("an-id", scripts.TAKE_UP),
        "",
    )


def test_it_listens_until_the_lease_in_its_way_may_have_ended():
    assert queued_form().seconds_to_listen() == listens_until(1.05, 800, 6.0) - 1.05
    assert queued_form().seconds_to_listen() == pytest.approx(0.801)
    assert queued_form(markers=MARKERS).seconds_to_listen() == 0.0
    form = queued_form()
    form.reply = b"7"
    assert form.seconds_to_listen() == 0.0
    late = queued_form()
    late.terms = replace(TERMS, wait=0.5)
    assert late.seconds_to_listen() == pytest.approx(0.45)


def test_the_bell_hands_it_the_lock():
    form = queued_form()
    form.seconds_to_listen()
    granted = form.heard(f"granted {form.id} 7 5100000".encode(), 1.2)
    queued = QueuedReply(*form.reply)
    ring = GrantedRing("granted", form.id, "7", "5100000")
    assert granted == take_up(ring, queued, 1.0, 1.2, 10.0)
    assert granted.fence == 7
    assert form.bell == Bell(["granted", form.id, "7", "5100000"], 1.2)


@pytest.mark.parametrize(
    "ring", [None, b"granted another-id 7 5100000", b"granted", b"\xff\xfe", b""]
)
def test_a_bell_that_is_not_for_it_is_a_reason_to_look(ring):
    form = queued_form()
    form.seconds_to_listen()
    assert form.heard(ring, 1.2) is None
    assert form.bell == Bell([], 1.2)


def test_a_bell_that_says_to_look_is_told_to_the_flow():
    form = queued_form()
    form.seconds_to_listen()
    assert form.heard(f"look {form.id} 300".encode(), 1.2) is None
    assert form.bell == Bell(["look", form.id, "300"], 1.2)


def test_the_flow_is_told_what_was_answered_in_that_order():
    form = queued_form()
    answer = Answer(form.reply, 1.0, 1.05)
    assert form.answers == [answer]
    form.seconds_to_listen()
    form.granted = form.heard(f"granted {form.id} 7 5100000".encode(), 1.2)
    assert form.answers == [answer, form.bell, None]


def test_a_release_is_a_form():
    form = release_form("lottery", "token", "id", OWNER)
    assert (form.script, form.arguments, form.args) == (scripts.RELEASE, ("token",), 1)
    assert (form.name, form.token, form.permit) == ("lottery", "token", 1)
    assert release_form("lottery", "token", "id", OWNER, permit=2).permit == 2
    assert form.made_in is process.current
    assert form.is_plain
    assert not form.notes


@pytest.mark.parametrize("left", [{"min_hold": 1.0}, {"once": 1.0}, {"ended": "done"}])
def test_a_release_that_leaves_something_behind_is_one_too(left):
    form = release_form("lottery", "token", "id", OWNER, **left)
    assert (form.script, len(form.arguments)) == (scripts.CONCLUDE, form.args)
    assert form.is_plain
    assert form.notes


def test_the_release_of_a_lease_that_was_lost_is_left_to_its_flow():
    assert not release_form("lottery", "token", "id", OWNER, lost="expired").is_plain
