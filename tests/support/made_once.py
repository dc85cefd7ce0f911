"""What takes long to make, and is only looked at: one process of a run makes it for all."""

import fcntl
import tempfile
from pathlib import Path

import pytest
from xdist import is_xdist_worker


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory):
    """Give a name, and how to make it in an empty folder; returns where it is."""
    base = tmp_path_factory.getbasetemp()
    of_run = base.parent if is_xdist_worker(request) else base

    def made(name, make):
        where = of_run / f"{name}.where"
        with (of_run / f"{name}.turn").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not where.exists():
                folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=of_run))
                where.write_text(str(make(folder)))
        return Path(where.read_text())

    return made
