"""Settings of the workers of demo_chaos with FAULT=pause: each eighth winner is stopped."""

from __future__ import annotations

from example_project.chaos_settings import *  # noqa: F403
from lottery.demo.pauses import Pauses

PAUSES = Pauses(every=8)
