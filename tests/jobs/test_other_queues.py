"""Jobs as tasks of other queues, each with its own worker: their decorator goes above ours."""

import json

import pytest

from django_redislock import distributed_lock, held, single_instance
from django_redislock.jobs import current_lease
from tests.support.processes import python

results = []


@single_instance("import:{source}")
def load(source):
    """A job; a module has it, since a worker looks for it there."""
    lease = current_lease()
    results.append(lease and lease.name)
    return results[-1]


@single_instance("import:{source}")
async def aload(source):
    """One that awaits."""
    return load.__wrapped__(source)


@pytest.fixture
def somebody_else(redislock):
    """Holds a lock while a worker wants it and another one; the latter is its to have."""
    results.clear()
    with redislock.simulate_held_by_other("import:eu"):
        yield
    assert results == ["import:us"]
    record = held.record("import:eu")
    assert record.skips == 1


def both(queue):
    """Have both sources queued."""
    return [queue(source) for source in ("eu", "us")]


@pytest.mark.usefixtures("somebody_else")
def test_huey(tmp_path):
    huey = pytest.importorskip("huey")
    app = huey.SqliteHuey(filename=str(tmp_path / "huey.db"))
    queued = both(app.task()(load))
    while (task := app.dequeue()) is not None:
        app.execute(task)
    skipped, name = [one.get() for one in queued]
    assert (skipped["skipped"], name) == ("busy", "import:us")


@pytest.mark.usefixtures("somebody_else")
def test_rq(server, key_prefix):
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


@pytest.mark.usefixtures("somebody_else")
def test_dramatiq():
    dramatiq = pytest.importorskip("dramatiq")
    broker = pytest.importorskip("dramatiq.brokers.stub").StubBroker()
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


@pytest.mark.usefixtures("somebody_else")
async def test_procrastinate():
    connector = pytest.importorskip("procrastinate.testing").InMemoryConnector()
    app = pytest.importorskip("procrastinate").App(connector=connector)
    task = app.task(aload)
    async with app.open_async():
        for source in ("eu", "us"):
            await task.defer_async(source=source)
        await app.run_worker_async(wait=False, install_signal_handlers=False)


def test_tasks_of_django_in_a_worker_and_at_once(locks, settings, tmp_path):
    pytest.importorskip("django_tasks_db")
    redislock = json.dumps(settings.REDISLOCK)
    with distributed_lock("import:eu") as lease:
        done = python("-m", "tests.jobs.tasks_site", str(tmp_path / "db.sqlite3"), redislock)
    skipped = {"skipped": "busy", "lock": "import:eu", "holder": str(lease.owner)}
    blocking, awaiting = [skipped, "import:us"], [skipped, "import:us"]
    with_context = [skipped, ["import:us", 1]]
    results = [*blocking, *awaiting, *with_context, *blocking, *with_context]
    assert json.loads(done.stdout) == [["SUCCESSFUL", result] for result in results]
    record = held.record("import:eu")
    jobs = {f"tests.jobs.tasks.{name}" for name in ("load", "aload", "load_as")}
    assert (record.skips, record.tasks) == (5, jobs)


def tell():
    """A body to make a task of."""


def huey_task(job):
    return pytest.importorskip("huey").MemoryHuey().task()(job)


def dramatiq_actor(job):
    broker = pytest.importorskip("dramatiq.brokers.stub").StubBroker()
    return pytest.importorskip("dramatiq").actor(job, broker=broker)


def procrastinate_task(job):
    connector = pytest.importorskip("procrastinate.testing").InMemoryConnector()
    return pytest.importorskip("procrastinate").App(connector=connector).task(job)


@pytest.mark.parametrize("decorator", [single_instance, distributed_lock])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (huey_task, r"a task of huey, .* Write @huey\.task\(\) above @"),
        (dramatiq_actor, r"an actor of dramatiq, .* Write @dramatiq\.actor above @"),
        (procrastinate_task, r"a task of procrastinate, .* Write @app\.task above @"),
    ],
)
def test_above_a_task_only_the_call_that_queues_it_would_be_locked_so_that_is_refused(
    decorator, make, says
):
    task = make(tell)
    for decorate in (decorator, decorator("import")):
        with pytest.raises(TypeError, match=says):
            decorate(task)
