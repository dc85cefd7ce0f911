"""Real workers whose locks are kept on several servers, of which one is killed under a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from django_redislock import held
from tests.celery.project import PATIENCE
from tests.operations.test_locks_command import locks_command
from tests.support.topologies import await_copies
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


class Topology(NamedTuple):
    """Servers that keep the locks of a stage."""

    setting: dict[str, Any]
    key: str  # A lock that is kept on the server that will be killed.
    kill: Callable[[], object]  # Returns when locks go on.


@pytest.fixture(params=["sentinel", "cluster", "quorum"])
def topology(request, own_stage, make_watched, make_cluster, make_quorum):
    """Each kind of several servers, ready to lose the one that matters."""
    if request.param == "sentinel":
        watched = make_watched()

        def kill_master():
            with watched.in_a_hurry():
                watched.master.kill()
                watched.await_failover()

        # Acknowledged by a replica, or the grant might die with the master.
        return Topology({**watched.setting(), "REPLICAS_ACK": 1}, own_stage.key(), kill_master)
    if request.param == "cluster":
        cluster = make_cluster(replicas=1)
        name = cluster.name_on(cluster.servers[0])

        def kill_node():
            # A node that takes over has no replica that could acknowledge anything.
            await_copies(cluster.servers[0], cluster.replicas)
            with cluster.in_a_hurry():
                cluster.servers[0].kill()
                cluster.await_failover()

        return Topology(cluster.setting(), name, kill_node)
    quorum = make_quorum()
    return Topology(quorum.setting(), own_stage.key(), quorum.servers[0].kill)


def test_a_task_keeps_its_lock_when_a_server_is_killed_and_others_run_after_it(
    topology, own_stage, settings, db
):
    setting = {**topology.setting, "KEY_PREFIX": own_stage.key(), "UNAVAILABLE_AFTER": PATIENCE}
    own_stage.redislock = settings.REDISLOCK = {"default": setting}
    key = topology.key
    own_stage.start(pool="prefork", concurrency=3)
    first = own_stage.send("skipping", key, hold=True)
    own_stage.wait_for(key, "start")
    waits = own_stage.send("waiting", key)
    topology.kill()
    # It is renewed on those that are left.
    seen = held.get(key)
    wait_until(lambda: (now := held.get(key)) is not None and now.renewals > seen.renewals)
    skipped = own_stage.send("skipping", key).get(timeout=PATIENCE)
    assert skipped["skipped"] == "busy"
    own_stage.open_gate(key)
    assert first.get(timeout=PATIENCE) == f"did {key}"
    assert waits.get(timeout=PATIENCE) == f"did {key}"
    assert own_stage.send("skipping", key).get(timeout=PATIENCE) == f"did {key}"
    events = own_stage.events(key)
    assert [one["event"] for one in events] == ["start", "end"] * 3
    fences = [one["fence"] for one in events if one["event"] == "start"]
    assert fences == sorted(set(fences))
    if setting["BACKEND"].endswith("QuorumBackend"):
        return  # It keeps locks only.
    told = locks_command("explain", waits.id).out
    assert "It ended well at " in told
    assert "The call succeeded, or " in told
