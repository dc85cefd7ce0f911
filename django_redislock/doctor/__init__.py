"""Is the server fit to keep locks? Each finding says ok, warn or fail, and what to do.

``manage.py locks doctor`` and ``manage.py check --deploy`` are made of these. A module is a topic.
"""

from __future__ import annotations

from django_redislock.doctor.examination import (
    Load,
    beginnings,
    examine,
    examine_admin,
    examine_tables,
    loads,
)
from django_redislock.doctor.rights import minimal_acl
from django_redislock.findings import Finding

__all__ = [
    "Finding",
    "Load",
    "beginnings",
    "examine",
    "examine_admin",
    "examine_tables",
    "loads",
    "minimal_acl",
]
