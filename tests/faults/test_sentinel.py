"""What sentinels say of their master: at a failover, if they disagree, and if they are silent."""

import threading

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock, take_up
from django_redislock.backends.registry import backends
from django_redislock.backends.sentinel import MasterDialer
from tests.support.faults import in_fork, lease_of, takes
from tests.support.servers import Sentinel
from tests.support.stored import NAME, is_held_by, is_left_clean
from tests.support.topologies import SERVICE, await_copies
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop, in_thread

pytestmark = pytest.mark.slow

# Of which a sentinel has a small part only to say hello.
UNHASTY = {"socket_timeout": 20}


def commands_run(server):
    """How many scripts a server has been asked to run."""
    stats = server.client().info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def await_asked(caller, server):
    """Return once a server is asked when somebody looks at a lock."""

    def is_asked():
        asked = commands_run(server)
        caller.run(caller.way.locked(distributed_lock("probe")))
        return commands_run(server) > asked

    wait_until(is_asked)


def use(caller, locks, name=NAME):
    """Take a lock on the server that the test takes for the master."""
    with caller.block(distributed_lock(name)) as lease:
        assert is_held_by(locks, lease)


def addresses(sentinels):
    return [f"redis://{one.host}:{one.port}" for one in sentinels]


# --- a server that was the master ----------------------------------------------------------------


@pytest.mark.proves("P1")
def test_a_baton_that_the_replica_knows_is_taken_up_there_and_once(start):
    watched, _ = start("sentinels", "redis")
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


@pytest.mark.proves("R7", "R13")
@pytest.mark.parametrize(("kind", "tls"), [("valkey", False), ("redis", True)], ids=["", "TLS"])
def test_after_a_planned_failover_nothing_is_lost_and_the_old_master_is_never_asked(
    kind, tls, start, callers
):
    """It goes on as a master for ten seconds, and so would all who are connected to it."""
    watched, locks = start("sentinels", kind, tls=tls, WAIT=0, OPTIONS=UNHASTY)
    handles = [(caller, distributed_lock(caller.way.name, ttl=60)) for caller in callers]
    for caller, lock in handles:
        assert caller.acquire(lock)
    await_copies(watched.master, watched.replicas)
    old = watched.master
    watched.fail_over()
    locks.redis = watched.client(watched.await_failover())
    for caller in callers:
        await_asked(caller, watched.master)
    assert old.client().role()[0] == b"master"
    asked = commands_run(old)
    for caller, lock in handles:
        assert is_held_by(locks, lease_of(lock))
        caller.renew(lease_of(lock))
        assert caller.begin(distributed_lock(lock.name)).result(HUNG) is False
        assert caller.acquire(distributed_lock(f"{lock.name} anew"))
        caller.release(lock)
        wait_until(lambda lock=lock: is_left_clean(locks, lock.name))
    assert commands_run(old) == asked
    assert old.client().role()[0] == b"master"


@pytest.mark.proves("R13")
def test_an_old_master_that_comes_back_to_life_is_never_asked(start, callers):
    """It was only frozen: connections to it are open, and a command on one of them unanswered."""
    watched, locks = start("sentinels")
    for caller in callers:
        assert not caller.run(caller.way.locked(distributed_lock(NAME)))
    old, handles = watched.master, [distributed_lock("a"), distributed_lock("b")]
    with watched.in_a_hurry():
        old.pause()
        acquired = [caller.begin(lock) for caller, lock in zip(callers, handles, strict=True)]
        locks.redis = watched.client(watched.await_failover())
    for lock, future in zip(handles, acquired, strict=True):
        assert future.result(HUNG)
        assert is_held_by(locks, lease_of(lock))
    old.resume()
    # What was sent before it stood still is answered now, to nobody.
    wait_until(lambda: old.client().ping())
    asked = commands_run(old)
    for caller in callers:
        use(caller, locks)
    assert commands_run(old) == asked


@pytest.mark.proves("R13")
def test_a_server_that_says_it_is_no_master_is_not_asked(caller, watched, settings, key_prefix):
    """As for a moment in a failover: sentinels name who is about to become the master."""
    replica = watched.replicas[0]
    locks = watched.locks(settings, key_prefix, UNAVAILABLE_AFTER=0)
    with Sentinel(replica.kind, f"sentinel monitor other {replica.host} {replica.port} 1") as one:
        locks.configure(**watched.setting(service_name="other", **UNHASTY))
        locks.configure(LOCATION=addresses([one]))
        with pytest.raises(LockUnavailable, match="call the master: it says that it is no master"):
            caller.acquire(distributed_lock(NAME, wait=0))


# --- sentinels that disagree ---------------------------------------------------------------------


@pytest.mark.proves("R13")
def test_a_sentinel_that_slept_through_the_failover_is_outvoted(start, make_server):
    """As when a machine with a master and a sentinel is started anew: both think as before."""
    watched, locks = start("sentinels", OPTIONS=UNHASTY)
    with watched.in_a_hurry():
        watched.master.kill()
        locks.redis = watched.client(watched.await_failover())
    # One that never learns better, whatever the others say.
    former = make_server("valkey")
    sleeper = Sentinel("valkey", f"sentinel monitor {SERVICE} {former.host} {former.port} 2")
    with sleeper:
        awake = watched.sentinels[:2]
        for number in range(8):  # Each backend asks them in another order.
            locks.configure(LOCATION=addresses([sleeper, *awake]))
            use(Blocking(), locks, f"{NAME} {number}")
        # And alone it is not believed by those who know better.
        for one in (*awake, watched.master):
            one.kill()
        with pytest.raises(LockUnavailable, match="most of them have named"):
            distributed_lock(NAME, wait=0, ttl=6).acquire()
    assert commands_run(former) == 0


@pytest.fixture
def disagreeing(start, make_server):
    """One of three sentinels was told anew, and all count the same failovers: none.

    The topology, the other two sentinels, the locks, and the master of the one apart.
    """
    watched, locks = start("sentinels", OPTIONS=UNHASTY)
    other = make_server("valkey")
    *most, apart = watched.sentinels
    watched.ask(apart, "REMOVE", SERVICE)
    watched.ask(apart, "MONITOR", SERVICE, other.host, str(other.port), "2")
    return watched, most, locks, other


@pytest.mark.proves("P1", "R13")
def test_of_sentinels_that_name_different_masters_the_majority_is_believed_or_nobody(
    disagreeing, callers
):
    watched, most, locks, other = disagreeing

    def nobody_is_believed(says):
        for caller in callers:
            with pytest.raises(LockUnavailable, match=says):
                caller.acquire(distributed_lock(NAME, wait=0, ttl=6))

    for _ in range(8):  # Each backend asks them in another order.
        backends.reset()
        for caller in callers:
            use(caller, locks)
    # Those who know the majority's master do not believe the one that is left, ...
    for one in (*most, watched.master):
        one.kill()
    nobody_is_believed("most of them have named")
    # ... and of two nobody believes either.
    most[0].start()
    for _ in range(4):
        backends.reset()
        nobody_is_believed("name different masters")
    assert commands_run(other) == 0


@pytest.mark.proves("P1", "R13")
def test_a_listener_does_not_believe_the_one_sentinel_that_names_another_master(
    disagreeing, monkeypatch
):
    watched, *_ = disagreeing
    apart = watched.sentinels[-1]
    learned, learn = [], MasterDialer.learn

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
        backends["default"]._pool.close()
        with begin() as caller:
            use(caller, locks)
        assert commands_run(other) == before


@pytest.mark.proves("P1", "R13")
def test_sentinels_that_are_told_anew_which_server_is_the_master_are_followed(start, callers):
    """They count failovers from 0 then, and this process has seen one. The old master lives on."""
    watched, locks = start("sentinels")
    watched.fail_over()
    locks.redis = watched.client(watched.await_failover())
    wait_until(watched.is_settled)
    threads, _ = callers
    for caller in callers:
        await_asked(caller, watched.master)
    with threads.block(distributed_lock(NAME, ttl=6)) as lease:
        wait_until(lambda: lease.renewals)  # So all connections are there, and none is dialed.
        # The first master may not know yet that it is a replica now.
        successor = wait_until(lambda: next(filter(watched.is_in_step, watched.replicas), None))
        await_copies(watched.master, [successor])
        for sentinel in watched.sentinels:  # All of them first: they would correct each other.
            watched.ask(sentinel, "REMOVE", SERVICE)
        watched.client(successor).replicaof("NO", "ONE")
        for sentinel in watched.sentinels:
            watched.ask(sentinel, "MONITOR", SERVICE, successor.host, str(successor.port), "2")
        for caller in callers:
            await_asked(caller, successor)
        locks.redis = watched.client(successor)
        assert is_held_by(locks, lease)


# --- acknowledgement -----------------------------------------------------------------------------


@pytest.mark.proves("P1", "R11", "N2")
@pytest.mark.parametrize("acknowledged", [0, 1])
def test_r11_a_grant_that_no_replica_has_counts_only_without_acknowledgement(
    acknowledged, start, make_proxy
):
    # Sentinels would connect the replicas anew after their failover timeout. Each try waits as long
    # as the timeout of the socket.
    patience = {"OPTIONS": {"socket_timeout": 1}} if acknowledged else {}
    watched, locks = start(
        "sentinels", failover_timeout=30, TTL=60, REPLICAS_ACK=acknowledged, **patience
    )
    proxies = [make_proxy(watched.master) for _ in watched.replicas]
    for replica, proxy in zip(watched.replicas, proxies, strict=True):
        watched.client(replica).replicaof(proxy.host, proxy.port)
    locks.redis.set("written", 1, ex=60)
    wait_until(lambda: locks.redis.wait(2, 100) == 2)
    for proxy in proxies:  # The replicas hear nothing more of their master, without knowing it.
        proxy.blackhole()
    first, second = distributed_lock(NAME, wait=0), distributed_lock(NAME, wait=0)
    if acknowledged:
        with pytest.raises(LockUnavailable, match="REPLICAS_ACK"):
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


def test_dead_and_silent_sentinels_cost_no_more_than_their_share(start, callers):
    # The operation timeout is 2 s; of that the only one that is alive has little.
    watched, _ = start("sentinels", TTL=6, WAIT=0)
    dead, silent, alive = watched.sentinels
    dead.kill()
    silent.pause()
    for number in range(3):  # Each backend asks them in another order.
        backends.reset()
        for caller in callers:
            lock = distributed_lock(f"{caller.way.name} {number}", wait=HUNG)
            with takes(at_most=2):
                assert caller.acquire(lock)
    alive.pause()
    backends.reset()
    at_once = [caller.begin(distributed_lock(NAME)) for caller in callers]
    for future in at_once:
        with takes(at_most=4), pytest.raises(LockUnavailable) as caught:
            future.result(HUNG)
        for sentinel in watched.sentinels:
            assert f"{sentinel.host}:{sentinel.port}" in str(caught.value)


def listeners(sentinel):
    """How many clients wait to be told of a failover."""
    return sum(int(one["sub"]) for one in sentinel.client().client_list())


def listening_threads():
    return [one.name for one in threading.enumerate() if one.name == "redislock-sentinel"]


def test_it_listens_to_another_sentinel_when_one_falls_silent(start):
    watched, _ = start("sentinels")
    with distributed_lock(NAME):
        pass
    wait_until(lambda: any(map(listeners, watched.sentinels)))
    listened_to = next(one for one in watched.sentinels if listeners(one))
    listened_to.pause()
    others = [one for one in watched.sentinels if one is not listened_to]
    wait_until(lambda: any(map(listeners, others)))


def test_a_listener_that_could_not_start_is_tried_again_with_the_next_connection(
    watched, settings, key_prefix, monkeypatch
):
    watched.locks(settings, key_prefix, TTL=10, WAIT=HUNG)
    wait_until(lambda: not listening_threads())  # Those of other tests may be about to end.
    begin, tries = threading.Thread.start, []

    def refuse(thread):
        if thread.name == "redislock-sentinel":
            tries.append(thread)
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with distributed_lock(NAME):
            assert tries
            assert not listening_threads()
    backends["default"]._pool.close()  # As when the server has closed them.
    with distributed_lock(NAME):
        assert listening_threads()


def test_a_forked_child_has_a_listener_of_its_own_and_none_is_left_when_no_connection_is(
    watched, settings, key_prefix
):
    watched.locks(settings, key_prefix)

    def locking():
        with distributed_lock(NAME):
            return listening_threads()

    wait_until(lambda: not listening_threads())
    assert locking() == in_fork(locking) == ["redislock-sentinel"]
    backends.reset()
    wait_until(lambda: not listening_threads())


# --- who may ask ---------------------------------------------------------------------------------


def test_sentinels_and_servers_may_have_passwords_of_their_own(start, callers):
    words = {"password": "of-data", "sentinel_password": "of-sentinels"}
    watched, locks = start("sentinels", **words, TTL=12, WAIT=0, UNAVAILABLE_AFTER=None)
    for caller in callers:
        use(caller, locks)
    for wrong in (
        {"sentinel_kwargs": {"password": "a-wrong-one"}},
        {"sentinel_kwargs": {}},
        {"password": "a-wrong-one"},
    ):
        locks.configure(**watched.setting(**wrong))
        for caller in callers:
            with takes(at_most=8), pytest.raises(LockUnavailable) as caught:
                caller.acquire(distributed_lock(NAME))
            said = str(caught.value)
            assert not any(one in said for one in (*words.values(), "a-wrong-one"))
