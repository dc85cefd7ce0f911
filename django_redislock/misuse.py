"""Calls that a lock refuses since they could not end well, and what to write instead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from django_redislock.exceptions import LockMisuse
from django_redislock.holder import running_loop, this_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_redislock.rules.circles import Circle


def needs_a_block(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "with atomic, the lock needs a block that ends its transaction. Write `with`; or"
        " leave atomic out, and write `with lock.lease.atomic():` between acquire() and"
        " release().",
    )


def has_no_transactions(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "Django has no asynchronous transactions. Call a function through sync_to_async,"
        " and write `with` in that.",
    )


def awaits_a_commit(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "release_on_commit=True is for blocking code, since Django has no asynchronous"
        " transactions. Use `with` in the function that opens the transaction, and call that by"
        " `await sync_to_async(function)()`.",
    )


def blocks_the_loop(name: str, instead: str) -> LockMisuse:
    return LockMisuse(
        name,
        "blocking code asks for it in a thread whose event loop runs, so all its"
        f" tasks would stand still. Use {instead}; or call it in another thread, as"
        " sync_to_async does.",
    )


def is_patched_late(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "gevent or eventlet has patched `threading` after this package was imported. All greenlets"
        " would be one holder, and wait for each other's mutexes for ever. Patch before Django is"
        " imported; of `gunicorn --preload`, that is `from gevent import monkey;"
        " monkey.patch_all()` in gunicorn.conf.py.",
    )


def shares_a_thread(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "another asyncio task holds it by the thread that sync_to_async lends to both, and"
        " waiting would block that thread. Write `async with"
        f" distributed_lock({name!r})` in the tasks.",
    )


def mixes_limits(name: str, limit: int | None) -> LockMisuse:
    now, before = "with a limit", "without one"
    if limit is None:
        now, before = "without a limit", "with one"
    return LockMisuse(
        name,
        f"it is asked for {now} here, and was {before} elsewhere in this process. Write the same"
        " limit wherever the lock is taken.",
    )


def waits_for_itself(
    name: str,
    holder: object,
    me: object,
    *,
    blocking: bool,
    of_job: bool = False,
    limit: int = 1,
) -> LockMisuse | None:
    """The error if the wait of *me* for *holder* would never end; None if it may.

    Args:
        name: The lock.
        holder: The thread or asyncio task of this process that holds it.
        me: The one that asks for it.
        blocking: Whether the wait blocks the thread.
        of_job: Whether it is asked for by the run of a job.
        limit: How many permits it has; the error is for a holder of all of them.
    """
    it = "it" if limit == 1 else f"all of its {limit} permits"
    if holder is me:
        who = "asyncio task" if isinstance(me, asyncio.Task) else "thread"
        cure = (
            "Call the work without the lock: of a function with @single_instance, that is its"
            " `__wrapped__`."
            if of_job
            else "Pass reentrant=True to nest, or release it first."
        )
        return LockMisuse(
            name, f"this {who} holds {it} already, so waiting for it would never end. {cure}"
        )
    if isinstance(me, asyncio.Task) and holder is this_thread():
        return LockMisuse(
            name,
            "blocking code of this thread holds it, beneath the event loop, and cannot release"
            " it before the loop has ended.",
        )
    if blocking and isinstance(holder, asyncio.Task) and holder.get_loop() is running_loop():
        return LockMisuse(
            name,
            "a task of this thread's event loop holds it, and cannot release it while this"
            " call blocks the loop. Use `async with`.",
        )
    return None


def waits_in_a_circle(
    name: str, circle: Circle, me: object, with_limit: Mapping[str, bool]
) -> LockMisuse:
    """The error of a wait that can never end, and was the last to begin.

    Args:
        name: The lock that is waited for.
        circle: The circle that the wait is in.
        me: The thread or asyncio task that waits.
        with_limit: Of the locks of this process, whether each is taken with a limit, maybe of 1.
    """
    who = "this asyncio task" if isinstance(me, asyncio.Task) else "this thread"
    cure = "Take these locks in one order everywhere."
    if len({(link.wanted_by.alias, link.wanted_by.name) for link in circle.links}) == 1:
        cure = "Wait for no second permit of a lock while you hold one."
    elif wanted := circle.wanted:
        together = ", ".join(map(repr, wanted))
        if any(limit > 1 or with_limit.get(one) for one, limit in wanted.items()):
            limits = ", ".join(f"Limit({one!r}, {limit})" for one, limit in wanted.items())
            together = f"limits=[{limits}]"
        cure = f"Take them together, by distributed_lock({together}), or in one order everywhere."
    return LockMisuse(name, f"this wait would never end: {circle.told(who)}. {cure}")


def holds_several(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "this handle holds several leases, and none of them is of this thread or asyncio"
        " task, so it is not known which one to release.",
    )


def holds_none(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "this thread or asyncio task holds no lease by this handle, so there is none to release."
        " Call release() only after acquire() has returned True. A block's lease is released by its"
        " end, or by whoever entered it.",
    )


def hands_nothing_over(alias: str, name: str) -> LockMisuse:
    return LockMisuse(
        name,
        f"the servers of REDISLOCK[{alias!r}] cannot hand a lease over, since none of them decides"
        " alone who has a lock. Release it, and let the task wait for it; or keep the lock on"
        " another backend.",
    )


def counts_arguments(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "the number of its limit is a function of arguments, and a block has none. Write the number"
        " there; or write @distributed_lock(limits=[...]) above a function that takes them.",
    )


def is_joint(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "the lease of several locks cannot be handed over as one. Take each lock by a"
        " distributed_lock() of its own, and hand over each lease.",
    )


def is_of_run(name: str) -> LockMisuse:
    return LockMisuse(
        name,
        "its lease is that of the run of a job. The run needs it to note its end, so it cannot be"
        " handed over. Let the next run wait for the lock; or take another lock by"
        " distributed_lock(), and hand that over.",
    )


def is_held_further(name: str, *, by_transaction: bool) -> LockMisuse:
    if by_transaction:
        return LockMisuse(
            name,
            "a transaction is open, so the lease cannot be handed over: its next holder would not"
            " see what is written. Call hand_over() in transaction.on_commit(), and hold the lock"
            " until then by release_on_commit=True.",
        )
    return LockMisuse(
        name,
        "its lease is held by a reentrant acquire too, so it cannot be handed over. Call"
        " hand_over() when only the outermost acquire is left.",
    )


def belongs_to_the_parent(name: str) -> LockMisuse:
    return LockMisuse(name, "its lease belongs to the parent process; only that may release it.")
