"""docs/deploys.md: two processes, one with the old value and one with the new."""

import re
from datetime import timedelta

import pytest
from django.test import override_settings

from django_redislock import (
    LockUnavailable,
    Skipped,
    distributed_lock,
    held,
    single_instance,
    take_up,
)
from tests import ROOT
from tests.package.test_docs import lines_of_definitions
from tests.samples.side_by_side import STOCK, enters, leave, pairs_together, sell
from tests.support.others import hold
from tests.support.processes import say
from tests.support.stored import NAME, keys_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

PAGE = "deploys.md"
NO_WAIT = {"wait=5": "wait=0"}


def holds(child):
    """A child that runs hold(), once it has the lock."""
    assert child.read() > 0
    return child


def is_refused(**options):
    """Whether this process, which is another one, does not get the lock."""
    lock = distributed_lock(NAME, wait=0, **options)
    if not lock.acquire():
        return True
    lock.release()
    return False


def expires_in():
    """Seconds until the lease ends, as everybody can see."""
    lock = held.get(NAME)
    assert lock.expires_in is not None
    return lock.expires_in


def replica_of(server, make_server):
    """A replica that has all that the server has, and acknowledges what comes."""
    replica = make_server(server.kind, replicaof=f"{server.host} {server.port}")
    client = server.client()
    client.set("written", 1)
    wait_until(lambda: client.wait(1, 100) == 1)
    return replica


def test_the_tests_that_the_page_names_exist():
    named = re.findall(
        r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "tests/upgrades/README.md").read_text()
    )
    assert len(named) > 3
    for file, test in named:
        assert test in lines_of_definitions(ROOT / file)


# The ttl


def test_processes_with_two_ttls_exclude_each_other_each_for_its_own(locks, spawn):
    for own, other in ((60, 600), (600, 60)):
        holder = holds(spawn(hold, ttl=own))
        assert own / 2 < expires_in() <= own
        assert is_refused(ttl=other)
        waiting = distributed_lock(NAME, ttl=other, wait=HUNG)
        granted = in_thread(waiting.acquire)
        wait_until(lambda: (lock := held.get(NAME)) and lock.waiters == 1)
        holder.send("end")
        assert granted.result(HUNG)
        # A hand-over lasts a moment until it is confirmed, for the ttl of the new holder.
        wait_until(lambda other=other: other / 2 < expires_in() <= other)
        waiting.release()


def test_of_a_killed_holder_its_own_ttl_counts(locks, spawn):
    holder = holds(spawn(hold, ttl=1))
    holder.kill()
    with distributed_lock(NAME, ttl=600, wait=HUNG) as lease:
        assert lease.ttl == 600


# once, min_hold


def succeed(seconds):
    """In a child: a run of the job in a version with these seconds."""
    once = single_instance(NAME, once=seconds)(lambda: "done")
    say(isinstance(once(), Skipped))


def test_the_seconds_of_once_are_those_of_the_run_that_succeeded(locks, spawn):
    marker = keys_of(locks).done
    assert spawn(succeed, 600).read() is False
    assert spawn(succeed, 3600).read() is True
    assert 0 < locks.redis.ttl(marker) <= 600
    # As the page says, but with the prefix of the test.
    page = (ROOT / "docs" / PAGE).read_text()
    (delete,) = re.findall(r'redis-cli -u URL DEL "redislock:(.*)"', page)
    assert locks.redis.delete(f"{locks.prefix}:{delete.replace('nightly', NAME)}") == 1
    assert spawn(succeed, 3600).read() is False
    assert locks.redis.ttl(marker) > 600
    assert spawn(succeed, 600).read() is True


def cool_down(seconds):
    """In a child: hold the lock for a moment in a version with this min_hold."""
    with distributed_lock(NAME, min_hold=seconds, wait=0):
        pass
    say("done")


def test_the_min_hold_is_that_of_the_run_that_succeeded(locks, spawn):
    spawn(cool_down, 600).read()
    assert is_refused(min_hold=6000)
    assert expires_in() <= 600


@pytest.mark.django_db(transaction=True)
def test_once_in_seconds_and_in_the_database_know_nothing_of_each_other(locks):
    in_seconds = single_instance(NAME, once=timedelta(days=1))(lambda: "did it")
    in_database = single_instance(NAME, once="database", atomic=True)(lambda: "did it")
    assert in_seconds() == "did it"
    assert in_database() == "did it"
    assert in_database()["skipped"] == "done"  # Skipped
    locks.redis.delete(keys_of(locks).done)
    assert in_seconds() == "did it"


# A name


def test_code_with_both_names_keeps_old_and_new_apart(paste, locks, spawn, tmp_path):
    version = """
        from django_redislock import distributed_lock
        from shop.stock import count_down

        @distributed_lock("{}:{{pk}}", wait=0)
        def sell(pk):
            count_down(pk)
        """
    before, after = version.format("report"), version.format("statement")
    paste(PAGE, STOCK | {"shop/before.py": before, "shop/after.py": after}, NO_WAIT)
    versions = ("before", "two_names", "tasks", "after")
    together = pairs_together(versions, lambda: spawn(sell, str(tmp_path)))
    assert together == {("before", "after"), ("after", "before")}


# Another place


def test_code_with_both_servers_keeps_old_and_new_apart(
    paste, locks, spawn, settings, make_server, tmp_path
):
    version = """
        from django_redislock import distributed_lock
        from shop.stock import count_down

        def sell(pk):
            with distributed_lock(f"stock:{{pk}}", using="{}", wait=0):
                count_down(pk)
        """
    before, after = version.format("old"), version.format("default")
    servers = {
        "redis://old.example.com:6379/0": locks.server.url,
        "redis://new.example.com:6379/0": make_server().url,
    }
    others = STOCK | {"shop/before.py": before, "shop/after.py": after}
    page = paste(PAGE, others, NO_WAIT | servers)
    settings.REDISLOCK = page.settings()["REDISLOCK"]
    versions = ("before", "two_servers", "tasks_on_two_servers", "after")
    together = pairs_together(versions, lambda: spawn(sell, str(tmp_path)))
    assert together == {("before", "after"), ("after", "before")}

    # A pause: by the new settings, of the lock on the new server.
    commands = next(code for code in page.blocks() if "locks pause" in code)
    keep, _, resume = commands.splitlines()
    old, new = (spawn(sell, str(tmp_path)) for _ in range(2))
    assert page.manage(keep)[0] == 0
    assert enters(old, "before")
    assert not enters(new, "after")
    leave(old)
    assert page.manage(resume)[0] == 0
    assert enters(new, "after")


def test_what_was_done_comes_along_with_a_replica_and_fences_go_on(
    locks, server_kind, spawn, make_server
):
    old = make_server(server_kind, repl_diskless_sync_delay=0)
    locks.on(old)
    assert spawn(succeed, 3600).read() is False
    with distributed_lock("other") as lease:
        fence = lease.fence
    new = replica_of(old, make_server)
    new.client().replicaof("NO", "ONE")
    locks.on(new)
    assert spawn(succeed, 3600).read() is True
    record = held.record(NAME)
    assert record.last_success is not None
    with distributed_lock("other") as lease:
        assert lease.fence > fence
    new.client().flushall()
    with distributed_lock("other") as later:
        assert later.fence > lease.fence
    assert spawn(succeed, 3600).read() is False


def test_sentinels_of_the_same_server_keep_the_same_locks(watched, settings, key_prefix, spawn):
    by_sentinels = {**watched.setting(), "KEY_PREFIX": key_prefix}
    by_address = {"LOCATION": watched.find_master().url, "KEY_PREFIX": key_prefix}
    settings.REDISLOCK = {"default": by_sentinels, "by address": by_address}
    for one, other in (("default", "by address"), ("by address", "default")):
        holder = holds(spawn(hold, using=one))
        assert is_refused(using=other)
        holder.send("end")
        wait_until(lambda other=other: not is_refused(using=other))


def test_a_quorum_with_the_old_server_does_not_exclude_old_processes(
    shared_quorum, settings, key_prefix, spawn
):
    servers = shared_quorum()
    settings.REDISLOCK = {
        "default": {
            "BACKEND": "django_redislock.backends.QuorumBackend",
            "LOCATION": [server.url for server in servers],
            "KEY_PREFIX": key_prefix,
        },
        "old": {"LOCATION": servers[0].url, "KEY_PREFIX": key_prefix},
    }
    holds(spawn(hold, using="old"))
    assert not is_refused(using="default")


# REPLICAS_ACK


def test_with_and_without_acknowledgement_it_is_the_same_lock(
    locks, server_kind, spawn, make_server
):
    server = make_server(server_kind, repl_diskless_sync_delay=0)
    locks.on(server, REPLICAS_ACK=0)
    old = holds(spawn(hold))
    locks.on(server, REPLICAS_ACK=1)
    assert is_refused()
    old.send("end")
    old.wait()
    with pytest.raises(LockUnavailable):  # There is no replica yet.
        is_refused()
    replica_of(server, make_server)
    new = holds(spawn(hold, wait=HUNG))
    locks.on(server, REPLICAS_ACK=0)
    assert is_refused()
    new.send("end")


# SECRET_KEY


def test_a_baton_is_taken_up_with_a_key_that_is_known_and_no_other(locks):
    today = {"SECRET_KEY": "old", "SECRET_KEY_FALLBACKS": []}
    first = {"SECRET_KEY": "old", "SECRET_KEY_FALLBACKS": ["new"]}
    second = {"SECRET_KEY": "new", "SECRET_KEY_FALLBACKS": ["old"]}

    def passes(giver, taker):
        with override_settings(**giver), distributed_lock(NAME, wait=HUNG) as lease:
            baton = lease.hand_over(within=60)
        with override_settings(**taker):
            try:
                with take_up(baton):
                    return True
            except ValueError:
                lock = held.get(NAME)
                held.force_release(NAME, lock.id)
                return False

    releases = [(today, first), (first, today), (first, second), (second, first)]
    assert [passes(*pair) for pair in releases] == [True] * 4
    assert not passes(second, today)
