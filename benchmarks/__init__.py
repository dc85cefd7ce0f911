"""Same-run comparison of Redis locks: `python -m benchmarks [names] [--quick] [--write]`."""

from __future__ import annotations
