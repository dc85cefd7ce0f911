"""The command: `python -m tests.simulation [--seconds N] [--seed S] [--control TITLE]`."""

import argparse
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import count, islice
from multiprocessing import get_context

import django


def main():
    """Run worlds, each with the next seed, until the time is over."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.simulation.controls import CONTROLS
    from tests.simulation.report import Report
    from tests.simulation.runs import run, story

    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first world; then the next one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--control", choices=CONTROLS, help="leave a rule out, and see what breaks")
    options = parser.parse_args()

    report, seeds = Report(), count(options.seed)
    until = time.monotonic() + options.seconds
    with ProcessPoolExecutor(options.processes, get_context("spawn"), django.setup) as pool:
        first = islice(seeds, options.processes)
        running = {pool.submit(run, seed, options.control) for seed in first}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in (future.result() for future in done):
                if one.promise:
                    print(f"{one.promise}\n\nThe seed is {one.seed}.", end=" ")
                    print("Looking for the shortest story ...")
                    sys.exit(story(one.seed, options.control))
                report.add(one)
                if time.monotonic() < until:
                    running.add(pool.submit(run, next(seeds), options.control))
    print(f"seeds {options.seed} to {next(seeds) - 1}: no promise was broken")
    print(report.told(options.processes))


if __name__ == "__main__":
    main()
