"""Jobs as tasks of Django, run by a real worker and at once."""

import json

import pytest

from django_redislock import distributed_lock, held
from tests.support.processes import python

pytest.importorskip("django_tasks_db")


def test_a_skip_is_a_successful_result_in_a_worker_and_at_once(locks, settings, tmp_path):
    redislock = json.dumps(settings.REDISLOCK)
    with distributed_lock("import:eu") as lease:
        done = python("-m", "tests.jobs.tasks_site", str(tmp_path / "db.sqlite3"), redislock)
    skipped = {"skipped": "busy", "lock": "import:eu", "holder": str(lease.owner)}
    blocking, awaiting = [skipped, "import:us"], [skipped, "import:us"]
    with_context = [skipped, ["import:us", 1]]
    results = [*blocking, *awaiting, *with_context, *blocking, *with_context]
    assert json.loads(done.stdout) == [["SUCCESSFUL", result] for result in results]
    record = held.record("import:eu")
    jobs = {f"tests.jobs.tasks.{name}" for name in ("load", "aload", "load_as")}
    assert (record.skips, record.tasks) == (5, jobs)
