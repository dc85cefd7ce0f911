"""A test runner for Django that keeps tests away from the servers in the settings."""

from __future__ import annotations

from typing import Any

from django.test.runner import DiscoverRunner, ParallelTestSuite, RemoteTestRunner

from django_redislock.testing import LockTestKit


class _Worker(RemoteTestRunner):
    """Runs tests in a process of ``test --parallel``.

    If it was forked, it has the locks in memory already. If it was spawned, it knows nothing of the
    parent but the name of this class.
    """

    def run(self, test: Any) -> Any:
        with LockTestKit():
            return super().run(test)


class _Workers(ParallelTestSuite):
    runner_class = _Worker


class InMemoryRunner(DiscoverRunner):
    """Keeps all locks in memory while tests, and the migrations before them, run.

    That includes each process of ``test --parallel``, however it is started. For ``TEST_RUNNER``,
    or as the base of a runner of your own.
    """

    parallel_test_suite = _Workers

    def run_tests(self, *args: Any, **kwargs: Any) -> int:
        """Run the tests; return how many have failed."""
        with LockTestKit():
            failed: int = super().run_tests(*args, **kwargs)
            return failed
