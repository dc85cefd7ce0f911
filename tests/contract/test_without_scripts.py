"""Plain commands do what the scripts do, where nobody waits.

Hypothesis makes up sequences of operations; each is done by plain commands on a real server, and by
its script in this process, and what they answer and keep must be the same. The clock of the server
is moved by hand, so that leases end within an example.
"""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from django_redislock.backends.memory.interpreter import Interpreter
from django_redislock.backends.memory.keyspace import Keyspace
from django_redislock.backends.redis import without_scripts
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys
from django_redislock.rules.scripts import Script
from django_redislock.rules.steps import Call
from tests.support.servers import Server, missing

if TYPE_CHECKING:
    from tests.support.servers import Kind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None,
        reason="moving a server's clock needs Linux and a C compiler",
    ),
]

NAME = "lottery"
AT_ONCE = 0.03  # Seconds; when the machine is slower, an example says nothing and is dropped.
CLOSE = 100  # ms by which times may differ: the two servers are asked one after the other.

CHANNELS = ["bell:one:1", "bell:one:2", "bell:two:1", "bell:three:1"]
TOKENS = [f"{number}" * 32 for number in range(len(CHANNELS))]
IDS = [f"{number}" * 16 for number in range(len(CHANNELS))]
PERMITS = ["", "#1", "#2", "#2"]
OWNERS = [b'{"host":"web-%d"}' % number for number in range(len(CHANNELS))]

Operation = tuple[Any, ...]  # The name of a script, and what tells its arguments.
SCRIPTS = {script.name: script for script in vars(scripts).values() if isinstance(script, Script)}


# --- the worlds -------------------------------------------------------------------------------


class Memory:
    """The scripts in this process. Nobody listens: nobody waits."""

    def __init__(self) -> None:
        self.tickets: dict[int, bytes] = {}
        self._keyspace = Keyspace(lambda *_: 0)
        self._interpreter = Interpreter(self._keyspace)

    def perform(self, script: Script, args: tuple[Any, ...], us: int) -> Any:
        self._keyspace.us = us
        return self._interpreter.run(script, script.given(lock_keys("twin", NAME)), args)


class Real:
    """A real server, asked by script or by plain commands."""

    def __init__(self, client: redis.Redis) -> None:
        self.tickets: dict[int, bytes] = {}
        self._client = client
        self._keys = lock_keys(f"twin-{uuid.uuid4().hex[:8]}", NAME)

    def time(self) -> int:
        seconds, us = self._client.time()
        return seconds * 1_000_000 + us

    def perform(self, script: Script, args: tuple[Any, ...], *, by_script: bool) -> Any:
        if by_script:
            keys = script.given(self._keys)
            return self._client.eval(script.source, len(keys), *keys, *args)
        step = Call(script, NAME, args[:-1], 1.0)  # The channel is for scripts only.
        connection = self._client.connection_pool.get_connection()

        def ask(*command: Any) -> Any:
            connection.send_command(*command)
            return connection.read_response()

        try:
            return without_scripts.perform(step, self._keys, ask)
        finally:
            self._client.connection_pool.release(connection)


def alike(one: Any, other: Any) -> bool:
    """Whether two answers say the same, but for the moments at which they were given."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    left, right = (str(x.decode() if isinstance(x, bytes) else x) for x in (one, other))
    if "|" in left or " " in left:
        separator = "|" if "|" in left else " "
        return alike(left.split(separator), right.split(separator))
    if not (left.lstrip("-").isdecimal() and right.lstrip("-").isdecimal()) or left in TOKENS + IDS:
        return left == right
    first, second = int(left), int(right)
    if min(first, second) < 0:  # Such as -1 for "never".
        return first == second
    return abs(first - second) <= CLOSE * (1000 if first > 10**15 else 1)


def counts(name: str, answer: Any) -> Any:
    """What of an answer is no time, and must be the same to the last."""
    match name, answer:
        case "acquire", [b"queued", *_, newly]:
            return newly
        case "look", [_, _, waiters, *_]:
            return waiters
        case "runs", [*_, skips]:
            return int(skips)
        case "leave" | "retract" | "skip" | "start" | "finish", number:
            return number
    return None


# --- the operations ---------------------------------------------------------------------------

who = st.integers(0, len(CHANNELS) - 1)
ttls = st.sampled_from([1370, 4370])
runs = st.sampled_from(["", "run-1:0.0", "run-1:0.1", "run-2:0.0"])
heeds = st.sampled_from(["", "0run-1:0.0", "0run-1:0.1", "1", "1run-2:0.0"])
advances = st.tuples(st.just("advance"), st.sampled_from([300, 1100, 2300, 6500]))


def acquires(modes: list[str]) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just("acquire"), who, ttls, st.sampled_from(modes), st.booleans(), heeds)


of_owners = st.one_of(
    st.tuples(st.just("renew"), who, ttls, st.sampled_from(["r00000", "-00001", "r00002"])),
    st.tuples(
        st.just("conclude"),
        who,
        st.sampled_from([0, 0, 2170]),
        st.sampled_from([0, 0, 5170]),
        st.sampled_from(["", "done", "failed"]),
        runs,
        st.sampled_from([0, 60_000]),
    ),
    st.tuples(st.just("release"), who),
    st.tuples(st.just("leave"), who),
    st.tuples(st.just("force_release"), who, st.sampled_from(["a" * 16, "b" * 16])),
)
of_tasks = st.one_of(
    st.tuples(st.just("skip"), who),
    st.tuples(st.just("start"), who),
    st.tuples(st.just("finish"), who, st.sampled_from(["success", "failure", "retried"]), runs),
    st.tuples(st.just("finished"), runs),
    st.tuples(st.just("announce"), runs),
    st.tuples(st.just("requeue"), runs),
    st.tuples(st.just("retract"), runs),
)
LOOKS: list[Operation] = [("look",), ("inspect",), ("runs",)]


def arguments(  # noqa: PLR0911 - one return per operation
    operation: Operation, tickets: dict[int, bytes]
) -> tuple[Any, ...]:
    """What a client sends for it, its channel included."""
    name, *rest = operation
    number = rest[0] if rest and isinstance(rest[0], int) else 0
    token, id_, owner = TOKENS[number], IDS[number], OWNERS[number]
    channel = CHANNELS[number]
    match name, rest:
        case "acquire", [_, ttl, mode, comes_back, heed]:
            ticket = tickets.get(number, b"0") if comes_back else b"0"
            return token, id_, ttl, mode, ticket, heed, "r-"[number % 2], owner, channel
        case "renew", [_, ttl, renewals]:
            return token, ttl, renewals, channel
        case "conclude", [_, min_hold, once, ended, run, remembered]:
            # Only what is remembered as ended is remembered as a run.
            kept = remembered if ended else 0
            return token, min_hold, once, owner, ended, run, kept, channel
        case "release" | "leave", _:
            return token, channel
        case "force_release", [_, request]:
            return id_, request, channel
        case "skip", _:
            return "busy", owner, channel
        case "finish", [_, what, run]:
            return what, 170, owner, run, 60_000, PERMITS[number], id_, channel
        case "start", _:
            return PERMITS[number], id_, owner, channel
        case "announce" | "requeue", [run]:
            return run or "run-0", 3370, channel
        case "finished" | "retract", [run]:
            return run or "run-0", channel
        case "inspect", _:
            return 10, channel
    return (channel,)


# --- the tests --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["redis", "valkey"])
def movable(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose clock can be moved, for all examples of this module."""
    kind: Kind = request.param
    if reason := missing(kind):
        pytest.skip(reason)
    with Server(kind, movable_clock=True) as server:
        server.shift = 0.0  # type: ignore[attr-defined]
        yield server


class Twins:
    """A real server and the one in memory, which are told the same."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.real = Real(server.client())
        self.memory = Memory()
        self._fences: tuple[list[int], list[int]] = ([], [])

    def advance(self, ms: int) -> None:
        self._server.shift += ms / 1000  # type: ignore[attr-defined]
        self._server.shift_clock(self._server.shift)  # type: ignore[attr-defined]

    def do(self, operation: Operation, *, by_script: bool = True) -> None:
        script = SCRIPTS[operation[0]]
        begin, us = time.monotonic(), self.real.time()
        there = self.real.perform(
            script, arguments(operation, self.real.tickets), by_script=by_script
        )
        if time.monotonic() - begin > AT_ONCE:
            reject()
        here = self.memory.perform(script, arguments(operation, self.memory.tickets), us)
        same = alike(there, here) and counts(script.name, there) == counts(script.name, here)
        assert same, f"{script.name} on the server: {there!r}; in memory: {here!r}"
        if operation[0] == "acquire":
            self._note(operation[1], there, here)

    def _note(self, number: int, there: Any, here: Any) -> None:
        if isinstance(there, bytes):
            ranks = []
            for fences, fence in zip(self._fences, (int(there), int(here)), strict=True):
                assert not fences or fence >= fences[-1], "a fence did not grow"
                if fence not in fences:
                    fences.append(fence)
                ranks.append(fences.index(fence))
            assert ranks[0] == ranks[1], "one granted anew, the other confirmed"
        elif there[0] == b"queued":
            self.real.tickets[number] = there[1]
            self.memory.tickets[number] = here[1]


def compare(
    server: Server, operations: list[Any], by_script: Callable[[int], bool] = lambda _: True
) -> None:
    twins = Twins(server)
    for number, operation in enumerate(operations):
        if operation[0] == "advance":
            twins.advance(operation[1])
        else:
            twins.do(operation, by_script=by_script(number))
        for look in LOOKS:
            twins.do(look, by_script=by_script(number) or look[0] == "inspect")


bounded = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


alone = st.lists(
    st.one_of(acquires(["try"]), acquires(["try"]), of_owners, of_tasks, advances),
    min_size=3,
    max_size=14,
)


@bounded
@given(operations=alone)
def test_plain_commands_answer_as_the_scripts_do(movable: Server, operations: list[Any]) -> None:
    compare(movable, operations, lambda _: False)


@bounded
@given(operations=alone, by_script=st.lists(st.booleans(), min_size=14, max_size=14))
def test_clients_with_and_without_scripting_share_one_lock(
    movable: Server, operations: list[Any], by_script: list[bool]
) -> None:
    compare(movable, operations, by_script.__getitem__)
