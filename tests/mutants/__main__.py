"""The command: `python -m tests.mutants [PATH ...] [--sample N] [--seed S]`.

The tests run on a copy of the repository, for each mutant until the first of them fails. What came
of it is kept: the next run tries those that are new, and those that survived and nobody explains.
The exit status is 1 if there are such survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests import ROOT
from tests.mutants.mutating import Mutant, mutants_of

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = ROOT / "django_redislock"
EXPLAINED = Path(__file__).with_name("survivors.toml")
RESULTS = ROOT / ".mutants.jsonl"

IN_MEMORY = ("--quick", "tests/contract", "-k", "memory")
RULES = (
    "--quick",
    "tests/rules",
    "tests/contract/test_arguments.py",
    "tests/contract/test_conf.py",
)
MODEL = ("tests/rules/test_model.py",)
#: The files that are mutated, and the tests that are to notice it: one run after the other.
ROOMS = {
    "rules/*.py": (RULES, IN_MEMORY, MODEL),
    "lua/*.lua": (
        IN_MEMORY,
        (
            "--quick",
            "tests/operations",
            "tests/celery",
            "-k",
            "held or runs or kept or line or queue",
        ),
        MODEL,
        ("--quick", "tests/contract", "-k", "not memory"),
    ),
    "backends/redis/*.py": (("--quick", "tests/contract", "tests/faults", "-k", "not memory"),),
}
# A mutant may wait for ever.
TOO_LONG = 1800.0
LIMITS = ("--timeout", "170", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider")


class Case(NamedTuple):
    """A mutant, and how it is written down: its line as it was and as it becomes."""

    path: str
    was: str
    becomes: str
    nth: int  # Of the same ones in the file.
    mutant: Mutant

    @property
    def key(self) -> str:
        return _key(self.path, self.was, self.becomes, self.nth)


class Copy:
    """A copy of the repository, to be mutated."""

    def __init__(self, folder: Path, jobs: str) -> None:
        ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        self._folder = folder
        self._jobs = jobs
        self._sound: set[tuple[str, ...]] = set()  # The tests that pass as the code is.

    def kills(self, case: Case) -> bool:
        """Whether a test fails with a mutant."""
        file = self._folder / PACKAGE.relative_to(ROOT) / case.path
        source = file.read_text()
        for tests in ROOMS[room_of(case.path)]:
            if tests not in self._sound and not self._pass(tests):
                sys.exit(f"tests fail without any mutant: {' '.join(tests)}")
            self._sound.add(tests)
            _write(file, case.mutant.applied_to(source))
            try:
                if not self._pass(tests):
                    return True
            finally:
                _write(file, source)
        return False

    def _pass(self, tests: tuple[str, ...]) -> bool:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *LIMITS, "-n", self._jobs, *tests],
            cwd=self._folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return process.wait(TOO_LONG) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.terminate()
            process.wait()


def _write(file: Path, source: str) -> None:
    second = file.stat().st_mtime // 1 + 1
    file.write_text(source)
    # By its second and its length, Python knows whether it has compiled a file already.
    os.utime(file, (second, second))


def _key(*parts: object) -> str:
    return json.dumps(parts, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("paths", nargs="*", help="such as rules/*.py; all, by default")
    parser.add_argument("--sample", type=int, help="so many, chosen by chance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", default="0", help="processes of pytest for a mutant")
    options = parser.parse_args()

    cases = cases_of(options.paths or ["*"])
    if options.sample is not None and options.sample < len(cases):
        cases = random.Random(options.seed).sample(cases, options.sample)
    results, explained = _known(), explanations()
    known = {key for key, killed in results.items() if killed or key in explained}
    untried = [case for case in cases if case.key not in known]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder) / "repository", options.jobs)
        for case in untried:
            killed = results[case.key] = copy.kills(case)
            with RESULTS.open("a") as file:
                file.write(json.dumps([case.key, killed]) + "\n")
            print(f"{'killed  ' if killed else 'SURVIVED'} {_told(case)}", flush=True)
    unexplained = [case for case in cases if not results[case.key] and case.key not in explained]
    _report(cases, results, set(explained))
    sys.exit("\n".join(["", "survive:", *map(_told, unexplained)]) if unexplained else 0)


def cases_of(patterns: list[str]) -> list[Case]:
    """All mutants of the files that match one of these."""
    found = []
    for file in (file for room in ROOMS for file in sorted(PACKAGE.glob(room))):
        path = file.relative_to(PACKAGE)
        if any(map(path.match, patterns)):
            found += _cases(str(path), file)
    return found


def _cases(path: str, file: Path) -> Iterator[Case]:
    seen: Counter[tuple[str, str]] = Counter()
    source = file.read_text()
    for mutant in mutants_of(file):
        was, becomes = (_line(text, mutant) for text in (source, mutant.applied_to(source)))
        yield Case(path, was, becomes, seen[was, becomes], mutant)
        seen[was, becomes] += 1


def room_of(path: str) -> str:
    """The pattern of ROOMS by which a file is mutated."""
    return next(pattern for pattern in ROOMS if Path(path).match(pattern))


def explanations() -> dict[str, str]:
    """Why a mutant may survive, by its key."""
    every = tomllib.loads(EXPLAINED.read_text())["survivor"]
    return {
        _key(one["path"], one["was"], one["becomes"], one.get("nth", 0)): one["why"]
        for one in every
    }


def _line(text: str, mutant: Mutant) -> str:
    lines = text.count("\n", 0, mutant.at), mutant.old.count("\n") + 1
    return " ".join("\n".join(text.split("\n")[lines[0] : sum(lines)]).split())


def _known() -> dict[str, bool]:
    if not RESULTS.exists():
        return {}
    return dict(json.loads(line) for line in RESULTS.read_text().splitlines())


def _report(cases: list[Case], results: dict[str, bool], explained: set[str]) -> None:
    print(f"\n{'killed':>8} {'explained':>10} {'survive':>8}  file")
    for path in sorted({case.path for case in cases}):
        of_file = [case.key for case in cases if case.path == path]
        left = {key for key in of_file if not results[key]}
        killed = len(of_file) - len(left)
        print(f"{killed:8} {len(left & explained):10} {len(left - explained):8}  {path}")


def _told(case: Case) -> str:
    return f"{case.path}:{case.mutant.line}\n    {case.was}\n    {case.becomes}"


if __name__ == "__main__":
    # However it is ended, it leaves no copy and no tests behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
