"""Wheels of the package: of the working tree, and of the minor version before it.

Both are built once and unpacked below build/. A child process finds one in place of the package of
the working tree: see environment_for() in nursery.py.
"""

import fcntl
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from tests import ROOT

# The version before that of the working tree. To be moved on when a minor version is made.
FORMER = "22ac8833f7955c48e419127efe5352732e0bd3c0"

OLD, NEW = VERSIONS = ("old", "new")  # That one, and the working tree.

_PACKAGE = ROOT / "django_redislock"
_SOURCES = ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", _PACKAGE.name)
_LEFTOVERS = ("__pycache__", "*.orig", "*.rej", "*~")
_UNPACKED = ROOT / "build" / "versions"
_DAY = 86_400.0  # Seconds for which the wheel of a working tree stays that is no more.


class NoHistory(Exception):
    """The former version cannot be built here; says why."""


def unpacked(version):
    """The folder in which the wheel of OLD or NEW is unpacked.

    Raises:
        NoHistory: It is OLD, and not to be had.
    """
    if version == OLD:
        return str(_made_once(FORMER, _take_from_history))
    return str(_made_once(f"tree-{_digest()}", _copy_tree))


def _files_of_package():
    for path in sorted(_PACKAGE.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not any(fnmatch(part, one) for part in parts for one in _LEFTOVERS):
            yield path


def _copy_tree(source):
    """Copy what a wheel is built from, so that building leaves nothing in the checkout."""
    for name in _SOURCES[:-1]:
        shutil.copy(ROOT / name, source)
    shutil.copytree(_PACKAGE, source / _PACKAGE.name, ignore=shutil.ignore_patterns(*_LEFTOVERS))


def _build(source, target):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-input", "--no-build-isolation"]  # It needs no index.
    command += ["--wheel-dir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def _digest():
    digest = hashlib.sha256()
    for path in (*(ROOT / name for name in _SOURCES[:-1]), *_files_of_package()):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _made_once(name, get_sources):
    """Unpack the wheel of these sources, unless another process of this or a former run has."""
    _UNPACKED.mkdir(parents=True, exist_ok=True)
    made = _UNPACKED / name
    with (_UNPACKED / "lock").open("a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        if not made.exists():
            for tree in _UNPACKED.glob("tree-*"):
                if tree.stat().st_mtime < time.time() - _DAY:
                    shutil.rmtree(tree, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=_UNPACKED) as folder:
                source, target, ready = (Path(folder) / one for one in ("source", "whl", "ready"))
                source.mkdir()
                get_sources(source)
                with zipfile.ZipFile(_build(source, target)) as wheel:
                    wheel.extractall(ready)
                ready.rename(made)
    return made


def _take_from_history(source):
    command = ["git", "-c", f"safe.directory={ROOT}", "archive", FORMER, *_SOURCES]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        raise NoHistory(
            "there is no git here, which has the former version of the package"
        ) from None
    if found.returncode:
        raise NoHistory(
            f"the former version of the package, commit {FORMER[:12]}, is not in the history here"
            " (of a shallow clone: git fetch --unshallow):"
            f" {found.stderr.decode(errors='replace').strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(source, filter="data")
