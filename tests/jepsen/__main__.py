"""The command: `python -m tests.jepsen`; `--help` lists its options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING

from tests import ROOT

if TYPE_CHECKING:
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
    from tests.jepsen.places import CONTENDERS
    from tests.jepsen.trial import run
    from tests.support.wheels import VERSIONS, unpacked

    parser = argparse.ArgumentParser(prog="python -m tests.jepsen")
    parser.add_argument("--backend", choices=CONTENDERS, action="append", help="all, by default")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of them")
    parser.add_argument("--seed", type=int, default=1)
    upgrade = "every other client has the minor version before this one"
    parser.add_argument("--upgrade", action="store_true", help=upgrade)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.write and (options.backend or options.upgrade):
        parser.error("--write writes the whole table of this version: no --backend, no --upgrade")

    packages = [unpacked(version) for version in VERSIONS] if options.upgrade else [""]
    command = f"make jepsen SECONDS={options.seconds:g} SEED={options.seed}"
    command += " ARGS=--upgrade" * options.upgrade
    lines = [f"`{command}`", "", _line(*COLUMNS), _line("---", "---", *["--:"] * 5)]
    print("\n".join(lines), flush=True)
    wrong = []
    for backend in options.backend or CONTENDERS:
        how = {"seconds": options.seconds, "seed": options.seed}
        report = run(backend, packages=packages, **how)
        lines.append(_row(backend, report))
        print(lines[-1], flush=True)
        wrong += [f"{backend}: {one}" for one in report.wrong]
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        measured = "\n".join([BEGIN, "", *lines, "", END])
        PAGE.write_text(f"{before}{measured}{after}", encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


def _row(backend: str, report: Report) -> str:
    verdict = report.verdict
    fenced = (verdict.lost_with_fence, verdict.refused) if report.has_fence else ("", "")
    return _line(
        f"`{backend}`",
        ", ".join(f"{what} {times}" for what, times in sorted(report.harm.items())),
        verdict.granted,
        verdict.lost,
        *fenced,
        f"{verdict.longest_gap:.1f} s",
    )


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
