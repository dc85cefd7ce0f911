"""`make demo-admin` from the outside: what a newcomer finds, and what is left afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import suppress
from functools import partial
from http.cookiejar import CookieJar
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

import pytest

from tests import ROOT
from tests.demo.test_demo import processes_of, pytestmark, running_demo, surroundings
from tests.support.servers import free_port
from tests.support.waiting import HUNG, wait_until

__all__ = ["pytestmark", "surroundings"]  # The same marks, and a fixture.

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


def running(surroundings, port):
    return running_demo(
        surroundings, "--port", str(port), command="demo_admin", stderr=subprocess.STDOUT
    )


def lines_up_to(demo, what):
    """What the demo says, until it says *what*."""
    assert demo.stdout is not None
    said = []
    for line in demo.stdout:
        said.append(line)
        yield line
        if what in line:
            return
    pytest.fail(f"The demo has never come to say {what!r}, but:\n{''.join(said)}")


def welcome_of(demo):
    return "".join(lines_up_to(demo, LAST_LINE))


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


def shows(browser, page, part):
    return part in text_of(browser, page)


def shell(command, env):
    """Do as one who pastes it into another terminal."""
    return subprocess.run(
        command, shell=True, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def measures(first_port, sample):
    """Whether a process has such a sample; each has the first port that was free."""
    for port in range(first_port, first_port + MOST_PROCESSES):
        with suppress(OSError):  # Nobody is there, or somebody else.
            page = text_of(build_opener(ProxyHandler({})), f"http://127.0.0.1:{port}/metrics")
            if re.search(sample, page, re.MULTILINE):
                return True
    return False


def test_a_newcomer_sees_a_page_full_of_life(surroundings, tmp_path):
    metrics_port = free_port()
    surroundings["METRICS_PORT"] = str(metrics_port)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(surroundings, port) as demo:
            welcome = welcome_of(demo)
            assert f"port {port} is taken" in welcome
            page = found(r"^    http://127\.0\.0\.1:\d+/admin/\S+$", welcome)
            operator, viewer = re.findall(LOGIN, welcome, re.MULTILINE)
            browser = signed_in(page, *operator)
            for part in LIFE:  # One after the other: some of it comes and goes.
                wait_until(
                    partial(shows, browser, page, part), message=f"shows {part!r}", every=0.2
                )
            assert RELEASE in text_of(browser, page)
            only_looking = text_of(signed_in(page, *viewer), page)
            assert "redislock-held" in only_looking
            assert RELEASE not in only_looking
            assert ".redislock-badge" in text_of(browser, urljoin(page, STYLES))

            for sample in SAMPLES:
                wait_until(
                    partial(measures, metrics_port, sample), message=f"has {sample!r}", every=0.2
                )

            locks = found(r"^    REDIS_URL=.* locks watch$", welcome).removesuffix(" watch")
            held = {lock["name"] for lock in json.loads(shell(f"{locks} --json", surroundings))}
            assert {"catalogue:import", "payments:reconcile"} <= held
            assert shell(f"{locks} once --json", surroundings) == "[]\n"  # In the demo's database.
            shell(f"{locks} release payments:reconcile --yes", surroundings)
            *_, news = lines_up_to(demo, "reconcile_payments: The lease")
            assert "an operator released it by force" in news

            demo.send_signal(signal.SIGINT)
            rest, _ = demo.communicate(timeout=HUNG)

    assert rest.splitlines()[-1] == "Stopped; nothing is left running."
    assert demo.returncode == 0
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("part", "number"),
    # The server of the locks ends with the status 0, as if it had been meant to.
    [("valkey", signal.SIGTERM), ("worker-2@", signal.SIGKILL), ("runserver", signal.SIGKILL)],
)
def test_without_one_of_its_parts_the_demo_ends_and_says_why(surroundings, tmp_path, part, number):
    with running(surroundings, free_port()) as demo:
        welcome_of(demo)
        processes = processes_of(tmp_path)
        (victim,) = [pid for pid, command in processes.items() if part in command]
        os.kill(victim, number)
        rest, _ = demo.communicate(timeout=HUNG)

    ended = 0 if number == signal.SIGTERM else -number
    assert re.search(rf"(valkey|worker-2|web) ended with {ended}:", rest)
    assert demo.returncode == 1
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_the_demo_while_it_starts(surroundings, tmp_path):
    with running(surroundings, free_port()) as demo:
        list(lines_up_to(demo, " s  database "))
        demo.send_signal(signal.SIGTERM)
        rest, _ = demo.communicate(timeout=HUNG)

    assert LAST_LINE not in rest
    assert demo.returncode == 128 + signal.SIGTERM
    assert processes_of(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
