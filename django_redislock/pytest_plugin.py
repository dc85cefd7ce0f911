"""The ``redislock`` fixture: locks in memory and the test kit, without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_redislock.testing import LockTestKit


@pytest.fixture
def redislock(settings: Any) -> LockTestKit:
    """Keep all locks of this test in memory, and return the test kit.

    Every alias of REDISLOCK becomes in-memory and keeps its other settings. It uses
    pytest-django's ``settings`` fixture, so everything is as before after the test.
    """
    from django_redislock.testing import IN_MEMORY, LockTestKit

    kept = {"KEY_PREFIX", "TTL", "WAIT", "RENEW", "MAX_HOLD"}
    configured = {"default": {}, **getattr(settings, "REDISLOCK", {})}
    settings.REDISLOCK = {
        alias: {**{key: value for key, value in one.items() if key in kept}, **IN_MEMORY}
        for alias, one in configured.items()
    }
    return LockTestKit()
