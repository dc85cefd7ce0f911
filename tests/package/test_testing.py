"""LockTestKit: locks in memory for a block, servers that do not answer, and time that passes."""

import asyncio
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import django
import pytest
from celery import Celery
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_redislock import (
    LockLost,
    LockUnavailable,
    distributed_lock,
    held,
)
from django_redislock.backends import InMemoryBackend
from django_redislock.backends.registry import backends
from django_redislock.celery import SingleInstanceTask
from django_redislock.testing import LockTestKit
from tests import ROOT
from tests.support.others import held_by_other
from tests.support.processes import python
from tests.support.waiting import HUNG, await_until, wait_until
from tests.support.ways import both_ways, in_thread

pytest_plugins = ["pytester"]


# --- in memory, for a block ----------------------------------------------------------------------


@both_ways
async def test_the_locks_of_every_alias_are_in_memory_during_the_block(way, settings):
    nowhere = {"LOCATION": "redis://127.0.0.1:1/0", "REPLICAS_ACK": 2, "TTL": 7}
    settings.REDISLOCK = {"default": nowhere, "jobs": {**nowhere, "OPTIONS": {"no_such": 1}}}
    with LockTestKit():
        for alias in ("default", "jobs"):
            async with way.entered(distributed_lock("lottery", using=alias)) as lease:
                assert lease.ttl == 7
                assert isinstance(backends[alias], InMemoryBackend)


def test_each_block_begins_without_locks_and_leaves_none():
    kit = LockTestKit()
    for _ in range(2):
        with kit:
            kit.assert_not_locked("lottery")
            lock = distributed_lock("lottery", wait=0, min_hold=60)
            assert lock.acquire()
            lock.release()
            for inner in (kit, LockTestKit()):  # Blocks nest.
                with inner:
                    inner.assert_not_locked("lottery")
            kit.assert_locked("lottery")


def test_after_the_block_everything_is_as_before_also_if_it_raises(place):
    left = distributed_lock("raffle")
    with distributed_lock("lottery") as lease:
        before = backends["default"]
        with suppress(ZeroDivisionError), LockTestKit() as kit:
            kit.assert_not_locked("lottery")
            with distributed_lock("lottery", wait=0) as inner:
                assert inner.held
            assert lease.held
            assert left.acquire()  # Its lease may end after the block.
            raise ZeroDivisionError
        assert backends["default"] is before
        assert lease.held
        assert left.lease.held
        assert not left.locked()
        left.release()
        with held_by_other("tombola"):
            assert distributed_lock("tombola", wait=0).acquire() is False
        lease.ensure_held(verify=True)


def test_changed_settings_stay_in_memory(locks):
    with LockTestKit() as kit:
        setting = {"default": {"LOCATION": locks.server.url, "TTL": 5}}
        with override_settings(REDISLOCK=setting), distributed_lock("lottery") as lease:
            assert lease.ttl == 5
            kit.assert_locked("lottery")
        with distributed_lock("lottery") as lease:
            assert lease.ttl == 30
    assert locks.redis.keys() == []


def test_a_setting_that_is_changed_in_the_block_and_stays_counts_after_it(place, settings):
    # As when tests of one class are in memory each, and the class has override_settings.
    before = settings.REDISLOCK

    def set_ttl(seconds):
        settings.REDISLOCK = {"default": {**before["default"], "TTL": seconds}}

    with LockTestKit():
        set_ttl(9)
    set_ttl(8)
    with distributed_lock("lottery") as lease:
        assert lease.ttl == 8
    with LockTestKit():
        set_ttl(9)
    with distributed_lock("lottery") as lease:
        assert lease.ttl == 9
        with LockTestKit():
            settings.REDISLOCK = before
        assert lease.held  # Its backend is retired, not closed.
    with distributed_lock("lottery") as lease:
        assert lease.ttl != 9


def test_no_server_need_be_named_but_what_is_wrong_is_still_refused(settings):
    del settings.REDISLOCK
    with LockTestKit(), distributed_lock("lottery") as lease:
        assert lease.ttl == 30
    settings.REDISLOCK = {"default": {"LOCATION": None}}
    with LockTestKit(), distributed_lock("lottery") as lease:
        assert lease.held
    for setting in ({"default": {"TTL": 0}}, {"jobs": {}}, {"default": 1}, 1):
        settings.REDISLOCK = setting
        with LockTestKit(), pytest.raises(ImproperlyConfigured, match="REDISLOCK"):
            distributed_lock("lottery").acquire()


# --- unavailable ----------------------------------------------------------------------------------


@both_ways
async def test_simulate_unavailable(way, redislock):
    lock = distributed_lock("lottery", wait=30)
    async with way.entered(distributed_lock("tombola", ttl=60)) as lease:
        with redislock.simulate_unavailable():
            begin = time.monotonic()
            with pytest.raises(LockUnavailable, match="'lottery' is unavailable"):
                await way.acquire(lock)
            with pytest.raises(LockUnavailable):
                await way.locked(lock)
            with pytest.raises(LockUnavailable):
                await way.renew(lease)
            with pytest.raises(LockUnavailable):
                await way.ensure_held(lease, verify=True)
            for look in (held.list, lambda: held.get("tombola"), held.records):
                with pytest.raises(LockUnavailable):
                    look()
            assert time.monotonic() - begin < 5  # At once: it need not wait to know.
            assert lease.held  # It was granted, and its time is not over.
        assert await way.acquire(lock)
        await way.release(lock)


@both_ways
async def test_a_release_while_unavailable(way, redislock, caplog):
    lock = distributed_lock("lottery", wait=0)
    assert await way.acquire(lock)
    with redislock.simulate_unavailable(), pytest.raises(LockUnavailable):
        await way.release(lock)
    redislock.assert_locked("lottery")
    redislock.advance(30)
    async with way.entered(lock):
        outage = redislock.simulate_unavailable()
        outage.__enter__()
    assert "Left the block of lock 'lottery'" in caplog.text
    outage.__exit__(None, None, None)


async def begun_to_wait(way, lock):
    waiting = way.start(lambda: way.acquire(lock))
    await way.until(lambda: (seen := held.get(lock.name)) is not None and seen.waiters)
    return waiting


@both_ways
async def test_a_waiter_learns_of_it_at_once(way, redislock):
    with redislock.simulate_held_by_other("lottery"):
        waiting = await begun_to_wait(way, distributed_lock("lottery", wait=60))
        with redislock.simulate_unavailable():
            await way.until(waiting.done)
            with pytest.raises(LockUnavailable):
                await waiting.result()


def test_an_outage_outlasts_a_change_of_settings(redislock):
    lock = distributed_lock("lottery", wait=0)
    with redislock.simulate_unavailable():
        with override_settings(REDISLOCK={"default": {"TTL": 5}}), pytest.raises(LockUnavailable):
            lock.acquire()
        with pytest.raises(LockUnavailable):
            lock.acquire()
    with lock:
        redislock.assert_locked("lottery")


def test_one_alias_may_be_unavailable(settings, redislock):
    settings.REDISLOCK = {"default": {}, "jobs": {}}
    with redislock.simulate_unavailable(using="jobs"):
        assert distributed_lock("lottery", wait=0).acquire()
        with redislock.simulate_unavailable(using="jobs"), pytest.raises(LockUnavailable):
            distributed_lock("lottery", wait=0, using="jobs").acquire()
        with pytest.raises(LockUnavailable):
            distributed_lock("lottery", wait=0, using="jobs").acquire()
    assert distributed_lock("lottery", wait=0, using="jobs").acquire()


@both_ways
async def test_a_danger_is_told_before_the_loss(way, redislock):
    told = []
    with pytest.raises(LockLost):  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery", ttl=600)) as lease:
            lease.on_endangered(lambda _: told.append("half"))
            lease.on_endangered(lambda _: told.append("quarter"), left=0.25)
            with redislock.simulate_unavailable():
                redislock.advance(240)
                assert told == []
                redislock.advance(80)
                await way.until(lambda: told == ["half"])
                redislock.advance(1200)
                await way.until(lambda: told == ["half", "quarter"])


@pytest.mark.parametrize(("ttl", "silent", "later"), [(600, 320, 0), (30, 25, 10)])
def test_an_outage_that_ends_in_time_costs_no_lease(redislock, ttl, silent, later):
    """Its watchdog slept until a time that was past by then, and renews right after it."""
    with distributed_lock("lottery", ttl=ttl) as lease:
        with redislock.simulate_unavailable():
            redislock.advance(silent)
            assert lease.held
        redislock.advance(later)
        assert lease.held
        wait_until(lambda: lease.expires_in > 5 / 6 * ttl)


# --- time -----------------------------------------------------------------------------------------


@both_ways
async def test_a_min_hold_and_the_lease_of_another_end_when_time_passes(way, redislock):
    lock = distributed_lock("lottery", wait=0, min_hold=300)
    async with way.entered(lock):
        pass
    redislock.advance(290)
    assert not await way.acquire(lock)
    redislock.advance(timedelta(seconds=10))
    assert await way.acquire(lock)
    with redislock.simulate_held_by_other("tombola", ttl=60):
        redislock.advance(50)
        redislock.assert_locked("tombola")
        redislock.advance(10)
        assert await way.acquire(distributed_lock("tombola", wait=0))


def lottery():
    return "drawn"


def test_once_ends_when_time_passes(redislock):
    app = Celery(set_as_current=False)
    options = {"once": timedelta(days=7)}
    run = app.task(base=SingleInstanceTask, single_instance=options, lazy=False)(lottery)
    assert run() == "drawn"
    redislock.advance(timedelta(days=6, hours=23))
    assert run()["skipped"] == "done"
    redislock.advance(timedelta(hours=1))
    assert run() == "drawn"


@both_ways
async def test_what_is_held_here_is_renewed_while_time_passes(way, redislock):
    async with way.entered(distributed_lock("lottery")) as lease:
        redislock.advance(3600)
        assert lease.held
        assert lease.expires_in > 20
        assert lease.renewals >= 360
        assert not await way.start(
            lambda: way.acquire(distributed_lock("lottery", wait=0))
        ).result()
        await way.ensure_held(lease, verify=True)


@both_ways
@pytest.mark.parametrize(
    ("options", "ends", "reason"),
    [
        ({"renew": False, "ttl": 300}, 300, "expired"),
        ({"max_hold": 1000}, 1000, "expired"),
        ({"ttl": 400}, 400, "unreachable"),
    ],
    ids=repr,
)
async def test_what_is_not_renewed_is_lost_when_time_passes(way, redislock, options, ends, reason):
    told = []
    is_silent = reason == "unreachable"
    with pytest.raises(LockLost) as raised:  # noqa: PT012 - by leaving the block
        async with way.entered(distributed_lock("lottery", **options)) as lease:
            lease.on_lost(told.append)
            with redislock.simulate_unavailable() if is_silent else nullcontext():
                redislock.advance(ends - 60)
                assert lease.held
                redislock.advance(60)
                assert not lease.held
                await way.until(lambda: told == [lease])
            # The server may keep it for as long as the last renewal was on its way.
            await way.until(lambda: held.get("lottery") is None)
            redislock.assert_not_locked("lottery")
    assert raised.value.reason == reason


@both_ways
async def test_the_watchdog_goes_on_after_time_has_passed(way, redislock):
    async with way.entered(distributed_lock("lottery", ttl=9)) as lease:
        redislock.advance(10)
        before = lease.renewals
        await way.until(lambda: lease.renewals > before)
        assert lease.held


@both_ways
@pytest.mark.parametrize(("ttl", "passes"), [(None, 60), (30, 30)], ids=["gives up", "is served"])
async def test_a_waiter_hears_of_it_when_time_passes(way, redislock, ttl, passes):
    with redislock.simulate_held_by_other("lottery", ttl=ttl or 600):
        waiting = await begun_to_wait(way, distributed_lock("lottery", wait=60))
        redislock.advance(passes)
        await way.until(waiting.done)
        assert await waiting.result() is bool(ttl)


def test_time_passes_for_every_alias(settings, redislock):
    settings.REDISLOCK = {"default": {}, "jobs": {}}
    others = [
        redislock.simulate_held_by_other("lottery", ttl=10, using=alias)
        for alias in ("default", "jobs")
    ]
    with others[0], others[1]:
        redislock.advance(10)
        redislock.assert_not_locked("lottery")
        redislock.assert_not_locked("lottery", using="jobs")


@pytest.mark.parametrize("seconds", [-1, "10", None, float("inf")])
def test_time_does_not_pass_backwards(redislock, seconds):
    with pytest.raises(ValueError, match="seconds must be"):
        redislock.advance(seconds)


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": 1001}, {"limit": True}, {"ttl": -1}, {"ttl": "5"}], ids=str
)
def test_another_machine_can_hold_only_what_a_lock_can_be(redislock, wrong):
    (argument,) = wrong
    with pytest.raises(ValueError, match=f"{argument} must be"):
        redislock.simulate_held_by_other("lottery", **wrong).__enter__()
    with redislock.simulate_held_by_other("lottery", ttl=timedelta(hours=1)):
        redislock.advance(3540)
        redislock.assert_locked("lottery")
        redislock.advance(60)
        redislock.assert_not_locked("lottery")


def test_on_a_server_time_and_outages_cannot_be_pretended(locks):
    kit = LockTestKit()
    with pytest.raises(RuntimeError, match="LockTestKit"):
        kit.advance(1)
    with pytest.raises(RuntimeError, match="LockTestKit"), kit.simulate_unavailable():
        pytest.fail("the block ran")


def test_time_may_pass_while_threads_lock(redislock):
    over = threading.Event()

    def work():
        while not over.is_set():
            with distributed_lock("lottery", ttl=1000, wait=1000):
                pass

    at_work = [in_thread(work) for _ in range(3)]
    with distributed_lock("tombola", ttl=12) as lease:
        for _ in range(20):
            redislock.advance(5)
        assert lease.held
    over.set()
    for one in at_work:
        one.result(HUNG)
    wait_until(lambda: held.get("lottery") is None)


async def queued(lock):
    """A task that waits for the lock. It hears nothing while its event loop stands still."""
    waiter = asyncio.create_task(lock.aacquire())
    await await_until(lambda: (seen := held.get(lock.name)) is not None and seen.waiters)
    return waiter


async def test_no_lock_is_handed_over_amid_a_jump(redislock, monkeypatch):
    backend = backends["default"]
    holds, may_release, released = threading.Event(), threading.Event(), threading.Event()

    def hold():
        with distributed_lock("lottery", ttl=1000):
            holds.set()
            may_release.wait(HUNG)
        released.set()

    def confirm_then_have_released(confirm=backend._confirm_grants):
        confirm()
        may_release.set()
        released.wait(0.3)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(HUNG)
    lock = distributed_lock("lottery", ttl=1000, wait=1000)
    waiter = await queued(lock)
    monkeypatch.setattr(backend, "_confirm_grants", confirm_then_have_released)
    redislock.advance(5)
    holder.join(HUNG)
    assert not await distributed_lock("lottery", wait=0).aacquire()
    assert await waiter
    await lock.arelease()


async def test_a_release_that_read_the_clock_before_a_jump_hands_over_after_it(
    redislock, monkeypatch
):
    backend = backends["default"]
    run = backend.interpreter.run

    def jump_then_run(*args):
        monkeypatch.undo()
        redislock.advance(5)
        return run(*args)

    async with distributed_lock("lottery"):
        lock = distributed_lock("lottery", ttl=1000, wait=1000)
        waiter = await queued(lock)
        monkeypatch.setattr(backend.interpreter, "run", jump_then_run)
    assert not await distributed_lock("lottery", wait=0).aacquire()
    assert await waiter
    await lock.arelease()


# --- Django's own test runner ---------------------------------------------------------------------

PROJECT = """
SECRET_KEY = "not a secret"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django_redislock", "reports"]
REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0", "WAIT": 0}}
"""

REPORTS = """
from django_redislock import LockTimeout, distributed_lock

def build_if_free(number):
    try:
        with distributed_lock(f"report:{number}", min_hold=60):
            return number
    except LockTimeout:
        return None
"""

MIGRATION = """
from django.db import migrations

import reports

class Migration(migrations.Migration):
    operations = [migrations.RunPython(lambda *args: reports.build_if_free(0))]
"""

MORE = """
    def test_again(self):
        self.assertEqual(build_if_free(7), 7)  # Whatever the other tests have left.

    def test_and_again(self):
        self.assertEqual(build_if_free(7), 7)
        self.locks.advance(60)
        self.assertEqual(build_if_free(7), 7)


class Forgotten(TestCase):
    def test_no_server_is_reached(self):
        self.assertEqual(build_if_free(8), 8)
"""

MANAGE = """
import multiprocessing, sys
from django.core.management import execute_from_command_line

multiprocessing.set_start_method(sys.argv[1])
execute_from_command_line(sys.argv[1:])
"""


def recipes():
    """The pieces of Python under the heading about unittest in docs/testing.md."""
    from tests.package.test_docs import code_of

    page = (ROOT / "docs/testing.md").read_text()
    return code_of(page.partition("## unittest")[2], "python")


FORKSERVER = pytest.param(
    "forkserver", 2, marks=pytest.mark.skipif(django.VERSION < (6, 1), reason="unknown to Django")
)


@pytest.mark.parametrize(
    ("start", "processes"), [("fork", 1), ("fork", 2), ("spawn", 2), FORKSERVER]
)
def test_the_recipes_for_unittest_work_as_pasted(tmp_path, start, processes):
    case, runner = recipes()
    (tmp_path / "project_settings.py").write_text(PROJECT + runner)
    (tmp_path / "test_reports.py").write_text(f"{case}\n{MORE}")
    (tmp_path / "reports/migrations").mkdir(parents=True)
    (tmp_path / "reports/__init__.py").write_text(REPORTS)
    (tmp_path / "reports/migrations/__init__.py").write_text("")
    (tmp_path / "reports/migrations/0001_initial.py").write_text(MIGRATION)
    command = ("test", "--settings=project_settings", "--pythonpath=.", f"--parallel={processes}")
    ran = python("-c", MANAGE, start, *command, cwd=tmp_path)
    assert "Ran 4 tests" in ran.stderr


async def test_freezegun_with_real_asyncio_lets_an_async_wait_end(redislock):
    freezegun = pytest.importorskip("freezegun")
    frozen = freezegun.freeze_time("2027-01-01", real_asyncio=True)
    with redislock.simulate_held_by_other("lottery"), frozen:
        assert await distributed_lock("lottery", wait=0.2).aacquire() is False
