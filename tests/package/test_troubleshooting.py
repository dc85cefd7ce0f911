"""docs/troubleshooting.md has every error, and the beginning of every message, that there is."""

import ast
import re
from typing import get_args

import pytest

import django_redislock
from django_redislock import LockError, LockLost, LockTimeout, StaleFence
from django_redislock.celery import RunAbandoned
from django_redislock.exceptions import LostReason, UnavailableReason
from django_redislock.rules.stored import Holding, Owner
from tests import ROOT
from tests.package.test_logs import logged

PACKAGE = ROOT / "django_redislock"
SOURCE = (ROOT / "docs" / "troubleshooting.md").read_text()
WEB = Owner("web-2", 4711)
# As one line, without the marks of quotations.
PAGE = " ".join(re.sub(r"^> ", "", SOURCE, flags=re.MULTILINE).split())


def test_each_public_error_has_a_section():
    public = (getattr(django_redislock, name) for name in django_redislock.__all__)
    errors = {
        one.__name__ for one in public if isinstance(one, type) and issubclass(one, LockError)
    }
    sections = set(re.findall(r"^## (\w+)$", SOURCE, flags=re.MULTILINE))
    assert errors - {"LockError"} | {"RunAbandoned"} <= sections


@pytest.mark.parametrize(
    "error",
    [
        LockTimeout("report:7", "web-2:4711", 28.6),
        LockTimeout("report:7", Holding("", WEB, "held", newer_format=2).holder, 28.6),
        LockTimeout("report:7", "web-2:4711", 12.0, cooling=True),
        LockTimeout("report:7", "ops", 3600.0, reason="DB upgrade"),
        StaleFence("stock:7", 41, 42),
        RunAbandoned("report", "4f1c", "report:7", 3),
    ],
    ids=str,
)
def test_the_quoted_messages_are_real(error):
    assert str(error) in PAGE


def test_each_reason_of_a_loss_or_a_silence_is_told():
    for reason in get_args(LostReason):
        text = str(LockLost("lottery", reason)).partition(" was lost: ")[2].rstrip(".")
        assert f"- **{text}:**" in PAGE
    for reason in get_args(UnavailableReason):
        assert f"- `{reason}`:" in PAGE


def text_of(node):
    """A text in the code, with … for what differs; "" if it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value) or "…" for value in values)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + (text_of(right) or "…")
    return ""


def problems_of(error):
    """What the code says in the second argument of each *error* that it makes."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == error
                and len(node.args) > 1
            ):
                yield text_of(node.args[1])


def clauses_of_losses():
    tree = ast.parse((PACKAGE / "rules" / "lease_state.py").read_text())
    for function in ast.walk(tree):
        if getattr(function, "name", "") in {"loss", "_setting_that_was_over"}:
            for node in ast.walk(function):
                if isinstance(node, ast.Return | ast.Assign):
                    yield text_of(node.value) if node.value else ""
                elif isinstance(node, ast.IfExp):
                    yield from (text_of(node.body), text_of(node.orelse))


def is_told(text):
    """Whether the page has its first five words, or its first clause if that is shorter."""
    words = re.split(r"[.;:(]", " ".join(text.split()[:5]))[0].rstrip(" ,…")
    return bool(re.search(re.escape(words).replace("…", ".+?"), PAGE))


@pytest.mark.parametrize(
    ("texts", "least"),
    [
        (problems_of("LockMisuse"), 25),
        (problems_of("InvalidLockName"), 10),
        (clauses_of_losses(), 5),
    ],
    ids=["misuse", "names", "losses"],
)
def test_the_beginning_of_each_message_is_told(texts, least):
    found = [text for text in texts if text.strip("…")]
    assert len(found) >= least
    assert [text for text in found if not is_told(text)] == []


def test_each_line_of_the_log_that_warns_is_told():
    items = re.findall(
        r"^- (`[^`]+`(?:,\s+`[^`]+`)*):", SOURCE.partition("## Lines of the log")[2], re.MULTILINE
    )
    lines = [" ".join(line.split()) for item in items for line in re.findall(r"`([^`]+)`", item)]
    warnings = [
        one for one in logged() if re.search("WARNING|ERROR", one.levels) and one.text != "…"
    ]
    assert len(warnings) > 25
    missing = [one.text for one in warnings if not any(one.text.startswith(line) for line in lines)]
    assert missing == []
    texts = [one.text for one in logged()]
    assert [line for line in lines if not any(text.startswith(line) for text in texts)] == []
