"""Variants of the protocol that look right and are not: each leaves one rule out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django_redislock.backends.memory.backend import Server
from django_redislock.exceptions import LockUnavailable
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import Granted
from django_redislock.rules.steps import Answer, Call, Listen, Refused, Tell, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable

    from django_redislock.backends.memory.backend import _Lock
    from django_redislock.rules.flows import Request
    from django_redislock.rules.steps import Flow


def changed(
    flow: Flow[Any],
    step_of: Callable[[Any], Any] = lambda step: step,
    answer_of: Callable[[Any, Any], Any] = lambda step, answer: answer,
    error_of: Callable[[Any, BaseException], Any] = lambda step, error: None,
) -> Flow[Any]:
    """A flow whose steps and answers are changed on the way; an error may become an answer."""
    step = next(flow)
    while True:
        try:
            answer = answer_of(step, (yield step_of(step)))
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


def acquire_without_undo(request: Request, now: float) -> Flow[Any]:
    """Without R4: an acquire that was interrupted or not answered just ends."""
    try:
        return (yield from flows._acquire(request, now))
    except (Unanswered, Refused) as error:
        raise LockUnavailable(request.name, error.problem) from error


def acquire_trusting_its_undo(request: Request, now: float) -> Flow[Any]:
    """A token is used again although nobody knows whether its undo is still on its way."""

    def error_of(step: Any, error: BaseException) -> Any:
        undoes = isinstance(step, Call) and step.script is scripts.LEAVE
        if undoes and isinstance(error, Unanswered):
            return Answer(0, error.sent, error.now)
        return None

    return changed(flows.acquire(request, now), error_of=error_of)


def acquire_believing_old_bells(request: Request, now: float) -> Flow[Any]:
    """Without R2 for hand-overs: a bell is a grant from when it is heard."""
    flow = flows.acquire(request, now)
    step = next(flow)
    while True:
        try:
            answer = yield step
            if isinstance(step, Listen) and answer.words[:1] == ("granted",):
                deadline = answer.now + flows.CLAIM
                flow.close()
                return Granted(int(answer.words[2]), deadline, answer.now, answer.now + request.ttl)
            step = flow.send(answer)
        except StopIteration as end:
            return end.value
        except (Unanswered, Refused) as error:
            step = flow.throw(error)


def acquire_confirming_by_asking(request: Request, now: float) -> Flow[Any]:
    """A hand-over is confirmed by a command that also grants, and may arrive after the release."""

    def step_of(step: Any) -> Any:
        if isinstance(step, Tell):
            return Tell(*flows._acquire_call(request, "try", b"0")[:3])
        return step

    return changed(flows.acquire(request, now), step_of)


class ServerWithoutResends(Server):
    """Without R1: a resend is a stranger, as with a new token for each try, or a bare SET NX."""

    def _acquire(self, lock: _Lock, us: int, ms: int, token: str, *args: Any) -> Any:
        if lock.lease is not None and lock.lease.token == token:
            return [b"busy", lock.lease.expires - ms, lock.lease.packed()]
        return super()._acquire(lock, us, ms, token, *args)


class ServerThatFreesForAnybody(Server):
    """Without P3: a release is not compared with the token of the lease."""

    def _release(self, lock: _Lock, us: int, ms: int, token: str, *args: Any) -> bytes:
        if lock.lease is not None:
            token = lock.lease.token
        return super()._release(lock, us, ms, token, *args)


class ServerThatOnlyConfirms(Server):
    """Without the end of R2: a resend is told "yours" without restarting the ttl."""

    def _acquire(self, lock: _Lock, us: int, ms: int, token: str, *args: Any) -> Any:
        before = lock.lease
        value = super()._acquire(lock, us, ms, token, *args)
        after = lock.lease
        if before is not None and after is not None and before.fence == after.fence:
            lock.lease = replace(after, expires=before.expires)
        return value


class ServerWithoutClaims(Server):
    """Without the claim time of R14: whoever was rung has the lock for its whole ttl."""

    def _hand_over(self, lock: _Lock, us: int, ms: int, *args: Any) -> str | None:
        token = super()._hand_over(lock, us, ms, *args)
        if token is not None and lock.lease is not None and lock.lease.state == "c":
            lock.lease = replace(lock.lease, state="h", expires=ms + 60_000)
        return token


class ServerThatBringsBack(Server):
    """A renewal brings back a lease that the server has lost."""

    def _renew(self, lock: _Lock, us: int, ms: int, token: str, ttl: int, *args: Any) -> bytes:
        if lock.lease is None:
            grant = (token, token[:2], ttl, "try", b"0", "", "-", "{}", "")
            text = [arg.decode() if isinstance(arg, bytes) else arg for arg in grant]
            self._acquire(lock, us, ms, *text)
        return super()._renew(lock, us, ms, token, ttl, *args)
