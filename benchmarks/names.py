"""Whether server memory stays flat, however many names are locked: python -m benchmarks.names.

Each is locked shortly: a lease of a second or longer is kept in the timeline for 2 days.

It takes some minutes, so `make bench` leaves it out.
"""

from __future__ import annotations

from benchmarks.contenders import OURS, Contender, contender
from benchmarks.server import Server

NAMES = 1_000_000
STEPS = 10


def main() -> None:
    """Lock and release each name once, and print what the server keeps on the way."""
    with Server() as server:
        server.keep_no_log()
        ours: Contender = contender(OURS, server.port)
        with ours.lock("bench:warm-up"):  # Connections and scripts take memory too.
            pass
        before = server.memory()
        for step in range(STEPS):
            for nth in range(NAMES // STEPS):
                with ours.lock(f"bench:order{step}:{nth:06}"):
                    pass
            kept = server.memory() - before
            print(f"{(step + 1) * NAMES // STEPS:>9,} names: {kept:+,} bytes, {server.keys()} keys")


if __name__ == "__main__":
    main()
