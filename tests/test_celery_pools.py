"""Every pool of Celery, and result and broker backends other than Redis."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.celery_app.stage import Stage

pytest_plugins = ["tests.celery_app.stage"]
pytestmark = pytest.mark.slow


@pytest.fixture(params=["prefork", "threads", "gevent", "eventlet"])
def pool(request: pytest.FixtureRequest) -> str:
    """A pool in which several runs are under way at a time."""
    pool: str = request.param
    if pool in {"gevent", "eventlet"} and importlib.util.find_spec(pool) is None:
        pytest.skip(f"{pool} is not installed")
    return pool


def test_each_run_has_a_lease_of_its_own_and_a_conflict_is_seen(
    own_stage: Stage, pool: str
) -> None:
    own_stage.start(pool=pool, concurrency=4)
    keys = [own_stage.key() for _ in range(3)]
    running = [own_stage.send("late", key, hold=True) for key in keys]
    fences = {own_stage.wait_for(key, "start")["fence"] for key in keys}
    assert len(fences) == 3
    assert own_stage.result(own_stage.send("late", keys[0]))["skipped"] == "busy"
    own_stage.redeliver(running[1].id)
    own_stage.wait_for_log(f"[{running[1].id}]: lock {keys[1]!r} is busy")
    for key in keys:
        own_stage.open_gate(key)
    assert [own_stage.result(one) for one in running] == [f"did {key}" for key in keys]
    own_stage.wait_until_idle()
    assert [own_stage.count(key, "start") for key in keys] == [1, 1, 1]


def test_a_lease_is_renewed_while_the_body_runs(own_stage: Stage, pool: str) -> None:
    own_stage.start(pool=pool, concurrency=2)
    key = own_stage.key()
    sent = own_stage.send("brisk", key, seconds=1.5)  # Three times its ttl.
    own_stage.wait_for(key, "start")
    results = []
    while not own_stage.count(key, "end"):
        results.append(own_stage.result(own_stage.send("brisk", key)))
    assert own_stage.result(sent) == f"did {key}"
    assert len(results) > 1
    assert all(one["skipped"] == "busy" for one in results[:-1])
