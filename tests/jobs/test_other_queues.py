"""Jobs as tasks of other queues, each with its own worker: their decorator goes above ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from django_redislock import held, single_instance
from django_redislock.jobs import current_lease

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from django_redislock.testing import LockTestKit
    from tests.support.servers import Endpoint

results: list[Any] = []


@single_instance("import:{source}")
def load(source: str) -> Any:
    """A job; a module has it, since a worker looks for it there."""
    lease = current_lease()
    results.append(lease and lease.name)
    return results[-1]


@single_instance("import:{source}")
async def aload(source: str) -> Any:
    """One that awaits."""
    return load.__wrapped__(source)


@pytest.fixture(autouse=True)
def somebody_else(redislock: LockTestKit) -> Iterator[None]:
    """Holds a lock while a worker wants it and another one; the latter is its to have."""
    results.clear()
    with redislock.simulate_held_by_other("import:eu"):
        yield
    assert results == ["import:us"]
    record = held.record("import:eu")
    assert record is not None
    assert record.skips == 1


def both(queue: Callable[[str], Any]) -> list[Any]:
    """Have both sources queued."""
    return [queue(source) for source in ("eu", "us")]


def test_huey(tmp_path: Path) -> None:
    huey = pytest.importorskip("huey")
    app = huey.SqliteHuey(filename=str(tmp_path / "huey.db"))
    queued = both(app.task()(load))
    while (task := app.dequeue()) is not None:
        app.execute(task)
    skipped, name = [one.get() for one in queued]
    assert (skipped["skipped"], name) == ("busy", "import:us")


def test_rq(server: Endpoint, key_prefix: str) -> None:
    rq = pytest.importorskip("rq")
    with server.client() as client:
        queue = rq.Queue(key_prefix, connection=client)
        queued = both(lambda source: queue.enqueue(load, source))
        rq.SimpleWorker([queue], connection=client).work(burst=True)
        skipped, name = [one.return_value() for one in queued]
        for one in queued:
            one.delete()
        queue.delete()
    assert (skipped["skipped"], name) == ("busy", "import:us")


def test_dramatiq() -> None:
    dramatiq = pytest.importorskip("dramatiq")
    from dramatiq.brokers.stub import StubBroker

    broker = StubBroker()
    dramatiq.set_broker(broker)
    actor = dramatiq.actor(load, broker=broker)
    both(actor.send)
    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    try:
        broker.join(actor.queue_name)
        worker.join()
    finally:
        worker.stop()


async def test_procrastinate() -> None:
    procrastinate = pytest.importorskip("procrastinate")
    from procrastinate.testing import InMemoryConnector

    app = procrastinate.App(connector=InMemoryConnector())
    task = app.task(aload)
    async with app.open_async():
        for source in ("eu", "us"):
            await task.defer_async(source=source)
        await app.run_worker_async(wait=False, install_signal_handlers=False)
