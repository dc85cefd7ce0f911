"""What is sent to servers, command by command: no change of structure may change it.

make test ARGS='tests/wire --write-wire'    # Write it down anew, and read the difference.
"""

import asyncio
import functools
import random
from pathlib import Path

import pytest

from tests.support.matrix import everywhere
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.wire.recorder import recorded
from tests.wire.scene import Scene, aperform, perform

WRITTEN = Path(__file__).parent


@pytest.fixture
def key_prefix():
    return "wire"


@pytest.fixture
def shared_cluster(make_cluster):
    """One whose slots nobody has moved."""
    return functools.cache(make_cluster)


@pytest.fixture
def shared_watched(make_watched):
    """One that nobody has failed over."""
    return functools.cache(lambda: make_watched(KIND))


@pytest.fixture
def servers(place, shared_cluster, shared_watched):
    """The servers of a place by their ports. They know no script."""
    others = []
    if place.name == "quorum":
        keepers = [locks.server for locks in place.locks]
    elif place.name == "cluster":
        keepers = shared_cluster().servers
    else:
        keepers = [place.locks.server]
        others = shared_watched().sentinels if place.name == "sentinel" else []
    for server in keepers:
        with server.client() as client:
            client.script_flush()
    named = {server.port: f"server-{n}" for n, server in enumerate(keepers, 1)}
    return named | dict.fromkeys([one.port for one in others], "sentinel")


@everywhere
@pytest.mark.places("redis", "sentinel", "cluster", "quorum", "unscripted")
@pytest.mark.no_permit("it would be another log")
def test_the_same_is_sent_as_was_written_down(request, place, servers, monkeypatch):
    # A lease that was held for some time is noted at its end, by another script.
    monkeypatch.setattr("django_redislock.handle.NOTED_FROM", HUNG)
    random.seed(1)  # It chooses among the permits of a quorum.
    # A quorum has a majority before all have answered: those may have granted what is to be undone.
    passed_over = {"leave"} if place.name == "quorum" else ()
    with recorded(servers, passed_over) as recorder:
        scene = Scene(recorder, in_turn=place.name not in {"quorum", "unscripted"})
        perform(scene)
        asyncio.run(aperform(scene))
    log = WRITTEN / f"{place.name}.log"
    if request.config.getoption("write_wire"):
        log.write_text(recorder.text())
    assert recorder.text() == log.read_text()
