"""The one clock that deadlines are measured with."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# CLOCK_BOOTTIME neither jumps when the wall clock is set nor stands still while the machine
# sleeps; time.monotonic() does the latter on Linux, and a lease goes on ending meanwhile.
now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)
