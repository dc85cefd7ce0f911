"""The trials of one backend, and the row of the table that they make."""

import os
import signal
import sys
from collections import Counter


def set_up():
    """In a process that has just begun."""
    # However we are ended, the blocks of a trial end its servers and clients.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()


def row_of(backend, seeds, seconds, packages, folder):
    """The row of one backend, "" if no trial came to its end; and what was wrong."""
    from tests.jepsen.trial import run

    reports, wrong = [], []
    for seed in seeds:
        keep = folder and folder / f"{backend}-{seed}.edn"
        try:
            report = run(backend, seed=seed, keep=keep, seconds=seconds, packages=packages)
        except AssertionError as error:  # The others are tried nevertheless.
            wrong.append(f"{backend}, seed {seed}: {error}")
            continue
        reports.append(report)
        wrong += [f"{backend}, seed {seed}: {one}" for one in report.wrong]
    return _row_of_all(backend, reports) if reports else "", wrong


def _row_of_all(backend, reports):
    """All seeds together."""
    harm = sum((Counter(report.harm) for report in reports), Counter())
    verdicts = [report.verdict for report in reports]
    has_fence = reports[0].has_fence
    return line(
        f"`{backend}`",
        ", ".join(f"{what} {times}" for what, times in sorted(harm.items())),
        sum(one.granted for one in verdicts),
        sum(one.lost for one in verdicts),
        sum(one.lost_with_fence for one in verdicts) if has_fence else "",
        sum(one.refused for one in verdicts) if has_fence else "",
        f"{max(one.longest_gap for one in verdicts):.1f} s",
    )


def line(*cells):
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"
