"""What a flow yields and is answered: each step is performed by the method of its name."""

from types import SimpleNamespace

import pytest

from django_redislock.rules import scripts
from django_redislock.rules.steps import (
    Answer,
    Call,
    Calls,
    Elsewhere,
    Listen,
    NotDone,
    Notify,
    Pause,
    Refused,
    Tell,
    Unanswered,
)


@pytest.mark.parametrize(
    "step",
    [
        Call(scripts.LOOK, "lottery", (), 1.0),
        Tell(scripts.RENEW, "lottery", ()),
        Listen("an-id", 1.0),
        Pause(1.0),
        Notify(None, {}),
        Elsewhere(None, None),
    ],
    ids=lambda step: type(step).__name__.lower(),
)
def test_a_step_is_performed_by_the_method_of_its_name(step):
    name = type(step).__name__.lower()
    performer = SimpleNamespace(**{name: lambda performed: ("the answer to", performed)})
    assert step.perform(performer) == ("the answer to", step)


def test_several_calls_are_performed_as_one_and_shielded_if_one_of_them_is():
    call = Call(scripts.LOOK, "lottery", (), 1.0)
    calls = Calls((call, call._replace(shielded=True)))
    assert calls.perform(SimpleNamespace(call_all=lambda all_of_them: all_of_them)) is calls.calls
    assert calls.shielded
    assert not Calls((call, call)).shielded


def test_no_replica_is_asked_unless_that_is_said():
    assert Call(scripts.LOOK, "lottery", (), 1.0).replicas == 0
    assert Answer(b"7", 1.0, 2.0).replicas == 0


@pytest.mark.parametrize("kind", [Unanswered, NotDone])
def test_trouble_tells_the_problem_and_when(kind):
    trouble = kind("Timeout", 1.0, 2.0)
    assert trouble.args == (trouble.problem, trouble.sent, trouble.now) == ("Timeout", 1.0, 2.0)
    assert Refused("NOPERM").args == (Refused("NOPERM").problem,) == ("NOPERM",)


def test_scripts_are_told_apart_and_take_a_channel_only_if_they_name_it():
    assert scripts.ACQUIRE != scripts.ACQUIRE_MARKED
    assert scripts.Script("x", b"", "", ()).takes_channel is False
    assert scripts.ACQUIRE.takes_channel
