"""Where a test runs: in which places, and on which kind of server.

    async def test_the_block_holds_the_lock(way, place): ...

is written for every place. It runs in those that have an implementation of their own: a server,
one that forbids scripts, the memory, a cluster, a quorum. The others are a server too, and differ
in what it is, how it is reached, what it allows and what it speaks. They run what is marked:

    @everywhere
    async def test_a_dead_connection_is_replaced(way, place): ...

So do both kinds of server, for a test that asks for one (`server`, `locks`, `proxy`).

    make test ARGS=--everywhere    # Every test, in every place that it is written for.
    make test-quick                # On one server and in the memory.
"""

from itertools import chain

import pytest

from tests.support.servers import KIND, KINDS

UNSCRIPTED = "unscripted"
MEMORY = "memory"
SENTINEL = "sentinel"
CLUSTER = "cluster"
QUORUM = "quorum"
SOCKET = "socket"
SECURED = "secured"
RESP2 = "resp2"
SERVERS = (*KINDS, UNSCRIPTED)
PLACES = (*SERVERS, SOCKET, SECURED, RESP2, MEMORY, SENTINEL, CLUSTER, QUORUM)

QUICK = {KIND, MEMORY}
USUAL = {KIND, UNSCRIPTED, MEMORY, CLUSTER, QUORUM}

# Where tests with these marks do not run.
LACKING = (("needs_scripts", [UNSCRIPTED]), ("needs_records", [UNSCRIPTED, QUORUM]))

#: To run a test in all places and on both kinds of server: what it proves may differ there.
everywhere = pytest.mark.everywhere

#: To leave out the place that forbids scripts: it has no tasks, lists and force releases.
needs_scripts = pytest.mark.needs_scripts

#: To leave out that place, and the quorum, which keeps locks only.
needs_records = pytest.mark.needs_records

#: To run a test in these places only, as far as the run is to reach them at all.
places = pytest.mark.places
on_servers = places(*SERVERS)
in_turn = places(*(name for name in PLACES if name not in {UNSCRIPTED, QUORUM}))  # A fair queue.
unscripted = places(UNSCRIPTED)

#: Only Redis: the Valkey of the wheel speaks no TLS.
only_redis = pytest.mark.parametrize("server_kind", ["redis"], indirect=True)


def pytest_addoption(parser):
    parser.addoption("--everywhere", action="store_true", help="every test in every place")
    parser.addoption(
        "--quick",
        action="store_true",
        help="only what answers at once: no slow tests, no child processes, one kind of server",
    )


def pytest_generate_tests(metafunc):
    """Choose the places and the kinds of servers of a test, unless it names them itself."""
    test, wanted = metafunc.definition, {"place", "server_kind"} & set(metafunc.fixturenames)
    for mark in test.iter_markers("parametrize"):
        wanted -= {*mark.args[0].split(",")} if isinstance(mark.args[0], str) else {*mark.args[0]}
    if "place" in wanted:
        mark = test.get_closest_marker("places")
        written_for = mark.args if mark else PLACES
        if written_for != (UNSCRIPTED,):
            lacking = [one for mark, one in LACKING if test.get_closest_marker(mark)]
            written_for = [name for name in written_for if name not in {*chain(*lacking)}]
        metafunc.parametrize("place", _chosen(written_for, test), indirect=True)
    if "server_kind" in wanted:
        metafunc.parametrize("server_kind", _chosen(KINDS, test), indirect=True)


def _chosen(written_for, test):
    """Of the places that a test is written for, those to run it in; if none of them is, all."""
    if test.config.getoption("quick"):
        reached = QUICK
    elif test.config.getoption("everywhere") or test.get_closest_marker("everywhere"):
        reached = set(PLACES)
    else:
        reached = USUAL
    return [name for name in written_for if name in reached] or written_for
