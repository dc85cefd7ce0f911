"""Sentry's integrations for Celery, Django, logging and redis-py, in a real worker."""

import json

import pytest

from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytest.importorskip("sentry_sdk")

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def worker(own_stage):
    return own_stage.start(
        pool="prefork", concurrency=4, settings="tests.neighbours.sentry_settings"
    )


@pytest.fixture
def reports(own_stage, worker):
    def find(kind, count=1):
        def found():
            return [one["report"] for one in own_stage.events("sentry", kind)]

        return wait_until(lambda: len(found()) >= count and found(), message=f"{count} {kind}")

    return find


def test_a_run_that_is_skipped_deferred_or_retried_for_a_busy_lock_is_no_error(own_stage, reports):
    key = own_stage.key()
    first = own_stage.send("late", key, hold=True)
    own_stage.wait_for(key, "start")
    for skipping in ("late", "impatient"):
        assert own_stage.result(own_stage.send(skipping, key))["skipped"] == "busy"
    # As Sentry's integration has the publisher do.
    headers = {"sentry-trace": f"{TRACE}-b7ad6b7169203331-1", "baggage": "sentry-sampled=true"}
    headers["headers"] = dict(headers)
    deferred = own_stage.task("retrying").apply_async((key,), headers=headers)
    retried = own_stage.send("insisting", key)
    own_stage.wait_for_log("Deferred")
    own_stage.wait_for_log("Retry in")
    own_stage.open_gate(key)
    runs = [first, deferred, retried]
    assert [own_stage.result(one) for one in runs] == [f"did {key}"] * 3

    # What is an error is reported, and nothing else was.
    with pytest.raises(ValueError, match="as asked"):
        own_stage.result(own_stage.send("late", key, fail=True))
    own_stage.wait_until_idle()
    said = {
        error["exception"]["values"][-1]["value"] if "exception" in error else error["logentry"]
        for error in reports("event")
    }
    assert said == {"as asked"}

    traces = [one["contexts"]["trace"] for one in reports("transaction", 8)]
    assert sum(trace["trace_id"] == TRACE for trace in traces) >= 2  # Deferred, and run.
    assert {trace["parent_span_id"] for trace in traces if trace["trace_id"] == TRACE} == {
        "b7ad6b7169203331"
    }
    told = json.dumps(reports("transaction"))
    # Of what the journal sends, and not of locks: their commands have tokens in them.
    assert "BLPOP" in told
    assert "EVALSHA" not in told
