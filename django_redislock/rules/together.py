"""Several flows performed as one: scripts that they call at the same time are sent in one go."""

from __future__ import annotations

from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, Any, TypeVar

from django_redislock.exceptions import LockError, LockLost
from django_redislock.rules.steps import Call, Calls, Pause, Refused, Unanswered

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from django_redislock.rules.steps import Flow, Step

Result = TypeVar("Result")


def together(flows: Iterable[Flow[Result]]) -> Flow[list[Result]]:
    """Perform *flows* side by side, and return their results in the same order.

    If one of them fails, the others go on to their ends before the error is raised. An interrupt is
    thrown into each of them, so each undoes what it has begun.

    Raises:
        BaseException: The interrupt; or else the loss of a lease; or else the first error.
    """
    going = dict(enumerate(flows))
    results: dict[int, Result] = {}
    error: BaseException | None = None
    answers: dict[int, Any] = dict.fromkeys(going)
    try:
        while going:  # Turns again only after an interrupt, which may come where a loop turns.
            try:
                while going:
                    steps: dict[int, Step] = {}
                    for number in list(answers):
                        flow = going[number]
                        try:
                            steps[number] = _next_step(flow, answers.pop(number))
                        except BaseException as raised:
                            if getgeneratorstate(flow) != GEN_CLOSED:
                                raise  # A signal handler raised it, outside the flow.
                            del going[number]
                            if isinstance(raised, StopIteration):
                                results[number] = raised.value
                            elif error is None or _weight(raised) > _weight(error):
                                error = raised
                    answers = yield from _performed(steps)
            except GeneratorExit:
                for flow in going.values():
                    flow.close()
                raise
            except BaseException as raised:  # noqa: BLE001 - each flow undoes what it has begun
                error = raised
                answers = dict.fromkeys(going, raised)
        if error is not None:
            raise error
        return [results[number] for number in sorted(results)]
    finally:
        # An error refers to the frames that it has passed. These would refer to it: a cycle.
        del error, answers


def _next_step(flow: Flow[Any], answer: Any) -> Step:
    try:
        return flow.throw(answer) if isinstance(answer, BaseException) else flow.send(answer)
    finally:
        del answer  # See together().


def _performed(steps: Mapping[int, Step]) -> Flow[dict[int, Any]]:
    """The answers to the steps of several flows; their calls go out in one go.

    Of several pauses, all last as long as the longest.
    """
    answers: dict[int, Any] = {}
    calls: dict[int, Call] = {}
    pauses = {number: step for number, step in steps.items() if isinstance(step, Pause)}
    if pauses:
        answers.update(dict.fromkeys(pauses, (yield max(pauses.values()))))
    for number, step in steps.items():
        if isinstance(step, Call):
            calls[number] = step
        elif number not in pauses:
            try:
                answers[number] = yield step
            except (Unanswered, Refused) as trouble:
                answers[number] = trouble.with_traceback(None)  # See together().
    if calls:
        try:
            answers.update(zip(calls, (yield Calls(tuple(calls.values()))), strict=True))
        except (Unanswered, Refused) as trouble:
            answers.update(dict.fromkeys(calls, trouble.with_traceback(None)))
    return answers


def _weight(error: BaseException) -> int:
    """How much an error matters beside others."""
    if not isinstance(error, LockError):
        return 2
    return int(isinstance(error, LockLost))
