"""The command: `python -m tests.simulation [--seconds N] [--seed S] [--control TITLE]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import count


def main() -> None:
    """Run one world after the other, each with the next seed, until the time is over."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.simulation.controls import CONTROLS, SHIPPED
    from tests.simulation.plan import plan_of
    from tests.simulation.report import Report
    from tests.simulation.shrinking import broken, shrunk

    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first world; then the next one")
    parser.add_argument("--control", choices=CONTROLS, help="leave a rule out, and see what breaks")
    options = parser.parse_args()

    variant = CONTROLS.get(options.control, SHIPPED)
    report = Report()
    until, began = time.monotonic() + options.seconds, time.process_time()
    for seed in count(options.seed):
        plan = plan_of(seed, variant.bounds)
        with variant.patched():
            world = variant.world(plan)
            promise = broken(world)
            if promise:
                print(f"{promise}\n\nThe seed is {seed}. Looking for the shortest story ...")
                found = shrunk(plan, variant.world)
                again = f" ARGS='--control \"{options.control}\"'" if options.control else ""
                sys.exit(f"\n{found}\n\nAgain: make simulate SEED={seed}{again}")
        report.add(world)
        if time.monotonic() > until:
            break
    print(f"seeds {options.seed} to {seed}: no promise was broken")
    print(report.told(time.process_time() - began))


if __name__ == "__main__":
    main()
