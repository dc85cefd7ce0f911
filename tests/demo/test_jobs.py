"""`make demo-jobs` from the outside: one of each kind runs, and a beat goes on for another one."""

import re
from collections import Counter

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESULT = r"RESULT servers=3 jobs=3 ran_once=3 skipped=6 sent=\d+ sent_twice=0 takeover=\d+\.\ds"
# How a row of the table ends: the work was done, or skipped.
ENDS = {"command": "Sent the invoices", "script": "Backed up", "task": "Fetched the rates"}


def test_one_of_each_kind_runs_and_a_beat_goes_on_for_one_that_is_killed(demos):
    status, lines = demos.run("demo_jobs")
    assert re.fullmatch(RESULT, lines[-1])
    assert status == 0
    rows = [re.split(r"\s{2,}", line) for line in lines if re.match(r"\w+ +web-\d ", line)]
    assert Counter(row[0] for row in rows if ENDS[row[0]] in row[4]) == dict.fromkeys(ENDS, 1)
    assert Counter(row[0] for row in rows) == dict.fromkeys(ENDS, 3)
    (leader,) = (line.split()[2] for line in lines if " leads, pid " in line)
    (standby,) = (line.split()[2] for line in lines if " stands by, pid " in line)
    assert sorted([leader, standby]) == ["web-1-beat", "web-2-beat"]
    assert any(f" {standby} leads, " in line for line in lines)
    records = lines[lines.index("$ manage.py locks runs") :]
    for name in ("celery-beat:example_project:bank", "invoices:2026-11", "backup", "rates:EUR"):
        assert any(line.startswith(name) and " s ago" in line for line in records), name
