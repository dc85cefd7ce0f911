"""Real workers whose locks are kept on several servers, of which one is killed under a task."""

import pytest

from django_redislock import held
from tests.celery.project import PATIENCE
from tests.operations.test_locks_command import locks_command
from tests.support.topologies import await_copies
from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(params=["sentinel", "cluster", "quorum"])
def topology(request, own_stage, make_watched, make_cluster, make_quorum):
    """Several servers: their setting, a lock, and how to kill the one that keeps it."""
    if request.param == "quorum":
        quorum = make_quorum()
        return quorum.setting(), own_stage.key(), quorum.servers[0].kill
    if request.param == "sentinel":
        watched = make_watched()
        # Acknowledged by a replica, or the grant might die with the master.
        setting, key = {**watched.setting(), "REPLICAS_ACK": 1}, own_stage.key()
    else:
        watched = make_cluster(replicas=1)
        setting, key = watched.setting(), watched.name_on(watched.servers[0])

    def kill():
        if request.param == "cluster":
            # A node that takes over has no replica that could acknowledge anything.
            await_copies(watched.servers[0], watched.replicas)
        with watched.in_a_hurry():
            server = watched.master if request.param == "sentinel" else watched.servers[0]
            server.kill()
            watched.await_failover()

    return setting, key, kill


def test_a_task_keeps_its_lock_when_a_server_is_killed_and_others_run_after_it(
    topology, own_stage, settings, db
):
    setting, key, kill = topology
    setting = {**setting, "KEY_PREFIX": own_stage.key(), "UNAVAILABLE_AFTER": PATIENCE}
    own_stage.redislock = settings.REDISLOCK = {"default": setting}
    own_stage.start(pool="prefork", concurrency=3)
    first = own_stage.send("skipping", key, hold=True)
    own_stage.wait_for(key, "start")
    waits = own_stage.send("waiting", key)
    kill()
    # It is renewed on those that are left.
    seen = held.get(key)
    wait_until(lambda: (now := held.get(key)) is not None and now.renewals > seen.renewals)
    assert own_stage.result(own_stage.send("skipping", key))["skipped"] == "busy"
    own_stage.open_gate(key)
    assert own_stage.result(first) == own_stage.result(waits) == f"did {key}"
    assert own_stage.result(own_stage.send("skipping", key)) == f"did {key}"
    events = own_stage.events(key)
    assert [one["event"] for one in events] == ["start", "end"] * 3
    fences = [one["fence"] for one in events if one["event"] == "start"]
    assert fences == sorted(set(fences))
    if setting["BACKEND"].endswith("QuorumBackend"):
        return  # It keeps locks only.
    told = locks_command("explain", waits.id).out
    assert "It ended well at " in told
    assert "The call succeeded, or " in told
