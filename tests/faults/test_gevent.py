"""Under gevent and eventlet a lock belongs to a greenlet, and the watchdog is one too."""

import threading
import time

import pytest

from django_redislock import LockMisuse, distributed_lock
from tests.support.backends import PATIENT
from tests.support.faults import in_fork
from tests.support.others import waiters as waiters_of
from tests.support.processes import say
from tests.support.waiting import HUNG

pytest.importorskip("gevent")

EVENTLET = "import eventlet; eventlet.monkey_patch()"
PATCH = "from gevent import monkey; monkey.patch_all()"


def serve_greenlets_in_turn():
    import gevent

    served = []

    def wait(number):
        with distributed_lock("lottery", wait=HUNG):
            served.append(number)

    with distributed_lock("lottery"):
        waiters = []
        for number in range(5):
            waiters.append(gevent.spawn(wait, number))
            waiting = len(waiters)
            while waiters_of("lottery") < waiting:
                gevent.sleep(0.01)
    gevent.joinall(waiters, timeout=HUNG)
    say(served)


def work_without_ever_yielding():
    lock = distributed_lock("lottery", ttl=2)
    assert lock.acquire()
    lease = lock.lease
    while lease.held:
        pass
    say(lease.lost_reason)


def refuse_a_second_acquire_of_the_same_greenlet():
    import gevent

    with distributed_lock("lottery"):
        try:
            distributed_lock("lottery").acquire()
        except LockMisuse:
            other = gevent.spawn(distributed_lock("lottery", wait=0).acquire)
            say(other.get(timeout=HUNG))


def wait_for_a_greenlet_that_is_renewed():
    served = []

    def wait(number):
        with distributed_lock("lottery", wait=HUNG):
            served.append(number)

    with distributed_lock("lottery", ttl=6) as lease:
        waiters = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
        for waiter in waiters:
            waiter.start()
        while lease.held and not lease.renewals:
            time.sleep(0.05)
        was_held = lease.held
    for waiter in waiters:
        waiter.join(HUNG)
    say([was_held, sorted(served)])


def patch_late_and_acquire(prelude, is_used_before):
    """As a worker of `gunicorn -k gevent --preload` does, whose master has imported Django."""
    if is_used_before:
        with distributed_lock("tombola"):
            pass

    def work():
        exec(prelude)
        said = []
        for handle in (distributed_lock("lottery"), distributed_lock("a", "b", reentrant=True)):
            try:
                handle.acquire()
            except LockMisuse as error:
                said.append(str(error))
        return said

    say(in_fork(work))


@pytest.fixture
def locks(locks):
    """A server that stands still for a moment is not given up, however short the ttl."""
    return locks.configure(OPTIONS=PATIENT)


@pytest.mark.proves("P6")
def test_greenlets_are_served_in_turn(locks, spawn):
    assert spawn(serve_greenlets_in_turn, prelude=PATCH).read() == [0, 1, 2, 3, 4]


@pytest.mark.proves("P5", "N5")
def test_a_greenlet_that_never_yields_learns_of_its_loss_by_the_deadline(locks, spawn):
    assert spawn(work_without_ever_yielding, prelude=PATCH).read() == "expired"


def test_a_lease_belongs_to_the_greenlet(locks, spawn):
    # The same greenlet would wait for itself; another one is told that the lock is busy.
    child = spawn(refuse_a_second_acquire_of_the_same_greenlet, prelude=PATCH)
    assert child.read() is False


@pytest.mark.parametrize(
    ("where", "prelude"),
    [("server", PATCH), ("quorum", PATCH), ("quorum", EVENTLET)],
    ids=["server", "quorum", "quorum, eventlet"],
)
def test_the_watchdog_renews_and_greenlets_ask_while_others_go_on(
    where, prelude, locks, make_quorum, spawn
):
    if where == "quorum":
        make_quorum()
    child = spawn(wait_for_a_greenlet_that_is_renewed, prelude=prelude)
    assert child.read() == [True, [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("is_used_before", [False, True])
@pytest.mark.parametrize("prelude", [PATCH, EVENTLET], ids=["gevent", "eventlet"])
def test_a_patch_that_comes_late_is_refused_by_the_place_to_patch(
    prelude, is_used_before, locks, spawn
):
    said = spawn(patch_late_and_acquire, prelude, is_used_before).read()
    assert len(said) == 2
    assert all("monkey.patch_all()` in gunicorn.conf.py" in one for one in said)
