"""Variants of the protocol that look right and are not: each leaves one rule out.

Those of the server are the scripts that ship, with one line changed. A line that is not there any
more is an error, or the model would find nothing in what is no variant.
"""

import hashlib
from dataclasses import replace

from django_redislock.exceptions import LockUnavailable
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import Granted
from django_redislock.rules.replies import is_busy
from django_redislock.rules.scripts import Script
from django_redislock.rules.steps import Answer, Call, Listen, Refused, Tell, Unanswered


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


def hand_over_without_undo(over):
    """Without R4: a hand-over that is not answered is left as it is."""
    reason = yield from flows.hand_over(over)
    return "" if reason else over.next_id


def acquire_confirming_by_asking(attempt, now):
    """A hand-over is confirmed by a command that also grants, and may arrive after the release."""

    def step_of(step):
        if isinstance(step, Tell):
            return Tell(*attempt.call("try", b"0", 0.0, 1.0)[:3])
        return step

    return changed(flows.acquire(attempt, now), step_of)


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


# Without R1: a resend is a stranger, as with a new token for each try, or a bare SET NX.
RESENDS_ARE_STRANGERS = instead(
    "if fence and is_of(value, token) and state ~= 'k' then", "if false then"
)

# Without P3: a release is not compared with the token of the lease.
ANYBODY_RELEASES = instead(
    "if value and string.sub(value, 1, 33) == token .. 'h' then",
    "if value then",
)

# Without the end of R2: a resend is told "yours" without restarting the ttl.
RESENDS_ONLY_CONFIRM = instead("call('PEXPIRE', LOCK, ttl, 'GT') -- ", "-- ")

# Without the claim time of R14: whoever was rung has the lock for its whole ttl.
HAND_OVERS_ARE_GRANTS = instead(
    "state, confirm_by, px = 'c', digits(ms + math.min(within or CONFIRM_WITHIN, ttl)),"
    " ttl + CONFIRM_WITHIN",
    "px = 60000",
)

# A renewal brings back a lease that the server has lost.
RENEWALS_BRING_BACK = instead(
    "local renewals = string.sub(count, 2)\nlocal value = call('GET', LOCK)",
    """local renewals = string.sub(count, 2)
local value = call('GET', LOCK)
if not value then
  value = token .. 'h-00000' .. string.sub(token, 1, 16) .. '|' .. digits(clock() + 1) .. '|0|0|0||'
  call('SET', LOCK, value, 'PX', ttl)
end""",
)

# Whoever has the baton takes up whatever lease there is.
BATONS_ARE_GOOD_TWICE = instead("(not is_baton or tonumber(confirm_by) <= ms)", "value == ''")

# A pause waits its turn, like anybody else.
PAUSES_COME_LAST = instead("ticket = '-' .. us", "ticket = us")

# A permit more than there are.
ONE_PERMIT_TOO_MANY = instead(
    "local permits = tonumber(limit)", "local permits = tonumber(limit) + 1"
)

# Whoever comes to a permit that is free has it, also if others wait for one.
NEWCOMERS_PASS_WAITERS = instead(
    "not chosen or call('EXISTS', QUEUE) == 1", "not chosen", "and call('EXISTS', QUEUE) == 0", ""
)

# A permit that is released goes to the first waiter, whatever limit that has in mind.
WAITERS_GET_ANY_PERMIT = instead(" or limit_of(record) < tonumber(permit)) then", ") then")

# An undo looks at the first permit alone.
UNDOS_KNOW_ONE_PERMIT = instead("for number = 2, tonumber(limit or 1) do", "for number = 2, 1 do")
