"""The locks that are held right now, for programs: list, look, force a release, pause.

The admin page and ``manage.py locks`` are made of these. They raise ImproperlyConfigured if the
settings of the alias are wrong.
"""

from __future__ import annotations

import difflib
import math
import secrets
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured

from django_redislock import clock, logs, signals
from django_redislock.backends.registry import backends
from django_redislock.conf import conf
from django_redislock.deadlocks import LOOK_WITHIN, circle_of
from django_redislock.exceptions import InvalidLockName, LockUnavailable
from django_redislock.held_lock import (
    STATES,
    Detail,
    HeldLock,
    HeldLocks,
    PastLease,
    Selection,
    Waiter,
    read_past,
)
from django_redislock.humanize import visible
from django_redislock.process import is_gone
from django_redislock.rules import flows, scripts
from django_redislock.rules.arguments import seconds
from django_redislock.rules.forms import Attempt
from django_redislock.rules.lease_state import Granted
from django_redislock.rules.names import Permit, check_name, meant_by
from django_redislock.rules.options import DEFAULT_ALIAS, LONGEST_OPERATION, Options
from django_redislock.rules.replies import RELEASED, ForceReleaseReply, InspectReply, in_seconds
from django_redislock.rules.steps import Call
from django_redislock.rules.stored import PAUSE, TOKEN_LENGTH, Owner, read_holding
from django_redislock.task_runs import MOST_NAMES, Record, Records, Run, job, record, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from django_redislock.backends.base import Backend
    from django_redislock.held_lock import State
    from django_redislock.options import Seconds
    from django_redislock.rules.replies import LookReply

LONGEST_PAUSE = 30 * 86400.0  # Seconds: people forget a longer pause.

audit = logs.logger("django_redislock.audit")

# Lists are bounded, whatever the server holds: names are cheap, looks are not.
MOST_LOOKS = 10_000
LOOKED_AT_ONCE = 1000
BEYOND_ALL = 2**32  # An offset that no index reaches, and any server can read.
MOST_WAITERS_NAMED = 100
MOST_COMPARED = 1000  # Names of each index, to find similar ones.
CIRCLES_WITHIN = 1.0  # Seconds for which circles of waits are looked for.

# Errors that make a look impossible; see problem().
PROBLEMS = (LockUnavailable, InvalidLockName, ImproperlyConfigured)


def list(  # noqa: A001
    *,
    using: str = DEFAULT_ALIAS,
    limit: int = 1000,
    offset: int = 0,
    latest_first: bool = False,
    only: Selection | None = None,
) -> HeldLocks:
    """Up to *limit* held locks of one alias, ordered by the ends of their leases.

    It takes a few round trips and never scans the keyspace.

    Args:
        using: Alias in REDISLOCK.
        limit: How many at most, up to 100,000.
        offset: How many to skip.
        latest_first: Whether those that end last come first.
        only: Which locks to list. At most 10,000 locks are looked at to find them.

    Raises:
        LockUnavailable: The server did not or could not answer.
        ValueError: The limit or the offset is negative, or there is no such state.
    """
    if limit < 0 or offset < 0:
        raise ValueError(f"limit and offset must not be negative: {limit}, {offset}.")
    limit, offset = min(limit, MOST_NAMES), min(offset, BEYOND_ALL)
    backend = backends[using]
    found = HeldLocks()
    if only is None or only == Selection():
        permits, found.total, found.silent = backend.held_permits(
            limit, offset, latest_first=latest_first
        )
        found.extend(look_at(permits, using=using))
        found.partial = found.total > offset + limit
        return found
    only.check()
    permits, found.total, found.silent = backend.held_permits(MOST_NAMES, latest_first=latest_first)
    permits = only.narrow(permits)
    admitted = filter(only.admits, look_at(permits[:MOST_LOOKS], using=using))
    found.extend(islice(admitted, offset, offset + limit))
    found.partial = (
        found.total > MOST_NAMES or len(permits) > MOST_LOOKS or next(admitted, None) is not None
    )
    if only.search:  # The names that matched were looked at first.
        found.sort(key=_end, reverse=latest_first)
    return found


def every(*, using: str = DEFAULT_ALIAS, only: Selection | None = None) -> Iterator[HeldLock]:
    """All held locks of one alias, however many: for programs that act on all of a selection.

    Raises:
        LockUnavailable: The server did not or could not answer.
        ValueError: There is no such state.
    """
    only = only or Selection()
    only.check()
    backend = backends[using]
    offset, total = 0, 1
    while offset < total:
        permits, total, silent = backend.held_permits(MOST_NAMES, offset)
        if silent:
            raise LockUnavailable(backend.prefix, f"no answer from {', '.join(silent)}")
        offset += MOST_NAMES
        yield from filter(only.admits, look_at(only.narrow(permits), using=using))


def get(name: str, *, permit: int | None = None, using: str = DEFAULT_ALIAS) -> HeldLock | None:
    """The lock *name*, or None if nobody holds it.

    Args:
        name: "gpu#2" is the second permit of "gpu" if that is held, else the lock named "gpu#2".
        permit: The number of a permit. If given, the name is taken literally, and 1 is the lock
            itself.
        using: Alias in REDISLOCK.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    return next(look_at(_meant_by(name, permit), using=using), None)


def _meant_by(name: str, permit: int | None) -> Sequence[Permit]:
    """The locks that the name may mean, see get(); the likeliest first."""
    return meant_by(name) if permit is None else [Permit(check_name(name), permit)]


def look_at(permits: Iterable[Permit], *, using: str = DEFAULT_ALIAS) -> Iterator[HeldLock]:
    """Those of *permits* that are held, in few round trips.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend, remaining = backends[using], iter(permits)
    until = clock.now() + CIRCLES_WITHIN
    while some := [*islice(remaining, LOOKED_AT_ONCE)]:
        looks = zip(some, backend.look_many(some), strict=True)
        yield from filter(None, (_read_look(backend, *look, until) for look in looks))


def detail(name: str, *, permit: int | None = None, using: str = DEFAULT_ALIAS) -> Detail:
    """The holder of the lock *name*, its waiters, and its past leases, those of all permits.

    Args:
        name: See get().
        permit: See get(). The past is that of this permit alone.
        using: Alias in REDISLOCK.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    found = details(_meant_by(name, permit), using=using)
    # The first one that is held, as for get(), or else that was held.
    shown = max(found, key=lambda one: (one.lock is not None, not one.lock and bool(one.past)))
    others = [Permit(shown.key.name, number) for number in range(1, shown.limit + 1)]
    lock = shown.lock
    if len(others) == 1 and (lock is None or lock.state == "foreign" or lock.owner.operator):
        # No owner says a limit here, but a higher permit may still be held.
        listed = backends[using].held_permits(MOST_LOOKS).permits
        others = [one for one in listed if one.name == shown.key.name]
    others = [one for one in others if one != shown.key]
    if permit is not None or shown.number > 1:
        return replace(shown, others=[*look_at(others, using=using)])
    more = details(others, using=using)
    past = sorted((*shown.past, *chain(*(one.past for one in more))), key=lambda one: one.since)
    return replace(shown, others=[one.lock for one in more if one.lock], past=past)


def details(permits: Sequence[Permit], *, using: str = DEFAULT_ALIAS) -> Sequence[Detail]:
    """As detail(), for several locks in one round trip, without the other permits of each.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    calls = []
    for one in permits:
        calls += [
            backend.look(*one),
            Call(
                scripts.INSPECT,
                one.name,
                (MOST_WAITERS_NAMED, backend.conf.timeline),
                backend.within,
                permit=one.number,
            ),
        ]
    answers = iter(backend.results_of(calls) if calls else ())
    return [
        _read_detail(backend, one, looked, InspectReply(*inspected))
        for one, looked, inspected in zip(permits, answers, answers, strict=True)
    ]


def _read_detail(backend: Backend, permit: Permit, looked: Any, found: InspectReply) -> Detail:
    lock = _read_look(backend, permit, backend.seen(permit.name, looked))
    now = in_seconds(found.server_ms)
    return Detail(
        name=permit.label,
        number=permit.number,
        alias=backend.alias,
        lock=lock,
        waiters=[
            Waiter(
                id=waiter.id.decode(),
                owner=Owner.unpack(waiter.owner.decode(errors="replace")),
                waiting_for=max(0.0, now - waiter.since),
            )
            for waiter in found.queue
        ],
        past=read_past(found.past, lock, permit.number),
        server_time=now,
    )


def record_of(detail: Detail) -> Record | None:
    """The record of the task runs under a lock, over all its permits.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    return record(detail.key.name, using=detail.alias)


def unknown(detail: Detail, record: Record | None) -> str:
    """A sentence that says that nothing is known of a lock; "" if anything is."""
    if detail.lock or detail.others or detail.waiters or detail.past or record:
        return ""
    return "Nothing is known of it: no lease of a second or longer, and no run of a task."


def similar(name: str, *, using: str = DEFAULT_ALIAS) -> Sequence[str]:
    """Up to three other names, in case *name* is misspelt or a part: the most similar first.

    It compares up to 1,000 held locks, and the 1,000 under which tasks ran last.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    permits, *_ = known_permits(MOST_COMPARED, using=using)
    known = dict.fromkeys(one.name for one in permits)
    known.pop(name, None)
    part = name.casefold()
    with_part = sorted((one for one in known if part in one.casefold()), key=len)
    return [*dict.fromkeys([*difflib.get_close_matches(name, known), *with_part])][:3]


def known_permits(
    limit: int, *, using: str = DEFAULT_ALIAS
) -> tuple[Sequence[Permit], bool, Sequence[str]]:
    """Up to *limit* held locks or permits, and up to *limit* under which tasks ran.

    Returns:
        Each once; whether there are more; and the servers that did not answer.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    now, ran = backend.held_permits(limit), backend.ran_permits(limit)
    permits = [*dict.fromkeys([*now.permits, *ran.permits])]
    return permits, max(now.total, ran.total) > limit, [*now.silent, *ran.silent]


def force_release(
    name: str,
    id: str,  # noqa: A002
    *,
    permit: int | None = None,
    using: str = DEFAULT_ALIAS,
    by: str = "",
    reason: str = "",
) -> bool:
    """End exactly the lease *id* of the lock *name*; the next waiter gets the lock.

    The holder is not stopped. It loses its lease, with the reason "forced", at the next renewal;
    without renewals, at the release.

    Args:
        name: The lock, or "gpu#2" for the second permit of "gpu".
        id: The lease that was seen. A newer lease is not touched.
        permit: See get().
        using: Alias in REDISLOCK.
        by: The operator, for the audit log.
        reason: Why, for the audit log.

    Returns:
        Whether the lease was ended; False if it was over already.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    # An id that cannot be encoded is a typing error in a shell that is not UTF-8. The second
    # argument is the id of this request, by which the server recognises it if the first answer was
    # lost.
    request = secrets.token_hex(8)
    args = id.encode(errors="replace"), request, backend.retention
    meant = _meant_by(name, permit)
    name = meant[0].label

    def end(one: Permit) -> ForceReleaseReply:
        call = Call(scripts.FORCE_RELEASE, one.name, args, backend.within, permit=one.number)
        return ForceReleaseReply(*backend.run(flows.result_of(call)))

    known = {"lock": name, "alias": using, "lease": id, "reason": reason or None}
    extra = logs.of(**known)
    # Anybody may write owners, operators and reasons: with %r none forges a line of the log.
    try:  # No two leases have the same id, so at most one is ended.
        reply = next((one for one in map(end, meant) if one.word == RELEASED), None)
    except LockUnavailable:
        text = "Lock %r (%s): whether lease %r was released is unknown, by %r, reason %r"
        audit.warning(text, name, using, id, by, reason, extra=extra)
        raise
    if reply is None:
        text = "Lock %r (%s): lease %r was not there to release, by %r, reason %r"
        audit.info(text, name, using, id, by, reason, extra=extra)
        return False
    owner = read_holding(reply.value).owner
    holder = str(owner)
    extra = logs.of(**known, job=owner.task or None, task_id=owner.task_id or None)
    text = "Lock %r (%s): lease %r of %r released by %r, reason %r"
    audit.warning(text, name, using, id, holder, by, reason, extra=extra)
    news = {"name": name, "template": name, "using": using, "id": id, "holder": holder, "by": by}
    signals.lock_force_released.send_robust(sender=HeldLock, **news)
    return True


def pause_seconds(lasts: Seconds) -> float:
    """The seconds of a pause, checked.

    Raises:
        ValueError: The time is no duration, or shorter than a second, or longer than 30 days.
    """
    found = seconds(lasts, "The time of a pause", least=1.0)
    if found > LONGEST_PAUSE:
        raise ValueError(
            f"The time of a pause must be at most 30 days, not {found / 86400:g} days."
        )
    return found


def pause(
    name: str,
    lasts: Seconds,
    *,
    by: str,
    reason: str = "",
    using: str = DEFAULT_ALIAS,
    wait: float = 0.0,
) -> bool:
    """Keep the lock *name* from everybody for a while, as for maintenance; see resume().

    If somebody holds the lock, the pause begins after that lease, before all waiters. Of a lock
    with a limit, the pause has all permits as soon as the first is free: runs under the others go
    on to their end, and nobody gets a permit. The time counts from now.

    Args:
        name: The lock, never a permit of it: "gpu#2" is the lock of that name.
        lasts: For how long, in seconds or as a timedelta; at most 30 days.
        by: The operator, shown as the holder.
        reason: Why, shown beside the operator.
        using: Alias in REDISLOCK.
        wait: On a quorum, seconds to wait until nobody else holds the lock, since a quorum has no
            queue. The time of the pause counts from then.

    Returns:
        Whether the pause has begun; False if it begins after the lease of the present holder.

    Raises:
        ValueError: The time is too short or too long, or nobody is named.
        LockTimeout: Another pause is in the way; the error has its reason. Or, on a quorum, anybody
            else holds the lock.
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    ttl = pause_seconds(lasts)
    if not by:
        raise ValueError("by must name the operator.")
    attempt = _attempt_of_operator(name, by, reason, backend, ttl)
    attempt.is_pause = True
    try:
        outcome = backend.run(flows.pause(attempt, backend.clock()))
        if isinstance(outcome, flows.Busy) and outcome.reason is None and wait:
            # An undo of the first token may still be on its way (R4).
            attempt = _attempt_of_operator(name, by, reason, backend, ttl, wait)
            outcome = backend.run(flows.pause(attempt, backend.clock()))
    except LockUnavailable:
        text = "Lock %r (%s): whether it is paused for %.0f s is unknown, by %r, reason %r"
        extra = logs.of(lock=attempt.name, alias=using, lease=attempt.id, reason=reason or None)
        audit.warning(text, attempt.name, using, ttl, by, reason, extra=extra)
        raise
    if isinstance(outcome, flows.Busy):
        raise outcome.timeout(using)
    extra = logs.of(lock=attempt.name, alias=using, lease=attempt.id, reason=reason or None)
    begun = isinstance(outcome, Granted)
    text = (
        "Lock %r (%s): paused for %.0f s by %r, reason %r"
        if begun
        else "Lock %r (%s): a pause is pending, for %.0f s by %r, reason %r"
    )
    audit.warning(text, attempt.name, using, ttl, by, reason, extra=extra)
    return begun


def _attempt_of_operator(
    name: str, by: str, reason: str, backend: Backend, ttl: float, wait: float = 0.0
) -> Attempt:
    """An attempt whose token shows everybody that the lease is a pause."""
    # The time of the pause says nothing of how soon a server must answer.
    terms = backend.terms(Options(wait=wait, renew=False))
    terms = replace(terms, ttl=ttl, max_hold=math.inf, unavailable_after=math.inf)
    owner = Owner(operator=by, reason=reason)
    attempt = Attempt(check_name(name), owner, terms, backend.conf.replicas_ack)
    attempt.token = (PAUSE + attempt.token)[:TOKEN_LENGTH]
    return attempt


def resume(name: str, *, using: str = DEFAULT_ALIAS, by: str = "") -> bool:
    """End the pause of the lock *name*; the next waiter gets the lock. Other leases stay.

    Args:
        name: The lock.
        using: Alias in REDISLOCK.
        by: The operator, for the audit log.

    Returns:
        Whether there was a pause, begun or not.

    Raises:
        InvalidLockName: The name cannot be a lock's name.
        LockUnavailable: The server did not or could not answer.
    """
    backend = backends[using]
    name = check_name(name)
    call = Call(scripts.RESUME, name, (backend.retention,), backend.within)
    try:
        answer = backend.run(flows.answer_to(call))
    except LockUnavailable:
        text = "Lock %r (%s): whether its pause was ended is unknown, by %r"
        audit.warning(text, name, using, by, extra=logs.of(lock=name, alias=using))
        raise
    # If the first try was not answered, it may have ended the pause.
    if not answer.value and answer.unanswered_since == math.inf:
        return False
    owner = Owner.unpack(answer.value.decode(errors="replace"))
    text = "Lock %r (%s): pause of %r, reason %r, ended by %r"
    extra = logs.of(lock=name, alias=using, reason=owner.reason or None)
    audit.warning(text, name, using, owner.operator, owner.reason, by, extra=extra)
    return True


def why_not_released(name: str, *, permit: int | None = None, using: str = DEFAULT_ALIAS) -> str:
    """A sentence that names the present holder, after force_release() found nothing to release.

    Raises:
        LockUnavailable: The server did not or could not answer.
    """
    lock = get(name, permit=permit, using=using)
    if lock is None:
        return "Nobody holds it."
    if lock.state == "rate":
        return "It is a rate, which nobody holds: there is nothing to release."
    if lock.state == "foreign":
        return f"Its key now holds {lock.strange}."
    return visible(f"Somebody else holds it now: {lock.owner}, by lease {lock.id}.")


def problem(error: Exception, alias: str) -> str:
    """Why an alias cannot be looked at (see PROBLEMS), as a sentence without secrets.

    It names a server that cannot answer.
    """
    if not isinstance(error, LockUnavailable):
        return visible(str(error))
    server = " ".join(filter(None, [conf(alias).address, f"({alias})"]))
    return visible(f"The server {server} cannot answer: {error.problem}.")


def silence(silent: Iterable[str], alias: str) -> dict[str, str]:
    """The problem of each server that did not answer while others did."""
    return {
        server: visible(
            f"The server {server} ({alias}) did not answer all that was asked; locks that it keeps"
            " may be missing."
        )
        for server in silent
    }


def tells_where(alias: str) -> bool:
    """Whether the alias keeps its locks on several servers, so that each lock names its server.

    Raises:
        ImproperlyConfigured: Something about the alias is wrong.
    """
    return backends[alias].in_parts


def _read_look(
    backend: Backend, permit: Permit, look: LookReply, until: float = math.inf
) -> HeldLock | None:
    """Judge what the server shows of a lock; None if nobody holds it.

    If the holder waits itself, look for a circle of waits until *until*, by the clock.
    """
    holding, expires_in, rate = look.holding, look.expires_in, look.rated
    if holding is None:
        return None
    state: State = "held"
    if holding.state == "foreign":
        state = "foreign"
    elif rate:
        state, expires_in = "rate", rate.due_in
    elif expires_in is None:
        state = "no-expiry"
    elif holding.owner.operator:
        state = "paused"
    elif holding.state == "cooling":
        state = "cooling"
    elif holding.renews and holding.ttl and expires_in < _least_left(backend, holding.ttl):
        state = "overdue"
    return HeldLock(
        name=permit.label,
        number=permit.number,
        alias=backend.alias,
        state=state,
        id=holding.id,
        owner=holding.owner,
        fence=holding.fence,
        held_for=None if holding.since is None else max(0.0, look.server_time - holding.since),
        expires_in=expires_in,
        waiters=int(look.waiters),
        renewals=holding.renewals,
        ttl=holding.ttl,
        where=look.where,
        strange=holding.strange,
        newer_format=holding.newer_format,
        handed_over=holding.is_baton,
        waits_for=look.wait.name if look.wait else "",
        starts_left=rate.starts_left if rate else None,
        circle=_circle(backend, look, until),
        gone=not (state in {"cooling", "rate"} or holding.is_baton)
        and is_gone(holding.owner.host, holding.owner.pid, holding.owner.birth),
    )


def _circle(backend: Backend, look: LookReply, until: float) -> str:
    """The circle of waits that the holder is in, in words; "" if it is in none."""
    within = min(until - clock.now(), LOOK_WITHIN)
    if look.wait is None or look.holding is None or within <= 0:
        return ""
    circle = backend.run(circle_of(look.wait, within))
    return circle.told(str(look.holding.owner)) if circle else ""


def _least_left(backend: Backend, ttl: float) -> float:
    """The least seconds that are left of a lease whose owner renews it in time.

    The owner renews it each third of the ttl. An unanswered renewal is sent again until the
    operation timeout is over, so it may come that much later. We do not know the owner's operation
    timeout: we assume LONGEST_OPERATION at least, and a third of the ttl at most.
    """
    late = min(max(backend.operation_timeout(ttl), LONGEST_OPERATION), ttl / 3)
    return ttl - ttl / 3 - late


def _end(lock: HeldLock) -> float:
    return math.inf if lock.expires_in is None else lock.expires_in


__all__ = [
    "STATES",
    "Detail",
    "HeldLock",
    "HeldLocks",
    "PastLease",
    "Record",
    "Records",
    "Run",
    "Selection",
    "Waiter",
    "detail",
    "every",
    "force_release",
    "get",
    "job",
    "list",
    "pause",
    "record",
    "records",
    "resume",
    "similar",
]
