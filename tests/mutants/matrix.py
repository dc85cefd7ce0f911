"""Which tests kill which mutants, and which of them are needed for that.

    python -m tests.mutants.matrix FILE ... -- PYTEST_ARGUMENT ...

FILE is as in `rules/flows.py`. With each of its mutants, all chosen tests run that reach its line.
What is printed are tests without which the others still kill each mutant and reach each line of
the package; ALL, if that is so of each case of a test function. Those that kill least are left out
first. What child processes do is not seen, nor is what a module does when it is imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import coverage
import pytest

from tests import ROOT
from tests.mutants.__main__ import PACKAGE, Copy, Suite, Tests, cases_of_file, write


class Reaching:
    """The plugin that notes which lines of the package each test reaches."""

    def __init__(self):
        self._measured = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)

    def pytest_runtest_logstart(self, nodeid):
        self._measured.start()
        self._measured.switch_context(nodeid)

    def pytest_runtest_logfinish(self):
        self._measured.stop()

    def tests(self):
        """The tests by file and line."""
        data = self._measured.get_data()
        return {
            str(Path(file).relative_to(PACKAGE)): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }


def reach(arguments):
    """Which tests reach each line of each file, as a process of its own sees it."""
    with tempfile.NamedTemporaryFile() as file:
        program = [sys.executable, "-m", "tests.mutants.matrix", "--reach", file.name]
        subprocess.run([*program, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)
        return json.loads(Path(file.name).read_text())


def tell_reach(file, arguments):
    """In that process: run the tests, and write down what they reach."""
    reaching = Reaching()
    late = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*arguments, *late, "-q", "-n0"], plugins=[reaching])
    Path(file).write_text(json.dumps(reaching.tests()))
    return status


def killers_of(path, folder, suite, reached):
    """The tests that fail with each mutant of a file, by the mutant's place."""
    file = PACKAGE.relative_to(ROOT) / path
    source = (folder / file).read_text()
    for number, case in enumerate(cases_of_file(path)):
        last = case.mutant.line + case.mutant.old.count("\n")
        lines = map(str, range(case.mutant.line, last + 1))
        only = sorted({test for line in lines for test in reached.get(line, ()) if test})
        if path.endswith(".py") and not only:
            continue
        write(folder / file, case.mutant.applied_to(source))
        try:
            run = suite.run(file, only=only, goes_on=True)
        finally:
            write(folder / file, source)
        yield f"{path}:{case.mutant.line} {number}", {test for test, _ in run.failed}


def spare(needed):
    """The tests that may go, since others do all that is needed."""
    counts = Counter(test for tests in needed.values() for test in tests)
    of_test = defaultdict(list)
    for tests in needed.values():
        for test in tests:
            of_test[test].append(tests)
    kept = set(counts)
    for test in sorted(counts, key=counts.__getitem__):
        kept.discard(test)
        if not all(tests & kept for tests in of_test[test]):
            kept.add(test)
    return set(counts) - kept, kept


def main(files, arguments):
    tests = Tests(("--tb=no", *arguments))
    reached = reach(arguments)
    needed = {
        f"{path}:{line}": {test for test in of_line if test}
        for path, lines in reached.items()
        for line, of_line in lines.items()
    }
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        repository = Path(folder) / "repository"
        Copy(repository, quick=True)
        with Suite(repository, tests) as suite:
            run = suite.run()
            if not run.passed:
                sys.exit(f"tests fail without any mutant: {run.failed}")
            for path in files:
                found = dict(killers_of(path, repository, suite, reached.get(path, {})))
                print(f"{path}: {sum(map(bool, found.values()))} of {len(found)} killed")
                needed |= {mutant: killers for mutant, killers in found.items() if killers}
    spared, kept = spare(needed)
    functions = {test.partition("[")[0] for test in kept}
    for test in sorted(spared):
        print("   " if test.partition("[")[0] in functions else "ALL", test)


if __name__ == "__main__":
    if sys.argv[1] == "--reach":
        sys.exit(tell_reach(sys.argv[2], sys.argv[3:]))
    split = sys.argv.index("--")
    main(sys.argv[1:split], sys.argv[split + 1 :])
