"""What a type checker must refuse. Never run: test_public_api.py has it checked.

Each line with a comment is an error for mypy and for pyright. One that they let pass is reported,
since nothing is there to be ignored; so is an error of another kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from django_redislock import (
    Limit,
    LockLost,
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
from django_redislock.monitors import Monitor, Ping, Run
from django_redislock.testing import LockTestKit

if TYPE_CHECKING:
    from django.contrib.auth.models import Permission
    from django.db.models import QuerySet

    from django_redislock import Lease

# --- the handle ----------------------------------------------------------------------------------

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

lock = distributed_lock("lottery")
lock.acquire(wait=5)  # type: ignore[call-arg]
print(lock.lease.fence)  # type: ignore[union-attr]

with lock as lease:
    lease.fence + "1"  # type: ignore[operator]
    lease.on_lost(lambda: None)  # type: ignore[arg-type, misc]
    print(lease.token)  # type: ignore[attr-defined]


async def in_a_coroutine() -> None:
    with await lock:  # type: ignore[misc]
        pass
    if lock.acquire:  # type: ignore[truthy-function]
        pass


# --- a function under a lock ---------------------------------------------------------------------


@distributed_lock("report:{report_id}")
def render(report_id: int, *, draft: bool = False) -> bytes:
    return b"" if draft else str(report_id).encode()


@distributed_lock("report:{report_id}")
async def arender(report_id: int, *, draft: bool = False) -> bytes:
    return render(report_id, draft=draft)


class Shelf:
    @distributed_lock("shelf:{self}")
    def sort(self, key: str) -> list[str]:
        return [key]


render("7")  # type: ignore[arg-type]
render(7, True)  # type: ignore[call-arg]
render()  # type: ignore[call-arg]
Shelf().sort(1)  # type: ignore[arg-type]
distributed_lock("report")("a string")  # type: ignore[arg-type]


async def await_it() -> None:
    await arender(7, drafty=True)  # type: ignore[call-arg]
    await render(7)  # type: ignore[misc]
    text: str = await arender(7)  # type: ignore[assignment]
    print(text)


# --- jobs ----------------------------------------------------------------------------------------


@single_instance("import:{source}")
def load(source: str) -> list[str]:
    return [source]


load(1)  # type: ignore[arg-type]
load.lock_name(1)  # type: ignore[arg-type]
load("eu").append("us")  # type: ignore[union-attr]
single_instance(limit="3")  # type: ignore[call-overload]
single_instance(on_conflict="retry")  # type: ignore[call-overload]
single_instance(monitor="https://example.org")  # type: ignore[arg-type]

# --- tasks ---------------------------------------------------------------------------------------


@single_instance_task
def draw(draw_id: int, *, dry: bool = False) -> str:
    return f"{draw_id} {dry}"


@single_instance_task(key="sync:{customer_id}", bind=True, acks_late=True)
def sync(self: SingleInstanceTask, customer_id: int) -> str:
    print(self.lease.fence)  # type: ignore[union-attr]
    print(current_lease().fence)  # type: ignore[union-attr]
    return str(customer_id)


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

# --- the rest ------------------------------------------------------------------------------------


def of_a_loss(lost: LockLost) -> Literal["stolen"]:
    return lost.reason  # type: ignore[return-value]


def in_the_database(rows: QuerySet[Permission], lease: Lease) -> None:
    fenced_update(lease, rows)  # type: ignore[arg-type]
    fenced_update(rows, 7)  # type: ignore[arg-type]


with leadership("scheduler", max_silence="1m") as term:  # type: ignore[arg-type]
    term.beat(5)  # type: ignore[call-arg]

print(held.get("lottery").name)  # type: ignore[union-attr]
held.force_release("lottery")  # type: ignore[call-arg]
signals.lock_acquired.connect("print")  # type: ignore[arg-type]
Ping(timeout=5)  # type: ignore[call-arg]


class Mine(Monitor):
    def started(self, run: str) -> None:  # type: ignore[override]
        print(run)


Mine().succeeded(Run)  # type: ignore[call-arg, arg-type]

with LockTestKit() as kit:
    kit.simulate_lost("lottery", "stolen")  # type: ignore[arg-type]
