"""How the public names look to a type checker. Never run: test_public_api.py has it checked.

Each line with `type: ignore` is an error for mypy and for pyright. One that they let pass is
reported, since nothing is there to be ignored; so is an error of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Literal, assert_type

from django.contrib.auth.models import Permission
from django.db.models import QuerySet

from django_redislock import (
    InvalidLockName,
    Lease,
    Limit,
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
    signals,
    single_instance,
    single_instance_task,
    take_up,
)
from django_redislock.celery import SingleInstanceTask, current_lease
from django_redislock.held import HeldLock, HeldLocks
from django_redislock.lock import Lock
from django_redislock.monitors import Monitor, Ping, Run, Sentry
from django_redislock.term import Term
from django_redislock.testing import LockTestKit

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
distributed_lock("lottery", release_on_commit=True)
distributed_lock("account:1", "account:2", wait=5)
distributed_lock(limits=[Limit("export:acme", 2), Limit("export", 10)])

distributed_lock(7)  # type: ignore[arg-type]
distributed_lock("lottery", 5)  # type: ignore[arg-type]
distributed_lock("lottery", ttl="5")  # type: ignore[arg-type]
distributed_lock("lottery", timeout=5)  # type: ignore[call-arg]
distributed_lock("lottery", atomic=7)  # type: ignore[arg-type]
distributed_lock("lottery", limits=["lottery"])  # type: ignore[list-item]
distributed_lock(["account:1", "account:2"])  # type: ignore[arg-type]
take_up("baton", wait=5)  # type: ignore[call-arg]
Limit("export")  # type: ignore[call-arg]
Limit("export", "2")  # type: ignore[arg-type]
lock.acquire(wait=5)  # type: ignore[call-arg]
print(lock.lease.fence)  # type: ignore[union-attr]

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
    lease.on_lost(lambda: None)  # type: ignore[arg-type, misc]
    print(lease.token)  # type: ignore[attr-defined]


def code_after_a_block_may_run_only_if_it_did() -> int:
    # A block that swallowed exceptions would make this "missing return".
    with distributed_lock("lottery"):
        return 1


with distributed_lock("account:1", "account:2") as both, take_up("baton") as taken_up:
    assert_type(both, Lease)
    assert_type(taken_up, Lease)
    assert_type(both.hand_over(within=timedelta(minutes=1)), str)


async def in_a_coroutine() -> None:
    async with distributed_lock("lottery") as lease:
        assert_type(lease, Lease)
        await lease.aensure_held(verify=True)
        await lease.arenew()
    assert_type(await lock.aacquire(), bool)
    assert_type(await lock.alocked(), bool)
    await lock.arelease(success=False)
    with await lock:  # type: ignore[misc]
        pass
    if lock.acquire:  # type: ignore[truthy-function]
        pass


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


async def await_it() -> None:
    assert_type(await arender(7), bytes)
    await arender(7, drafty=True)  # type: ignore[call-arg]
    await render(7)  # type: ignore[misc]
    text: str = await arender(7)  # type: ignore[assignment]
    print(text)


class Shelf:
    """With a method under a lock."""

    @distributed_lock("shelf:{self}")
    def sort(self, key: str) -> list[str]:
        """Sort it."""
        return [key]


assert_type(Shelf().sort("title"), list[str])
render("7")  # type: ignore[arg-type]
render(7, True)  # type: ignore[call-arg]
render()  # type: ignore[call-arg]
Shelf().sort(1)  # type: ignore[arg-type]
distributed_lock("report")("a string")  # type: ignore[arg-type]

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
except StaleFence as stale:
    assert_type(stale.newer - stale.fence, int)
except LockUnavailable as unavailable:
    assert_type(unavailable.problem, str)
except LockError as error:
    assert_type(error.name, str)

a_value_error: ValueError = InvalidLockName("'x'", "it is empty")


def of_a_loss(lost: LockLost) -> Literal["stolen"]:
    return lost.reason  # type: ignore[return-value]


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


with leadership("scheduler", max_silence="1m") as term:  # type: ignore[arg-type]
    term.beat(5)  # type: ignore[call-arg]

# --- looking -------------------------------------------------------------------------------------

assert_type(held.list(), HeldLocks)
assert_type(held.list().partial, bool)
assert_type(held.get("lottery"), HeldLock | None)
assert_type(held.force_release("lottery", "0123456789abcdef", by="ann"), bool)
print(held.get("lottery").name)  # type: ignore[union-attr]
held.force_release("lottery")  # type: ignore[call-arg]


# --- fencing in the database ---------------------------------------------------------------------


def in_the_database(rows: QuerySet[Permission], lease: Lease) -> None:
    done = fenced_update(rows, lease, name="drawn")
    assert_type(done.updated, int)
    assert_type(done.refused, int)
    fenced_update(lease, rows)  # type: ignore[arg-type]
    fenced_update(rows, 7)  # type: ignore[arg-type]


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
load.lock_name(1)  # type: ignore[arg-type]
load("eu").append("us")  # type: ignore[union-attr]
single_instance(limit="3")  # type: ignore[call-overload]
single_instance(on_conflict="retry")  # type: ignore[call-overload]
single_instance(monitor="https://example.org")  # type: ignore[arg-type]


# --- tasks ---------------------------------------------------------------------------------------


@single_instance_task
def draw(draw_id: int, *, dry: bool = False) -> str:
    lease = current_lease()
    assert_type(lease, Lease | None)
    return f"{draw_id} {dry} {lease.fence if lease else None}"


@single_instance_task(60, key="sync:{customer_id}", bind=True, acks_late=True, limit=2)
def sync(self: SingleInstanceTask, customer_id: int) -> str:
    assert_type(self.lease, Lease | None)
    print(self.lease.fence)  # type: ignore[union-attr]
    print(current_lease().fence)  # type: ignore[union-attr]
    if self.lease and not self.lease.held:
        raise self.retry(countdown=5)
    return str(customer_id)


def exports_of(tenant: str) -> int:
    return len(tenant)


@single_instance_task(limits=[Limit("export:{tenant}", exports_of), Limit("export", 10)])
def export(tenant: str) -> None:
    print(tenant)


@single_instance_task(once="database", atomic=True, on_conflict=lambda found: found.holder)
def pay(month: int) -> int:
    return month


assert_type(draw(7, dry=True), str | Skipped)
assert_type(sync(7), str | Skipped)
if pay(7):
    print("paid")
draw.delay(7, dry=True)
draw.delay(draw_id=7)
draw.delay(7, baton="of another lease")
draw.delay_on_commit(7)
draw.apply_async((7,), {"dry": True}, countdown=5, queue="lottery")
sync.delay(7)
chain = draw.s(7) | sync.s()
chain = draw.si(7) | sync.si(7)
print(sync.name, sync.lock_name((7,), {}))
as_task: SingleInstanceTask = sync
draw("7")  # type: ignore[arg-type]
draw(7).upper()  # type: ignore[union-attr]
draw.delay("7")  # type: ignore[call-overload]
draw.delay()  # type: ignore[call-overload]
draw.delay(7, wet=True)  # type: ignore[call-overload]
draw.delay(7, baton=lease)  # type: ignore[call-overload]
draw.delay_on_commit("7")  # type: ignore[arg-type]
draw.si("7")  # type: ignore[arg-type]
sync.delay(sync, 7)  # type: ignore[call-overload]
sync("7")  # type: ignore[arg-type]
single_instance_task(ttl="5")  # type: ignore[call-overload]
single_instance_task(limit="3")  # type: ignore[call-overload]
single_instance_task(on_conflict="skp")  # type: ignore[call-overload]
single_instance_task(on_unavailable="skip", bind=True)  # type: ignore[call-overload]
single_instance_task(once="redis")  # type: ignore[call-overload]

# --- monitors, signals, tests --------------------------------------------------------------------


class Log(Monitor):
    def started(self, run: Run) -> None:
        assert_type(run.job, str)

    def failed(self, run: Run, took: float, error: BaseException | None) -> None:
        print(run.lock, took, error)


single_instance(monitor=[Ping("https://example.org/ping"), Sentry("nightly"), Log()])
single_instance_task(monitor=Log())


def note(sender: Any, lease: Lease, **kwargs: Any) -> None:
    print(lease.fence)


signals.lock_lost.connect(note)
signals.lock_acquired.connect("print")  # type: ignore[arg-type]
Ping(timeout=5)  # type: ignore[call-arg]


class Mine(Monitor):
    def started(self, run: str) -> None:  # type: ignore[override]
        print(run)


Mine().succeeded(Run)  # type: ignore[call-arg, arg-type]

with LockTestKit() as kit, kit.simulate_held_by_other("lottery"):
    kit.advance(timedelta(days=1))
    assert_type(kit.simulate_lost("report", "forced"), Lease)
    kit.simulate_lost("lottery", "stolen")  # type: ignore[arg-type]
