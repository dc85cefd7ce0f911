"""Fixtures: a broker, a result backend and a lock server, and workers of flesh and blood."""

import gc
import itertools
import json
import os
import signal
import tempfile
import uuid
import warnings
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest
from celery.signals import before_task_publish
from kombu import pools

from django_redislock import held
from tests.celery.project import PATIENCE, tasks
from tests.celery.project.app import make_app
from tests.support.backends import PATIENT
from tests.support.celery_app import current
from tests.support.nursery import environment_for, start_python
from tests.support.servers import KINDS, Server, binary, missing
from tests.support.waiting import HUNG, wait_until

DATABASES = 1000  # Of the server; each stage takes one that nobody has used.


class Program:
    """A ``celery`` process with the application of a stage, and what it has written."""

    def __init__(self, stage, *command, environment, redislock=None, forked=True, **conf):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        environment = environment | {
            "TESTS_CELERY": json.dumps({**stage.conf, **conf}),
            "TESTS_REDISLOCK": json.dumps(redislock or stage.redislock),
            "TESTS_JOURNAL": stage.url,
        }
        with Path(os.devnull).open() as nothing:
            self.process = start_python(
                "celery.__main__:main",
                *("-A", "tests.celery.project.app", *command, "--loglevel", "INFO"),
                files=(nothing.fileno(), self._log.fileno(), self._log.fileno()),
                environment=environment,
                forked=forked,
                start_new_session=True,  # So that kill() reaches the children too.
            )

    @property
    def pid(self):
        """The process id of the worker, which in a prefork pool runs no task itself."""
        return self.process.pid

    @property
    def log(self):
        """All that it and its children wrote."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def signal(self, number):
        """Send a signal to the process itself: TERM ends a worker warm, QUIT cold."""
        self.process.send_signal(number)

    def wait(self, timeout=HUNG):
        """Return its exit status once it has ended."""
        return self.process.wait(timeout)

    def kill(self):
        """Kill it and its children (SIGKILL), as when the machine loses power."""
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait(HUNG)

    def close(self):
        """End it whatever its state."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # Its children too, also when it has ended itself.
        self.process.wait(HUNG)
        self._log.close()


class Worker(Program):
    """A ``celery worker`` process with its children."""

    def __init__(
        self,
        stage,
        *options,
        pool="solo",
        concurrency=1,
        settings="tests.settings",
        package="",
        **conf,
    ):
        command = ["worker", "--hostname", f"worker-{uuid.uuid4().hex[:8]}@%h"]
        command += ["--pool", pool, "--concurrency", str(concurrency)]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        environment = environment_for(settings, package=package)
        # The last two replace what others import.
        forked = pool not in {"gevent", "eventlet"}
        super().__init__(stage, *command, *options, environment=environment, forked=forked, **conf)

    def wait_ready(self, timeout=HUNG):
        """Return once it consumes its queues."""

        def ready():
            assert self.process.poll() is None, f"the worker ended\n{self.log}"
            return " ready." in self.log

        wait_until(ready, timeout, "the worker is ready", every=0.02)
        return self


class Stage:
    """Everything that a Celery test needs, and nobody else uses.

    Attributes:
        url: Of broker, result backend, journal and, unless a test says otherwise, locks.
        conf: The configuration of the Celery application.
        redislock: The setting REDISLOCK.
        published: The headers of the last message of each task id that this process has published.
    """

    def __init__(self, server, database, **conf):
        self.url = f"redis://{server.host}:{server.port}/{database}"
        self.redis = server.client(db=database)
        self.conf = {"broker_url": self.url, "result_backend": self.url, **conf}
        self.redislock = {"default": {"LOCATION": self.url, "OPTIONS": PATIENT}}
        self.workers = []
        self.published = {}
        before_task_publish.connect(self._note_published)
        self.current_key = ""

    def _note_published(self, headers, **kwargs):
        self.published[headers["id"]] = dict(headers)

    @cached_property
    def app(self):
        """The application as the publisher's process has it."""
        return make_app(self.conf)

    def configure(self, **conf):
        """Change the configuration of the application, and of workers to come."""
        self.conf |= conf
        self.app.conf.update(conf)

    def use_broker(self, broker, **conf):
        """Publish to RabbitMQ, in a queue of our own."""
        self.configure(broker_url=broker.url, task_default_queue=self.key(), **conf)

    def run(self, *command, **how):
        """Run another program of Celery; see Program."""
        return Program(self, *command, **how)

    def start(self, *options, ready=True, **how):
        """Start a worker; see Worker."""
        worker = Worker(self, *options, **how)
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    def task(self, name):
        """A task of tasks.py, bound to this stage."""
        return self.app.tasks[f"{tasks.__name__}.{name}"]

    def key(self):
        """A key that no other test uses."""
        return uuid.uuid4().hex[:12]

    def send(self, name, key, *, queue=None, **how):
        """Publish a task."""
        return self.task(name).apply_async((key,), how, queue=queue)

    def begin(self, name, **how):
        """Have a task hold the lock of a key until its gate is opened: the key, and the result."""
        key = self.key()
        sent = self.send(name, key, **{"hold": True, **how})
        self.wait_for(key, "start")
        return key, sent

    def redeliver(self, task_id):
        """Deliver a message again that is being worked on, as a broker does that gave it up.

        Only a task with acks_late has its message still at the broker by then.
        """

        def find():
            kept = (json.loads(one) for one in self.redis.hvals("unacked"))
            found = (message for message, *_ in kept if message["headers"]["id"] == task_id)
            return next(found, None)

        message = wait_until(find, message=f"the message of {task_id} is unacknowledged")
        message["properties"]["delivery_tag"] = str(uuid.uuid4())
        message["properties"]["delivery_info"]["redelivered"] = True
        self.redis.lpush("celery", json.dumps(message))

    def result(self, sent):
        """Return the result of a task once it is there, or raise what it raised."""
        return sent.get(timeout=PATIENCE, interval=0.02)

    def events(self, key, event=None):
        """What the journal says of *key*, in order; of one kind of event, if named."""
        entries = [json.loads(entry) for entry in self.redis.lrange(f"journal:{key}", 0, -1)]
        return [one for one in entries if event in (None, one["event"])]

    def wait_for(self, key, event, count=1, timeout=PATIENCE):
        """Return the *count*-th event of this kind once it is there."""
        found = wait_until(
            lambda: self.events(key, event)[count - 1 :],
            timeout,
            f"event {event!r} number {count} of {key}",
            every=0.01,
        )
        return found[0]

    def count(self, key, event):
        """How often this happened."""
        return len(self.events(key, event))

    def wait_for_log(self, text, count=1, timeout=PATIENCE):
        """Return once the workers' logs have *text* this often."""

        def logged():
            return sum(worker.log.count(text) for worker in self.workers) >= count

        wait_until(logged, timeout, f"the workers' logs have {text!r} {count} times", every=0.02)

    def wait_for_waiter(self, key):
        """Return once somebody stands in the queue of the lock *key*."""

        def queued():
            lock = held.get(key)
            return lock is not None and lock.waiters > 0

        wait_until(queued, PATIENCE, f"somebody waits for {key}", every=0.02)

    def wait_until_idle(self, timeout=PATIENCE):
        """Return once no message is queued, delayed or being worked on."""

        looks = 0

        def idle():
            # Once is not enough: a message that a worker has popped is nowhere until it is noted.
            nonlocal looks
            looks = 0 if self.redis.llen("celery") or self.redis.hlen("unacked") else looks + 1
            return looks >= 10

        wait_until(idle, timeout, "no message is left at the broker", every=0.02)

    def open_gate(self, key, times=1):
        """Let bodies that stand at the gate of *key* go on, now or when they come."""
        self.redis.rpush(f"gate:{key}", *["go"] * times)

    def close(self):
        """End the workers and the application."""
        for worker in self.workers:
            worker.close()
        if "app" in vars(self):
            with warnings.catch_warnings():
                # It may find a socket that another test has left, and that nobody has closed.
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()  # A result that goes later connects to the backend once more.
            self.app.pool.force_close_all()
            for group in (pools.connections, pools.producers):
                group.clear()  # Another stage may use the same broker.
            self.app.backend.client.close()
            self.app.close()
        self.redis.close()


@pytest.fixture(scope="session")
def celery_server():
    """One server for all stages of the run (of an xdist worker)."""
    kind = next(filter(binary, KINDS), None)
    if kind is None:
        pytest.skip(str(missing(KINDS[0])))
    with Server(kind, databases=DATABASES) as server:
        yield server


_databases = itertools.count()


@pytest.fixture(scope="session")
def shared_stage(celery_server):
    """See stage."""
    stage = Stage(celery_server, next(_databases))
    yield stage
    stage.close()


@pytest.fixture(scope="session")
def shared_worker(shared_stage):
    """See worker."""
    return shared_stage.start(pool="prefork", concurrency=4)


@pytest.fixture
def stage(shared_stage, settings):
    """The stage that tests share which break nothing; REDISLOCK points at its locks."""
    settings.REDISLOCK = shared_stage.redislock
    with current(shared_stage.app):
        yield shared_stage


@pytest.fixture
def worker(request, stage, shared_worker):
    """The prefork worker, four processes wide, that tests share which break nothing."""
    assert shared_worker.process.poll() is None, f"the worker ended\n{shared_worker.log}"
    return shared_worker


@pytest.fixture
def own_stage(celery_server, settings):
    """A stage for a test that starts workers of its own, or breaks something."""
    stage = Stage(celery_server, next(_databases))
    settings.REDISLOCK = stage.redislock
    with current(stage.app):
        yield stage
    stage.close()
