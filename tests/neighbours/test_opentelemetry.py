"""OpenTelemetry's instrumentations for Celery and redis-py, beside the package's own app."""

from collections import Counter

import pytest

pytest_plugins = ["tests.celery.project.stage"]
pytest.importorskip("opentelemetry.instrumentation.celery")
pytest.importorskip("opentelemetry.instrumentation.redis")

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TASK = "tests.celery.project.tasks.retrying"


def test_a_deferred_run_stays_in_its_trace_and_each_thing_has_one_span(own_stage):
    own_stage.start(pool="prefork", concurrency=2, settings="tests.neighbours.otel_settings")
    key = own_stage.key()
    first = own_stage.send("late", key, hold=True)
    own_stage.wait_for(key, "start")
    # As the instrumentation has the publisher do.
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    deferred = own_stage.task("retrying").apply_async((key,), headers=headers)
    own_stage.wait_for_log("Deferred")
    own_stage.open_gate(key)
    assert [own_stage.result(one) for one in (first, deferred)] == [f"did {key}"] * 2
    own_stage.wait_until_idle()

    told = [one["span"] for one in own_stage.events("otel", "span")]
    spans = [one for one in told if one["context"]["trace_id"] == f"0x{TRACE}"]
    names = Counter(one["name"] for one in spans)
    runs = [one for one in spans if one["name"] == f"run/{TASK}"]
    published = [one for one in spans if one["name"] == f"apply_async/{TASK}"]
    assert len(runs) >= 2
    assert len(published) == len(runs) - 1
    parents = {one["parent_id"] for one in runs}
    assert parents == {f"0x{CALLER}", *(one["context"]["span_id"] for one in published)}
    assert all(one["status"]["status_code"] == "UNSET" for one in spans)
    # Locks are in the package's spans, and not once more in those of redis-py.
    assert names["hold {key}"] == 1
    assert names["wait {key}"] >= 1
    assert names["RPUSH"] >= 2  # Of the journal.
    assert names["EVALSHA"] == 0
