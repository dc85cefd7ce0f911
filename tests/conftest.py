"""Fixtures of the suite: real servers, a faulty network, child processes.

tests/support/matrix.py says which kind of server a test gets, by `server`, `own_server`, `locks` or
`proxy`.

    def test_a_lost_reply_is_no_busy(locks, proxy):
        locks.on(proxy, TTL=2)
        proxy.rule("EVALSHA", "cut_after")
        with distributed_lock("lottery", wait=0): ...
        assert locks.keys() == []
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import uuid
from contextlib import contextmanager

import pytest

from tests.support.processes import Child
from tests.support.proxy import Proxy
from tests.support.servers import (
    IMAGES,
    KIND,
    KINDS,
    Server,
    binary,
    docker_answers,
    made_once,
    missing,
    shared,
)

pytest_plugins = [
    "tests.support.matrix",  # Others import it, and the next one.
    "tests.support.made_once",
    "tests.support.run_servers",
    "tests.support.backends",
    "tests.support.clusters",
    "tests.support.databases",
    "tests.support.interrupts",
    "tests.support.proofs",
    "tests.support.quorums",
    "tests.support.sockets",
    "tests.support.topologies",
    "tests.support.ways",
    "tests.support.permits",
    "tests.support.orders",  # It imports the one before.
]

_REPORTERS = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let the garbage collector pass over what stays until the end: modules, and the tests."""
    # To look for garbage meanwhile took a fifth of the time, in each process of xdist.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class Locks:
    """The REDISLOCK setting of a test, and a look at what is on its server."""

    def __init__(self, settings, server, prefix):
        self.prefix = prefix
        self._settings = settings
        self.on(server)

    def on(self, target, **options):
        """Point the default alias at a server or a proxy; *options* are its other settings."""
        self.server = target.server if isinstance(target, Proxy) else target
        self.redis = self.server.client()  # Straight to the server, past any proxy.
        if isinstance(target, Server) and target.scheme == "rediss":
            options["OPTIONS"] = {"ssl_ca_certs": target.ca, **options.get("OPTIONS", {})}
        self._apply({"LOCATION": target.url, "KEY_PREFIX": self.prefix, **options})
        return self

    def configure(self, **options):
        """Change some settings of the default alias, and keep the others."""
        self._apply({**self._settings.REDISLOCK["default"], **options})
        return self

    def keys(self):
        """Return all keys of this test, by a connection of our own."""
        return sorted(self.redis.scan_iter(match=f"{self.prefix}*", count=1000))

    def connections(self):
        """Return how many connections there are of this test, whose client_name is the prefix."""
        return sum(one["name"] == self.prefix for one in self.redis.client_list())

    def without_ttl(self):
        """Return the keys that would stay for ever."""
        return [key for key in self.keys() if self.redis.pttl(key) == -1]

    def _apply(self, default):
        self._settings.REDISLOCK = {"default": default}


# Servers


@pytest.fixture(scope="session")
def shared_servers():
    """One server of each kind for the whole run (of an xdist worker), from when it is asked for."""
    yield from made_once(shared)


@pytest.fixture(scope="session")
def server_kind(request):
    """The kind of the servers of the test; in CI none may be missing."""
    kind = request.param
    if binary(kind) is None:
        skip_or_fail(f"no {kind} program here, and a container cannot be broken as needed")
    return kind


@pytest.fixture
def server(server_kind, shared_servers):
    """A running server shared by many tests: to use, not to break. See own_server.

    It is looked up for each test. For the session, pytest would keep the one of another kind when
    tests of a module with a `server_kind` of its own come in between.
    """
    return shared_servers(server_kind)


@pytest.fixture
def make_server(request):
    """Start servers of the test's own: ``make_server("redis", maxmemory="20mb", tls=True)``.

    Without a kind it is that of the test's other servers, or whatever this machine has.
    """
    with closed_later(
        request, "log of a server", lambda server: f"{server!r}\n{server.log}"
    ) as note:

        def make(kind=None, *arguments, **config):
            return note(Server(chosen_kind(request, kind), *arguments, **config)).start()

        yield make


def chosen_kind(request, kind=None):
    """That kind, or that of the test's other servers, or whatever this machine has."""
    if kind is None:
        wants = "server_kind" in request.fixturenames
        kind = request.getfixturevalue("server_kind") if wants else KIND
    if reason := missing(kind):
        skip_or_fail(reason)
    return kind


@pytest.fixture
def own_server(server_kind, make_server):
    """A fresh server for a test that stops, kills, freezes or reconfigures it."""
    return make_server(server_kind)


@pytest.fixture
def make_proxy(request):
    """Put a fault proxy in front of any server."""
    proxies = []
    with closed_later(request, "commands through the proxy", Proxy.report) as note:

        def make(server, *, seed=0):
            proxies.append(note(Proxy(server, seed=seed)))
            return proxies[-1]

        yield make
    # redis-py may send INCR as INCRBY: a rule that misses its command proves nothing, silently.
    for proxy in proxies:
        assert not proxy.idle_rules(), f"these faults never happened: {proxy.idle_rules()}"


@pytest.fixture
def proxy(server, make_proxy):
    """A fault proxy in front of the shared server."""
    return make_proxy(server)


# Locks and processes


@pytest.fixture
def key_prefix():
    """A KEY_PREFIX that no other test has."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def redis_url(server):
    """The address of the shared server, emptied for this test."""
    with server.client() as client:
        client.flushall()
    yield server.url
    if isinstance(server, Server):
        server.resume()  # Should the test have left it frozen.


@pytest.fixture
def locks(settings, server, redis_url, key_prefix):
    """REDISLOCK for this test, on the shared server unless ``locks.on(...)`` says otherwise."""
    locks = Locks(settings, server, key_prefix)
    yield locks
    locks.redis.close()


@pytest.fixture
def spawn(request, settings):
    """Run code in child processes, with the REDISLOCK of this moment; see support/processes.py."""
    with closed_later(request, "stderr of a child", lambda child: child.stderr) as note:

        def start(code, *args, prelude="", **kwargs):
            redislock = settings.REDISLOCK
            return note(Child(code, *args, redislock=redislock, prelude=prelude, **kwargs))

        yield start


# Order and selection


@pytest.hookimpl(trylast=True)  # The order is random until here.
def pytest_collection_modifyitems(config, items):
    """Begin with what takes longest, and give each process its part of that."""
    if config.getoption("quick"):
        slow = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if _is_quick(item)]

    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _dealt(items, hands):
    """Put tests in the order in which the processes of xdist, one stretch each, are soonest done.

    Slow tests keep the processor busy, and most others wait for a server. So three in eight
    processes begin with the slow ones, and come to others while there are some, lest at the end
    everybody waits for a slow one. Those of a module stay together: they share a browser, or a
    site. So do others by their place, in random order: a cluster or three sentinels are then
    started by few processes.
    """
    modules = {}
    for item in items:
        if _is_slow(item):
            modules.setdefault(item.path, []).append(item)
    stretches = [[] for _ in range(hands)]
    slow = stretches[: max(1, hands * 3 // 8)]
    for module in sorted(modules.values(), key=len, reverse=True):
        min(slow, key=len).extend(module)
    others = iter(sorted((item for item in items if not _is_slow(item)), key=_place))
    length = -(-len(items) // hands)
    for stretch in stretches:
        stretch.extend(itertools.islice(others, max(0, length - len(stretch))))
    return [*itertools.chain(*stretches), *others]


def _is_slow(item):
    """Whether it takes seconds of processor time, or has a time limit of its own."""
    return any(item.get_closest_marker(name) for name in ("slow", "timeout"))


def _place(item):
    """Where it keeps its locks, if it runs in one of several places."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("place", "")) if callspec else ""


def _is_quick(item):
    """Whether it is over at once."""
    starts_python = {"spawn", "pytester"} & set(getattr(item, "fixturenames", ()))
    return not (item.get_closest_marker("slow") or starts_python)


# Reports


def pytest_configure():
    # For each connection by TLS, redis-py reads all authorities that the system trusts, which
    # takes 40 ms of processor time. No test trusts them, nor does any process that a test starts.
    os.environ["SSL_CERT_FILE"] = os.environ["SSL_CERT_DIR"] = os.devnull
    # A shell has its background jobs ignore Ctrl-C and Ctrl-\, nohup SIGHUP; so would all that
    # tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_report_header():
    """Say which servers the tests will run on."""
    origin = IMAGES if docker_answers() else {kind: binary(kind) for kind in KINDS}
    return [f"{kind} server: {missing(kind) or origin[kind]}" for kind in KINDS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show what servers, proxies and children have to say about a failure."""
    report = yield
    if report.failed and report.when != "teardown":
        for title, tell in item.stash.get(_REPORTERS, []):
            report.sections.append((title, tell()))
    return report


def on_failure(request, title, tell):
    """Have what *tell* says stand in the report of the test, should it fail."""
    request.node.stash.setdefault(_REPORTERS, []).append((title, tell))


@contextmanager
def closed_later(request, title, tell):
    """Give a function to which all is passed that is to be closed at the end of the block.

    Should the test fail, its report shows what *tell* says of each, under that title.
    """
    made = []

    def note(one):
        made.append(one)
        on_failure(request, title, lambda: tell(one))
        return one

    yield note
    for one in made:
        one.close()


def skip_or_fail(reason):
    """Leave the test out for want of something that this machine lacks; CI may lack nothing."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI may lack nothing: {reason}")
    pytest.skip(reason)
