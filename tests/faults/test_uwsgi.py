"""uWSGI forks in C, and runs no hook of Python unless it is told to: a worker notices by itself."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.servers import tied_to_us
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

UWSGI = shutil.which("uwsgi", path=str(Path(sys.executable).parent))

pytestmark = pytest.mark.skipif(UWSGI is None, reason="no uWSGI: pip install pyuwsgi")

WORKERS = 3


@pytest.fixture
def uwsgi(locks, settings):
    """A site of several workers, all forked from a master that has used locks; its socket."""
    locks.configure(TTL=3, WAIT=HUNG)
    assert UWSGI is not None
    with tempfile.TemporaryDirectory() as directory:
        address, log_file = Path(directory, "http.socket"), Path(directory, "log")
        command = [
            *(UWSGI, "--master", "--processes", str(WORKERS), "--enable-threads"),
            *("--http-socket", str(address), "--module", "tests.support.uwsgi_site", "--need-app"),
            *("--die-on-term", "--disable-logging", "--home", sys.prefix),
        ]
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": str(ROOT),
            "TESTS_REDISLOCK": json.dumps(settings.REDISLOCK),
        }
        with (
            log_file.open("w") as log,
            subprocess.Popen(
                tied_to_us(command), env=environment, cwd=ROOT, stdout=log, stderr=log
            ) as master,
        ):
            try:
                wait_until(lambda: listens(address) or master.poll() is not None)
                yield str(address)
            finally:
                wait_until(partial(terminated, master), every=0.1)
                print(log_file.read_text())


def listens(address):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(address)) == 0


def terminated(master):
    """Whether it has ended; else it is told to. Before its loop begins, uWSGI loses a signal."""
    master.terminate()
    return master.poll() is not None


def get(address, path):
    """What the site says to one request."""
    with closing(http.client.HTTPConnection("localhost", timeout=HUNG)) as connection:
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(HUNG)
        connection.sock.connect(address)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    assert response.status == 200, body
    return json.loads(body)


@pytest.mark.proves("P10", "R8")
def test_workers_forked_in_c_have_connections_and_a_watchdog_of_their_own(uwsgi):
    paths = [f"/{number}" for number in range(2 * WORKERS)]
    requests = [in_thread(partial(get, uwsgi, path)) for path in paths]
    answers = [request.result(HUNG) for request in requests]
    assert len({answer["pid"] for answer in answers}) > 1
    for answer in answers:
        assert answer["is_worker"]
        assert answer["owner"] == answer["pid"]
        assert answer["in_order"]
        assert not answer["holds_what_the_master_holds"]
