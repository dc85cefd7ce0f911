"""The `redislock` fixture, as a project that uses locks has it in its tests."""

import threading

import pytest

from django_redislock import LockLost, LockTimeout, distributed_lock, signals
from django_redislock.backends import InMemoryBackend
from django_redislock.backends.registry import backends
from django_redislock.rules.stored import Owner
from django_redislock.testing import LockTestKit
from tests.support.ways import both_ways

pytest_plugins = ["pytester"]


# --- in memory -----------------------------------------------------------------------------------


@both_ways
async def test_locks_need_no_server(way, redislock):
    assert isinstance(backends["default"], InMemoryBackend)
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.held
        assert not await way.start(
            lambda: way.acquire(distributed_lock("lottery", wait=0))
        ).result()


def run_project(pytester, test, *arguments, **more):
    pytester.makepyfile(test_project=test, **more)
    return pytester.runpytest_subprocess(*arguments, "-p", "no:randomly", "-p", "no:xdist")


SETTINGS = """
    REDISLOCK = {
        "default": {"LOCATION": "redis://127.0.0.1:1/0", "TTL": 7, "REPLICAS_ACK": 1},
        "jobs": {"LOCATION": "redis://127.0.0.1:1/0", "KEY_PREFIX": "jobs"},
    }
"""


def test_it_comes_by_itself_and_leaves_no_trace(pytester):
    test = """
        import pytest
        from django_redislock import LockUnavailable, distributed_lock

        def test_with_it(redislock):
            with distributed_lock("lottery") as lease:
                assert lease.ttl == 7
                redislock.assert_locked("lottery")
                redislock.assert_not_locked("lottery", using="jobs")
            with distributed_lock("lottery", using="jobs"):
                redislock.assert_locked("lottery", using="jobs")

        @pytest.mark.parametrize("time", [1, 2])
        def test_every_test_begins_without_locks(redislock, time):
            assert distributed_lock("lottery", wait=0).acquire()

        def test_without_it():
            with pytest.raises(LockUnavailable):
                distributed_lock("lottery", wait=0).acquire()
    """
    ran = run_project(pytester, test, "--ds=project_settings", project_settings=SETTINGS)
    ran.assert_outcomes(passed=4)


OPTED_IN = """
    import pytest
    from django_redislock import LockUnavailable, distributed_lock

    @pytest.fixture(scope="session")
    def of_the_session():
        assert distributed_lock("lottery", wait=0).acquire()

    @pytest.fixture
    def settings_of_this_test(settings):
        settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0", "TTL": 9}}

    def test_without_the_fixture(of_the_session):
        assert not distributed_lock("lottery", wait=0).acquire()

    def test_the_next_begins_without_locks():
        with distributed_lock("lottery", wait=0) as lease:
            assert lease.held

    def test_changed_settings(settings_of_this_test):
        with distributed_lock("lottery", wait=0) as lease:
            assert lease.ttl == 9

    def test_with_the_fixture(redislock):
        with distributed_lock("lottery", wait=0):
            redislock.assert_locked("lottery")

    @pytest.mark.redislock_servers
    def test_that_wants_the_server():
        with pytest.raises(LockUnavailable):
            distributed_lock("lottery", wait=0).acquire()

    @pytest.mark.redislock_servers
    class TestOfServers:
        def test_with_the_fixture(self, redislock):
            with distributed_lock("lottery", wait=0):
                redislock.assert_locked("lottery")
"""


def test_an_option_keeps_forgotten_tests_from_the_servers(pytester):
    pytester.makeini("[pytest]\nredislock_in_memory = true\naddopts = --strict-markers")
    ran = run_project(pytester, OPTED_IN, "--ds=project_settings", project_settings=SETTINGS)
    ran.assert_outcomes(passed=6)


@pytest.mark.parametrize("has_settings", [False, True])
def test_without_pytest_django_it_works_with_settings_and_else_says_what_it_needs(
    pytester, monkeypatch, has_settings
):
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    if has_settings:
        pytester.makeconftest(
            "from django.conf import settings\nsettings.configure(REDISLOCK={'default': {}})"
        )
    test = """
        from django_redislock import distributed_lock

        def test_it(redislock):
            with distributed_lock("lottery"):
                redislock.assert_locked("lottery")
    """
    ran = run_project(pytester, test, "-p", "no:django")
    ran.assert_outcomes(passed=int(has_settings), errors=int(not has_settings))
    if not has_settings:
        needs = "*needs Django's settings: install pytest-django and set DJANGO*"
        ran.stdout.fnmatch_lines([needs])


# --- the kit, in memory and on servers -----------------------------------------------------------


@pytest.fixture
def kit():
    """The test kit on whatever REDISLOCK says; the fixture `redislock` is it in memory."""
    return LockTestKit()


@both_ways
async def test_simulate_held_by_other(way, place, kit):
    lock = distributed_lock("lottery", wait=0, reentrant=True)
    with kit.simulate_held_by_other("lottery"):
        assert not await way.acquire(lock)
        with pytest.raises(LockTimeout, match="another-host:1"):
            async with way.entered(lock):
                pytest.fail("the block ran")
    named = Owner(host="web2", pid=7, task="lottery.tasks.draw")
    with kit.simulate_held_by_other("lottery", owner=named):
        with pytest.raises(LockTimeout) as raised:
            await way.entered(lock).__aenter__()
        assert raised.value.holder == "web2:7 lottery.tasks.draw"
    assert await way.acquire(lock)
    with pytest.raises(AssertionError, match="'lottery' is held"):  # By us, so by nobody else.
        kit.simulate_held_by_other("lottery").__enter__()


@both_ways
@pytest.mark.parametrize("reason", ["expired", "forced", "taken", "unreachable"])
async def test_simulate_lost(way, place, kit, reason):
    told = []
    signalled = threading.Event()

    def receive(lease, reason, **kwargs):
        signalled.set()

    signals.lock_lost.connect(receive)
    try:
        with pytest.raises(LockLost) as raised:  # noqa: PT012 - by leaving the block
            async with way.entered(distributed_lock("lottery")) as lease:
                lease.on_lost(told.append)
                assert kit.simulate_lost("lottery", reason) is lease
                assert not lease.held
                assert lease.lost_reason == reason
                kit.assert_not_locked("lottery")
                await way.until(lambda: told == [lease])
                await way.until(signalled.is_set)
    finally:
        signals.lock_lost.disconnect(receive)
    assert raised.value.reason == reason


def test_what_cannot_be_lost_is_said(place, kit):
    with pytest.raises(AssertionError, match="Nobody in this process holds the lock 'lottery'"):
        kit.simulate_lost("lottery")
    reasons = "'expired', 'forced', 'taken', 'unreachable', 'replaced', not"
    with distributed_lock("lottery") as lease:
        with pytest.raises(ValueError, match=reasons):
            kit.simulate_lost("lottery", "stolen")
        assert lease.held


def test_assert_locked_and_its_opposite(place, kit):
    kit.assert_not_locked("lottery")
    with pytest.raises(AssertionError, match="'lottery' is not held"):
        kit.assert_locked("lottery")
    with distributed_lock("lottery", min_hold=60):
        kit.assert_locked("lottery")
        with pytest.raises(AssertionError, match="'lottery' is held"):
            kit.assert_not_locked("lottery")
    kit.assert_locked("lottery")  # It cools down.


def test_a_lock_is_locked_while_anybody_has_one_of_its_permits(place, kit):
    first, second = (distributed_lock("gpu", limit=2, wait=0) for _ in range(2))
    with second:
        with first:
            kit.assert_locked("gpu")
        kit.assert_locked("gpu")
    kit.assert_not_locked("gpu")
    with first, second:
        first.release()
        kit.assert_locked("gpu")
        with pytest.raises(AssertionError, match="'gpu' is held"):
            kit.assert_not_locked("gpu")
    kit.assert_not_locked("gpu")
