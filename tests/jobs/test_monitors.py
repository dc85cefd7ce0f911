"""monitor=: a service outside is told of runs that do the work, and never of a skip."""

import asyncio
import gzip
import importlib
import io
import json
import logging
import math
import os
import re
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit
from uuid import UUID

import pytest
from celery.exceptions import Ignore, Reject, Retry
from django.core.management import CommandError, call_command

from django_redislock import LockLost, distributed_lock, held, single_instance, single_instance_task
from django_redislock.jobs import current_lease
from django_redislock.monitors import MOST_LATE, Monitor, Ping, Sentry
from tests.support.celery_app import EAGER, celery_app
from tests.support.interrupts import alarm
from tests.support.others import add_rival, rival
from tests.support.waiting import wait_until
from tests.support.ways import blocking_or_not

HUNG = 10.0
NOBODY = "http://127.0.0.1:1/nightly"  # Nothing listens there.


class Request(NamedTuple):
    """What a service was asked for."""

    path: str
    query: dict[str, list[str]]
    body: str


class Service:
    """A server on loopback that a monitor tells."""

    def __init__(self):
        self.requests = []
        self.targets = []  # The path and the query of each, as they were sent.
        self.status, self.says = 200, b"OK"
        self.redirects = 0  # A status with which it leads to another place.
        self.trickles = b""  # What it begins with, to go on with a byte now and then, for ever.
        self.dropped = 0  # Trickles that nobody reads any more.
        self.closed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                service.targets.append(self.path)
                url = urlsplit(self.path)
                service.requests.append(Request(url.path, parse_qs(url.query), body.decode()))
                service.answers.wait(HUNG)
                if service.trickles:
                    self._trickle()
                    return
                if service.redirects and not self.path.startswith("/moved"):
                    self.send_response(service.redirects)
                    self.send_header("Location", f"http://{service.leads_to}/moved{self.path}")
                    self.end_headers()
                    return
                self.send_response(service.status)
                self.end_headers()
                with suppress(BrokenPipeError):  # The client has waited long enough.
                    self.wfile.write(service.says)

            def _trickle(self):
                self.wfile.write(service.trickles)
                with suppress(OSError):  # The client has gone.
                    while not service.closed.wait(0.05):
                        self.wfile.write(b"x")
                service.dropped += 1

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.leads_to = self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}/nightly"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def paths(self):
        """What was asked for, in order."""
        return [request.path for request in self.requests]

    def close(self):
        """End it."""
        self.answers.set()
        self.closed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()


def ping(service, **how):
    return Ping(f"{service.url}?create=1", **how)


def job(is_async=False, **options):
    """A job that returns 1, or raises what it is given; called by blocking code."""

    def work(raising=None):
        if raising:
            raise raising
        return 1

    async def awork(raising=None):
        return work(raising)

    if not is_async:
        return single_instance("nightly", **options)(work)
    made = single_instance("nightly", **options)(awork)
    return lambda *given: asyncio.run(made(*given))


def fail(run):
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError("secret"))


@blocking_or_not
def test_a_run_tells_its_start_and_its_end_by_one_id_and_a_skip_tells_nothing(
    is_async, locks, settings, service
):
    run = job(is_async, once=60, monitor=ping(service))
    fail(run)
    assert service.paths == ["/nightly/start", "/nightly/fail"]
    assert "ZeroDivisionError" in service.requests[1].body
    assert "secret" not in service.requests[1].body
    assert run() == 1
    assert service.paths[2:] == ["/nightly/start", "/nightly"]
    assert run()["skipped"] == "done"
    add_rival(settings, locks)
    with rival("nightly"):
        assert job(is_async, monitor=ping(service))()["skipped"] == "busy"
    ids = [request.query["rid"][0] for request in service.requests]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert [request.query["create"] for request in service.requests] == [["1"]] * 4


def test_a_run_that_lost_its_lock_tells_a_failure(locks, service):
    @single_instance("nightly", monitor=ping(service))
    def work():
        held.force_release("nightly", current_lease().id, by="the test")
        with pytest.raises(LockLost):
            current_lease().ensure_held(verify=True)

    with pytest.raises(LockLost):
        work()
    assert service.paths == ["/nightly/start", "/nightly/fail"]


def test_a_service_that_hangs_or_refuses_is_told_of_in_the_log_and_fails_no_run(
    locks, service, caplog
):
    service.answers.clear()
    assert job(monitor=ping(service, timeout=0.1))() == 1
    assert not distributed_lock("nightly").locked()
    service.answers.set()
    service.status = 500
    assert job(monitor=ping(service))() == 1
    service.status, service.says = 200, b"OK (not found)"
    assert job(monitor=ping(service))() == 1
    assert job(monitor=Ping(NOBODY))() == 1
    assert "timed out" in caplog.text or "it has not answered yet" in caplog.text
    for reason in ("HTTP Error 500", "OK (not found)", "Connection refused"):
        assert reason in caplog.text
    assert "/nightly" not in caplog.text  # Whoever knows the path may ping.


def test_a_monitor_that_hangs_keeps_a_bounded_number_of_threads_and_no_other_from_its_own(
    locks, caplog
):
    answers, told, told_too = threading.Event(), [], []

    class Hanging(Monitor):
        timeout = 0.001

        def started(self, run):
            answers.wait(HUNG)
            told.append(run.id)

    class Healthy(Monitor):
        timeout = 0.001

        def started(self, run):
            told_too.append(run.id)

    def telling():
        return [thread.name for thread in threading.enumerate()].count("redislock-monitor")

    work = job(monitor=[Hanging(), Healthy()])
    for number in range(3 * MOST_LATE):
        assert work() == 1
        wait_until(lambda so_far=number: len(told_too) > so_far, HUNG, "the other is told")
    wait_until(lambda: telling() <= MOST_LATE, HUNG, "only those that hang are left")
    assert f"it has not answered {MOST_LATE} earlier runs yet" in caplog.text
    answers.set()
    wait_until(lambda: not telling(), HUNG, "all threads have ended")
    assert len(told) == MOST_LATE
    work()
    wait_until(lambda: len(told) == MOST_LATE + 1, HUNG, "it is told again")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_followed_and_takes_the_text_along(status, locks, service):
    """One from http:// to https:// is a 308 with ingress-nginx, and a 301 with most others."""
    service.redirects = status
    fail(job(monitor=ping(service)))
    told = [(request.path, "ZeroDivisionError" in request.body) for request in service.requests]
    assert told == [
        ("/nightly/start", False),
        ("/moved/nightly/start", False),
        ("/nightly/fail", True),
        ("/moved/nightly/fail", True),
    ]


def test_a_place_that_is_none_is_an_error_of_the_service(locks, service):
    service.redirects, service.leads_to = 308, "[::1"
    for one in (ping(service), Ping("http://hc..example/x")):
        with pytest.raises(OSError, match="no such address"):
            one.send()


@pytest.mark.parametrize("begin", [b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_service_that_trickles_has_no_more_time_than_others(begin, locks, service, caplog):
    def running_threads():
        return {thread.name for thread in threading.enumerate()}

    service.trickles = begin
    assert job(monitor=ping(service, timeout=0.3))() == 1
    wait_until(lambda: service.dropped == 2, HUNG, "both requests are given up")
    wait_until(lambda: "redislock-monitor" not in running_threads(), HUNG, "its thread has ended")
    assert caplog.text.count("timed out") == 2


def test_a_monitor_that_raises_fails_no_run_and_a_handler_of_logs_keeps_no_end_from_it(
    locks, caplog, monkeypatch
):
    class Broken(Monitor):
        def started(self, run):
            raise KeyError("broken")

        def succeeded(self, run, took):
            told.append(run.job)
            sys.exit("broken")

    class BrokenHandler(logging.Handler):
        def emit(self, record):
            raise ZeroDivisionError("of a handler")

    told = []
    assert job(monitor=Broken())() == 1
    assert caplog.text.count("was not told of") == 2
    assert "SystemExit('broken')" in caplog.text
    log = logging.getLogger("django_redislock.monitors")
    monkeypatch.setattr(log, "handlers", [BrokenHandler()])
    assert job(monitor=Broken())() == 1
    wait_until(lambda: len(told) == 2, HUNG, "the monitor is told of the success")


def test_what_interrupts_the_wait_for_a_service_does_not_fail_a_run_that_is_over(locks, service):
    class TooLong(Exception):
        pass

    service.answers.clear()
    with alarm(TooLong) as set_alarm:

        @single_instance("nightly", monitor=ping(service))
        def work():
            set_alarm(0.3)
            return 1

        assert work() == 1


async def test_waiting_for_services_leaves_threads_to_others(locks, service):
    service.answers.clear()

    @single_instance("nightly:{number}", monitor=ping(service, timeout=30))
    async def work(number):
        return number

    many = 2 * (os.cpu_count() or 1) + 8
    jobs = asyncio.gather(*(work(number) for number in range(many)))
    while len(service.requests) < many:
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(int) == 0
    assert not jobs.done()
    service.answers.set()
    await jobs


def test_a_run_that_is_cancelled_leaves_no_thread(locks, service):
    class Stops(Monitor):
        def started(self, run):
            nonlocal teller
            teller = threading.current_thread()

    teller = None

    @single_instance("nightly", monitor=Stops())
    async def work():
        await asyncio.Event().wait()

    async def drop():
        task = asyncio.ensure_future(work())
        while teller is None:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(drop())
    wait_until(lambda: not (teller and teller.is_alive()), HUNG, "its thread has ended")


# --- tasks of Celery, which have ends that are neither a success nor a failure --------------------


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (None, ["/nightly/start", "/nightly"]),
        (ValueError(), ["/nightly/start", "/nightly/fail"]),
        (Reject("no", requeue=False), ["/nightly/start"]),
        (Retry(), ["/nightly/start"]),
        (Ignore(), ["/nightly/start"]),
    ],
    ids=str,
)
def test_a_task_tells_an_end_unless_it_goes_on(raised, told, locks, service):
    with celery_app(**EAGER):

        @single_instance_task(key="nightly", monitor=ping(service))
        def work():
            if raised is not None:
                raise raised

        work.apply()
    assert service.paths == told


def test_a_task_does_not_wait_for_a_service_beyond_its_time_limit(locks, service, caplog):
    service.answers.clear()
    with celery_app(**EAGER):
        how = {"monitor": ping(service, timeout=HUNG), "soft_time_limit": 1.2}

        @single_instance_task(key="nightly", **how)
        def work():
            return 1

        assert work.apply().get() == 1
    assert "it has not answered yet" in caplog.text


# --- Sentry ---------------------------------------------------------------------------------------


@pytest.fixture
def sentry_sdk(monkeypatch):
    """It imports eventlet, if there is one, which from then on warns of each fork."""
    for module in ("eventlet", "eventlet.patcher", "gevent", "gevent.monkey"):
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, None)
    return importlib.import_module("sentry_sdk")


@pytest.mark.usefixtures("locks")
def test_sentry_gets_check_ins_and_one_that_is_not_initialised_is_told_of_in_the_log(
    service, sentry_sdk, caplog
):
    run = job(monitor=Sentry("nightly"))
    assert run() == 1
    assert "sentry-sdk is not initialised" in caplog.text
    how = {"default_integrations": False, "auto_enabling_integrations": False}
    sentry_sdk.init(dsn=f"http://key@{service.address}/1", **how)
    try:
        run()
        fail(run)
    finally:
        sentry_sdk.init(**how)  # Without a DSN: off.
    check_ins = [json.loads(request.body.splitlines()[2]) for request in service.requests]
    assert [one["status"] for one in check_ins] == ["in_progress", "ok", "in_progress", "error"]
    assert {one["monitor_slug"] for one in check_ins} == {"nightly"}
    assert check_ins[0]["check_in_id"] == check_ins[1]["check_in_id"] != check_ins[2]["check_in_id"]


def test_without_sentry_sdk_its_monitor_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentry_sdk", None)
    monkeypatch.setitem(sys.modules, "sentry_sdk.crons", None)
    with pytest.raises(ImportError, match="pip install sentry-sdk"):
        Sentry("nightly")


# --- what is refused where it is written ----------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", ["https://hc-ping.com/x", Ping, [Ping("http://localhost/x"), None], 5], ids=repr
)
def test_what_is_no_monitor_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^monitor must be a monitor"):
        job(monitor=wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *("hc-ping.com/x", "ftp://localhost/x", "http:///x", "", None),
        *("http://localhost:x/", "http://[::1/x", "http://localhost/a b", "http://localhost/é"),
        *("http://localhost/x\n", "http://user:password@localhost/x"),
    ],
)
def test_a_url_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"^url must "):
        Ping(wrong)


@pytest.mark.parametrize("timeout", ["5", -1, None, math.inf])
def test_a_timeout_that_is_no_duration_is_refused(timeout):
    monitor = type("Slow", (Monitor,), {"timeout": timeout})
    with pytest.raises(ValueError, match="timeout of the monitor Slow must be"):
        job(monitor=monitor())


@blocking_or_not
def test_a_timeout_may_be_a_timedelta_and_one_that_becomes_wrong_fails_no_run(locks, is_async):
    class Slow(Monitor):
        timeout = timedelta(seconds=HUNG)

        def succeeded(self, run, took):
            wait_until(lambda: not distributed_lock("nightly").locked(), HUNG)
            told.append(run.lock)

    told, monitor = [], Slow()
    run = job(is_async, monitor=monitor)
    assert run() == 1
    assert told == ["nightly"]
    monitor.timeout = "soon"
    assert run() == 1


@pytest.mark.parametrize(
    ("written", "after_success", "after_start"),
    [
        ("/x/", "/x/", "/x/start?"),
        ("", "/", "/start?"),
        ("/x?k=a%20b;c", "/x?k=a%20b;c", "/x/start?k=a%20b;c&"),
        ("/x?flag&k=%FF", "/x?flag&k=%FF", "/x/start?flag&k=%FF&"),
    ],
)
def test_a_url_is_requested_as_it_is_written(service, written, after_success, after_start):
    ping = Ping(f"http://{service.address}{written}")
    ping.send()
    ping.send("/start", UUID(int=7))
    assert service.targets == [after_success, f"{after_start}rid={UUID(int=7)}"]


def test_what_is_told_late_is_told_all_the_same(locks, service):
    service.answers.clear()
    job(monitor=ping(service, timeout=1))()
    service.answers.set()
    wait_until(lambda: len(service.requests) == 2, HUNG, "the end is told")


# --- `locks runs --no-success-for 26h --ping URL`, for an alarm if no run even begins -------------


def locks_runs(*chosen, ping, **how):
    call_command("locks", "runs", *chosen, "--no-success-for", "26h", "--ping", ping, **how)


def test_a_success_in_time_is_told_and_none_is_told_as_a_failure(locks, service):
    job()()
    locks_runs("nightly", ping=service.url)
    assert service.paths == ["/nightly"]
    locks_runs("--job", "never", ping=service.url)
    with pytest.raises(CommandError, match="No success"):
        locks_runs("--job", "never", "--fail", ping=service.url)
    with pytest.raises(BrokenPipeError):  # Also if nothing can be printed.
        locks_runs("never", ping=service.url, stdout=Gone())
    assert service.paths[1:] == ["/nightly/fail"] * 3
    assert "No success of --job" in service.requests[1].body


class Gone(io.StringIO):
    """An output whose reader has gone."""

    def write(self, text, /):
        raise BrokenPipeError


@pytest.mark.parametrize("chosen", [["nightly"], ["--prefix", "n"], ["--job", "nightly"], []])
def test_a_server_that_does_not_answer_is_told_as_a_failure_and_both_are_said(
    redislock, service, chosen
):
    with redislock.simulate_unavailable():
        with pytest.raises(CommandError) as raised:
            locks_runs(*chosen, ping=service.url)
        assert raised.value.returncode == 3
        assert service.paths == ["/nightly/fail"]
        assert service.requests[0].body == str(raised.value)
        with pytest.raises(CommandError) as raised:
            locks_runs(*chosen, ping=NOBODY)
    assert raised.value.returncode == 3
    assert re.search("cannot answer.*\nThe Ping of 127.0.0.1 did not", str(raised.value))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--fail"],
            "1 lock without a success in the last 1 d 2 h.\nThe Ping of 127.0.0.1 did not",
        ),
        ([], "The Ping of 127.0.0.1 did not"),
    ],
)
def test_a_monitor_that_does_not_answer_fails_the_command_and_hides_no_missing_success(
    locks, options, says
):
    with pytest.raises(CommandError) as raised:
        locks_runs("nightly", *options, ping=NOBODY)
    assert raised.value.returncode == 1
    assert str(raised.value).startswith(says)


def test_it_goes_with_a_time_and_a_url_only(locks, service):
    with pytest.raises(CommandError, match="--ping goes with --no-success-for"):
        call_command("locks", "runs", "nightly", "--ping", service.url)
    with pytest.raises(CommandError, match="url must begin with http"):
        locks_runs(ping="nightly")
