"""A cluster whose slots move and whose masters die, while locks go on."""

import asyncio
import os
import threading
import time
from contextlib import nullcontext
from itertools import count, islice

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse

from django_redislock import LockUnavailable, distributed_lock, doctor, handle, held
from django_redislock.backends.registry import backends
from django_redislock.doctor import minimal_acl
from django_redislock.rules import flows, scripts
from django_redislock.rules.keys import bucket_of
from django_redislock.rules.steps import Answer, Call
from tests.support.backends import UNHURRIED
from tests.support.clusters import slot_of
from tests.support.faults import lease_of, takes
from tests.support.lockers import Lockers, line_up
from tests.support.others import queued, waiters
from tests.support.processes import hear, say
from tests.support.stored import NAME, is_held_by, is_left_clean, keys_of, value_of
from tests.support.topologies import can_be_rung
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop

pytestmark = pytest.mark.slow


def another(cluster, than):
    """A master that is not this one."""
    return next(one for one in cluster.servers if one is not than)


def move_of(cluster):
    """The master that keeps the lock, and another one, where it is to go."""
    source = cluster.owner_node(NAME)
    return source, another(cluster, source)


def backend():
    return backends["default"]


def found(about):
    return [(one.level, one.says) for one in doctor.examine("default") if one.about == about]


# --- a slot moves --------------------------------------------------------------------------------


@pytest.mark.proves("P1", "R9", "R10")
def test_locking_goes_on_while_the_slot_of_a_lock_moves_to_and_fro(start, callers):
    cluster, _ = start("cluster", TTL=15)  # A lease is to outlast whatever happens.
    lockers = Lockers(NAME, callers * 3)
    for _ in range(6):
        begun = time.monotonic()
        wait_until(lambda begun=begun: lockers.since(begun) >= 5)
        cluster.move(NAME, another(cluster, cluster.owner_node(NAME)))
        moved = time.monotonic()
    wait_until(lambda: lockers.since(moved) >= 20)
    lockers.stop()
    # A hand-over is confirmed within a second, but not while the keys are between two nodes, or the
    # machine is busy elsewhere. Then the lease on its way is lost to the next in turn, who gets the
    # lock when that second is over.
    assert all("'taken'" in one for one in lockers.errors)
    assert len(lockers.errors) <= lockers.seconds_idle / (0.8 * flows.CONFIRM_WITHIN)
    lockers.check()


@pytest.mark.proves("P6")
def test_waiters_that_share_a_bell_find_the_slot_that_has_moved(start):
    """And find it again when it comes back, where their first bell was."""
    cluster, locks = start("cluster", OPTIONS={"max_connections": 4})
    home, away = move_of(cluster)
    with distributed_lock(NAME, ttl=30):
        waiting = line_up(locks, NAME, [Blocking()] * 6)
        for target in (away, home):
            cluster.move(NAME, target)
            wait_until(lambda at=target: can_be_rung(locks, at, NAME) == len(waiting))
    for lock, caller, acquired in waiting:
        assert acquired.result(HUNG)
        caller.release(lock)


@pytest.mark.proves("R13")
def test_r13_while_a_slot_is_on_its_way_who_waits_tries_again_and_others_are_told(start, callers):
    cluster, locks = start("cluster", OPTIONS=UNHURRIED)
    threads, _ = callers
    _, target = move_of(cluster)
    with distributed_lock(NAME):
        pass  # Its bucket has a mark of fences: some keys are there, and others are not.
    cluster.begin_move(NAME, target)
    for caller in callers:
        with pytest.raises(LockUnavailable, match=r"TRYAGAIN|on its way"):
            caller.acquire(distributed_lock(NAME, wait=0))
    with threads.block(distributed_lock(cluster.name_on(target), wait=0)):
        pass
    handles = [(caller, distributed_lock(NAME)) for caller in callers]
    acquired = [(lock, caller, caller.begin(lock)) for caller, lock in handles]
    cluster.move_keys(NAME, target)  # From here on the source answers ASK.
    with pytest.raises(LockUnavailable):
        threads.acquire(distributed_lock(NAME, wait=0))
    assert not any(future.done() for _, _, future in acquired)
    cluster.end_move(NAME, target)
    while acquired:
        wait_until(lambda: any(future.done() for _, _, future in acquired))
        lock, caller, future = next(one for one in acquired if one[2].done())
        assert future.result()
        assert is_held_by(locks, lease_of(lock))
        caller.release(lock)
        acquired.remove((lock, caller, future))


@pytest.mark.proves("P6", "R13")
@pytest.mark.parametrize(
    ("kind", "limit"), [("valkey", None), ("valkey", 2), ("redis", 2)]
)  # Each has words of its own.
def test_r13_who_waits_waits_on_while_keys_of_its_lock_are_there_and_others_are_not(
    start, caller, kind, limit, monkeypatch
):
    """All keys of a script may be there, so it begins, and ends where it needs another one."""
    monkeypatch.setattr(flows, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(handle, "NOTED_FROM", 0.0)
    cluster, locks = start("cluster", kind, TTL=600)
    locks.configure(OPTIONS=UNHURRIED)
    source, target = move_of(cluster)
    keys = keys_of(locks, NAME)
    with distributed_lock(NAME, limit=limit):
        pass
    assert locks.redis.exists(keys.past)
    with source.client() as client, InLoop() as tasks:

        def asked_for():
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        holders = [distributed_lock(NAME, limit=limit, wait=0) for _ in range(limit or 1)]
        for holder in holders:
            assert tasks.acquire(holder)
        waiter = distributed_lock(NAME, limit=limit)
        acquired = caller.begin_waiting(waiter, locks)
        cluster.begin_move(NAME, target)
        if limit:
            second = keys.of_permit(2).lock
            client.migrate(target.host, target.port, [second], 0, 5000)
        before = asked_for()
        wait_until(lambda: acquired.done() or asked_for() > before + 2)
        assert not acquired.done(), acquired.result()
        assert queued(locks, NAME) == 1
        cluster.move_keys(NAME, target)
        cluster.end_move(NAME, target)
        for holder in holders:
            tasks.release(holder)
        assert acquired.result(HUNG)
        caller.release(waiter)


@pytest.fixture
def nameless(start):
    """A cluster whose nodes lack the hostname that is preferred, so each says: MOVED to "?"."""
    cluster, _ = start("cluster", "redis", OPTIONS=UNHURRIED)
    for server in cluster.servers:
        with server.client() as client:
            client.config_set("cluster-preferred-endpoint-type", "hostname")
    for server in cluster.servers:
        with distributed_lock(cluster.name_on(server)):
            pass
    return cluster


@pytest.mark.proves("R13")
@pytest.mark.parametrize("names", [[NAME], [NAME, "report"]], ids=len)
def test_r13_a_node_without_the_hostname_that_is_preferred_keeps_its_locks_available(
    nameless, caller, names
):
    lock = distributed_lock(*names)
    source, target = move_of(nameless)
    with caller.block(lock):
        pass
    nameless.move(NAME, target)
    with caller.block(lock):
        assert sorted(one.name for one in held.list()) == sorted(names)
        nameless.move(NAME, source)
        assert held.get(NAME)
    assert not any(distributed_lock(name).locked() for name in names)


@pytest.mark.proves("P6", "R14")
def test_a_waiter_does_not_rely_on_a_bell_that_ended_while_nobody_read_it(start, if_rung, callers):
    cluster, locks = start("cluster", OPTIONS=UNHURRIED)
    holder = distributed_lock(NAME, wait=0, ttl=60)
    home = cluster.owner_node(NAME)
    threads, tasks = callers
    for _ in range(2):
        assert tasks.acquire(holder)
        waiter = distributed_lock(NAME, wait=HUNG, ttl=60)
        acquired = threads.begin(waiter)
        wait_until(lambda: can_be_rung(locks, home, NAME), if_rung)
        tasks.release(holder)
        assert acquired.result(if_rung)
        threads.release(waiter)
        # Its connection is idle, and reads nothing of this.
        cluster.move(NAME, another(cluster, home))
        cluster.move(NAME, home)


@pytest.mark.proves("R13")
def test_r13_what_has_one_key_follows_an_ask(start):
    """Its key is not there, so the node that the slot is on its way to is asked, for this once."""
    cluster, _ = start("cluster", "redis", OPTIONS=UNHURRIED)
    source, target = move_of(cluster)
    with distributed_lock(NAME):
        pass
    cluster.begin_move(NAME, target)
    before = asked(target)
    call = Call(scripts.RUNS, NAME, (), HUNG)
    assert backend().run(flows.result_of(call))[1:4] == [b"", b"", b""]
    assert asyncio.run(backend().arun(flows.result_of(call)))[1:4] == [b"", b"", b""]
    assert held.record(NAME) is None
    assert asked(target) == before + 3
    assert cluster.owner_node(NAME) is source


def test_a_script_reaches_a_node_also_if_the_first_call_of_a_batch_is_turned_away(start):
    """The text of a script is sent once for a batch, and must not go with a call that is moved."""
    cluster, _ = start("cluster", OPTIONS=UNHURRIED)
    source, target, _ = cluster.servers
    gone, first, second = islice(cluster.names_on(source), 3)
    with distributed_lock(gone), distributed_lock(first), distributed_lock(second):
        node = backend().slots.last_owner_node(gone)
        cluster.begin_move(gone, target)
        cluster.move_keys(gone, target)
        with source.client() as client:
            client.script_flush()
        calls = [backend().look(name) for name in (gone, first, second)]
        outcomes = node.call_many(calls)
        assert [isinstance(outcome, Answer) for outcome in outcomes] == [False, True, True]
        assert node.redirection(outcomes[0]) is not None
        cluster.end_move(gone, target)


def test_what_is_said_while_a_slot_is_on_its_way_recommends_no_other_backend(start, caplog):
    """RedisBackend says of the same replies that ClusterBackend is needed."""
    cluster, _ = start("cluster", OPTIONS=UNHURRIED)
    _, target = move_of(cluster)
    with distributed_lock(NAME, ttl=12) as lease:
        cluster.begin_move(NAME, target)
        cluster.move_keys(NAME, target)
        wait_until(lambda: "Could not renew lock 'lottery' yet: ASK " in caplog.text)
        (outcome,) = (
            backend().slots.last_owner_node(NAME).call_many([Call(scripts.RUNS, NAME, (), HUNG)])
        )
        assert str(outcome.__cause__) == outcome.problem
        assert "ClusterBackend" not in caplog.text
        cluster.end_move(NAME, target)
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)


def asked(server):
    """How often a node was asked for what is on its way there."""
    stats = server.client().info("commandstats")
    return int(stats.get("cmdstat_asking", {"calls": 0})["calls"])


# --- a master dies -------------------------------------------------------------------------------


@pytest.mark.proves("R13")
def test_r13_a_cluster_that_is_down_is_unavailable_until_it_is_whole_again(start, callers):
    cluster, locks = start("cluster", TTL=6, WAIT=0, UNAVAILABLE_AFTER=None)
    first, *_, last = cluster.servers
    name = cluster.name_on(last)
    for caller in callers:
        with caller.block(distributed_lock(name)):
            pass
    with cluster.in_a_hurry():  # Until its end: so they soon believe that it is back, too.
        first.kill()
        wait_until(lambda: b"cluster_state:fail" in cluster.tell(last, "INFO"))
        for caller in callers:
            with pytest.raises(LockUnavailable, match="CLUSTERDOWN"):
                caller.acquire(distributed_lock(name))
        locks.configure(UNAVAILABLE_AFTER=HUNG)
        waiting = [
            (caller, lock, caller.begin(lock))
            for caller in callers
            for lock in [distributed_lock(f"{name} {caller.way.name}", wait=HUNG)]
        ]
        first.start()
        for caller, lock, acquired in waiting:
            assert acquired.result(HUNG)
            caller.release(lock)


# --- a node is added, or is silent ---------------------------------------------------------------


def test_a_node_that_is_added_keeps_locks_and_is_listed(start, callers):
    cluster, locks = start("cluster", OPTIONS=UNHURRIED)
    handles = [distributed_lock(f"{caller.way.name} lottery", ttl=60) for caller in callers]
    for caller, lock in zip(callers, handles, strict=True):
        assert caller.acquire(lock)
    new = cluster.add()
    for caller, lock in zip(callers, handles, strict=True):
        cluster.move(lock.name, new)
        caller.ensure_held(lease_of(lock))
        assert is_held_by(locks, lease_of(lock))
    address = f"{new.host}:{new.port}"
    assert [one.where for one in held.list()] == [address, address]
    assert address in {node.address for node in backend().slots.nodes()}
    for caller, lock in zip(callers, handles, strict=True):
        caller.release(lock)
        assert is_left_clean(locks, lock.name)


@pytest.mark.django_db
def test_a_list_says_which_node_is_silent_and_shows_what_the_others_keep(
    start, admin_client, capsys
):
    cluster, _ = start("cluster", TTL=60, OPTIONS={"socket_timeout": 3})
    names = [cluster.name_on(server) for server in cluster.servers]
    handles = [distributed_lock(name, ttl=120, renew=False) for name in names]
    assert all(lock.acquire() for lock in handles)
    silent, other, _ = cluster.servers
    address, alive = (f"{one.host}:{one.port}" for one in (silent, other))
    with silent.paused():
        with takes(at_most=12):  # That is the operation timeout; there are two tries of two.
            listed = held.list()
        assert {lock.name for lock in listed} == set(names[1:])
        assert listed.silent == (address,)
        said = f"The server {address} \\(default\\) did not answer all"
        with pytest.raises(CommandError, match=said) as ended:
            call_command("locks", "list")
        assert ended.value.returncode == 3
        out, _ = capsys.readouterr()
        assert names[1] in out
        assert alive in out
        with pytest.raises(LockUnavailable, match=address):
            list(held.every())
        url = reverse("admin:django_redislock_heldlock_changelist")
        page = admin_client.get(url).content.decode()
        assert f'<td class="field-where">{alive}</td>' in page
        assert f"The server {address} (default) did not answer all that was asked" in page
    assert {lock.name for lock in held.list()} == set(names)
    for lock in handles:
        lock.release()


def test_a_node_that_refuses_the_dial_hides_nothing_that_the_others_keep(start):
    """Its certificate is not trusted, say, or it does not know the user, as a new node may not."""
    cluster, locks = start("cluster", TTL=60)
    refusing, *others = cluster.servers
    for server in others:
        server.client().execute_command("ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all")
    locks.configure(OPTIONS={"username": "locks", "password": "pw", **UNHURRIED})
    handles = [distributed_lock(cluster.name_on(server)) for server in others]
    assert all(lock.acquire() for lock in handles)
    listed = held.list()
    assert {lock.name for lock in listed} == {lock.name for lock in handles}
    address = f"{refusing.host}:{refusing.port}"
    assert listed.silent == (address,)
    (unreached,) = [one.says for one in doctor.examine("default") if one.id == "E020"]
    assert unreached.startswith(f"{address}: refused: WRONGPASS ")
    for lock in handles:
        lock.release()
    locks.configure(OPTIONS={"username": "nobody", "password": "pw"})
    with pytest.raises(LockUnavailable, match="WRONGPASS"):
        held.list()


@pytest.mark.proves("R7")
def test_r7_a_node_that_hangs_delays_no_renewal_on_another(start, monkeypatch):
    # So that one try of a renewal may take half of a third of the ttl.
    cluster, _ = start("cluster", OPTIONS={"socket_timeout": 20})
    one, other, _ = cluster.servers
    hanging = distributed_lock(cluster.name_on(one), ttl=12)
    assert hanging.acquire()
    node = backend().slots.last_owner_node(hanging.name)
    renew_many, under_way = node.renew_many, threading.Event()

    def noted(calls):
        under_way.set()
        try:
            return renew_many(calls)
        finally:
            under_way.clear()

    monkeypatch.setattr(node, "renew_many", noted)

    def renewed_meanwhile():
        renewals = lease.renewals
        while under_way.is_set():
            if lease.renewals > renewals:
                return True
            time.sleep(0.005)
        return False

    with distributed_lock(cluster.name_on(other), ttl=4) as lease, one.paused():
        wait_until(renewed_meanwhile)
    hanging.release()


def test_a_dead_node_in_location_costs_its_share_only(start, callers):
    cluster, locks = start("cluster", replicas=1, TTL=6)
    dead = cluster.servers[0]
    with cluster.in_a_hurry():
        dead.pause()
        cluster.await_failover()
    locks.configure(
        LOCATION=[f"redis://{one.host}:{one.port}" for one in (dead, cluster.servers[0])]
    )
    for caller in callers:
        backends.reset()
        lock = distributed_lock(f"{caller.way.name}")
        with takes(at_most=2):
            assert caller.acquire(lock)
        caller.release(lock)


@pytest.mark.proves("R13")
def test_r13_a_node_that_was_taken_out_and_runs_on_is_not_asked_who_keeps_a_lock(start, callers):
    cluster, _ = start("cluster", replicas=1, OPTIONS=UNHURRIED)
    former = cluster.master
    name = cluster.name_on(former)

    def use(caller):
        with caller.block(distributed_lock(name, wait=0)):
            pass

    for caller in callers:
        use(caller)
    cluster.fail_over()
    cluster.await_failover()
    cluster.take_out(former)
    for caller in callers:  # LOCATION still names it first.
        use(caller)
        backends.reset()
        use(caller)
    ((level, says),) = found("cluster")
    assert level == "warn"
    address = f"{former.host}:{former.port}"
    assert says.startswith(f"1 of 3 in LOCATION cannot be asked: {address}: ")


@pytest.mark.proves("R7")
def test_a_slot_that_no_node_keeps_harms_no_lock_on_the_node_that_kept_it(start):
    cluster, _ = start("cluster", cluster_require_full_coverage="no", OPTIONS=UNHURRIED)
    former = cluster.servers[0]
    names = islice(cluster.names_on(former), 2)
    kept, unkept = (Call(scripts.RUNS, name, (), HUNG) for name in names)
    backend().call_many([kept])
    node = backend().slots.last_owner_node(kept.name)
    for server in cluster.servers:
        cluster.tell(server, "DELSLOTS", slot_of(unkept.name))
    wait_until(lambda: found("cluster") == [("fail", "1 of 16384 slots are kept by no node")])
    # While nothing is held: a watchdog must have the connection for renewals to itself.
    for outcomes in (node.renew_many([kept, unkept]), backend().call_many([unkept, kept])[::-1]):
        assert [isinstance(one, Answer) for one in outcomes] == [True, False]
    with distributed_lock(kept.name, ttl=6) as lease:
        listed = held.list()
        assert [one.name for one in listed] == [kept.name]
        assert listed.silent == (f"{former.host}:{former.port}",)
        with pytest.raises(LockUnavailable, match="Hash slot not served"):
            distributed_lock(unkept.name, wait=0).acquire()
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
    cluster.tell(cluster.servers[1], "ADDSLOTS", slot_of(unkept.name))
    wait_until(lambda: found("cluster")[0][0] == "ok")
    with distributed_lock(unkept.name):
        pass


# --- bells ---------------------------------------------------------------------------------------


@pytest.mark.proves("P6", "R14")
def test_r14_a_bell_is_told_to_no_other_node(start, callers):
    cluster, locks = start("cluster")
    threads, _ = callers
    for caller in callers:
        for number in range(5):
            name = f"{caller.way.name} {number}"
            holder, waiter = distributed_lock(name), distributed_lock(name)
            assert threads.acquire(holder)
            acquired = caller.begin(waiter)
            wait_until(lambda name=name: queued(locks, name) == 1)
            threads.release(holder)
            assert acquired.result(HUNG)
            caller.release(waiter)
    for server in cluster.servers:
        info = cluster.tell(server, "INFO").decode()
        assert "cluster_stats_messages_ping_sent" in info
        assert "publish" not in info


# --- processes -----------------------------------------------------------------------------------


@pytest.mark.proves("R8")
def test_a_child_does_not_ask_another_node_for_what_its_parent_asked(start, spawn):
    cluster, locks = start("cluster")
    child = spawn(fork_behind_a_redirection, NAME)
    assert child.read() == "knows the nodes"
    cluster.move(NAME, another(cluster, cluster.owner_node(NAME)))
    child.send("moved")
    said = dict([child.read(), child.read()])
    assert said["parent"] is True
    assert "forked" in str(said["child"])
    assert value_of(locks, NAME), "the child has undone what its parent was granted"


def fork_behind_a_redirection(name):
    """In a child: fork when a node has named another one, and nobody has asked that yet."""
    with distributed_lock(name):
        pass
    say("knows the nodes")
    hear()
    node, parent = backend().slots.last_owner_node(name), os.getpid()
    begin = node.begin

    def begin_and_fork(form):
        begin(form)
        os.fork()

    node.begin = begin_and_fork
    try:
        outcome = distributed_lock(name, ttl=60).acquire()
    except LockUnavailable as error:
        outcome = error.problem
    say(["parent" if os.getpid() == parent else "child", outcome])
    os._exit(0)


# --- what is no cluster --------------------------------------------------------------------------


@pytest.mark.parametrize("database", [0, 3])
def test_a_cluster_may_have_a_password_users_with_few_rights_and_several_databases(
    database, start, settings, callers
):
    several = {"cluster_databases": 16} if database else {}
    cluster, locks = start("cluster", **several)
    rules = [*minimal_acl(backend().prefix).split(), *([f"db={database}"] if database else [])]
    for server in cluster.servers:
        server.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *rules)
    options = {"username": "locks", "password": "secret", "db": database, **UNHURRIED}
    default = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": {**default, "OPTIONS": options}, "in 0": default}
    threads, _ = callers
    for number, caller in enumerate(callers * 3):
        name = f"lottery {number}"
        elsewhere = distributed_lock(name, using="in 0") if database else nullcontext()
        holder, waiter = distributed_lock(name), distributed_lock(name)
        with threads.block(holder), elsewhere:
            acquired = caller.begin(waiter)
            wait_until(lambda name=name: waiters(name) == 1)
            (listed,) = held.list()
            assert listed.name == name
        assert acquired.result(HUNG)
        caller.release(waiter)
    findings = {one.about: one for one in doctor.examine("default")}
    assert not [one for one in findings.values() if one.level == "fail"]
    if database:
        assert findings["rights"].advice.endswith(" ".join(rules[:-1]) + " resetdbs db=3")
    assert held.list(using="in 0") == []
    locks.configure(OPTIONS={**options, "password": "wrong"})
    for caller in callers:
        with pytest.raises(LockUnavailable, match="WRONGPASS"):
            caller.acquire(distributed_lock("lottery", wait=0))


def test_a_cluster_may_speak_tls_only(start, caller):
    # The Valkey of the wheel speaks no TLS.
    cluster, locks = start("cluster", "redis", tls=True, OPTIONS=UNHURRIED)
    names = [cluster.name_on(server) for server in cluster.servers]
    mine = [distributed_lock(name) for name in names]
    for lock in mine:
        assert caller.acquire(lock)
    places = [f"{server.host}:{server.port}" for server in cluster.servers]
    assert {(one.name, one.where) for one in held.list()} == {*zip(names, places, strict=True)}
    waiting = distributed_lock(names[0])
    waiter = caller.begin_waiting(waiting, locks)
    caller.release(mine[0])
    assert waiter.result(HUNG)
    # Who is named by MOVED is reached by TLS, too.
    free = cluster.name_on(cluster.servers[0])
    caller.release(waiting)
    cluster.move(free, cluster.servers[1])
    with caller.block(distributed_lock(free)) as lease:
        assert is_held_by(locks, lease)


def test_a_list_is_in_order_though_one_bucket_has_most_of_it(cluster, settings, key_prefix):
    """More than is asked of each bucket at first."""
    cluster.locks(settings, key_prefix)
    crowded = (NAME for number in count() if bucket_of(NAME := f"crowded {number}") == 17)
    names = [*islice(crowded, 80), *(f"spread {number}" for number in range(20))]
    handles = [
        distributed_lock(NAME, ttl=60 + number, renew=False) for number, NAME in enumerate(names)
    ]
    assert all(lock.acquire() for lock in handles)
    assert [lock.name for lock in held.list()] == names
    part = held.list(limit=15, offset=70, latest_first=True)
    assert [lock.name for lock in part] == names[::-1][70:85]
    assert part.total == len(names)
    assert part.partial
    for lock in handles:
        lock.release()


@pytest.mark.proves("R10")
def test_r10_names_are_spread_over_the_nodes_and_cannot_choose_one(cluster, settings, key_prefix):
    locks = cluster.locks(settings, key_prefix)
    handles = [distributed_lock(f"{{same}} {number}", ttl=60) for number in range(60)]
    for lock in handles:
        assert lock.acquire()
    where = [one.where for one in held.list()]
    assert len(where) == len(handles)
    assert all(where.count(f"{one.host}:{one.port}") > 5 for one in cluster.servers)
    for lock in handles:
        keys = keys_of(locks, lock.name)
        assert len({locks.redis.keyslot(key) for key in keys}) == 1
        lock.release()


# --- the doctor ----------------------------------------------------------------------------------


def test_the_doctor_judges_each_node_of_a_cluster(start):
    cluster, locks = start("cluster", replicas=1, TTL=6, WAIT=0)
    first, second, third = (f"{one.host}:{one.port}" for one in cluster.servers)
    assert found("cluster") == [("ok", "all slots are kept; 3 nodes keep locks")]
    assert {level for level, _ in found("server")} == {"ok"}
    assert found("rights") == [
        ("ok", "all servers: a lock was taken and released as user 'default'")
    ]
    assert found("replication") == [
        ("warn", f"{first}: 1 replica; a failover may forget the last grants"),
        ("warn", f"{second}, {third}: no replicas, so no server can take over"),
    ]
    with distributed_lock("lottery", ttl=60):
        assert found("index") == [("ok", "all servers: every held lock is in the index")]
    cluster.servers[1].client().config_set("maxmemory", "50mb")
    cluster.servers[1].client().config_set("maxmemory-policy", "allkeys-lru")
    assert ("fail", f"{second}: the policy allkeys-lru may evict a held lock") in found("eviction")
    locks.configure(LOCATION=[*cluster.setting()["LOCATION"], "redis://127.0.0.1:1"])
    ((level, says),) = found("cluster")
    assert level == "warn"
    assert says.startswith("1 of 4 in LOCATION cannot be asked: 127.0.0.1:1: ")
    with cluster.servers[2].paused():
        assert ("fail", f"{third}: no answer") in [
            (level, says[: len(f"{third}: no answer")]) for level, says in found("server")
        ]
    backends.reset()
    with cluster.in_a_hurry():
        cluster.servers[2].kill()
        wait_until(lambda: b"cluster_state:fail" in cluster.tell(cluster.servers[1], "INFO"))
    assert any(level == "fail" for level, _ in found("rights"))
