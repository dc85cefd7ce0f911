"""`make demo-stale-holder` from the outside: it shows STORY, and docs/databases.md has its end."""

import re

import pytest

from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STORY = """\
with distributed_lock(...):

         web-1                                  web-2
  2.0 s  has the lock, fence 1795351462476489
  2.0 s  reads 0
  2.0 s  has checked its lease: SIGSTOP
  8.0 s  ┆                                      has the lock, fence 1795351468482518
  8.0 s  ┆                                      reads 0
  8.0 s  ┆                                      writes 20
  8.0 s  SIGCONT
  8.1 s  writes 10
  8.1 s  LockLost, after the write

         30 tickets are sold, and the pot has 10.

with distributed_lock(...) as lease, lease.atomic():

         web-1                                  web-2
  9.8 s  has the lock, fence 1795351470299930
  9.8 s  has checked its lease: SIGSTOP
 15.8 s  ┆                                      has the lock, fence 1795351476301625
 15.8 s  ┆                                      reads 0
 15.9 s  ┆                                      writes 20
 15.9 s  SIGCONT
 15.9 s  StaleFence: 1795351476301625 is newer
 15.9 s  tries again
 15.9 s  has the lock, fence 1795351476358674
 15.9 s  reads 20
 15.9 s  writes 30

         30 tickets are sold, and the pot has 30.

RESULT sold=30 without_fence=10 with_fence=30
"""


def shape_of(line):
    """The line as it is in every run: without times, fences and the version of the server."""
    line = re.sub(r"^ *\d+\.\d s", "time", line)
    return re.sub(r"\d{16}", "fence", re.sub(r"Valkey .*", "Valkey", line))


@pytest.mark.proves("N1")
def test_the_update_of_a_stopped_holder_is_lost_without_the_fence_and_refused_with_it(demos):
    status, lines = demos.run("demo_stale_holder")
    story = STORY.splitlines()
    assert lines[-1] == story[-1]
    assert status == 0
    shown = lines[lines.index(story[0]) :]
    assert [shape_of(line) for line in shown] == [shape_of(line) for line in story]
    assert lines[-1] in (ROOT / "docs" / "databases.md").read_text()
