"""What operators see: every act of `manage.py locks`, and the texts of the admin's pages.

    make test ARGS='tests/golden --write-golden'    # Write it down anew, and read the difference.

The command lines stand in the files: to show one more, write it there behind a dollar sign.
Numbers that differ in each run are masked: times, durations, ids, fences, processes.
"""

import json
import os
import re
import shlex
import socket
from html.parser import HTMLParser

import pytest
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse

from django_redislock import held
from django_redislock.models import LockPage
from tests.golden.conftest import WRITTEN
from tests.golden.scene import (
    TASK,
    await_later,
    command_of_this_process,
    locks_waiters_and_runs,
)
from tests.operations.commands import SILENT, locks_command, ran, typed
from tests.operations.test_once_command import DAY, add_run
from tests.support import site
from tests.support.others import held_by

# All locks of the scene are equally old, but for milliseconds.
BY_AGE = ("watch", "metrics", f"explain {TASK.task_id}")


@pytest.fixture
def key_prefix():
    return "golden"


@pytest.fixture
def scene(locks, db, monkeypatch):
    """The scene, on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    add_run("lottery", 90, fence=7, task_id="")
    add_run("old: 宝", 3 * DAY, fence=6, task_id="id-6")
    with locks_waiters_and_runs(locks):
        yield


def masked(text):
    """The text without what differs in each run."""
    for found, name in ((socket.gethostname(), "<host>"), (command_of_this_process(), "<command>")):
        text = re.sub(rf"(?<![\w-]){re.escape(found)}(?![\w-])", name, text)
    text = re.sub(r"\S+@<host> by manage.py", "<user>@<host> by manage.py", text)
    # Only where it stands for this process: an id or a time may have the same digits.
    text = re.sub(rf'(<host>:|"pid": ){os.getpid()}\b', r"\1<pid>", text)
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
    text = re.sub(r"\b(\d+ (d|h|min) )?\d+(\.\d+)? (ms|s|min|h|d)\b", "<duration>", text)
    text = re.sub(r"(?<![\d.])(\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+)\b(?!\.\d)", "<number>", text)
    text = re.sub(r"Error \d+ connecting", "Error <number> connecting", text)
    # The width of what was masked.
    return re.sub(r" *-{4,}| {2,}", "  ", text).replace("\t", " ")


def ran_again(name, run):
    """What a golden file shows, anew: run the command line behind each of its dollar signs."""
    shown = []
    for line in re.findall(r"(?m)^[$] (.*)", (WRITTEN / name).read_text()):
        outcome = run(*(word.encode().decode("unicode_escape") for word in shlex.split(line)))
        said = [text for one in outcome[1:] if (text := masked(one).strip("\n"))]
        if line in BY_AGE:
            said[0] = "\n".join(sorted(said[0].splitlines()))
        shown += [f"$ {line}", *said, f"= {outcome.status}", ""]
    return "\n".join(shown)


def as_json(*arguments):
    outcome = locks_command("--json", *arguments)
    document = json.loads(outcome.out)
    if TASK.task_id in arguments:
        document["facts"].sort(key=lambda fact: fact["lock"])
    return outcome._replace(out=json.dumps(document, indent=1))


def without_usage(*arguments):
    outcome = typed(*arguments)
    return outcome._replace(err=outcome.err.rpartition("error: ")[2])


def test_what_each_act_prints_is_as_it_was_written_down(scene, golden):
    golden("acts.txt", ran_again("acts.txt", locks_command))


def test_the_json_of_each_act_is_as_it_was_written_down(scene, golden):
    golden("json.txt", ran_again("json.txt", as_json))


def test_what_each_act_refuses_is_as_it_was_written_down(locks, golden):
    with held_by("lottery", ttl=2000):
        golden("refused.txt", ran_again("refused.txt", without_usage))
        assert [lock.name for lock in held.list()] == ["lottery"]


def test_what_each_act_says_of_aliases_that_cannot_answer_is_as_it_was_written_down(
    locks, db, settings, golden
):
    wrong = settings.REDISLOCK["default"] | {"TTL": "soon"}
    settings.REDISLOCK = {"silent": SILENT, "wrong": wrong} | settings.REDISLOCK
    ran("report:1", "1", task="tasks.report", error=ZeroDivisionError)
    await_later(locks.redis)
    ran("good:1", "2", task="tasks.good")
    with held_by("lottery", ttl=2000):
        golden("trouble.txt", ran_again("trouble.txt", locks_command))
        settings.REDISLOCK = {"default": wrong}
        for act in ("list", "runs", "explain 1", "explain tasks.report --job"):
            outcome = locks_command(*act.split())
            says = "REDISLOCK['default']['TTL'] must be a number of seconds or a timedelta, not"
            assert outcome == (2, "", f"{says} 'soon'.")


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
    assert {lock.state for lock in held.list()} == {
        *("held", "cooling", "paused", "foreign"),
    }
