"""The command: `python -m tests.jepsen`; `--help` lists its options."""

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests import ROOT
from tests.jepsen import rows

PAGE = ROOT / "tests" / "jepsen" / "README.md"
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


def main():
    """Try what was asked for, show a table, and write it down on request."""
    rows.set_up()
    from tests.jepsen import history
    from tests.jepsen.places import CONTENDERS
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
    together = "all backends at the same time, in a process each"
    parser.add_argument("--together", action="store_true", help=together)
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
    if chosen := [one for one in ("upgrade", "together") if getattr(options, one)]:
        command += f' ARGS="--{" --".join(chosen)}"'
    lines = [f"`{command}`", "", rows.line(*COLUMNS), rows.line("---", "---", *["--:"] * 5)]
    print("\n".join(lines), flush=True)
    wrong = []
    backends = list(options.backend or CONTENDERS)
    how = {"seeds": options.seeds, "seconds": options.seconds, "packages": packages}
    try_one = partial(rows.row_of, folder=options.histories, **how)
    with ExitStack() as stack:
        tried = map(try_one, backends)
        if options.together:
            spawning = multiprocessing.get_context("spawn")
            children = ProcessPoolExecutor(len(backends), spawning, rows.set_up)
            tried = stack.enter_context(children).map(try_one, backends)
        for row, problems in tried:
            wrong += problems
            if row:
                lines.append(row)
                print(row, flush=True)
    if options.write and not wrong:  # Else rows are missing, or stand for fewer seeds.
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        measured = "\n".join([BEGIN, "", *lines, "", END])
        PAGE.write_text(f"{before}{measured}{after}", encoding="utf-8")
    if wrong:
        sys.exit("\n".join(wrong))


def _numbers(words):
    """Of "3" or "1-10"."""
    first, _, last = words.partition("-")
    return list(range(int(first), int(last or first) + 1))


if __name__ == "__main__":
    main()
