"""The command: `make interleavings SECONDS=60 SEED=2 ARGS='--only SharedHandle'`."""

import argparse
import os
import sys
import time

TRIES_PER_SECOND = 4  # By chance, beside the ways that were searched one after the other.


def main():
    """Lead the threads of each scenario, print what was found, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make interleavings")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for each search")
    parser.add_argument("--seed", type=int, default=1, help="of the tries by chance")
    parser.add_argument("--only", action="append", help="the name of a scenario")
    options = parser.parse_args()

    from django_redislock import clock

    # frontrun replaces time.monotonic() while it leads threads, so it must be looked up each time.
    clock.now = lambda: time.monotonic()  # noqa: PLW0108
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.interleavings.settings"
    import django

    django.setup()
    from tests.interleavings.scenarios import CONTROLS, SCENARIOS

    is_wrong = False
    for scenario in (*SCENARIOS, *CONTROLS):
        if options.only and scenario.__name__ not in options.only:
            continue
        found, says = _explore(scenario, options.seconds, options.seed)
        is_right = bool(found) == (scenario in CONTROLS)
        print(f"{'' if is_right else 'WRONG: '}{scenario.__name__}: {says}", flush=True)
        if not is_right:
            is_wrong = True
            print(found)
    return int(is_wrong)


def _explore(scenario, seconds, seed):
    """Search for what breaks a scenario: how that came about, "" if nothing; and in a line."""
    import frontrun

    tries = max(int(seconds * TRIES_PER_SECOND) // scenario.share, 1)
    searches = {
        "dpor": {"total_timeout": seconds, "max_executions": 1_000_000},
        "random": {"max_attempts": tries, "max_ops": 200_000, "seed": seed},
    }
    started, explored = time.perf_counter(), []
    for strategy, bounds in searches.items():
        result = frontrun.explore(
            setup=scenario,
            workers=list(scenario.threads),
            invariant=scenario.holds,
            strategy=strategy,
            clock="virtual",
            trace_packages=["django_redislock.*"],
            detect_io=False,
            timeout_per_run=60,
            **bounds,
        )
        explored.append(f"{result.num_explored} by {strategy}")
        if not result.property_holds:
            return str(result.explanation), f"breaks after {', '.join(explored)}"
    took = time.perf_counter() - started
    return "", f"holds in {', '.join(explored)}, {took:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
