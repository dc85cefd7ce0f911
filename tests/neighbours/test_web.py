"""uvicorn with clients that leave; gunicorn that imports the site before it forks its workers."""

import json
import re
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from django_redislock import distributed_lock
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until

pytest_plugins = ["tests.neighbours.programs"]
pytest.importorskip("gunicorn")
pytest.importorskip("uvicorn")

WORKERS, REQUESTS = 3, 60


@pytest.fixture
def serve(program):
    """Start a server; return its port."""

    def start(*arguments, **variables):
        started = program(*arguments, **variables)
        at = r"http://127\.0\.0\.1:(\d+)"
        return int(wait_until(lambda: re.search(at, started.log), message="it serves")[1])

    return start


@pytest.fixture
def asgi(serve):
    return serve("uvicorn", "--port", "0", "tests.neighbours.web_site:asgi")


def ask(port, what):
    """Send a request, and return its connection without waiting for an answer."""
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(f"GET /{what} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return client


def get(port, what):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=HUNG) as answer:
        return answer.read().decode()


def test_uvicorn_a_client_that_leaves_while_its_view_holds_frees_the_lock(locks, asgi):
    lock = distributed_lock("lottery")
    with closing(ask(asgi, "hold")):
        wait_until(lock.locked)
    wait_until(lambda: not lock.locked(), timeout=10)
    assert get(asgi, "take") == "taken"


def test_uvicorn_a_client_that_leaves_while_its_view_waits_leaves_the_queue(locks, asgi):
    with distributed_lock("lottery", ttl=60):
        with closing(ask(asgi, "take")):
            wait_until(lambda: waiters("lottery") == 1)
        wait_until(lambda: waiters("lottery") == 0, timeout=10)
    assert get(asgi, "take") == "taken", "it was not handed to a view that is gone"


def test_gunicorn_preload_workers_exclude_each_other_and_no_one_inherits_a_lease(
    locks, serve, tmp_path
):
    counter = tmp_path / "counter"
    counter.write_text("0")
    port = serve(
        *("gunicorn", "--preload", "--workers", str(WORKERS), "--threads", "4"),
        *("--bind", "127.0.0.1:0", "--no-control-socket", "tests.neighbours.web_site:wsgi"),
        TESTS_COUNTER=str(counter),
        TESTS_HELD_BEFORE="1",
    )
    pids = set()

    def add(_):
        return json.loads(get(port, "add"))

    total = 0
    with ThreadPoolExecutor(12) as clients:
        while total < REQUESTS or len(pids) < 2:
            for arbiter, pid, inherited in clients.map(add, range(REQUESTS)):
                assert pid != arbiter, "the site was imported before the fork"
                assert not inherited
                pids.add(pid)
            total += REQUESTS
    assert counter.read_text() == str(total)
    assert distributed_lock("at import").locked(), "the arbiter renews its own"
