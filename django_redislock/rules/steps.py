"""The steps that a flow may ask for, and their answers."""

from __future__ import annotations

import math
from collections.abc import Generator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from django_redislock.exceptions import LockError, LockLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from django_redislock.exceptions import UnavailableReason
    from django_redislock.rules.scripts import Script


class Performer(Protocol):
    """Performs the steps of one flow: each method returns the answer, or an awaitable of it.

    It is closed when the flow has ended.
    """

    def call(self, step: Call) -> Any: ...
    def call_all(self, calls: Sequence[Call]) -> Any: ...
    def tell(self, step: Tell) -> Any: ...
    def listen(self, step: Listen) -> Any: ...
    def pause(self, step: Pause) -> Any: ...
    def notify(self, step: Notify) -> Any: ...
    def elsewhere(self, step: Elsewhere) -> Any: ...
    def close(self) -> None: ...


class Call(NamedTuple):
    """Run a script; the answer is an :class:`Answer`.

    If the script takes a channel, the performer adds the one on which its connection is rung.
    """

    script: Script
    name: str
    args: tuple[str | bytes | int, ...]
    within: float  # Seconds after which the answer is no longer awaited.
    listening: str = ""  # Lease id for which the bell must be able to ring us.
    replicas: int = 0  # How many replicas are asked to acknowledge it.
    shielded: bool = False  # An undo: a second cancellation must not interrupt it.
    patience: float = 0.0  # Seconds that it may wait for a connection, besides *within*.
    permit: int = 1  # The permit of the lock whose keys the script is given.

    def perform(self, by: Performer) -> Any:
        return by.call(self)


class Calls(NamedTuple):
    """Run several scripts, sent in one go; the answer is an :data:`Outcome` of each.

    All ask for the same number of replicas, and none for the bell.
    """

    calls: tuple[Call, ...]

    @property
    def shielded(self) -> bool:
        """Whether some of them are undos; see Call."""
        return any(call.shielded for call in self.calls)

    def perform(self, by: Performer) -> Any:
        return by.call_all(self.calls)


class Tell(NamedTuple):
    """Send a script on its way without awaiting its answer."""

    script: Script
    name: str
    args: tuple[str | bytes | int, ...]
    permit: int = 1

    def perform(self, by: Performer) -> Any:
        return by.tell(self)


class Listen(NamedTuple):
    """Sleep until the bell rings for *id*; the answer is a :class:`Bell`."""

    id: str
    seconds: float

    def perform(self, by: Performer) -> Any:
        return by.listen(self)


class Pause(NamedTuple):
    """Sleep; the answer is the time."""

    seconds: float

    def perform(self, by: Performer) -> Any:
        return by.pause(self)


class Notify(NamedTuple):
    """Send a Django signal to its receivers, and log what they raise; there is no answer."""

    signal: Any
    news: dict[str, Any]

    def perform(self, by: Performer) -> Any:
        return by.notify(self)


class Elsewhere(NamedTuple):
    """Perform a flow of its own on some backend; the answer is its result."""

    backend: Any
    flow: Flow[Any]

    def perform(self, by: Performer) -> Any:
        return by.elsewhere(self)


class Answer(NamedTuple):
    """What a script returned. Deadlines count from *sent*: the server acted at some later time."""

    value: Any
    sent: float
    now: float
    replicas: int = 0  # How many acknowledged.
    unanswered_since: float = math.inf  # When a first try was sent that may have been carried out.


class Bell(NamedTuple):
    """What the server said to a waiter, and when we read that; no words if it said nothing."""

    words: list[str]
    now: float


class Unanswered(Exception):
    """The command may or may not have been carried out; trying again may help."""

    def __init__(
        self, problem: str, sent: float, now: float, reason: UnavailableReason = "timeout"
    ) -> None:
        super().__init__(problem, sent, now)
        self.problem = problem
        self.sent = sent
        self.now = now
        self.reason = reason


class NotDone(Unanswered):
    """The command was certainly not carried out; trying again may help."""


class Refused(Exception):
    """The server refuses, and would again: rights, types, memory, configuration."""

    def __init__(self, problem: str, reason: UnavailableReason = "refused") -> None:
        super().__init__(problem)
        self.problem = problem
        self.reason = reason


class NotOurs(Refused):
    """The flow belongs to the parent of this forked child: the parent goes on with it."""


Trouble = Unanswered | Refused
Outcome = Answer | Trouble  # Of a Call.
Result = TypeVar("Result")
Step = Call | Calls | Tell | Listen | Pause | Notify | Elsewhere
Flow = Generator[Step, Any, Result]


# --- several flows performed as one: scripts that they call at the same time are sent in one go ---


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
