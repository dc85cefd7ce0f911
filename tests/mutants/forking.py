"""Runs tests in forks of one process of pytest, which has collected them: each with one mutant.

A fork costs next to nothing, so a mutant costs no more than the tests until one of them fails; the
shortest come first. Tests that mostly wait are shared out to several forks.

The program is started in the folder to be tested, with the arguments of pytest. It reads each run
as a line of JSON: how many processes, the file to which a mutant has been written, or null, the
only tests to run, or none for all, and whether to go on after a failure. It answers with a line:
whether the tests passed, null if the mutant could not be put in place; the seconds of processor
time that it took; and each test that has failed, with how.
"""

import gc
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryFile
from types import CodeType, FunctionType

import pytest

NOT_IN_PLACE = 99  # The exit status.
PARTS = (
    *("co_name", "co_qualname", "co_code", "co_names", "co_varnames", "co_freevars"),
    *("co_cellvars", "co_exceptiontable"),
)


class NotInPlace(Exception):
    """A mutant changes what is carried out at import."""


class Forking:
    """The plugin that runs the tests again and again."""

    def __init__(self):
        self._questions, self._answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        self._told = TemporaryFile("a+b")  # noqa: SIM115 - forks write to it.
        self._took = {}  # Seconds, by test.
        self._sources = {}  # As they were collected.
        self._is_fork = self._goes_on = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        """Answer all questions. In a fork it is called again, and leaves it to pytest."""
        if self._is_fork:
            return None
        gc.unfreeze()
        functions = [one for one in gc.get_objects() if isinstance(one, FunctionType)]
        self._sources = {path: path.read_text() for path in Path().rglob("*.py")}
        gc.collect()
        gc.freeze()
        most = None
        for line in self._questions:
            processes, mutated, only, goes_on = json.loads(line)
            before = _seconds()
            self._told.seek(0)
            self._told.truncate()
            child = os.fork()
            if not child:
                self._goes_on = goes_on
                self._run(session, processes, mutated, only, functions, most)
            try:
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            finally:
                _end_group(child)
            took = _seconds() - before
            self._told.seek(0)
            told = [json.loads(one) for one in self._told]
            if most is None:
                most = int(3 + 5 * took)  # A mutant may go on for ever.
                for durations, _ in told:
                    self._took.update(durations)
                session.items.sort(key=lambda item: self._took.get(item.nodeid, 0.0))
            failed = [failed for _, failed in told if failed]
            passed = None if status == NOT_IN_PLACE else status == 0 and not failed
            print(json.dumps([passed, took, failed]), file=self._answers, flush=True)
        return True

    def _run(self, session, processes, mutated, only, functions, most):
        self._is_fork = True
        os.setpgid(0, 0)  # To be ended with all that it starts.
        status = 1
        try:
            if most is not None:
                resource.setrlimit(resource.RLIMIT_CPU, (most, most))
            if mutated is not None:
                self._put_in_place(Path(mutated), functions)
            if only:
                session.items[:] = [item for item in session.items if item.nodeid in only]
            if processes == 1 or self._is_part(session, processes):
                session.config.hook.pytest_runtestloop(session=session)
                self._tell(self._took)
            status = 0
        except NotInPlace:
            status = NOT_IN_PLACE
        finally:
            os._exit(status)

    def _is_part(self, session, processes):
        """Share the tests out to forks. In each return True; here, False when all have passed."""
        for part in range(processes):
            if not os.fork():
                session.items[:] = session.items[part::processes]
                return True
        for _ in range(processes):
            if os.wait()[1]:
                os._exit(1)  # The others are ended with the group.
        return False

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._tell({}, report)
            if not self._goes_on:
                os._exit(1)
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration

    def _tell(self, took, failed=None):
        """Let the process that has forked this one know."""
        how = failed and [failed.nodeid, failed.longreprtext]
        os.write(self._told.fileno(), json.dumps([took, how]).encode() + b"\n")

    def _put_in_place(self, path, functions):
        """Let what is imported be as the file is now.

        Raises:
            NotInPlace: What has changed is carried out at import.
        """
        if path.suffix == ".lua":
            _read_scripts_again()
            return
        codes = (
            compile(text, str(path), "exec") for text in (self._sources[path], path.read_text())
        )
        changes = list(_changes(*codes))
        name = ".".join(path.with_suffix("").parts)
        for function in functions:
            if function.__module__ == name:
                for old, new in changes:
                    if _is_same(function.__code__, old):
                        function.__code__ = new


def _read_scripts_again():
    from django_redislock.rules import scripts

    spec = scripts.__spec__
    assert spec
    fresh = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fresh
    spec.loader.exec_module(fresh)
    sys.modules[spec.name] = scripts
    for name, script in vars(scripts).items():
        if isinstance(script, scripts.Script):
            for field in fields(script):
                object.__setattr__(script, field.name, getattr(vars(fresh)[name], field.name))


def _changes(old, new):
    """The functions that differ, in both versions."""
    if _is_same(old, new):
        return
    if old.co_flags & inspect.CO_OPTIMIZED:
        yield old, new
    elif not _is_alike(old, new):
        raise NotInPlace
    for one, other in zip(_inner(old), _inner(new), strict=False):
        yield from _changes(one, other)


def _is_same(one, other):
    """Whether two codes are the same, wherever they stand."""
    return _is_alike(one, other) and all(map(_is_same, _inner(one), _inner(other)))


def _is_alike(one, other):
    """Whether they differ at most in the codes of functions and classes within them."""
    return (
        all(getattr(one, part) == getattr(other, part) for part in PARTS)
        and _constants(one) == _constants(other)
        and len(_inner(one)) == len(_inner(other))
    )


def _inner(code):
    return [one for one in code.co_consts if isinstance(one, CodeType)]


def _constants(code):
    # True is no 1, though it equals it.
    return [(type(one), repr(one)) for one in code.co_consts if not isinstance(one, CodeType)]


def _end_group(child):
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # It has left nothing.


def _seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.path[0] = str(Path.cwd())  # In place of the folder of this file.
    forking = Forking()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    pytest.main(sys.argv[1:], plugins=[forking])


if __name__ == "__main__":
    main()
