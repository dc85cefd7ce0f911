"""How the public names look to a type checker. Never run: test_public_api.py has it checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, assert_type

from django.contrib.auth.models import Permission
from django.db.models import QuerySet

from django_redislock import (
    InvalidLockName,
    Lease,
    LockError,
    LockLost,
    LockTimeout,
    LockUnavailable,
    Skipped,
    StaleFence,
    distributed_lock,
    fenced_update,
    held,
    leadership,
    single_instance,
)
from django_redislock.held import HeldLock, HeldLocks
from django_redislock.lock import Lock
from django_redislock.term import Term

# --- the handle ----------------------------------------------------------------------------------

lock = distributed_lock("lottery")
assert_type(lock, Lock)
assert_type(lock.name, str)
assert_type(lock.lease, Lease | None)
assert_type(lock.acquire(), bool)
assert_type(lock.locked(), bool)
lock.release()
lock.release(success=False)

distributed_lock("lottery", ttl=5, wait=0, max_hold=1.5, min_hold=timedelta(days=1))
distributed_lock("lottery", wait=math.inf, renew=None, reentrant=True, using="other")
distributed_lock("lottery", atomic=True)
distributed_lock("lottery", atomic="other")
distributed_lock("lottery", atomic=7)  # type: ignore[arg-type]
distributed_lock("lottery", release_on_commit=True)
distributed_lock("account:1", "account:2", wait=5)
distributed_lock("lottery", 5)  # type: ignore[arg-type]
distributed_lock("lottery", ttl="5")  # type: ignore[arg-type]
distributed_lock("lottery", timeout=5)  # type: ignore[call-arg]
distributed_lock(7)  # type: ignore[arg-type]

# --- the block -----------------------------------------------------------------------------------

with lock as lease:
    assert_type(lease, Lease)
    assert_type(lease.name, str)
    assert_type(lease.fence, int)
    assert_type(lease.id, str)
    assert_type(lease.ttl, float)
    assert_type(lease.held, bool)
    assert_type(lease.expires_in, float)
    lease.ensure_held()
    lease.ensure_held(verify=True)
    with lease.atomic(), lease.atomic("other"):
        pass
    lease.renew()
    lease.on_lost(lambda lost: print(lost.fence))
    lease.on_endangered(lambda endangered: print(endangered.expires_in), left=0.25)
    print(lease.template)
    lease.fence + "1"  # type: ignore[operator]


def code_after_a_block_may_run_only_if_it_did() -> int:
    # A block that swallowed exceptions would make this "missing return".
    with distributed_lock("lottery"):
        return 1


async def in_a_coroutine() -> None:
    async with distributed_lock("lottery") as lease:
        assert_type(lease, Lease)
        await lease.aensure_held(verify=True)
        await lease.arenew()
    assert_type(await lock.aacquire(), bool)
    assert_type(await lock.alocked(), bool)
    await lock.arelease(success=False)


# --- the decorator keeps the function's type -----------------------------------------------------


@distributed_lock("report:{report_id}")
def render(report_id: int, *, draft: bool = False) -> bytes:
    """Blocking."""
    return b"" if draft else str(report_id).encode()


@distributed_lock("report:{report_id}")
async def arender(report_id: int, *, draft: bool = False) -> bytes:
    """In a loop."""
    return render(report_id, draft=draft)


assert_type(render(7, draft=True), bytes)
as_callable: Callable[[int], bytes] = render
as_coroutine: Callable[[int], Coroutine[Any, Any, bytes]] = arender
render("7")  # type: ignore[arg-type]
render(7, True)  # type: ignore[call-arg]
render()  # type: ignore[call-arg]


async def await_it() -> None:
    assert_type(await arender(7), bytes)
    await arender(7, drafty=True)  # type: ignore[call-arg]


class Shelf:
    """With a method under a lock."""

    @distributed_lock("shelf:{self}")
    def sort(self, key: str) -> list[str]:
        """Sort it."""
        return [key]


assert_type(Shelf().sort("title"), list[str])
Shelf().sort(1)  # type: ignore[arg-type]

# --- errors --------------------------------------------------------------------------------------

try:
    lock.acquire()
except LockTimeout as timeout:
    assert_type(timeout.name, str)
    assert_type(timeout.holder, str | None)
    assert_type(timeout.expires_in, float | None)
except LockLost as lost:
    if lost.reason == "forced":
        print(lost.name)
    is_reason = lost.reason == "stolen"  # type: ignore[comparison-overlap]
except StaleFence as stale:
    assert_type(stale.newer - stale.fence, int)
except LockUnavailable as unavailable:
    assert_type(unavailable.problem, str)
except LockError as error:
    assert_type(error.name, str)

a_value_error: ValueError = InvalidLockName("'x'", "it is empty")

# --- leading ---

with leadership("scheduler", ttl=15, max_silence=timedelta(minutes=1)) as term:
    assert_type(term, Term)
    assert_type(term.held, bool)
    assert_type(term.fence, int)
    term.on_lost(lambda lost: print(lost.name))
    term.beat()


async def lead() -> None:
    async with leadership("scheduler") as term:
        assert_type(term, Term)


# --- looking -------------------------------------------------------------------------------------

assert_type(held.list(), HeldLocks)
assert_type(held.list().partial, bool)
assert_type(held.get("lottery"), HeldLock | None)
assert_type(held.force_release("lottery", "0123456789abcdef", by="ann"), bool)


# --- fencing in the database ---------------------------------------------------------------------


def in_the_database(rows: QuerySet[Permission], lease: Lease) -> None:
    done = fenced_update(rows, lease, name="drawn")
    assert_type(done.updated, int)
    assert_type(done.refused, int)
    fenced_update(lease, rows)  # type: ignore[arg-type]


# --- jobs ----------------------------------------------------------------------------------------


@single_instance
def tidy() -> int:
    return 1


@single_instance("import:{source}", ttl=timedelta(seconds=60), once="database", atomic=True)
def load(source: str) -> list[str]:
    return [source]


@single_instance(on_conflict="wait", wait=math.inf)
async def fetch(source: str) -> int:
    return 1


class Importer:
    @single_instance
    def clear(self, country: str) -> int:
        return 1


assert_type(tidy(), int | Skipped)
assert_type(load("eu"), list[str] | Skipped)
assert_type(load.lock_name("eu"), str)
assert_type(load.__wrapped__("eu"), Any)
as_awaitable: Callable[[str], Coroutine[Any, Any, int | Skipped]] = fetch
assert_type(Importer().clear("eu"), int | Skipped)
load(1)  # type: ignore[arg-type]
single_instance(limit="3")  # type: ignore[call-overload]
