"""Monitors of jobs, outside of this site: they are told when a run begins its work and ends.

Such a monitor is a dead man's switch: it raises an alarm if it is told of a failure, or of nothing
for too long. It is told only of runs that do the work, not of skips. So if every run is skipped, or
none begins, the monitor misses a success.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

from django_redislock import logs, process
from django_redislock.rules.arguments import seconds, text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from uuid import UUID


# --- an HTTP POST with a time limit for the whole request -----------------------------------------

# The timeout of urllib limits each step alone, so a server that sends a byte a second is read for
# ever.

LONGEST_ANSWER = 200  # Bytes.


def post(url: str, body: bytes, timeout: float) -> bytes:
    """Post a text, and return the beginning of the answer. Redirects and proxies are followed.

    Args:
        url: It begins with http:// or https://.
        body: UTF-8.
        timeout: Seconds for all of it. It may take longer only if the resolver of names does not
            answer, or if several addresses of a name do not: each is tried that long.

    Raises:
        OSError: There was no answer in time, or it was no success.
    """
    request = urllib.request.Request(url, data=body, method="POST")
    request.add_header("Content-Type", "text/plain; charset=utf-8")
    request.add_header("User-Agent", "django_redislock")
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(_HTTP(deadline), _HTTPS(deadline), _Redirected())
    try:
        with opener.open(request) as answer:
            said: bytes = answer.read(LONGEST_ANSWER)
            return said
    except urllib.error.HTTPError as error:
        with error:  # It has the connection.
            raise OSError(str(error)) from None
    except http.client.RemoteDisconnected:  # It is an OSError, and a HTTPException too.
        raise
    except http.client.HTTPException as error:
        raise OSError(f"The answer is no HTTP: {error!r}") from None
    except ValueError as error:  # A host that is no name, or a redirect to no URL.
        raise OSError(f"There is no such address: {error}") from None


class _Redirected(urllib.request.HTTPRedirectHandler):
    """Posts to where a redirect leads. urllib refuses a 308, and follows a 301 or 302 by GET."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """See the base class. Only a 303 says that the body has arrived."""
        if code == HTTPStatus.SEE_OTHER:
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        return urllib.request.Request(newurl, req.data, req.headers, method="POST")


class _Until(urllib.request.AbstractHTTPHandler):
    """Opens connections that are read until a deadline."""

    def __init__(self, deadline: float) -> None:
        super().__init__()
        self._deadline = deadline

    def do_open(self, http_class: Any, req: Any, **how: Any) -> Any:
        """See the base class, which calls it for each request, also for those of a redirect."""

        def connection(*args: Any, **more: Any) -> http.client.HTTPConnection:
            made: http.client.HTTPConnection = http_class(*args, **more)
            made.response_class = partial(_Answer, self._deadline)  # type: ignore[assignment]
            return made

        req.timeout = _left(self._deadline)
        return super().do_open(connection, req, **how)


class _HTTP(_Until, urllib.request.HTTPHandler):
    pass


class _HTTPS(_Until, urllib.request.HTTPSHandler):
    pass


class _Answer(http.client.HTTPResponse):
    """An answer that is read until a deadline."""

    def __init__(self, deadline: float, sock: socket.socket, **how: Any) -> None:
        super().__init__(sock, **how)
        self.fp = io.BufferedReader(_Received(self.fp.detach(), sock, deadline))


class _Received(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _left(deadline: float) -> float:
    """Seconds until the deadline.

    Raises:
        TimeoutError: The deadline is over.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


logger = logs.logger("django_redislock.monitors")

_FAILURES = ("failure", "lost", "interrupted")

MOST_LATE = 20  # Threads that still tell one monitor of runs that are over, as if it hangs.

LONGEST_BODY = 10_000  # Bytes of a Ping's text about a failure; healthchecks.io keeps that many.


class Run(NamedTuple):
    """A run, as monitors are told of it."""

    id: UUID  #: The start and the end of a run have the same.
    job: str  #: The full name of the function, the task or the command.
    lock: str
    task_id: str  #: Celery's id of the task, or "".

    def __str__(self) -> str:
        return f"{self.job}[{self.task_id}]" if self.task_id else self.job


class Monitor:
    """A listener to the runs of a job. Subclasses tell a service.

    Each method runs in a thread of its own. What it raises is logged, and never makes a run fail.

    Attributes:
        timeout: Seconds, or a timedelta, that the end of a run waits at most, after the release,
            until the monitor is told. A task waits only while its time limits leave a second. The
            monitor is told later too, if the process lives.
    """

    timeout: float | timedelta = 5.0

    def started(self, run: Run) -> None:
        """A run has got its lock, and its body begins."""

    def succeeded(self, run: Run, took: float) -> None:
        """A run has ended well, *took* seconds after its start, and its lock is released."""

    def failed(self, run: Run, took: float, error: BaseException | None) -> None:
        """A run has raised *error*; None if it has lost its lock before its end."""


class Ping(Monitor):
    """Tells a URL of starts, successes and failures, by the protocol of healthchecks.io.

    ``Ping("https://hc-ping.com/<uuid>")`` requests that URL after a success. It adds ``/start`` at
    the start, and ``/fail`` with a line of text after a failure. Each request has the id of the run
    in ``rid``. Any service with the same protocol will do.
    """

    timeout: float

    def __init__(self, url: str, *, timeout: float | timedelta = 5.0) -> None:
        """Make a monitor; *url* is requested after a success.

        Args:
            url: Begins with http:// or https://. Its query is kept.
            timeout: Seconds, or a timedelta, in which each request must be answered.

        Raises:
            ValueError: *url* is no such URL, or the timeout is no duration.
        """
        try:
            parts = urlsplit(text(url, "url"))
            is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError as error:
            raise ValueError(f"url must be a URL, not {url!r}: {error}") from None
        if not is_whole:
            raise ValueError(
                f"url must begin with http:// or https:// and name a host, not {url!r}."
            )
        if "@" in parts.netloc or not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError(
                "url must have no user and no password, and be ASCII without spaces (write %20),"
                f" not {url!r}."
            )
        self.timeout = seconds(timeout, "timeout", least=0.1)
        self._parts = parts

    def __repr__(self) -> str:
        return f"Ping of {self._parts.hostname}"  # The path is a secret that allows to ping.

    def started(self, run: Run) -> None:
        """Request the URL with /start."""
        self.send("/start", run.id)

    def succeeded(self, run: Run, took: float) -> None:
        """Request the URL."""
        self.send("", run.id)

    def failed(self, run: Run, took: float, error: BaseException | None) -> None:
        """Request the URL with /fail; name the run and the kind of its exception."""
        why = "its lease was lost" if error is None else type(error).__name__
        says = f"{run} on {socket.gethostname()} failed after {took:.1f} s: {why}"
        self.send("/fail", run.id, says)

    def send(self, event: str = "", id: UUID | None = None, says: str = "") -> None:  # noqa: A002
        """Request the URL, now.

        Args:
            event: "" for a success, "/start" or "/fail".
            id: The id of the run, if it has one.
            says: A text for the monitor to show.

        Raises:
            OSError: There was no answer in time, or it says that the ping does not count.
        """
        path, query = self._parts.path, self._parts.query
        if event:
            path = path.rstrip("/") + event
        if id is not None:
            query = f"{query}&rid={id}" if query else f"rid={id}"
        url = urlunsplit(self._parts._replace(path=path, query=query, fragment=""))
        body = says.encode(errors="replace")[:LONGEST_BODY]
        said = post(url, body, self.timeout).decode(errors="replace")
        # healthchecks.io answers 200 also for an unknown check.
        if said.startswith("OK (") and said.strip() != "OK":
            raise OSError(f"{self._parts.hostname} says: {said.strip()}")


class Sentry(Monitor):
    """Tells Sentry, by check-ins of sentry-sdk. The site initialises sentry-sdk.

    Sentry's own monitoring of beat and of tasks calls a skip "ok", since the task returned. Switch
    it off for the tasks that have this monitor, see docs/jobs.md.
    """

    timeout: float

    def __init__(
        self,
        slug: str,
        *,
        timeout: float | timedelta = 5.0,
        monitor_config: Any = None,
    ) -> None:
        """Make a monitor that tells the one in Sentry with this slug.

        Args:
            slug: The slug of the monitor in Sentry.
            timeout: Seconds, or a timedelta, in which Sentry must get each check-in.
            monitor_config: With it Sentry makes the monitor if there is none, see its docs.

        Raises:
            ImportError: sentry-sdk is not installed.
            ValueError: The slug is no text, or the timeout is no duration.
        """
        try:
            import sentry_sdk.crons  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"The monitor Sentry({slug!r}) needs sentry-sdk: pip install sentry-sdk."
            ) from error
        self.slug = text(slug, "slug")
        self.timeout = seconds(timeout, "timeout", least=0.1)
        self._config = monitor_config

    def __repr__(self) -> str:
        return f"Sentry monitor {self.slug!r}"

    def started(self, run: Run) -> None:
        """Check in as under way."""
        self._check_in(run, "in_progress")

    def succeeded(self, run: Run, took: float) -> None:
        """Check in as ok."""
        self._check_in(run, "ok", took)

    def failed(self, run: Run, took: float, error: BaseException | None) -> None:
        """Check in as failed."""
        self._check_in(run, "error", took)

    def _check_in(self, run: Run, status: str, took: float | None = None) -> None:
        import sentry_sdk
        from sentry_sdk.crons import capture_checkin

        if sentry_sdk.get_client().transport is None:
            raise RuntimeError("sentry-sdk is not initialised; call sentry_sdk.init(dsn=...)")
        capture_checkin(
            monitor_slug=self.slug,
            check_in_id=run.id.hex,
            status=status,
            duration=took,
            monitor_config=self._config,
        )
        # A process may end right after its job. A child of Celery's pool calls no exit handlers.
        sentry_sdk.flush(timeout=self.timeout)


def check_monitors(raw: object) -> tuple[Monitor, ...]:
    """The monitors of a job, given as one or as a list.

    Raises:
        ValueError: One of them is no monitor, or its timeout is no duration.
    """
    given = tuple(raw) if isinstance(raw, list | tuple) else (raw,)
    for one in given:
        if not isinstance(one, Monitor):
            raise ValueError(
                'monitor must be a monitor, as in monitor=Ping("https://...") or'
                f' monitor=Sentry("nightly"), or a list of them, not {one!r}.'
            )
        _timeout_of(one)
    return given


def _timeout_of(monitor: Monitor) -> float:
    """Its timeout in seconds: a subclass may say it as it likes."""
    return seconds(monitor.timeout, f"timeout of the monitor {type(monitor).__name__}")


class CheckIns:
    """Tells the monitors of one run, each in a thread of its own."""

    def __init__(self, monitors: Sequence[Monitor], job: str, lock: str, task_id: str) -> None:
        """Tell the monitors that a run begins; do not wait for them."""
        self._run = run = Run(uuid4(), job, lock, task_id)
        self._began = time.monotonic()
        self._told = [_Telling(monitor, run) for monitor in monitors]

    def end(self, outcome: str = "", error: BaseException | None = None) -> None:
        """Tell the monitors the end of the run; do not wait for them. Call it in any case.

        Args:
            outcome: A jobs.run.RunOutcome. If it is neither a success nor a failure, nothing is
                told: the work goes on in another run, which begins anew.
            error: The exception of the run, if any.
        """
        run, took = self._run, time.monotonic() - self._began
        for one in self._told:
            if outcome == "success":
                one.tell(lambda monitor: monitor.succeeded(run, took))
            elif outcome in _FAILURES:
                one.tell(lambda monitor: monitor.failed(run, took, error))
            one.tell(None)

    def wait(self, most: float = math.inf) -> None:
        """Wait until all are told, but no longer than their timeouts or *most* seconds."""
        wait([one.done for one in self._told], min(most, self._patience))
        self._complain_of_silence()

    async def await_told(self) -> None:
        """As wait(), in an event loop."""
        told = [asyncio.wrap_future(one.done) for one in self._told]
        await asyncio.wait(told, timeout=self._patience)
        self._complain_of_silence()

    @property
    def _patience(self) -> float:
        # While the start is still being told, it has its own time, and the end has its own after
        # it.
        return max(_timeout_of(one.monitor) * (1 if one.has_begun else 2) for one in self._told)

    def _complain_of_silence(self) -> None:
        for one in self._told:
            if not one.done.done():
                one.complain("it has not answered yet")


_late: set[_Telling] = set()  # Of runs that are over, until all is told.


class _Telling:
    """Tells one monitor of one run.

    Attributes:
        done: Done when all is told.
        has_begun: Whether telling it of the start is over, well or not.
        thread: It tells.
    """

    has_begun = False

    def __init__(self, monitor: Monitor, run: Run) -> None:
        self.monitor = monitor
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # So nobody can cancel it.
        self._run = run
        self._news: SimpleQueue[Callable[[Monitor], None] | None] = SimpleQueue()
        self._news.put(lambda monitor: monitor.started(run))
        name = "redislock-monitor"
        self.thread = threading.Thread(target=self._tell_all, name=name, daemon=True)
        try:
            # A child that was forked has none of its parent's threads.
            late = sum(one.monitor is monitor and one.thread.is_alive() for one in [*_late])
            if late >= MOST_LATE:
                raise RuntimeError(f"it has not answered {late} earlier runs yet")
            process.start(self.thread)
        except RuntimeError as error:  # Or no more threads, or the interpreter is shutting down.
            self.complain(error)
            self.done.set_result(None)

    def tell(self, news: Callable[[Monitor], None] | None) -> None:
        """Add to what it is told; None ends it."""
        if news is None and not self.done.done():
            _late.add(self)
        self._news.put(news)

    def complain(self, why: object) -> None:
        """Log that it was not told."""
        run = self._run
        extra = logs.of(lock=run.lock, job=run.job, task_id=run.task_id or None)
        logger.warning("The %r was not told of %s: %s", self.monitor, run, why, extra=extra)

    def _tell_all(self) -> None:
        try:
            while news := self._news.get():
                try:
                    news(self.monitor)
                except BaseException as error:  # noqa: BLE001 - it must not make the run fail
                    with suppress(Exception):  # A handler of the project's logs may raise.
                        self.complain(error if isinstance(error, Exception) else repr(error))
                self.has_begun = True
        finally:
            self.done.set_result(None)
            _late.discard(self)
