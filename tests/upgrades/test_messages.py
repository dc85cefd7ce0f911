"""Workers of two versions work off one queue: what one publishes, defers or runs, both know."""

import signal

import pytest

from django_redislock import distributed_lock, task_runs
from tests.support.waiting import wait_until
from tests.support.wheels import NEW, OLD

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(170),
    pytest.mark.no_permit("both versions have locks here"),
]

both_ways = pytest.mark.parametrize(("one", "other"), [(OLD, NEW), (NEW, OLD)])


def published(stage, side, task, key, **how):
    sent = side.does("publish", stage.conf, task, key, **how)
    return stage.app.AsyncResult(sent)


@both_ways
def test_calls_outlive_the_workers_of_one_version_and_run_in_the_other(
    one, other, own_stage, packages, start
):
    publisher, later = start(packages[one]), start(packages[other])
    deferred, queued = own_stage.key(), own_stage.key()
    worker = own_stage.start(package=packages[one])
    with distributed_lock(deferred):
        sent = published(own_stage, publisher, "retrying", deferred)
        wait_until(lambda: task_runs.calls([deferred])[0].deferred, every=0.02)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0

        # Nobody takes messages now. One call waits, whoever makes another one.
        waiting = published(own_stage, publisher, "queued", queued)
        assert published(own_stage, later, "queued", queued).id == waiting.id
        assert published(own_stage, publisher, "queued", queued).id == waiting.id
        newest = published(own_stage, publisher, "queued_newest", f"{queued}:n", what="first")
        last = published(own_stage, later, "queued_newest", f"{queued}:n", what="last")
        assert last.id == newest.id

        own_stage.start(package=packages[other])
        assert own_stage.result(waiting) == f"did {queued}"
        own_stage.result(newest)
        said = own_stage.events(f"{queued}:n")
        assert "last" in str(said), said
        assert "first" not in str(said), said
        assert not own_stage.events(deferred, "start")
    assert own_stage.result(sent) == f"did {deferred}"
    assert own_stage.count(deferred, "start") == own_stage.count(queued, "start") == 1
    # Its announcement is over.
    assert published(own_stage, later, "queued", queued).id != waiting.id


@both_ways
def test_a_second_delivery_to_the_other_version_waits_and_does_not_run(
    one, other, own_stage, packages, start
):
    key = own_stage.key()
    own_stage.start(package=packages[one])
    sent = published(own_stage, start(packages[other]), "late", key, hold=True)
    own_stage.wait_for(key, "start")
    second = own_stage.start(package=packages[other])
    own_stage.redeliver(sent.id)
    wait_until(lambda: sent.id in second.log, every=0.02)
    own_stage.open_gate(key, times=2)
    assert own_stage.result(sent) == f"did {key}"
    own_stage.wait_until_idle()
    assert own_stage.count(key, "start") == 1


@both_ways
def test_a_run_whose_worker_was_killed_is_run_again_by_the_other(
    one, other, own_stage, packages, start
):
    key = own_stage.key()
    worker = own_stage.start(package=packages[one])
    sent = published(own_stage, start(packages[one]), "late", key, hold=True)
    own_stage.wait_for(key, "start")
    own_stage.redeliver(sent.id)
    worker.kill()
    own_stage.start(package=packages[other])
    own_stage.open_gate(key)
    assert own_stage.result(sent) == f"did {key}"
    assert own_stage.count(key, "start") == 2
