"""The test suite of django_redislock."""

from pathlib import Path

ROOT = Path(__file__).parent.parent  # Of the repository.
