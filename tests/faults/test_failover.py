"""A failover behind one address: what was the master keeps its connections, and is the wrong one.

So it is with managed Redis and with virtual IPs: the address leads to the new master, for those
who connect anew.
"""

import pytest

from django_redislock import Rate, distributed_lock, held
from django_redislock.rules import flows
from tests.conftest import Locks
from tests.support.backends import PATIENT, UNHURRIED, forbid_scripting
from tests.support.faults import lease_of, loses, takes
from tests.support.matrix import everywhere
from tests.support.stored import NAME, is_held_by, is_left_clean, keys_of
from tests.support.topologies import can_be_rung
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, in_thread

TTL = 6.0
PATIENCE = TTL / 3


class Pair:
    """A master and its replica behind one address."""

    def __init__(self, master, replica, proxy, locks):
        self.master, self.replica, self.proxy, self.locks = master, replica, proxy, locks

    def fail_over(self, *, master_becomes="READONLY", loses_data=False):
        """Let the replica be the master; what was it says *master_becomes* to whoever writes."""
        new, old = self.replica.client(), self.master.client()
        wait_until(lambda: new.info("replication")["master_repl_offset"] == self._offset())
        new.replicaof("NO", "ONE")
        if loses_data:
            new.flushall()
        match master_becomes:
            case "READONLY":
                old.replicaof(self.replica.host, self.replica.port)
                wait_until(lambda: old.info("replication")["master_link_status"] == "up")
            case "MASTERDOWN":
                old.config_set("replica-serve-stale-data", "no")
                old.replicaof("127.0.0.1", 1)
            case "NOREPLICAS":
                old.config_set("min-replicas-to-write", 1)
                wait_until(lambda: old.info("replication")["connected_slaves"] == 0)
        self.proxy.server = self.replica
        self.locks.redis = new

    def _offset(self):
        return int(self.master.client().info("replication")["master_repl_offset"])


@pytest.fixture
def pair(server_kind, make_server, make_proxy, settings, key_prefix):
    quick = {"repl_diskless_sync_delay": 0}
    master = make_server(server_kind, **quick)
    replica = make_server(server_kind, replicaof=f"{master.host} {master.port}", **quick)
    link = replica.client(socket_timeout=HUNG)  # It answers nobody while it loads what it is sent.
    wait_until(lambda: link.info("replication")["master_link_status"] == "up")
    proxy = make_proxy(master)
    locks = Locks(settings, master, key_prefix).on(proxy, TTL=TTL, WAIT=0, OPTIONS=PATIENT)
    return Pair(master, replica, proxy, locks)


def forbid_scripts(pair):
    options = {**PATIENT, **forbid_scripting(pair.locks)}
    pair.locks.redis = pair.replica.client()
    forbid_scripting(pair.locks)
    pair.locks.configure(OPTIONS=options)


def use_many_connections(caller):
    """Leave several connections behind, as threads that worked at the same time do."""
    with distributed_lock("busy", ttl=60):
        futures = [caller.begin(distributed_lock("busy", wait=0.1)) for _ in range(4)]
        for future in futures:
            assert future.result(HUNG) is False


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize(
    ("master_becomes", "scripts"),
    [("READONLY", True), ("MASTERDOWN", True), ("NOREPLICAS", True), ("READONLY", False)],
)
def test_r13_an_acquire_after_a_failover_goes_to_the_new_master(
    master_becomes, scripts, caller, pair
):
    if not scripts:
        forbid_scripts(pair)
    use_many_connections(caller)
    pair.fail_over(master_becomes=master_becomes)
    lock = distributed_lock(NAME)
    with takes(at_most=PATIENCE):
        assert caller.acquire(lock)
    assert is_held_by(pair.locks, lease_of(lock))
    assert caller.acquire(distributed_lock("another"))
    caller.release(lock)
    assert is_left_clean(pair.locks)


@pytest.mark.proves("R13")
def test_r13_an_acquire_that_only_reads_is_not_refused_for_the_acknowledgement(caller, pair):
    # The old master could say that the lock is busy, but no replica of its own could confirm that.
    pair.locks.configure(REPLICAS_ACK=1)
    assert caller.acquire(distributed_lock(NAME, ttl=60))
    pair.fail_over()
    pair.locks.redis.set("written", 1, ex=60)
    wait_until(lambda: pair.locks.redis.wait(1, 100) == 1)
    assert caller.begin(distributed_lock(NAME, wait=0)).result(HUNG) is False


@pytest.mark.proves("R13")
@pytest.mark.parametrize("master_becomes", ["READONLY", "NOREPLICAS"])
def test_r13_a_start_after_a_failover_is_one_of_the_new_master_which_gives_one_burst_more(
    master_becomes, caller, pair
):
    def start():
        return caller.acquire(distributed_lock(limits=[Rate(NAME, "2/h", burst=2)]))

    assert [start() for _ in range(3)] == [True, True, False]
    pair.fail_over(master_becomes=master_becomes, loses_data=True)
    assert [start() for _ in range(3)] == [True, True, False]


@pytest.mark.proves("R7")
@pytest.mark.parametrize("master_becomes", ["READONLY", "MASTERDOWN", "NOREPLICAS"])
def test_r7_a_lease_is_renewed_on_the_new_master(master_becomes, caller, pair):
    lock = distributed_lock(NAME, ttl=9)  # A replica may need seconds to find its new master.
    with caller.block(lock) as lease:
        wait_until(lambda: lease.renewals)
        pair.fail_over(master_becomes=master_becomes)
        renewals = lease.renewals
        wait_until(lambda: lease.renewals > renewals)
        assert is_held_by(pair.locks, lease)
        caller.renew(lease)
    assert is_left_clean(pair.locks)


@pytest.mark.proves("R7")
def test_r7_a_lease_that_the_new_master_does_not_have_is_lost(caller, pair):
    with loses("expired"), caller.block(distributed_lock(NAME, ttl=9)) as lease:
        wait_until(lambda: lease.renewals)
        pair.fail_over(loses_data=True)
        wait_until(lambda: lease.lost_reason)


@pytest.mark.proves("R7", "R13")
def test_r7_a_lease_of_the_new_master_is_not_looked_for_at_the_old_one(caller, pair):
    with caller.block(distributed_lock("earlier", ttl=9)) as earlier:
        wait_until(lambda: earlier.renewals)  # The watchdog has its connection.
    pair.fail_over(master_becomes="NOREPLICAS")
    with caller.block(distributed_lock(NAME, ttl=9)) as lease:
        wait_until(lambda: lease.renewals or lease.lost_reason)
        assert lease.lost_reason is None


@pytest.mark.proves("R13")
@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "plain"])
def test_r13_the_old_master_cannot_say_that_a_lock_is_busy(scripts, caller, pair):
    if not scripts:
        forbid_scripts(pair)
    holder, lock = distributed_lock(NAME, ttl=60), distributed_lock(NAME, wait=0)
    assert caller.acquire(holder)
    pair.fail_over(master_becomes="NOREPLICAS")
    pair.locks.redis.delete(keys_of(pair.locks).lock)
    assert caller.begin(lock).result(HUNG)


@pytest.mark.proves("P5", "R6")
@pytest.mark.parametrize("master_becomes", ["MASTERDOWN", "NOREPLICAS"])
def test_r6_a_loss_is_told_although_the_old_master_was_asked_first(master_becomes, caller, pair):
    # It knows the lease, and has not released it; so whoever has not got it has lost it.
    pair.locks.configure(OPTIONS=UNHURRIED)
    with loses("expired"), caller.block(distributed_lock(NAME, ttl=60)):
        pair.fail_over(master_becomes=master_becomes, loses_data=True)


@pytest.mark.proves("R13")
def test_a_block_that_ends_after_a_failover_frees_the_lock(caller, pair):
    with caller.block(distributed_lock(NAME, ttl=60)):
        pair.fail_over()
    assert is_left_clean(pair.locks)


@pytest.mark.proves("P6", "R13")
@everywhere
@pytest.mark.parametrize(("protocol", "is_cut"), [(2, False), (3, False), (2, True)])
def test_a_waiter_is_rung_by_the_new_master(protocol, is_cut, caller, pair, monkeypatch):
    """Also if its connections for commands were lost, so that none of them tells it of a change."""
    if is_cut:
        monkeypatch.setattr(flows, "LOOK_EVERY", 5.0)
    pair.locks.configure(OPTIONS={**PATIENT, "protocol": protocol})
    holder = distributed_lock(NAME, ttl=60)
    assert Blocking().acquire(holder)
    waiter = caller.begin_waiting(distributed_lock(NAME, ttl=60, wait=HUNG), pair.locks)
    wait_until(lambda: pair.replica.client().exists(keys_of(pair.locks).queue))
    pair.fail_over()
    if is_cut:
        pair.master.client().client_kill_filter(_type="normal", skipme=True)
    wait_until(lambda: can_be_rung(pair.locks, pair.replica))  # It looks by itself every 2 s.
    holder.release()
    assert waiter.result(HUNG)


@pytest.mark.proves("P1")
def test_a_release_at_the_new_master_rings_nobody_who_listens_to_the_old_one(pair, if_rung):
    holder = distributed_lock(NAME, ttl=60)
    assert Blocking().acquire(holder)
    mine = [distributed_lock(NAME, ttl=60, wait=HUNG) for _ in range(3)]
    waiting = [in_thread(lock.acquire) for lock in mine]  # Each hardly ever looks by itself.
    wait_until(lambda: pair.replica.client().zcard(keys_of(pair.locks).queue) == 2 * 3)
    pair.fail_over()
    with pair.master.client().pubsub() as heard:
        heard.psubscribe("*")
        assert heard.get_message(timeout=HUNG)["type"] == "psubscribe"
        holder.release()
        pair.locks.redis.publish("the", "end")
        assert heard.get_message(timeout=HUNG)["channel"] == b"the"
    assert not any(one.done() for one in waiting)
    pair.proxy.cut()  # They come back.
    while waiting:
        wait_until(lambda: any(one.done() for one in waiting))
        first = next(number for number, one in enumerate(waiting) if one.done())
        assert waiting.pop(first).result()
        mine.pop(first).release()


def test_an_operator_sees_and_frees_the_locks_of_the_new_master(pair):
    with loses("forced"), distributed_lock(NAME, ttl=60) as lease:
        assert [lock.id for lock in held.list()] == [lease.id]
        pair.fail_over(master_becomes="MASTERDOWN")
        assert [lock.id for lock in held.list()] == [lease.id]
        assert held.force_release(NAME, lease.id)
        assert is_left_clean(pair.locks)
