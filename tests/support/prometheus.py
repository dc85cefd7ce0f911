"""A real Prometheus that scrapes a function of ours: Debian's package, on loopback only.

with Prometheus(tmp_path, lambda: "up_to_me 1\\n", rules=text) as prometheus:
    prometheus.query("up_to_me")
"""

import io
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from django.core.management import CommandError, call_command

from django_redislock.management.console import UNAVAILABLE
from tests.support.servers import free_port, tied_to_us
from tests.support.waiting import HUNG, wait_until

EVERY = "200ms"  # Between scrapes, and between evaluations of the rules.
MISSING = "no prometheus here: install Debian's package of that name"


def is_here():
    """Whether this machine has Prometheus and its tool."""
    return bool(shutil.which("prometheus") and shutil.which("promtool"))


def promtool(*args, said=""):
    """Run promtool; fail with what it complains of, if anything."""
    ran = subprocess.run(
        ["promtool", *args], input=said, capture_output=True, text=True, timeout=HUNG, check=False
    )
    assert not ran.returncode, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def locks_metrics(*args):
    """What ``manage.py locks metrics`` prints, whatever its exit status."""
    out = io.StringIO()
    try:
        call_command("locks", "metrics", *args, stdout=out, stderr=io.StringIO())
    except CommandError as error:
        if error.returncode != UNAVAILABLE:
            raise
    return out.getvalue()


class Prometheus:
    """Scrapes what *metrics* returned last, during a block; it is called again and again.

    Args:
        folder: For its files.
        metrics: Returns what there is to scrape, as cron writes the file of node_exporter. However
            long that takes on a busy machine, a scrape does not wait for it.
        rules: The text of a file of rules.
        also: Addresses that are scraped too, if anybody listens there.
    """

    def __init__(self, folder, metrics, *, rules="", also=()):
        self._folder, self._metrics, self._also = folder, metrics, also
        (folder / "rules.yml").write_text(rules)
        self._port = free_port()
        self._over = threading.Event()
        self._failure = None
        self._content = b""

    def __enter__(self):
        with ExitStack() as stack:
            target = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), self._handler()))
            for work in (self._look, partial(target.serve_forever, poll_interval=0.05)):
                thread = threading.Thread(target=work)
                thread.start()
                stack.callback(thread.join, HUNG)
            stack.callback(target.shutdown)
            stack.callback(self._over.set)
            config = {
                "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
                "rule_files": ["rules.yml"],
                "scrape_configs": [
                    {
                        "job_name": "locks",
                        "static_configs": [{"targets": [f"127.0.0.1:{target.server_port}"]}],
                    },
                    {"job_name": "processes", "static_configs": [{"targets": [*self._also]}]},
                ],
            }
            file = self._folder / "prometheus.yml"  # JSON is YAML.
            file.write_text(json.dumps(config))
            log = stack.enter_context((self._folder / "prometheus.log").open("wb"))
            command = [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ]
            process = subprocess.Popen(tied_to_us(command), stdout=log, stderr=log)
            stack.callback(process.wait, HUNG)
            stack.callback(process.terminate)
            wait_until(self._is_ready, message="Prometheus scrapes", every=0.05)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def ask(self, path, **parameters):
        """The data of an answer of its HTTP API; a query that does not parse fails."""
        if self._failure is not None:
            raise self._failure
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=HUNG) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:  # It has the connection.
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression):
        """The labels and the value of each result of now."""
        found = self.ask("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def firing(self):
        """The alerts that fire, each with the job or the alias it is about, if any."""
        return {
            (
                one["labels"]["alertname"],
                one["labels"].get("job_name", one["labels"].get("alias", "")),
            )
            for one in self.ask("alerts")["alerts"]
            if one["state"] == "firing"
        }

    def _is_ready(self):
        try:
            return bool(self._content and self.query("up == 1"))
        except (OSError, AssertionError):  # It does not listen yet, or does not serve yet.
            return False

    def _look(self):
        while self._failure is None and not self._over.wait(0.1):
            try:
                self._content = self._metrics().encode()
            except Exception as error:
                self._failure = error

    def _handler(self):
        prometheus = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write(prometheus._content)

            def log_message(self, *_):
                """Say nothing."""

        return Handler
