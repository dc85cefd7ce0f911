"""What the package logs: with fields that formatters may rely on, as docs/monitoring.md says."""

from __future__ import annotations

import ast
import logging
import re
from typing import NamedTuple

from django_redislock import logs
from django_redislock.holder import Activity, busy_with
from tests import ROOT

PACKAGE = ROOT / "django_redislock"
MONITORING = ROOT / "docs" / "monitoring.md"

LOGGERS = {"logger", "self.logger", "audit"}
LEVELS = {"debug", "info", "warning", "error", "exception"}


class Event(NamedTuple):
    """One kind of record."""

    loggers: str
    levels: str
    text: str  # Its message, with … for what differs.


class Module:
    """What one file logs."""

    def __init__(self, path):
        self.tree = ast.parse(path.read_text())
        made = re.findall(r'logs\.logger\("([\w.]+)"\)', path.read_text())
        # The runs of tasks are runs of jobs too, and log what these do by a logger of their own.
        of_jobs = path.relative_to(PACKAGE).as_posix() == "jobs/run.py"
        self.loggers = ", ".join([*made, "django_redislock.celery"] if of_jobs else made)

    def events(self):
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        yield from self._events(call, function)

    def _events(self, call, function):
        of, _, method = ast.unparse(call.func).rpartition(".")
        if of in LOGGERS and method in LEVELS:
            level, text = ("error" if method == "exception" else method).upper(), call.args[0]
        elif (of in LOGGERS and method == "log") or method == "_say":
            named = ast.unparse(self._meant(call.args[0], call, function))
            level, text = ", ".join(sorted(re.findall(r"logging\.(\w+)", named))), call.args[1]
        else:
            return
        text = self._meant(text, call, function)
        for one in (text.body, text.orelse) if isinstance(text, ast.IfExp) else (text,):
            # Any other text is of a function that logs what it is given.
            if isinstance(one, ast.Constant):
                yield Event(self.loggers, level, re.sub(r"%(\.\d)?[srdf]", "…", one.value))

    def _meant(self, value, call, function):
        """What a variable was last set to before the call."""
        if not isinstance(value, ast.Name):
            return value
        before = [
            (node.lineno, node.value)
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == value.id
            and node.lineno < call.lineno
        ]
        return max(before, key=lambda one: one[0])[1] if before else value


def logged():
    return sorted({event for path in PACKAGE.rglob("*.py") for event in Module(path).events()})


def test_the_table_of_events_is_what_the_code_logs():
    rows = re.findall(
        r"^\| `([\w., ]+)` \| ([A-Z, ]+) \| `(.+?)` \|", MONITORING.read_text(), re.MULTILINE
    )
    table = [Event(*row) for row in rows]
    # The lines that warn are in docs/troubleshooting.md, see test_troubleshooting.py.
    events = [one for one in logged() if re.search("INFO|DEBUG", one.levels)]
    assert len(events) > 10
    told = set()
    for event in events:
        same = [row for row in table if row[:2] == event[:2] and event.text.startswith(row.text)]
        assert same, f"not in the table: {event}"
        told.add(max(same, key=lambda row: len(row.text)))
    assert set(table) == told, "these are not logged"


def test_each_logger_has_the_fields():
    made = {
        path.relative_to(PACKAGE).as_posix(): found
        for path in PACKAGE.rglob("*.py")
        if (found := re.findall(r"logging\.getLogger\(([^)]*)\)", path.read_text()))
    }
    # The second one only looks for a logger that another module has made.
    assert made == {"logs.py": ["name"], "management/console.py": ['"django_redislock.jobs"']}


def test_every_record_has_every_field_that_a_formatter_may_name(caplog):
    logger = logs.logger("django_redislock")
    with busy_with(Activity(task="shop.report", task_id="4711")):
        logger.warning("Something about %r", "lottery", extra=logs.of(lock="lottery", waited=0.5))
    (record,) = caplog.records
    assert {name: vars(record)[name] for name in logs.FIELDS} == {
        **dict.fromkeys(logs.FIELDS),
        "lock": "lottery",
        "waited": 0.5,
        "job": "shop.report",
        "task_id": "4711",
    }
    formatter = logging.Formatter("%(lock)s %(fence)s %(job)s")
    assert formatter.format(record) == "lottery None shop.report"


def test_a_record_factory_may_give_records_such_attributes_itself(caplog):
    """Python's logging refuses an *extra* that overwrites an attribute, with a KeyError."""
    factory = logging.getLogRecordFactory()

    def with_task_id(*args, **named):
        record = factory(*args, **named)
        record.task_id, record.job = "4711", "of the factory"
        return record

    logging.setLogRecordFactory(with_task_id)
    try:
        logs.logger("django_redislock").warning("Something", extra=logs.of(job="shop.report"))
    finally:
        logging.setLogRecordFactory(factory)
    (record,) = caplog.records
    assert {name: vars(record)[name] for name in ("job", "task_id", "lock")} == {
        "job": "shop.report",
        "task_id": "4711",
        "lock": None,
    }


def test_a_filter_of_the_project_sees_the_fields_even_if_it_was_there_first():
    """LOGGING is configured before the apps are imported."""
    seen = []

    def see(record):
        seen.append((record.fence, record.lock))
        return False

    log = logging.getLogger("django_redislock.of_a_test")
    log.addFilter(see)
    assert logs.logger(log.name) is logs.logger(log.name) is log
    log.warning("Something", extra=logs.of(fence=7))
    assert seen == [(7, None)]
    assert len(log.filters) == 2
