"""The test suite of django_redislock."""

from __future__ import annotations
