"""What operators see: every act of `manage.py locks`, and the texts of the admin's pages.

    make test ARGS='tests/golden --write-golden'    # Write it down anew, and read the difference.

Numbers that differ in each run are masked: times, durations, ids, fences, processes.
"""

import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_redislock import held
from django_redislock.models import LockPage
from tests.golden.scene import TASK, command_of_this_process, locks_waiters_and_runs
from tests.operations.test_locks_command import locks_command
from tests.support import site

WRITTEN = Path(__file__).parent
JOB = "tests.golden.scene._runs.<locals>.work"
ACTS = {
    "list": ["list"],
    "list of some": ["list", "--prefix", "import"],
    "list of none": ["list", "--host", "nowhere"],
    "show a held lock": ["show", "import:7"],
    "show a permit": ["show", "gpu"],
    "show a paused lock": ["show", "paused"],
    "show a free lock with a past": ["show", "report:False"],
    "show a foreign lock": ["show", "foreign"],
    "show an unknown lock": ["show", "impor"],
    "release without --yes": ["release"],
    "release what is free": ["release", "nobody", "--yes"],
    "clean on trial": ["clean", "--prefix", "import", "--dry-run"],
    "clean none": ["clean", "--host", "nowhere", "--yes"],
    "runs": ["runs"],
    "runs of a job": ["runs", "--job", JOB],
    "runs as a probe": ["runs", "--prefix", "rep", "--no-success-for", "26h", "--fail"],
    "explain a lock": ["explain", "import:7"],
    "explain a run": ["explain", TASK.task_id],
    "explain a job": ["explain", "--job", JOB],
    "explain a paused lock": ["explain", "paused"],
    "watch": ["watch"],
    "metrics": ["metrics"],
    "pause": ["pause", "paused", "--for", "3h", "--reason", "later"],
    "resume what nobody holds": ["resume", "nobody"],
    "once": ["once"],
}
# All locks of the scene are equally old, but for milliseconds.
BY_AGE = {"watch", "metrics", "explain a run"}
NO_JSON = {"watch", "metrics"}


@pytest.fixture
def key_prefix():
    return "golden"


@pytest.fixture
def scene(locks, db, monkeypatch):
    """The scene, on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    with locks_waiters_and_runs(locks):
        yield


def masked(text):
    """The text without what differs in each run."""
    for found, name in ((socket.gethostname(), "<host>"), (command_of_this_process(), "<command>")):
        text = re.sub(rf"(?<![\w-]){re.escape(found)}(?![\w-])", name, text)
    text = re.sub(rf"(?<![\d.]){os.getpid()}(?![\d.]*\d)", "<pid>", text)
    # Of a server that was started in this second, it is not said.
    text = re.sub(r".* was started at .* Records of runs begin there\.\n", "", text)
    text = re.sub(r'"birth": "[^"]*"', '"birth": "<birth>"', text)
    text = re.sub(r'server="[^"]*"} \d+', 'server="<server>"} <number>', text)
    text = re.sub(r"\b\d{4}(-\d\d){2}[ T][\d:.]{5,}(\+00:00|Z| UTC)?", "<time>", text)
    text = re.sub(r"\b\d\d:\d\d:\d\d\b", "<time>", text)
    text = re.sub(r"(?<![0-9a-f.])[0-9a-f]{16}(?![0-9a-f])", "<id>", text)
    # A time in seconds has no decimals if it is a whole one.
    text = re.sub(r"(_seconds{.*}) [1-9]\d*$", r"\1 <number>", text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\d.])(\d{15,}|1\d{9})\b(?!\.)", "<number>", text)
    text = re.sub(r"\b\d+ (d|h) \d+ (h|min)\b|\b\d+(\.\d+)? (ms|s|min|h|d)\b", "<duration>", text)
    text = re.sub(r"\b(\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+)\b", "<number>", text)
    # The width of what was masked.
    return re.sub(r" *-{4,}| {2,}", "  ", text).replace("\t", " ")


def test_what_each_act_prints_is_as_it_was_written_down(scene, golden):
    text = []
    for title, arguments in ACTS.items():
        plain = locks_command(*arguments)
        if title in BY_AGE:
            plain = plain._replace(out="\n".join(sorted(masked(plain.out).splitlines())))
        text += [f"# {title}: {' '.join(arguments)}", plain.out, plain.err, f"= {plain.status}\n"]
    golden("acts.txt", masked("\n".join(text)))


def test_the_json_of_each_act_is_as_it_was_written_down(scene, golden):
    text = []
    for title, arguments in ACTS.items():
        if title not in NO_JSON:
            printed = locks_command("--json", *arguments)
            shown = json.loads(printed.out or "null")
            if title in BY_AGE:
                shown["facts"].sort(key=lambda fact: fact["lock"])
            shown = json.dumps(shown, indent=1) if printed.out else ""
            text += [f"# {title}: {' '.join(arguments)}", shown, printed.err, ""]
    golden("json.txt", masked("\n".join(text)))


class Texts(HTMLParser):
    """The texts of a page, a line each, and the titles and labels of its elements."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self._hidden = 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self._hidden += tag in {"script", "style", "svg"}
        self.found += [f"[{value}]" for name, value in attrs if name in {"title", "aria-label"}]

    def handle_endtag(self, tag):
        self._hidden -= tag in {"script", "style", "svg"}

    def handle_data(self, data):
        if data.strip() and not self._hidden:
            self.found.append(" ".join(data.split()))


def test_the_texts_of_the_pages_are_as_they_were_written_down(scene, golden):
    client = Client()
    client.force_login(site.add_user("root"))
    pages = {"list": reverse("admin:django_redislock_heldlock_changelist")}
    for name in ("import:7", "gpu", "paused", "report:False", "cooling", "nobody"):
        key = quote(LockPage.named(name, "default", 1).key)
        pages[name] = reverse("admin:django_redislock_heldlock_change", args=[key])
    text = []
    for title, address in pages.items():
        page = client.get(address, follow=True).content.decode()
        main = page[page.index('id="main"') :]
        text += [f"# {title}", *Texts(main).found, ""]
    golden("pages.txt", masked("\n".join(text)))


def test_the_scene_has_every_state(scene):
    assert {lock.state for lock in held.list()} == {"held", "cooling", "paused"}
