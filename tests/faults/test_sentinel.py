"""A master that sentinels watch: it is killed, replaced, and comes back, while locks go on."""

import threading
import time
from contextlib import contextmanager

import pytest
import redis

from django_redislock import LockLost, LockUnavailable, distributed_lock, take_up
from django_redislock.backends.registry import backends
from django_redislock.backends.sentinel import MasterDialer, SentinelBackend
from tests.support.faults import lease_of, takes
from tests.support.lockers import Lockers, line_up, served_in_turn
from tests.support.others import queued
from tests.support.processes import hear, say
from tests.support.servers import Sentinel
from tests.support.stored import NAME, is_held_by, is_left_clean
from tests.support.topologies import SERVICE, await_copies, can_be_rung
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop, in_thread

pytestmark = pytest.mark.slow

# A lease may be lost with the master, or its release; then its lock is free when its ttl is over.
TTL = 3.0
PATIENT = {"TTL": TTL, "WAIT": HUNG, "UNAVAILABLE_AFTER": HUNG}
# Of which a sentinel has a small part only to say hello.
UNHASTY = {"socket_timeout": 20}


def commands_run(server):
    """How many scripts a server has been asked to run."""
    stats = server.client().info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


# --- the master dies under load ------------------------------------------------------------------


@contextmanager
def at_work():
    """Eight who take the lock in turn: threads, and tasks of a loop."""
    with Blocking() as threads, InLoop() as tasks:
        lockers = Lockers(NAME, [threads, tasks] * 4)
        wait_until(lambda: len(lockers.turns) > 10)
        try:
            yield lockers
        finally:
            lockers.stop()


def take_turns():
    """In a child: be eight lockers, until told otherwise; then tell of their turns."""
    with at_work() as lockers:
        say("at work")
        hear()
    say([lockers.turns, lockers.errors])


@pytest.mark.proves("P1", "R9", "R13")
@pytest.mark.timeout(170)
def test_locking_goes_on_when_the_master_is_killed_under_load(
    make_watched, settings, key_prefix, spawn
):
    """Threads, tasks and processes; each grant is on a replica when it counts."""
    watched = make_watched("valkey")
    watched.locks(settings, key_prefix, REPLICAS_ACK=1, **PATIENT)
    child = spawn(take_turns)
    with at_work() as here:
        assert child.read() == "at work"
        with watched.in_a_hurry():
            watched.master.kill()
            watched.await_failover()
        failed_over = time.monotonic()
        wait_until(lambda: here.since(failed_over) >= 20)
        child.send("stop")
        more, wrong = child.read()
    assert any(begun > failed_over for _, begun, _ in more)
    here.turns += more
    here.check()
    errors = here.errors + wrong
    # Nobody gave up. But who had the lock in that moment may have been told that it is lost, and
    # who asked next that no replica has found its new master yet.
    told = "LockLost", "REPLICAS_ACK"
    assert not [error for error in errors if not any(one in error for one in told)], errors


@pytest.mark.proves("P6", "R7")
def test_a_lease_that_the_replica_knows_goes_on_there_and_waiters_come_back_in_order(
    make_watched, settings, key_prefix
):
    watched = make_watched("redis")
    locks = watched.locks(settings, key_prefix, **PATIENT)
    with Blocking() as threads, InLoop() as tasks:
        with threads.block(distributed_lock(NAME, ttl=12)) as lease:
            waiting = line_up(locks, NAME, (threads, tasks, threads, tasks))
            await_copies(watched.master, watched.replicas)
            with watched.in_a_hurry():
                watched.master.kill()
                renewals = lease.renewals
                locks.redis = watched.client(watched.await_failover())
            wait_until(lambda: lease.renewals > renewals)
            assert is_held_by(locks, lease)
            wait_until(lambda: can_be_rung(locks, watched.master) == len(waiting))
            assert queued(locks) == len(waiting)
        served_in_turn(waiting)


@pytest.mark.proves("P1")
def test_a_baton_that_the_replica_knows_is_taken_up_there_and_once(
    make_watched, settings, key_prefix
):
    watched = make_watched("redis")
    watched.locks(settings, key_prefix, **PATIENT)
    with distributed_lock(NAME) as given:
        baton = given.hand_over(within=600)
    await_copies(watched.master, watched.replicas)
    with watched.in_a_hurry():
        watched.master.kill()
        watched.await_failover()
    with take_up(baton) as taken:
        assert taken.fence > given.fence
        with pytest.raises(LockLost, match="was taken up before"):
            in_thread(take_up(baton).acquire).result(HUNG)
        taken.ensure_held(verify=True)
    assert not distributed_lock(NAME).locked()


# --- a server that was the master ----------------------------------------------------------------


@pytest.mark.proves("R7", "R13")
def test_after_a_planned_failover_nothing_is_lost_and_the_old_master_is_never_asked(
    make_watched, settings, key_prefix
):
    """It goes on as a master for ten seconds, and so would all who are connected to it."""
    watched = make_watched("valkey")
    locks = watched.locks(settings, key_prefix, **{**PATIENT, "WAIT": 0})
    with Blocking() as threads, InLoop() as tasks:
        held = [(caller, distributed_lock(caller.way.name, ttl=60)) for caller in (threads, tasks)]
        for caller, lock in held:
            assert caller.acquire(lock)
        await_copies(watched.master, watched.replicas)
        old = watched.master
        watched.ask(watched.sentinels[0], "FAILOVER", SERVICE)
        locks.redis = watched.client(watched.await_failover())
        for caller, _ in held:
            wait_until(lambda caller=caller: is_asked_by(caller, watched.master))
        assert old.client().role()[0] == b"master"
        asked = commands_run(old)
        for caller, lock in held:
            assert is_held_by(locks, lease_of(lock))
            lease = lease_of(lock)
            caller.renew(lease)
            assert caller.begin(distributed_lock(caller.way.name)).result(HUNG) is False
            assert caller.acquire(distributed_lock(f"{caller.way.name} anew"))
            caller.release(lock)
        assert commands_run(old) == asked
        assert old.client().role()[0] == b"master"


def is_asked_by(caller, server):
    """Whether a server is asked when somebody looks at a lock."""
    asked = commands_run(server)
    caller.run(caller.way.locked(distributed_lock("probe")))
    return commands_run(server) > asked


@pytest.mark.proves("P1", "R13")
def test_a_coordinated_failover_of_valkey_loses_nothing_without_acknowledgement(
    make_watched, settings, key_prefix
):
    watched = make_watched("valkey")
    locks = watched.locks(settings, key_prefix, **{**PATIENT, "TTL": 15})  # Nothing is to end.
    with at_work() as lockers:
        try:
            watched.ask(watched.sentinels[0], "FAILOVER", SERVICE, "COORDINATED")
        except redis.ResponseError as error:
            pytest.skip(f"these sentinels coordinate no failover: {error}")
        locks.redis = watched.client(watched.await_failover())
        failed_over = time.monotonic()
        wait_until(lambda: lockers.since(failed_over) >= 20)
    lockers.check()
    assert lockers.errors == []


@pytest.mark.proves("R13")
def test_an_old_master_that_comes_back_to_life_is_never_asked(make_watched, settings, key_prefix):
    """It was only frozen: connections to it are open, and a command on one of them unanswered."""
    watched = make_watched("valkey")
    locks = watched.locks(settings, key_prefix, **PATIENT)
    with Blocking() as threads, InLoop() as tasks:
        for caller in (threads, tasks):
            assert not caller.run(caller.way.locked(distributed_lock(NAME)))
        old = watched.master
        with watched.in_a_hurry():
            old.pause()
            acquired = [
                (lock, caller.begin(lock))
                for caller, lock in [
                    (threads, distributed_lock("a")),
                    (tasks, distributed_lock("b")),
                ]
            ]
            locks.redis = watched.client(watched.await_failover())
        for lock, future in acquired:
            assert future.result(HUNG)
            assert is_held_by(locks, lease_of(lock))
        old.resume()
        # What was sent before it stood still is answered now, to nobody.
        wait_until(lambda: old.client().ping())
        asked = commands_run(old)
        for caller in (threads, tasks):
            lock = distributed_lock(caller.way.name)
            assert caller.acquire(lock)
            assert is_held_by(locks, lease_of(lock))
            caller.release(lock)
        assert commands_run(old) == asked


@pytest.mark.proves("R13")
def test_a_sentinel_that_slept_through_the_failover_is_outvoted(
    make_watched, make_server, settings, key_prefix
):
    """As when a machine with a master and a sentinel is started anew: both think as before."""
    watched = make_watched("valkey")
    locks = watched.locks(settings, key_prefix, **PATIENT)
    locks.configure(**watched.setting(**UNHASTY))
    with watched.in_a_hurry():
        watched.master.kill()
        locks.redis = watched.client(watched.await_failover())
    # One that never learns better, whatever the others say.
    former = make_server("valkey")
    sleeper = Sentinel("valkey", f"sentinel monitor {SERVICE} {former.host} {former.port} 2")
    with sleeper:
        awake = watched.sentinels[:2]
        addresses = [f"redis://{one.host}:{one.port}" for one in (sleeper, *awake)]
        for number in range(8):  # Each backend asks them in another order.
            locks.configure(LOCATION=addresses)
            lock = distributed_lock(f"{NAME} {number}")
            assert lock.acquire()
            assert is_held_by(locks, lease_of(lock))
            lock.release()
        # And alone it is not believed by those who know better.
        for one in (*awake, watched.master):
            one.kill()
        with pytest.raises(LockUnavailable, match="most of them have named"):
            distributed_lock(NAME, wait=0, ttl=6).acquire()
    assert commands_run(former) == 0


@pytest.fixture
def disagreeing(make_watched, make_server, settings, key_prefix):
    """One of three sentinels was told anew, and all count the same failovers: none.

    The topology, the other two sentinels, the locks, and the master of the one apart.
    """
    watched = make_watched("valkey")
    locks = watched.locks(settings, key_prefix, **PATIENT)
    locks.configure(**watched.setting(**UNHASTY))
    other = make_server("valkey")
    *most, apart = watched.sentinels
    watched.ask(apart, "REMOVE", SERVICE)
    watched.ask(apart, "MONITOR", SERVICE, other.host, str(other.port), "2")
    return watched, most, locks, other


@pytest.mark.proves("P1", "R13")
def test_of_sentinels_that_name_different_masters_the_majority_is_believed_or_nobody(disagreeing):
    watched, most, locks, other = disagreeing
    with Blocking() as threads, InLoop() as tasks:
        for number in range(8):  # Each backend asks them in another order.
            backends.reset()
            for caller in (threads, tasks):
                lock = distributed_lock(f"{caller.way.name} {number}")
                assert caller.acquire(lock)
                assert is_held_by(locks, lease_of(lock))
                caller.release(lock)
        # Those who know the majority's master do not believe the one that is left, ...
        for one in (*most, watched.master):
            one.kill()
        for caller in (threads, tasks):
            with pytest.raises(LockUnavailable, match="most of them have named"):
                caller.acquire(distributed_lock(NAME, wait=0, ttl=6))
        # ... and of two nobody believes either.
        most[0].start()
        for _ in range(4):
            backends.reset()
            for caller in (threads, tasks):
                with pytest.raises(LockUnavailable, match="name different masters"):
                    caller.acquire(distributed_lock(NAME, wait=0, ttl=6))
    assert commands_run(other) == 0


@pytest.mark.proves("P1", "R13")
def test_a_listener_does_not_believe_the_one_sentinel_that_names_another_master(
    disagreeing, monkeypatch
):
    watched, *_ = disagreeing
    apart = watched.sentinels[-1]
    learned = []
    learn = MasterDialer.learn

    def noting(dialer, master, asked):
        learned.append(master)
        return learn(dialer, master, asked)

    monkeypatch.setattr(MasterDialer, "learn", noting)

    def ours():
        clients = watched.master.client().client_list()
        return {one["id"] for one in clients if one["cmd"].startswith("eval")}

    def listens():
        if not listeners(apart):
            backends.reset()
            with distributed_lock(NAME):
                wait_until(lambda: any(map(listeners, watched.sentinels)))
        return bool(listeners(apart))

    wait_until(listens)
    connections = ours()
    assert connections
    learned.clear()
    wait_until(lambda: len(learned) >= 2)
    assert {master.port for master in learned} == {watched.master.port}
    assert ours() == connections


@pytest.mark.proves("P1", "R13")
def test_sentinels_that_are_told_anew_which_server_is_the_master_are_followed(
    make_watched, settings, key_prefix
):
    """They count failovers from 0 then, and this process has seen one. The old master lives on."""
    watched = make_watched()
    locks = watched.locks(settings, key_prefix, **PATIENT)
    watched.fail_over()
    locks.redis = watched.client(watched.await_failover())
    wait_until(watched.is_settled)
    with Blocking() as threads, InLoop() as tasks:
        lock = distributed_lock(NAME, ttl=6)
        for caller in (threads, tasks):
            wait_until(lambda caller=caller: is_asked_by(caller, watched.master))
        assert threads.acquire(lock)
        lease = lease_of(lock)
        wait_until(lambda: lease.renewals)  # So all connections are there, and none is dialed.
        # The first master may not know yet that it is a replica now.
        successor = wait_until(lambda: next(filter(watched.is_in_step, watched.replicas), None))
        await_copies(watched.master, [successor])
        for sentinel in watched.sentinels:  # All of them first: they would correct each other.
            watched.ask(sentinel, "REMOVE", SERVICE)
        watched.client(successor).replicaof("NO", "ONE")
        for sentinel in watched.sentinels:
            watched.ask(sentinel, "MONITOR", SERVICE, successor.host, str(successor.port), "2")
        for caller in (threads, tasks):
            wait_until(lambda caller=caller: is_asked_by(caller, successor))
        locks.redis = watched.client(successor)
        assert is_held_by(locks, lease)
        threads.release(lock)


# --- acknowledgement -----------------------------------------------------------------------------


def behind_black_hole(watched, make_proxy, locks):
    """Let the replicas hear nothing more of their master, without knowing it."""
    proxies = []
    for replica in watched.replicas:
        proxy = make_proxy(watched.master)
        watched.client(replica).replicaof(proxy.host, proxy.port)
        proxies.append(proxy)
    locks.redis.set("written", 1, ex=60)
    wait_until(lambda: locks.redis.wait(2, 100) == 2)
    for proxy in proxies:
        proxy.blackhole()


@pytest.mark.proves("P1", "R11", "N2")
@pytest.mark.parametrize("acknowledged", [0, 1])
def test_r11_a_grant_that_no_replica_has_counts_only_without_acknowledgement(
    acknowledged, make_watched, make_proxy, settings, key_prefix
):
    # Sentinels would connect the replicas anew after their failover timeout.
    watched = make_watched("valkey", failover_timeout=30)
    options = {**PATIENT, "TTL": 60, "UNAVAILABLE_AFTER": 0}
    locks = watched.locks(settings, key_prefix, REPLICAS_ACK=acknowledged, **options)
    if acknowledged:  # Each try waits as long.
        locks.configure(**watched.setting(socket_timeout=1))
    behind_black_hole(watched, make_proxy, locks)
    first, second = distributed_lock(NAME, wait=0), distributed_lock(NAME, wait=0)
    if acknowledged:
        with pytest.raises(LockUnavailable):
            Blocking().acquire(first)
    else:
        assert Blocking().acquire(first)
    with watched.in_a_hurry():
        watched.master.kill()
        watched.await_failover()
    backends.reset()
    locks.configure(REPLICAS_ACK=0)  # The other replica may not have found its way yet.
    assert Blocking().begin(second).result(HUNG)
    holders = [lease for lock in (first, second) if (lease := lease_of(lock)) and lease.held]
    assert len(holders) == (1 if acknowledged else 2)


# --- sentinels that do not answer ----------------------------------------------------------------


def test_dead_and_silent_sentinels_cost_no_more_than_their_share(
    make_watched, settings, key_prefix
):
    watched = make_watched("valkey")
    # The operation timeout is 2 s; of that the only one that is alive has little.
    watched.locks(settings, key_prefix, TTL=6, WAIT=0, UNAVAILABLE_AFTER=HUNG)
    dead, silent, alive = watched.sentinels
    dead.kill()
    silent.pause()
    with Blocking() as threads, InLoop() as tasks:
        for number in range(3):  # Each backend asks them in another order.
            backends.reset()
            for caller in (threads, tasks):
                lock = distributed_lock(f"{caller.way.name} {number}", wait=HUNG)
                with takes(at_most=2):
                    assert caller.acquire(lock)
        alive.pause()
        backends.reset()
        at_once = [caller.begin(distributed_lock(NAME)) for caller in (threads, tasks)]
        for future in at_once:
            with takes(at_most=4), pytest.raises(LockUnavailable) as caught:
                future.result(HUNG)
            for sentinel in watched.sentinels:
                assert f"{sentinel.host}:{sentinel.port}" in str(caught.value)


@pytest.mark.proves("P1", "R13")
def test_silent_sentinels_are_asked_at_each_dial_until_a_majority_was_heard(disagreeing):
    """Else the one that was told anew would be believed for as long as they count as silent."""
    _, most, locks, other = disagreeing
    for begin in (Blocking, InLoop):
        backends.reset()
        for one in most:
            one.kill()
        with begin() as caller:  # There is nobody else to believe.
            caller.acquire(distributed_lock(f"believing {begin.__name__}"))
        before = commands_run(other)
        assert before
        for one in most:
            one.start()
        backend = backends["default"]
        assert isinstance(backend, SentinelBackend)
        backend._pool.close()
        with begin() as caller:
            lock = distributed_lock(f"knowing {begin.__name__}")
            assert caller.acquire(lock)
            assert is_held_by(locks, lease_of(lock))
            caller.release(lock)
        assert commands_run(other) == before


def test_it_listens_to_another_sentinel_when_one_falls_silent(make_watched, settings, key_prefix):
    watched = make_watched("valkey")
    watched.locks(settings, key_prefix, **PATIENT)
    with distributed_lock(NAME):
        pass
    wait_until(lambda: any(map(listeners, watched.sentinels)))
    listened_to = next(one for one in watched.sentinels if listeners(one))
    listened_to.pause()
    others = [one for one in watched.sentinels if one is not listened_to]
    wait_until(lambda: any(map(listeners, others)))


def listeners(sentinel):
    """How many clients wait to be told of a failover."""
    return sum(int(one["sub"]) for one in sentinel.client().client_list())


def test_a_listener_that_could_not_start_is_tried_again_with_the_next_connection(
    watched, settings, key_prefix, monkeypatch
):
    watched.locks(settings, key_prefix, **PATIENT)
    wait_until(lambda: not listening_threads())  # Those of other tests may be about to end.
    start, tries = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "redislock-sentinel":
            tries.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with distributed_lock(NAME):
            assert tries
            assert not listening_threads()
    found = backends["default"]
    assert isinstance(found, SentinelBackend)
    found._pool.close()  # As when the server has closed them.
    with distributed_lock(NAME):
        assert listening_threads()


def test_no_listener_is_left_when_no_connection_is(watched, settings, key_prefix):
    watched.locks(settings, key_prefix)
    with distributed_lock(NAME):
        assert listening_threads()
    backends.reset()
    wait_until(lambda: not listening_threads())


def listening_threads():
    return [one.name for one in threading.enumerate() if one.name == "redislock-sentinel"]


def test_a_forked_child_has_a_listener_of_its_own(watched, settings, key_prefix, spawn):
    watched.locks(settings, key_prefix)
    child = spawn(lock_in_fork)
    assert child.read() == [["redislock-sentinel"], ["redislock-sentinel"]]


def lock_in_fork():
    """In a child: lock, and lock again in a child of that; tell of the threads in both."""
    from tests.support.faults import in_fork

    def locking():
        with distributed_lock(NAME):
            return listening_threads()

    say([locking(), in_fork(locking)])


# --- who may ask ---------------------------------------------------------------------------------


def test_sentinels_and_servers_may_have_passwords_of_their_own(make_watched, settings, key_prefix):
    watched = make_watched("valkey", password="of-data", sentinel_password="of-sentinels")
    locks = watched.locks(settings, key_prefix, TTL=12, WAIT=0)
    with Blocking() as threads, InLoop() as tasks:
        for caller in (threads, tasks):
            lock = distributed_lock(NAME)
            assert caller.acquire(lock)
            assert is_held_by(locks, lease_of(lock))
            caller.release(lock)
        for wrong in (
            {"sentinel_kwargs": {"password": "a-wrong-one"}},
            {"sentinel_kwargs": {}},
            {"password": "a-wrong-one"},
        ):
            locks.configure(**watched.setting(**wrong))
            for caller in (threads, tasks):
                with takes(at_most=8), pytest.raises(LockUnavailable) as caught:
                    caller.acquire(distributed_lock(NAME))
                said = str(caught.value)
                assert not any(one in said for one in ("of-data", "of-sentinels", "a-wrong-one"))


def test_sentinels_and_servers_may_speak_tls(make_watched, settings, key_prefix):
    watched = make_watched("redis", tls=True)
    locks = watched.locks(settings, key_prefix)
    with Blocking() as threads, InLoop() as tasks:
        held = [(caller, distributed_lock(caller.way.name, ttl=60)) for caller in (threads, tasks)]
        for caller, lock in held:
            assert caller.acquire(lock)
        await_copies(watched.master, watched.replicas)
        watched.ask(watched.sentinels[0], "FAILOVER", SERVICE)
        locks.redis = watched.client(watched.await_failover())
        for caller, lock in held:
            wait_until(lambda caller=caller: is_asked_by(caller, watched.master))
            assert is_held_by(locks, lease_of(lock))
            caller.release(lock)
            wait_until(lambda lock=lock: is_left_clean(locks, lock.name))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"service_name": "nobody"}, r"knows no 'nobody'; check OPTIONS\['service_name'\]"),
        ({"db": 99}, "DB index is out of range"),
    ],
)
def test_what_the_sentinels_or_servers_do_not_know_is_refused_at_once(
    options, says, caller, watched, settings, key_prefix
):
    locks = watched.locks(settings, key_prefix)
    locks.configure(**watched.setting(**options))
    with takes(at_most=1), pytest.raises(LockUnavailable, match=says):
        caller.acquire(distributed_lock(NAME, wait=20))


def test_an_address_that_is_no_sentinel_is_refused_at_once(caller, watched, settings, key_prefix):
    locks = watched.locks(settings, key_prefix)
    locks.configure(LOCATION=[f"redis://{one.host}:{one.port}" for one in watched.servers])
    with takes(at_most=1), pytest.raises(LockUnavailable, match="this is no sentinel; LOCATION"):
        caller.acquire(distributed_lock(NAME, wait=20))


@pytest.mark.proves("R13")
def test_a_server_that_says_it_is_no_master_is_not_asked(caller, watched, settings, key_prefix):
    """As for a moment in a failover: sentinels name who is about to become the master."""
    replica = watched.replicas[0]
    locks = watched.locks(settings, key_prefix, UNAVAILABLE_AFTER=0)
    with Sentinel(replica.kind, f"sentinel monitor other {replica.host} {replica.port} 1") as one:
        locks.configure(**watched.setting(service_name="other", **UNHASTY))
        locks.configure(LOCATION=[f"redis://{one.host}:{one.port}"])
        with pytest.raises(LockUnavailable, match="call the master: it says that it is no master"):
            caller.acquire(distributed_lock(NAME, wait=0))


def test_one_wrong_address_among_sentinels_does_no_harm(caller, watched, settings, key_prefix):
    locks = watched.locks(settings, key_prefix)
    right = watched.setting()["LOCATION"]
    locks.configure(LOCATION=[watched.master.url.removesuffix("/0"), *right[:1]])
    assert isinstance(backends["default"], SentinelBackend)
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    caller.release(lock)
