"""`make demo-admin` from the outside: what a newcomer finds, and what is left afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import suppress
from http.cookiejar import CookieJar
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

import pytest

from tests import ROOT
from tests.demo.conftest import ended_by, lines_up_to
from tests.support.servers import free_port
from tests.support.waiting import HUNG, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MOST_PROCESSES = 20  # As in example_project/telemetry.py.
SAMPLES = [r'^redislock_runs_total\{job="shop\..* [1-9]', r"^redislock_held\{.* [1-9]"]
LAST_LINE = "Ctrl-C ends it all."
LIFE = [
    "redislock-badge redislock-held",
    "redislock-badge redislock-cooling",
    "permit 1/3",
    'class="redislock-some"',  # waiters
    "worker-1",
    "manage.py count_stock",
    "Only skipped since their last success",
]
RELEASE = "Force release selected held locks"
STYLES = "/static/django_redislock/held.css"
LOGIN = r"^    (\w+) +/ (\S+)   "


def found(pattern, text):
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"{pattern} is not in {text}"
    return match[0].strip()


def signed_in(page, user, password):
    browser = build_opener(ProxyHandler({}), HTTPCookieProcessor(CookieJar()))
    csrf = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', text_of(browser, page))
    assert csrf
    form = {
        "csrfmiddlewaretoken": csrf[1],
        "username": user,
        "password": password,
        "next": urlsplit(page).path,
    }
    browser.open(urljoin(page, "/admin/login/"), urlencode(form).encode(), timeout=HUNG)
    return browser


def text_of(browser, page):
    return browser.open(page, timeout=HUNG).read().decode()


def measures(first_port, sample):
    """Whether a process has such a sample; each has the first port that was free."""
    for port in range(first_port, first_port + MOST_PROCESSES):
        with suppress(OSError):  # Nobody is there, or somebody else.
            page = text_of(build_opener(ProxyHandler({})), f"http://127.0.0.1:{port}/metrics")
            if re.search(sample, page, re.MULTILINE):
                return True
    return False


def test_a_newcomer_sees_a_page_full_of_life(demos):
    metrics_port = free_port()
    demos.env["METRICS_PORT"] = str(metrics_port)

    def shell(command):
        """Do as one who pastes it into another terminal."""
        return subprocess.check_output(command, shell=True, cwd=ROOT, env=demos.env, text=True)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with demos.running("demo_admin", "--port", str(port)) as demo:
            welcome = "".join(lines_up_to(demo, LAST_LINE))
            assert f"port {port} is taken" in welcome
            page = found(r"^    http://127\.0\.0\.1:\d+/admin/\S+$", welcome)
            operator, viewer = re.findall(LOGIN, welcome, re.MULTILINE)
            browser = signed_in(page, *operator)
            missing = {*LIFE}  # Some of it comes and goes.

            def all_was_shown():
                shown = text_of(browser, page)
                missing.difference_update([part for part in missing if part in shown])
                return not missing

            wait_until(all_was_shown, message="is full of life", every=0.2)
            assert RELEASE in text_of(browser, page)
            only_looking = text_of(signed_in(page, *viewer), page)
            assert "redislock-held" in only_looking
            assert RELEASE not in only_looking
            assert ".redislock-badge" in text_of(browser, urljoin(page, STYLES))

            for sample in SAMPLES:
                wait_until(lambda: measures(metrics_port, sample), message=sample, every=0.2)  # noqa: B023 - called at once

            locks = found(r"^    REDIS_URL=.* locks watch$", welcome).removesuffix(" watch")
            held = {lock["name"] for lock in json.loads(shell(f"{locks} --json"))}
            assert {"catalogue:import", "payments:reconcile"} <= held
            assert shell(f"{locks} once --json") == "[]\n"  # In the demo's database.
            shell(f"{locks} release payments:reconcile --yes")
            *_, news = lines_up_to(demo, "reconcile_payments: The lease")
            assert "an operator released it by force" in news
            rest = ended_by(demo, signal.SIGINT)
    assert rest.splitlines()[-1] == "Stopped; nothing is left running."
    assert demo.returncode == 0


@pytest.mark.parametrize(
    ("part", "says", "number"),
    [
        # The server of the locks ends with the status 0, as if it had been meant to.
        ("valkey", "valkey ended with 0", signal.SIGTERM),
        ("worker-2@", "worker-2 ended with -9", signal.SIGKILL),
        ("runserver", "web ended with -9", signal.SIGKILL),
    ],
)
def test_without_one_of_its_parts_the_demo_ends_and_says_why(demos, part, says, number):
    """While it starts, and so all the while: it looks after them in the same way."""
    with demos.running("demo_admin", "--port", str(free_port())) as demo:
        lines_up_to(demo, " s  database ")

        def victims():
            return [pid for pid, command in demos.processes().items() if part in command]

        wait_until(victims)
        for pid in victims():
            os.kill(pid, number)
        rest, _ = demo.communicate(timeout=HUNG)
    assert f"{says}:" in rest
    assert demo.returncode == 1
