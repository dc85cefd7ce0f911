"""The one clock that deadlines are measured with."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# CLOCK_BOOTTIME does not jump when the wall clock is set, nor stand still while the machine sleeps.
# On Linux time.monotonic() stands still then, though leases go on ending.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
