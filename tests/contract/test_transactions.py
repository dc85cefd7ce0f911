"""Locks in open transactions: the release waits for the commit, or the log says that it did not.

The databases are real: files of SQLite, each connection of each thread its own.
"""

from __future__ import annotations

import gc
import linecache
import os
import re
import textwrap
import unittest
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections
from django.db.backends.signals import connection_created
from django.db.transaction import (
    atomic,
    non_atomic_requests,
    on_commit,
    rollback,
    set_autocommit,
    set_rollback,
)
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase
from django.urls import path

from django_redislock import LockLost, LockMisuse, distributed_lock, single_instance_task
from django_redislock.signals import lock_released
from django_redislock.transactions import note_connection
from tests.contract.test_signals import received
from tests.support.orders import AUDIT, SHOP, OnPurpose, in_thread_of_its_own, order, orders
from tests.support.others import queued
from tests.support.processes import python
from tests.support.stored import NAME, is_left_clean, keys_of
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = pytest.mark.usefixtures("databases")


@pytest.fixture
def locks(locks):
    """Leases that outlast a pause of the machine, on a server, which has none at the end."""
    yield locks.on(locks.server, TTL=10, WAIT=0)
    assert is_left_clean(locks)


def kept(name=NAME, **options):
    return distributed_lock(name, release_on_commit=True, **options)


def use(name=NAME):
    with kept(name) as lease:
        pass
    return lease


def is_held(name=NAME):
    return distributed_lock(name).locked()


def somebody_gets_it(name=NAME):
    """Whether another thread gets the lock at once."""

    def get():
        lock = distributed_lock(name, wait=0)
        if got := lock.acquire():
            lock.release()
        return got

    return in_thread(get).result(HUNG)


# The fault and the cure


def order_the_first(lock, found, work):
    """What a new user writes. *found* gets the number of orders that there were."""
    with atomic(using=SHOP):
        with lock:
            found.append(orders())
            if not found[-1]:
                order()
        work()


@pytest.mark.parametrize("on_commit", [True, False])
def test_only_with_release_on_commit_the_next_holder_reads_what_was_committed(on_commit, locks):
    found, others = [], []

    def order_one(work=int):
        lock = distributed_lock(NAME, wait=HUNG, release_on_commit=on_commit)
        order_the_first(lock, found, work)

    def somebody_orders_too():
        others.append(in_thread_of_its_own(order_one))
        if on_commit:
            wait_until(lambda: queued(locks) == 1)
        else:
            # Two such rows on any other database: SQLite has one writer at a time.
            assert isinstance(others[0].exception(HUNG), OperationalError)

    order_one(work=somebody_orders_too)
    others[0].exception(HUNG)
    assert found == ([0, 1] if on_commit else [0, 0])
    assert orders() == 1


# When it is released


def test_a_lock_that_ends_within_a_transaction_is_released_by_its_commit(place, databases):
    with atomic(using=SHOP):
        lease = use()
        assert is_held()
        assert lease.held
        assert not somebody_gets_it()
    assert not is_held()
    assert not lease.held


def in_a_block():
    with kept():
        order()


def by_hand():
    lock = kept()
    assert lock.acquire()
    lock.release()
    assert lock.lease is None
    with pytest.raises(LockMisuse, match="holds no lease"):
        lock.release()


@kept("{name}")
def by_a_decorator(name=NAME):
    assert is_held(name)


def by_a_block_that_fails():
    with suppress(OnPurpose), kept():
        raise OnPurpose


def in_an_inner_transaction():
    for savepoint in (True, False):
        with atomic(using=SHOP, savepoint=savepoint):
            use()
        assert is_held()


def in_an_inner_transaction_that_is_rolled_back():
    with suppress(OnPurpose), atomic(using=SHOP):
        with atomic(using=SHOP), kept():
            order()
        raise OnPurpose
    assert is_held()
    gc.collect()


def by_an_inner_acquire():
    with distributed_lock(NAME), kept(reentrant=True):
        pass


USES = [
    in_a_block,
    by_hand,
    by_a_decorator,
    by_a_block_that_fails,
    in_an_inner_transaction,
    in_an_inner_transaction_that_is_rolled_back,
    by_an_inner_acquire,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_however_it_was_used_it_ends_with_the_transaction(use, locks):
    with atomic(using=SHOP):
        use()
        assert is_held()


@pytest.mark.parametrize("end", ["commit", "exception", "rollback", "close"])
def test_however_the_transaction_ends_it_is_released(end, locks):
    with suppress(OnPurpose), atomic(using=SHOP):
        in_a_block()
        assert is_held()
        if end == "exception":
            raise OnPurpose
        if end == "rollback":
            set_rollback(True, using=SHOP)
        if end == "close":
            connections[SHOP].close()
            assert is_left_clean(locks)
            use()  # The block is still open, but the transaction is gone.
            assert is_left_clean(locks)
            raise OnPurpose
        assert is_held()
    assert is_left_clean(locks)
    assert orders() == (end == "commit")


def test_so_is_one_that_was_taken_before_the_transaction_began(locks):
    lock = kept()
    assert lock.acquire()
    with atomic(using=SHOP):
        lock.release()
        assert is_held()


def test_outside_of_a_transaction_it_is_released_at_once(locks):
    use()
    assert is_left_clean(locks)
    lock = kept()
    with atomic(using=SHOP):
        assert lock.acquire()
    assert is_held()
    lock.release()  # The connection has no transaction open now.


def test_it_waits_for_the_transactions_of_all_databases(locks):
    with atomic(using=AUDIT):
        with atomic(using=SHOP), kept():
            pass
        assert is_held()


def test_other_threads_transactions_do_not_count(locks):
    with atomic(using=SHOP):
        in_thread(use).result(HUNG)
        assert is_left_clean(locks)


@pytest.mark.waits
def test_it_is_renewed_until_then(locks):
    locks.configure(TTL=6)
    with atomic(using=SHOP):
        lease = use()
        wait_until(lambda: lease.renewals >= 2)
        assert lease.held


def fail():
    raise OnPurpose


def test_it_is_released_in_turn_with_other_callbacks_whether_they_fail(locks):
    found = []
    with atomic(using=SHOP):
        with kept():
            on_commit(lambda: found.append(is_held()), using=SHOP)
        on_commit(lambda: found.append(is_held()), using=SHOP)
    assert found == [True, False]
    # Django calls no callback after one that failed, but forgets them.
    with suppress(OnPurpose), atomic(using=SHOP):
        on_commit(fail, using=SHOP)
        use()


@pytest.mark.waits
@pytest.mark.parametrize("end", ["of its thread", "by the collector"])
def test_what_nobody_will_commit_lapses(end, locks, caplog):
    """The collector may run in the middle of an operation, so nothing is released there."""
    locks.configure(TTL=6)
    open_for_ever = []

    def begin_and_leave():
        open_for_ever.append(connections[SHOP])
        open_for_ever[0].inc_thread_sharing()
        atomic(using=SHOP).__enter__()
        use()

    def fail_and_stay():
        error = OnPurpose()
        error.args = (error,)  # Nothing but the collector can delete it, and what it refers to.
        raise error

    gc.disable()
    try:
        if end == "of its thread":
            in_thread(begin_and_leave).result(HUNG)
        else:
            with suppress(OnPurpose), atomic(using=SHOP):
                on_commit(fail_and_stay, using=SHOP)
                use()
            assert is_held()
            in_thread(gc.collect).result(HUNG)
    finally:
        gc.enable()
    wait_until(lambda: not is_held())
    assert "dropped without a release" in caplog.text
    for one in open_for_ever:
        one.close()


# What it means for success


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("others", [(), ("other",)], ids=len)
@pytest.mark.parametrize("again", [True, False])
def test_min_hold_counts_only_after_a_commit(commits, others, again, locks):
    def both(**options):
        return distributed_lock(NAME, *others, release_on_commit=True, **options)

    with suppress(OnPurpose), atomic(using=SHOP):
        with both(min_hold=60):
            pass
        if again:
            with both():
                pass
        if not commits:
            raise OnPurpose
    assert is_held() == commits  # It cools down.
    locks.redis.delete(keys_of(locks).lock)


def test_the_signal_comes_with_the_release(locks):
    with received(lock_released) as news:
        with atomic(using=SHOP):
            use()
            assert news == []
        with suppress(OnPurpose), atomic(using=SHOP):
            use()
            raise OnPurpose
    assert [one["success"] for one in news] == [True, False]


# Taken again, lost


@pytest.mark.parametrize("again", [{}, {"release_on_commit": True}, {"reentrant": True}], ids=str)
def test_its_transaction_takes_it_again_at_once(again, locks):
    with atomic(using=SHOP):
        lease = use()
        for _ in range(2):
            with distributed_lock(NAME, **again) as same:
                assert same is lease
                with pytest.raises(LockMisuse, match="holds it already"):
                    distributed_lock(NAME, wait=1).acquire()
        assert is_held()


def test_what_was_taken_again_may_end_after_the_commit(locks):
    again = distributed_lock(NAME)
    with atomic(using=SHOP):
        use()
        assert again.acquire()
    assert is_held()
    with pytest.raises(LockMisuse, match="holds it already"):
        distributed_lock(NAME, wait=1).acquire()
    again.release()


def test_a_loss_within_the_block_is_told_at_its_end(locks):
    def lose():
        with atomic(using=SHOP), kept() as lease:
            order()
            locks.redis.delete(keys_of(locks).lock)
            with suppress(LockLost):
                lease.ensure_held(verify=True)

    with pytest.raises(LockLost):
        lose()
    assert orders() == 0


def test_a_loss_after_the_block_is_logged_and_the_next_acquire_raises_it(locks, caplog):
    with atomic(using=SHOP):
        lease = use()
        locks.redis.delete(keys_of(locks).lock)
        with pytest.raises(LockLost):
            lease.ensure_held(verify=True)
        with pytest.raises(LockLost):
            kept().acquire()
    assert f"The transaction under lock {NAME!r} is over: The lease of" in caplog.text


# Autocommit off, so that no end of a block commits


@contextmanager
def committing_by_hand():
    """Have this thread commit to the shop by hand."""
    set_autocommit(False, using=SHOP)
    try:
        yield
    finally:
        rollback(using=SHOP)
        set_autocommit(True, using=SHOP)


@pytest.mark.parametrize("block", [nullcontext, lambda: atomic(using=SHOP)], ids=["no", "in one"])
def test_a_commit_by_hand_is_refused_before_anything_is_taken(block, locks):
    """Django calls the callbacks of on_commit() only when autocommit is switched on again."""
    with committing_by_hand(), block():
        with pytest.raises(LockMisuse, match=r"autocommit is off.* leave release_on_commit out"):
            kept().acquire()
        with pytest.raises(LockMisuse, match=f"the commit of database {SHOP!r}"), kept():
            pass
        assert is_left_clean(locks)
        with distributed_lock(NAME):
            pass
    use()


def test_a_connection_whose_settings_turn_it_off_is_refused_as_soon_as_it_is_used(locks):
    def connect():
        use()  # This thread has no connection to the shop.
        with pytest.raises(LockMisuse, match="released at once"), kept():
            order()
        assert is_left_clean(locks)
        rollback(using=SHOP)
        connections[SHOP].close()
        with pytest.raises(LockMisuse, match="AUTOCOMMIT"):
            kept().acquire()

    connections.settings[SHOP]["AUTOCOMMIT"] = False
    in_thread_of_its_own(connect).result(HUNG)


@pytest.mark.parametrize("nested", [False, True])
def test_what_is_switched_off_under_the_lock_is_told_with_the_release(nested, locks, caplog):
    lock = kept()
    assert lock.acquire()
    with committing_by_hand(), atomic(using=SHOP) if nested else nullcontext():
        with pytest.raises(LockMisuse, match="released at once"):
            lock.release()
        assert lock.lease is None
        assert is_left_clean(locks)
    with suppress(OnPurpose), ExitStack() as at_end, kept():
        at_end.enter_context(committing_by_hand())
        raise OnPurpose  # Which is not masked.
    assert "released at once" in caplog.text


def test_the_other_databases_still_end_it(locks):
    lock = kept()
    assert lock.acquire()
    with atomic(using=AUDIT):
        with committing_by_hand(), pytest.raises(LockMisuse):
            lock.release()
        assert is_held()


# Asynchronous code


async def test_async_code_is_told_to_use_it_where_the_transaction_is(locks):
    with pytest.raises(LockMisuse, match=r"await sync_to_async\(function\)\(\)"):
        await kept().aacquire()
    with pytest.raises(LockMisuse, match="blocking code"):

        @kept()
        async def refused() -> None: ...

    def in_a_transaction():
        try:
            with atomic(using=SHOP):
                use()
                return is_held()
        finally:
            connections[SHOP].close()

    assert await sync_to_async(in_a_transaction)()
    assert not await distributed_lock(NAME).alocked()


# What the log is told


def told(caplog):
    """The warnings about a release before the commit."""
    return [text for text in caplog.messages if "while a transaction is open" in text]


def test_a_release_before_the_commit_is_logged_once_for_each_place(locks, caplog):
    for _ in range(3):
        with atomic(using=SHOP):
            with distributed_lock(NAME):
                "this line"
            assert is_left_clean(locks)
    (warning,) = told(caplog)
    place = re.search(r"released at (.+):(\d+) while", warning)
    assert place[1] == __file__
    assert "this line" in linecache.getline(__file__, int(place[2]) + 1)
    assert "open the transaction under it, or pass release_on_commit=True" in warning
    assert "REDISLOCK['default']['RELEASE_BEFORE_COMMIT']" in warning
    assert "ATOMIC_REQUESTS" not in warning
    with atomic(using=SHOP), distributed_lock(NAME):
        pass
    assert len(told(caplog)) == 2


def test_a_decorator_is_the_place_wherever_its_function_is_called(locks, caplog):
    @distributed_lock(NAME)
    def decorated() -> None: ...

    for _ in range(2):
        with atomic(using=SHOP):
            decorated()
    with atomic(using=SHOP):
        decorated()
    (warning,) = told(caplog)
    assert f"released at @distributed_lock({NAME!r}) of {__name__}." in warning
    assert "decorated() while" in warning


def test_a_task_that_is_called_in_a_transaction_is_told_of_delay_on_commit(locks, caplog):
    @single_instance_task(key=NAME, name="tests.transactions.draw")
    def draw() -> None: ...

    with atomic(using=SHOP):
        draw()
    (warning,) = told(caplog)
    assert f"{__file__}:" in warning
    assert "with delay_on_commit()" in warning


def test_the_right_order_is_not_logged(locks, caplog):
    with distributed_lock(NAME), atomic(using=SHOP), distributed_lock(NAME, reentrant=True):
        pass  # The end of the inner one ends nothing.
    lock = distributed_lock(NAME)
    with atomic(using=SHOP):
        lock.acquire()
    lock.release()
    assert told(caplog) == []


def test_of_several_locks_it_is_logged_if_one_of_them_ends(locks, caplog):
    def both():
        return distributed_lock(NAME, "other", reentrant=True)

    with both(), atomic(using=SHOP), both():
        pass  # The end of the inner one ends nothing.
    assert told(caplog) == []
    with distributed_lock(NAME), atomic(using=SHOP), both():
        pass
    assert len(told(caplog)) == 1
    outer, inner = both(), both()
    outer.acquire()
    inner.acquire()
    with atomic(using=SHOP):
        outer.release()
        assert len(told(caplog)) == 1
        inner.release()
    assert len(told(caplog)) == 2


def test_a_connection_of_which_nobody_has_told_is_found_by_a_new_thread(locks, caplog):
    """As without "django_redislock" in INSTALLED_APPS, where nobody hears connection_created."""

    def release_before_commit():
        with atomic(using=SHOP), distributed_lock(NAME):
            pass

    connection_created.disconnect(dispatch_uid="django_redislock.connection")
    try:
        in_thread_of_its_own(release_before_commit).result(HUNG)
    finally:
        connection_created.connect(note_connection, dispatch_uid="django_redislock.connection")
    assert len(told(caplog)) == 1


EARLY = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

from django.apps import AppConfig
from django.conf import settings

OPENED, INSTALLED = sys.argv[1:]


class Early(AppConfig):
    name, path = "early", os.getcwd()

    def ready(self):
        if OPENED == "in ready":
            on_each_thread(open_connections)


sys.modules["early"] = ModuleType("early")
sys.modules["early"].Early = Early
other = ThreadPoolExecutor(1)


def on_each_thread(function):
    function()
    other.submit(function).result()


def open_connections():
    from django.db import connections

    for alias in ("default", "other"):
        connections[alias].ensure_connection()


def use_lock():
    from django_redislock import distributed_lock

    with distributed_lock("lottery"):
        pass


def release_before_commit():
    from django.db.transaction import atomic

    with atomic(using="other"):
        use_lock()


memory = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(
    DATABASES={"default": memory, "other": memory},
    REDISLOCK={"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}},
    INSTALLED_APPS=["early.Early", *["django_redislock"] * (INSTALLED == "installed")],
)
if INSTALLED == "installed":
    on_each_thread(use_lock)  # Both threads have looked for connections before there are any.
if OPENED == "before setup":
    on_each_thread(open_connections)

import django

django.setup()

import django_redislock.transactions as transactions

warned = []
transactions.warn = lambda *args, **kwargs: warned.append(threading.current_thread().name)
on_each_thread(release_before_commit)
assert len(warned) == 2, warned
"""


@pytest.mark.parametrize("installed", ["installed", "not installed"])
@pytest.mark.parametrize("opened", ["before setup", "in ready"])
def test_connections_that_were_open_before_our_app_was_ready_are_noticed(opened, installed):
    python("-c", EARLY, opened, installed)


# The setting


def test_the_setting_can_turn_it_off(locks, caplog):
    locks.configure(RELEASE_BEFORE_COMMIT="ignore")
    with atomic(using=SHOP), distributed_lock(NAME):
        pass
    assert told(caplog) == []


def test_the_setting_can_make_it_an_error_before_anything_is_taken(locks, caplog):
    locks.configure(RELEASE_BEFORE_COMMIT="error")
    refused = partial(pytest.raises, LockMisuse, match="or pass release_on_commit=True")
    with atomic(using=SHOP):
        with refused():
            distributed_lock(NAME, wait=1).acquire()
        assert is_left_clean(locks)
        use()
        assert is_held()
    with distributed_lock(NAME), atomic(using=SHOP), distributed_lock(NAME, reentrant=True):
        pass
    with distributed_lock(NAME, "other"), atomic(using=SHOP):
        with distributed_lock(NAME, "other", reentrant=True):
            pass
        with refused():
            distributed_lock(NAME, "third", reentrant=True).acquire()
        assert is_held()
    before = distributed_lock(NAME)
    before.acquire()
    assert told(caplog) == []
    with atomic(using=SHOP):
        before.release()  # Refused, it would stay held. So it is logged.
    assert len(told(caplog)) == 1


# ATOMIC_REQUESTS


def view(request):
    with distributed_lock(NAME, release_on_commit="kept" in request.GET):
        order()
    return HttpResponse(str(is_held()))


@non_atomic_requests(using=SHOP)
def view_without(request: HttpRequest) -> HttpResponse:
    return view(request)


urlpatterns = [path("atomic/", view), path("not/", view_without)]


@pytest.fixture
def browser(settings, locks):
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = []
    connections.settings[SHOP]["ATOMIC_REQUESTS"] = True
    return Client()


def test_atomic_requests_release_it_with_the_response(browser, locks):
    for _ in range(2):
        assert browser.get("/atomic/?kept").content == b"True"
        assert is_left_clean(locks)
    assert orders() == 2


def test_atomic_requests_are_named_in_the_warning(browser, locks, caplog):
    assert browser.get("/not/").content == b"False"
    assert told(caplog) == []
    assert browser.get("/atomic/").content == b"False"
    (warning,) = told(caplog)
    assert "@transaction.non_atomic_requests above the view" in warning


# In a TestCase, whose transactions are never committed


def test_the_transaction_of_a_test_case_does_not_count(locks, db, caplog):
    assert connection.in_atomic_block
    with distributed_lock(NAME):
        pass
    assert told(caplog) == []
    use()
    assert is_left_clean(locks)
    with atomic(), distributed_lock(NAME):
        pass  # But that of the program does.
    assert len(told(caplog)) == 1


def test_callbacks_that_are_captured_release_it(locks, db, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        with atomic(), kept():
            pass
        assert is_held()


class OfAUser(TestCase):
    """Is run by the test below."""

    __test__ = False

    def test_first(self):
        assert not is_held()
        with atomic():
            with atomic(), kept():
                pass
            with distributed_lock(NAME):
                pass
        assert is_held()

    test_second = test_first


def test_the_end_of_the_test_releases_it(locks, django_db_setup, django_db_blocker):
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(OfAUser).run(result)
    assert (result.testsRun, result.errors, result.failures) == (2, [], [])


# Processes


def test_a_forked_child_leaves_it_to_its_parent(locks):
    with atomic(using=SHOP):
        lease = use()
        child = os.fork()
        if not child:
            connections[SHOP].run_on_commit.clear()  # As it is when the child's copy is closed.
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        lease.ensure_held(verify=True)


# What it costs others


def test_who_uses_no_database_does_not_import_one():
    code = """
    import sys
    import django_redislock, django_redislock.transactions
    assert not django_redislock.transactions.is_open()
    assert "django.db" not in sys.modules
    """
    python("-c", textwrap.dedent(code))


def test_nobody_is_asked_for_a_connection(locks):
    def names():
        with distributed_lock(NAME), kept("other"):
            pass
        return [one.alias for one in connections.all(initialized_only=True)]

    assert in_thread(names).result(HUNG) == []
