"""How soon calls that find their lock busy come back, with on_conflict="retry".

`python -m benchmarks.waiting_calls` starts four Celery workers of two processes each, sends them
calls that all want one lock, and compares the time until the last has run with the ideal: the work,
one call after the other. `--broker rabbitmq` takes RabbitMQ instead of a Valkey of its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import uuid
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import django
import redis
from celery import Celery, signals
from django.conf import settings

from benchmarks.crew import PROCESSES
from benchmarks.server import Server
from django_redislock import single_instance_task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WORKERS, CONCURRENCY = 4, 2
PATIENCE = 600  # Seconds that a case may take.
HEADINGS = (
    "calls of one lock",
    "ideal, s",
    "took, s",
    "times",
    "deliveries",
    "dropped",
    "overtaken",
)

app = Celery("waiting_calls")


class Case(NamedTuple):
    """So many calls of one lock."""

    calls: int
    seconds: float  # That each of them works.
    rate: float = 0.0  # Calls that are made per second; 0 for all at once.
    options: Mapping[str, Any] = {}  # Of the task.

    def __str__(self) -> str:
        when = f"{self.rate:g} a second" if self.rate else "at once"
        options = "".join(f", `{name}={value}`" for name, value in self.options.items())
        return f"{self.calls} calls of {self.seconds:g} s, {when}{options}"

    @property
    def ideal(self) -> float:
        """Seconds, if the lock were never idle as long as somebody wants it."""
        each = max(self.seconds, self.options.get("min_hold", 0.0))
        work = (self.calls - 1) * each / self.options.get("limit", 1) + self.seconds
        return max(work, self.calls / self.rate if self.rate else 0.0)


CASES = [
    Case(30, 0.2),
    Case(100, 0.1, rate=10),
    Case(60, 0.1, options={"conflict_deadline": 20}),
    Case(200, 0.1),
    Case(12, 2.0),
    Case(60, 0.2, options={"limit": 2}),
    Case(20, 0.1, options={"min_hold": 1}),
]


def _work(lock: str, seconds: float) -> tuple[float, float]:
    """Work, and say from when until when."""
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


TASKS = [
    single_instance_task(key="{lock}", on_conflict="retry", name=str(case), **case.options)(_work)
    for case in CASES
]


@app.task(name="ready")  # type: ignore[untyped-decorator] # Celery has no types
def ready() -> int:
    """The worker process that runs this."""
    time.sleep(0.05)
    return os.getpid()


def connect(port: int, broker: str) -> None:
    """Have everybody use this server, and this broker."""
    url = f"redis://127.0.0.1:{port}/0"
    settings.configure(
        INSTALLED_APPS=["django_redislock"], REDISLOCK={"default": {"LOCATION": url}}
    )
    django.setup()
    app.conf.update(
        broker_url=broker or url,
        result_backend=url,
        worker_prefetch_multiplier=1,
        result_backend_transport_options={"retry_policy": {"max_retries": 1}},
    )


def work(port: int, broker: str, number: int) -> None:
    """Be a worker, until SIGTERM."""
    os.dup2(2, 1)  # Our standard output is for what is measured.
    connect(port, broker)
    client = redis.Redis(port=port)

    @signals.task_prerun.connect(weak=False)
    def count(task: Any, args: Any, **kwargs: Any) -> None:
        if args:
            client.incr(f"deliveries:{args[0]}")

    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=ERROR")
    size = f"--concurrency={CONCURRENCY}"
    name = f"--hostname=w{number}@%h"
    app.worker_main(["--quiet", "worker", "--pool=prefork", size, name, *quiet])


@contextmanager
def workers(port: int, broker: str) -> Iterator[None]:
    """All of them, ready."""
    crew = [
        PROCESSES.Process(target=work, args=(port, broker, number)) for number in range(WORKERS)
    ]
    for worker in crew:
        worker.start()
    try:
        seen: set[int] = set()
        give_up = time.monotonic() + PATIENCE
        while len(seen) < WORKERS * CONCURRENCY:
            if time.monotonic() > give_up:
                raise RuntimeError("The workers are not ready.")
            seen |= {one.get(PATIENCE) for one in [ready.delay() for _ in range(16)]}
        yield
    finally:
        for worker in crew:
            worker.terminate()
        for worker in crew:
            worker.join()


def measure(number: int, client: redis.Redis) -> str:
    """One row of the table."""
    case, task = CASES[number], TASKS[number]
    lock = uuid.uuid4().hex
    began, sent = time.time(), []
    for call in range(case.calls):
        if case.rate:
            time.sleep(max(0.0, began + call / case.rate - time.time()))
        sent.append(task.delay(lock, case.seconds))
    results = [one.get(PATIENCE, interval=0.05) for one in sent]
    ran = [tuple(one) for one in results if isinstance(one, list)]
    took = max(end for _, end in ran) - began
    overtaken = sum(first > second for first, second in combinations(ran, 2))
    pairs = len(ran) * (len(ran) - 1) / 2
    deliveries = int(client.get(f"deliveries:{lock}") or 0)
    cells = [
        str(case),
        f"{case.ideal:.1f}",
        f"{took:.1f}",
        f"{took / case.ideal:.2f}",
        f"{deliveries / case.calls:.1f}",
        str(case.calls - len(ran)),
        f"{100 * overtaken / pairs:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure all cases, or those named by their number."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--broker", choices=["redis", "rabbitmq"], default="redis")
    parser.add_argument("cases", nargs="*", type=int, help="numbers, from 1; default all")
    options = parser.parse_args()
    # However we are ended, the blocks below end the servers and the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        server, broker = stack.enter_context(Server()), ""
        if options.broker == "rabbitmq":
            from tests.celery.project.rabbit import RabbitMQ

            broker = stack.enter_context(RabbitMQ()).url
        connect(server.port, broker)
        client = stack.enter_context(redis.Redis(port=server.port))
        stack.enter_context(workers(server.port, broker))
        print(f"| {' | '.join(HEADINGS)} |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for number in options.cases or range(1, len(CASES) + 1):
            print(measure(number - 1, client), flush=True)


if __name__ == "__main__":
    main()
