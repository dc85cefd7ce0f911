"""The command: `python -m tests.jepsen`; `--help` lists its options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.jepsen.trial import Report

PAGE = ROOT / "docs" / "jepsen.md"
BEGIN = "<!-- measured: written by python -m tests.jepsen --write, do not edit -->"
END = "<!-- end of what was measured -->"
COLUMNS = (
    "backend",
    "what went wrong, and how often",
    "operations",
    "lost",
    "lost with the fence",
    "refused",
    "longest gap",
)


def main() -> None:
    """Try what was asked for, show a table, and write it down on request."""
    # However we are ended, the blocks of a trial end its servers and clients.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    from tests.jepsen import history
    from tests.jepsen.places import CONTENDERS
    from tests.jepsen.trial import run
    from tests.support.wheels import VERSIONS, unpacked

    parser = argparse.ArgumentParser(prog="python -m tests.jepsen")
    parser.add_argument("--backend", choices=CONTENDERS, action="append", help="all, by default")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each of them, and each seed"
    )
    parser.add_argument(
        "--seeds", type=_numbers, default=[1], metavar="1-10", help="one, or from-to"
    )
    parser.add_argument("--histories", type=Path, metavar="FOLDER", help="keep them there, as EDN")
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="FILE", help="judge kept ones only"
    )
    upgrade = "every other client has the minor version before this one"
    parser.add_argument("--upgrade", action="store_true", help=upgrade)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and (options.backend or options.upgrade):
        parser.error("--write writes the whole table of this version: no --backend, no --upgrade")

    if options.check:
        for path in options.check:
            print(path, history.verdict_on(history.read(path)), sep=": ")
        return
    if options.histories:
        options.histories.mkdir(parents=True, exist_ok=True)

    packages = [unpacked(version) for version in VERSIONS] if options.upgrade else [""]
    first, *_, last = [options.seeds[0], *options.seeds]
    seeds = f"{first}-{last}" if last > first else first
    command = f"make jepsen SECONDS={options.seconds:g} SEED={seeds}"
    command += " ARGS=--upgrade" * options.upgrade
    lines = [f"`{command}`", "", _line(*COLUMNS), _line("---", "---", *["--:"] * 5)]
    print("\n".join(lines), flush=True)
    wrong = []
    for backend in options.backend or CONTENDERS:
        reports = []
        how = {"seconds": options.seconds, "packages": packages}
        for seed in options.seeds:
            keep = options.histories and options.histories / f"{backend}-{seed}.edn"
            try:
                report = run(backend, seed=seed, keep=keep, **how)
            except AssertionError as error:  # The others are tried nevertheless.
                wrong.append(f"{backend}, seed {seed}: {error}")
                continue
            reports.append(report)
            wrong += [f"{backend}, seed {seed}: {one}" for one in report.wrong]
        if reports:
            lines.append(_row(backend, reports))
            print(lines[-1], flush=True)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        measured = "\n".join([BEGIN, "", *lines, "", END])
        PAGE.write_text(f"{before}{measured}{after}", encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


def _numbers(words: str) -> list[int]:
    """Of "3" or "1-10"."""
    first, _, last = words.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _row(backend: str, reports: Sequence[Report]) -> str:
    """All seeds together."""
    harm = sum((Counter(report.harm) for report in reports), Counter())
    verdicts = [report.verdict for report in reports]
    has_fence = reports[0].has_fence
    return _line(
        f"`{backend}`",
        ", ".join(f"{what} {times}" for what, times in sorted(harm.items())),
        sum(one.granted for one in verdicts),
        sum(one.lost for one in verdicts),
        sum(one.lost_with_fence for one in verdicts) if has_fence else "",
        sum(one.refused for one in verdicts) if has_fence else "",
        f"{max(one.longest_gap for one in verdicts):.1f} s",
    )


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
