"""Several flows as one: what they ask at the same time goes out in one go; none is forgotten."""

import gc
from weakref import ref

import pytest

from django_redislock.exceptions import LockLost, LockUnavailable
from django_redislock.rules import scripts
from django_redislock.rules.steps import (
    Answer,
    Call,
    Calls,
    Pause,
    Refused,
    Tell,
    Unanswered,
    together,
)

TOLD = Tell(scripts.RENEW, "lottery", ("token",))


def call(name):
    return Call(scripts.LEAVE, name, ("token",), 1.0)


def asks(name, undone, error=None):
    try:
        answer = yield call(name)
    except BaseException:
        yield call(f"undo {name}")
        undone.append(name)
        raise
    if error is not None:
        raise error
    yield Pause(1.0)
    return answer.value


def answers(*values):
    return [one if isinstance(one, Exception) else Answer(one, 0.0, 0.0) for one in values]


def names(step):
    assert isinstance(step, Calls)
    return [one.name for one in step.calls]


def test_what_is_asked_at_the_same_time_is_asked_at_once():
    flow = together([asks("a", []), asks("b", [])])
    assert names(next(flow)) == ["a", "b"]
    assert flow.send(answers(1, 2)) == Pause(1.0)
    with pytest.raises(StopIteration) as end:
        flow.send(0.0)
    assert end.value.value == [1, 2]


def test_trouble_is_that_of_one_and_the_others_go_on():
    undone = []
    flow = together([asks("a", undone), asks("b", undone)])
    next(flow)
    assert flow.send(answers(Unanswered("silent", 0.0, 0.0), 2)) == Pause(1.0)
    assert names(flow.send(0.0)) == ["undo a"]
    with pytest.raises(Unanswered):
        flow.send(answers(0))
    assert undone == ["a"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_is_told_before_a_server_that_is_silent(is_first):
    lost, silent = LockLost("a", "forced"), LockUnavailable("b", "silent")
    errors = [lost, silent] if is_first else [silent, lost]
    flow = together([asks(error.name, [], error) for error in errors])
    next(flow)
    with pytest.raises(LockLost):
        flow.send(answers(1, 2))


def test_an_interrupt_is_thrown_into_each():
    undone = []
    flow = together([asks("a", undone), asks("b", undone)])
    next(flow)
    assert names(flow.throw(KeyboardInterrupt())) == ["undo a", "undo b"]
    with pytest.raises(KeyboardInterrupt):
        flow.send(answers(0, 0))
    assert undone == ["a", "b"]


@pytest.mark.parametrize("trouble", [Unanswered("silent", 0.0, 0.0), Refused("NOPERM")])
def test_trouble_of_the_sender_is_that_of_each_call(trouble):
    undone = []
    flow = together([asks("a", undone), asks("b", undone)])
    next(flow)
    assert names(flow.throw(trouble)) == ["undo a", "undo b"]
    with pytest.raises(type(trouble)):
        flow.send(answers(0, 0))
    assert undone == ["a", "b"]


@pytest.mark.parametrize("trouble", [Unanswered("silent", 0.0, 0.0), Refused("NOPERM")])
def test_trouble_of_a_step_that_is_done_alone_is_that_of_its_flow(trouble):
    def tells():
        yield TOLD

    flow = together([tells(), tells()])
    assert next(flow) == flow.throw(trouble) == TOLD
    with pytest.raises(type(trouble)):
        flow.send(None)


def test_an_interrupt_of_a_pause_is_thrown_into_all_that_pause():
    undone = []

    def pauses(name):
        try:
            yield Pause(1.0)
        except KeyboardInterrupt:
            undone.append(name)
            raise

    flow = together([pauses("a"), pauses("b")])
    next(flow)
    with pytest.raises(KeyboardInterrupt):
        flow.throw(KeyboardInterrupt())
    assert undone == ["a", "b"]


def test_of_several_pauses_all_last_as_long_as_the_longest():
    def pauses(seconds):
        return (yield Pause(seconds))

    flow = together([pauses(1.0), pauses(3.0), pauses(2.0)])
    assert next(flow) == Pause(3.0)
    with pytest.raises(StopIteration) as end:
        flow.send(7.0)
    assert end.value.value == [7.0, 7.0, 7.0]


def test_answers_that_are_too_few_are_nobodys():
    undone = []
    flow = together([asks("a", undone), asks("b", undone)])
    next(flow)
    assert names(flow.send(answers(1))) == ["undo a", "undo b"]
    with pytest.raises(ValueError, match="zip"):
        flow.send(answers(0, 0))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_bug_is_told_before_a_loss(is_first):
    errors = [AssertionError("a bug"), LockLost("b", "forced")]
    flow = together([asks("x", [], error) for error in (errors if is_first else errors[::-1])])
    next(flow)
    with pytest.raises(AssertionError):
        flow.send(answers(1, 2))


def test_of_errors_alike_the_first_is_told():
    flow = together([asks(name, [], LockUnavailable(name, "silent")) for name in "ab"])
    next(flow)
    with pytest.raises(LockUnavailable, match="'a'"):
        flow.send(answers(1, 2))


def test_flows_that_nobody_performs_any_more_are_closed():
    closed = []

    def goes_on(name):
        try:
            yield call(name)
        finally:
            closed.append(name)

    parts = [goes_on("a"), goes_on("b")]  # Else they were closed with their last references.
    flow = together(parts)
    next(flow)
    flow.close()
    assert closed == ["a", "b"]


class Interrupted:
    """A flow, of which a signal handler raises before it goes on for the first time."""

    def __init__(self, flow):
        self.flow = flow
        self.raised = False

    def __getattr__(self, name):
        return getattr(self.flow, name)

    def send(self, answer):
        if answer is not None and not self.raised:
            self.raised = True
            raise KeyboardInterrupt
        return self.flow.send(answer)


def test_a_flow_that_is_interrupted_before_it_goes_on_is_not_forgotten():
    undone = []
    interrupted = Interrupted(asks("b", undone))
    flow = together([asks("a", undone), interrupted])
    next(flow)
    undo = flow.send(answers(1, 2))
    assert names(undo) == ["undo b"]  # That of "a" had been answered.
    with pytest.raises(KeyboardInterrupt):
        flow.send(answers(0))


def test_an_error_that_was_raised_is_part_of_no_cycle():
    def fails():
        yield call("a")
        raise LockUnavailable("a", "silent")

    flow = together([fails()])
    next(flow)
    gc.disable()
    try:
        try:
            flow.send(answers(1))
        except LockUnavailable as error:
            raised = ref(error)
        assert raised() is None
    finally:
        gc.enable()
