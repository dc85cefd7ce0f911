"""The command: `python -m tests.mutants [PATH ...] [--sample N] [--seed S] [--quick]`.

The tests run on a copy of the repository, for each mutant until the first of them fails. What came
of it is kept: the next run tries those that are new, and those that survived and nobody explains.
The exit status is 1 if there are such survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests import ROOT
from tests.mutants.mutating import Mutant, mutants_of

PACKAGE = ROOT / "django_redislock"
EXPLAINED = Path(__file__).with_name("survivors.toml")
FORKING = Path(__file__).with_name("forking.py")
RESULTS = ROOT / ".mutants.jsonl"


class Tests(NamedTuple):
    """A run of tests."""

    arguments: tuple[str, ...]  # Of pytest.
    processes: int = 1  # More for those that mostly wait.


def of(*names, only="memory", marked="", processes=1):
    """Those of some files that answer at once, where *only* is true of their names."""
    files = [f"tests/{name}.py" if "/" in name else f"tests/{name}" for name in names]
    return Tests(("--quick", "-k", only, "-m", marked, *files), processes)


def of_rules(*names):
    """Those of some files that need no server, then what else a file of rules may break."""
    first = of(
        *(name if "/" in name else f"rules/test_{name}" for name in names), only="not redis-"
    )
    return first, OF_RULES, IN_MEMORY


# In memory and on servers, tests mostly wait.
IN_MEMORY = of("contract", marked="not waits", processes=12)
OF_RULES = of("rules", only="test")
ON_SERVERS = of("contract", "faults", only="not memory", processes=8)
ON_ONE_SERVER = of("contract", only="redis or unscripted", marked="not waits", processes=2)
OF_SETTINGS = of("contract/test_conf", "operations/test_checks", only="test")
WITHOUT_SCRIPTS = Tests(
    (
        *("-k", "without_scripts or unscripted", "-m", "not waits and not slow"),
        *(f"tests/contract/test_{name}.py" for name in ("without_scripts", "permits", "lock")),
    )
)
OF_CONNECTIONS = of(
    *(f"faults/test_{name}" for name in ("pool", "network", "resp2", "cancellation")),
    only="not memory",
    processes=2,
)
OF_TASKS = of(
    *(f"celery/test_{name}" for name in ("task", "line", "queued", "limit", "give_up")),
    *(f"operations/test_{name}" for name in ("held", "task_runs", "records_kept", "last_hour")),
    only="test",
    processes=4,
)
OF_JOBS = of("jobs", "celery/test_once_per", only="test", processes=4)
# Not on PostgreSQL, which does not start in such a copy.
OF_EFFECTS = of("effects", "celery/test_explain", only="test and not postgres", processes=2)
OF_CELERY = of("celery", only="test and not postgres", processes=6)
OF_SCRIPTS = of(
    *(f"rules/test_{name}_scripts" for name in ("lock", "permit", "task", "rate", "replacing")),
    "contract/test_replicas",
    only="_scripts or ring_does_not_reach or only_who_accepts",
)
SCRIPTS_OF_TASKS = ("announce", "finish", "leave_line", "requeue", "retract", "runs")
SCRIPTS_OF_TASKS += ("skip", "stand_in_line", "forget_start", "_past", "_runs", "_task_of")
SCRIPTS_OF_TASKS += ("calls", "count_start", "uncount_start")
#: The files that are mutated, and the tests that are to notice it: one run after the other.
ROOMS = {
    "rules/[ao]*.py": of_rules("options", "limit", "contract/test_arguments"),
    "rules/limit.py": of_rules("limit", "contract/test_rates"),
    "rules/f*.py": of_rules("forms", "flows"),
    "rules/lease_state.py": of_rules("lease_state", "flows"),
    "rules/[kn]*.py": of_rules("names"),
    "rules/circles.py": of_rules("circles"),
    "rules/*.py": of_rules("flows", "replies", "stored", "steps", "together"),
    **{f"lua/{name}.lua": (OF_SCRIPTS, OF_TASKS, ON_SERVERS) for name in SCRIPTS_OF_TASKS},
    "lua/*.lua": (OF_SCRIPTS, IN_MEMORY, OF_TASKS, ON_SERVERS),
    "backends/redis/checking.py": (OF_SETTINGS, ON_ONE_SERVER),
    "backends/redis/without_scripts.py": (WITHOUT_SCRIPTS, ON_ONE_SERVER),
    "backends/redis/*.py": (ON_ONE_SERVER, OF_CONNECTIONS, ON_SERVERS),
    "jobs/*.py": (OF_JOBS, OF_EFFECTS, OF_CELERY),
    "celery/*.py": (OF_CELERY, OF_JOBS, OF_EFFECTS),
}
LIMITS = (*("--timeout", "40"), *("-p", "no:randomly"), *("-p", "no:cacheprovider"), "-n0", "-s")


class Case(NamedTuple):
    """A mutant, and how it is written down: its line as it was and as it becomes."""

    path: str
    was: str
    becomes: str
    nth: int  # Of the same ones in the file.
    mutant: Mutant

    @property
    def key(self):
        return _key(self.path, self.was, self.becomes, self.nth)


class Copy:
    """A copy of the repository, to be mutated, and what runs its tests."""

    def __init__(self, folder, quick):
        ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT, folder, ignore=ignored)
        self._folder = folder
        self._quick = quick
        self._suites = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for suite in self._suites.values():
            suite.close()

    def trial(self, case):
        """Run the tests with a mutant until one of them fails."""
        file = PACKAGE.relative_to(ROOT) / case.path
        copied = self._folder / file
        source, seconds = copied.read_text(), 0.0
        for number, tests in enumerate(ROOMS[room_of(case.path)][: 1 if self._quick else None]):
            suite = self._suite(tests)
            write(copied, case.mutant.applied_to(source))
            try:
                run = suite.run(file)
                seconds += run.seconds
                # A test that waits may have failed since the machine is busy.
                if run.failed and tests.processes > 1:
                    run = suite.run(file, only=[run.failed[0][0]])
                    seconds += run.seconds
                # What is carried out at import is noticed by those who import the mutant.
                if run.passed is None or (run.passed and not number and file.suffix == ".py"):
                    before = _seconds_of_children()
                    with Suite(self._folder, tests) as anew:
                        run = anew.run()
                    seconds += _seconds_of_children() - before
            finally:
                write(copied, source)
            if not run.passed:
                return Trial(True, seconds)
        return Trial(False, seconds)

    def _suite(self, tests):
        if tests not in self._suites:
            suite = self._suites[tests] = Suite(self._folder, tests)
            run = suite.run()
            if not run.passed:
                told = " ".join(tests.arguments)
                sys.exit(f"tests fail without any mutant: {told}\n{run.failed}")
        return self._suites[tests]


class Suite:
    """A process that has collected tests, to run them again and again; see forking.py."""

    def __init__(self, folder, tests):
        self._processes = tests.processes
        self._process = subprocess.Popen(
            [sys.executable, FORKING, *LIMITS, *tests.arguments],
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "TMPDIR": str(folder.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for us.
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, mutated=None, *, only=(), goes_on=False):
        """Run the tests, or some of them, with the mutant that stands in a file."""
        processes = 1 if only else self._processes
        question = json.dumps([processes, mutated and str(mutated), only, goes_on])
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Run(False, 0.0)
        answer = self._process.stdout.readline()
        # Without an answer, the tests could not even be collected.
        return Run(*json.loads(answer)) if answer else Run(False, 0.0)

    def close(self):
        self._process.terminate()
        self._process.communicate()


class Run(NamedTuple):
    """What came of the tests."""

    passed: bool | None  # None if the mutant could not be put in place.
    seconds: float  # Of processor time.
    failed: list[list[str]] | tuple[()] = ()  # Tests, each with how.


class Trial(NamedTuple):
    """What came of a mutant."""

    killed: bool
    seconds: float  # Of processor time.


def _seconds_of_children():
    """Of processor time, of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write(file, source):
    """Write a source that Python compiles anew."""
    second = file.stat().st_mtime // 1 + 1
    file.write_text(source)
    # By its second and its length, Python knows whether it has compiled a file already.
    os.utime(file, (second, second))


def _key(*parts):
    return json.dumps(parts, ensure_ascii=False)


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("paths", nargs="*", help="such as rules/*.py; all, by default")
    parser.add_argument("--sample", type=int, help="so many, chosen by chance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="run the first tests of each only")
    options = parser.parse_args()

    every = cases_of(options.paths or ["*"])
    chosen = every
    if options.sample is not None and options.sample < len(every):
        chosen = random.Random(options.seed).sample(every, options.sample)
    results, explained = _known(), explanations()
    known = {key for key, trial in results.items() if trial.killed or key in explained}
    untried = [case for case in chosen if case.key not in known]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        Copy(Path(folder) / "repository", options.quick) as copy,
    ):
        for case in untried:
            trial = results[case.key] = copy.trial(case)
            with RESULTS.open("a") as file:
                file.write(json.dumps([case.key, *trial]) + "\n")
            outcome = "killed  " if trial.killed else "SURVIVED"
            print(f"{outcome} {trial.seconds:6.1f} s  {_told(case)}", flush=True)
    _report(every, results, set(explained))
    unexplained = [case for case in chosen if not results[case.key].killed]
    unexplained = [case for case in unexplained if case.key not in explained]
    sys.exit("\n".join(["", "survive:", *map(_told, unexplained)]) if unexplained else 0)


def cases_of(patterns):
    """All mutants of the files that match one of these."""
    found = []
    for file in dict.fromkeys(file for room in ROOMS for file in sorted(PACKAGE.glob(room))):
        path = file.relative_to(PACKAGE)
        if any(map(path.match, patterns)):
            found += cases_of_file(str(path))
    return found


def cases_of_file(path):
    file, seen = PACKAGE / path, Counter()
    source = file.read_text()
    for mutant in mutants_of(file):
        was = _lines(source, mutant.at, mutant.old)
        becomes = _lines(mutant.applied_to(source), mutant.at, mutant.new)
        yield Case(path, was, becomes, seen[was, becomes], mutant)
        seen[was, becomes] += 1


def room_of(path):
    """The pattern of ROOMS by which a file is mutated."""
    return next(pattern for pattern in ROOMS if Path(path).match(pattern))


def explanations():
    """Why a mutant may survive, by its key."""
    every = tomllib.loads(EXPLAINED.read_text())["survivor"]
    return {
        _key(one["path"], one["was"], one["becomes"], one.get("nth", 0)): one["why"]
        for one in every
    }


def _lines(text, at, part):
    """The lines of a text that a part of it stands on, as one."""
    first = text.count("\n", 0, at)
    lines = text.split("\n")[first : first + part.count("\n") + 1]
    return " ".join(" ".join(lines).split())


def _known():
    if not RESULTS.exists():
        return {}
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return {key: Trial(killed, seconds) for key, killed, seconds in lines}


def _report(cases, results, explained):
    """Print what is known of these, from this run and those before it."""
    print(f"\n{'killed':>8} {'explained':>10} {'survive':>8} {'untried':>8}  file")
    counted = {}
    for case in cases:
        trial = results.get(case.key)
        outcome = "untried" if trial is None else "killed" if trial.killed else "survive"
        if outcome == "survive" and case.key in explained:
            outcome = "explained"
        for title in (case.path, f"{Path(case.path).parent}/*"):
            counted.setdefault(title, Counter())[outcome] += 1
    for title, of in sorted(counted.items(), key=lambda one: ("*" in one[0], one[0])):
        print(f"{of['killed']:8} {of['explained']:10} {of['survive']:8} {of['untried']:8}  {title}")


def _told(case: Case) -> str:
    return f"{case.path}:{case.mutant.line}\n    {case.was}\n    {case.becomes}"


if __name__ == "__main__":
    # However it is ended, it leaves no copy and no tests behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
