"""The keyspace answers every command that our scripts use as servers do, and Lua sees the same.

Hypothesis makes up sequences of commands; a script performs each on a real server and in this
process, and tells what it was given back, and of which Lua type. Both have the same clock: that of
the server, which is moved by hand, so that keys expire within an example.
"""

from __future__ import annotations

import gc
import hashlib
import re
import shutil
import sys
import time
import uuid
import weakref
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_redislock.backends.memory.interpreter import Interpreter, ReplyError
from django_redislock.doctor.rights import called_by_scripts
from django_redislock.rules.scripts import Script
from tests.support.servers import Server, missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None,
        reason="moving a server's clock needs Linux and a C compiler",
    ),
]

ROUNDED = 2  # ms by which a time that is left may differ, though both were asked at one time.
HEARD = "bell:heard"  # Somebody listens on this channel.


def script(source):
    text = source.encode()
    return Script("test", text, hashlib.sha1(text, usedforsecurity=False).hexdigest(), ())


TOLD = script("""
local function told(reply)
  if type(reply) ~= 'table' then
    return { type(reply), tostring(reply) }
  end
  local all = { 'table', reply.ok or '', string.match(reply.err or '', '^[^.]*') }
  for _, one in ipairs(reply) do
    table.insert(all, told(one))
  end
  return all
end
local time = redis.call('TIME')
return { time[1], time[2], told(redis.pcall(unpack(ARGV))) }
""")


class Twins:
    """A real server and a keyspace, which are told the same."""

    def __init__(self, server):
        self._server = server
        self._interpreter = Interpreter()
        self._interpreter.listen(HEARD.encode())
        self._prefix = f"twins-{uuid.uuid4().hex}:"
        self._apart = 0.0  # The most ms that have gone by between the times of the two.

    def __enter__(self):
        self._client = self._server.client()
        self._listener = self._client.pubsub()
        self._listener.subscribe(HEARD)
        self._listener.get_message(timeout=5)
        return self

    def __exit__(self, *exc_info):
        self._listener.close()
        self._client.close()

    def key(self, name):
        return self._prefix + name

    def both(self, script, *args, keys=()):
        """What a client reads from the two; an error is told by the beginning of its message."""
        begun = time.monotonic()
        moment = self._client.time()
        names = [self.key(key) for key in keys]
        there: Any
        try:
            there = self._client.eval(script.source, len(names), *names, *args)
        except redis.ResponseError as error:
            there = _error(error)
        self._apart = max(self._apart, 1000 * (time.monotonic() - begun))
        if script is TOLD:  # Which tells when it was run: no key expires in between.
            moment = int(there[0]), int(there[1])
        us = moment[0] * 1_000_000 + moment[1]
        try:
            return there, self._interpreter.run(script, us, names, args)[0]
        except ReplyError as error:
            return there, _error(error)

    def compare(self, command):
        name, *args = command
        if name not in {"PUBLISH", "TIME"}:
            args[0] = self.key(args[0])
        there, here = self.both(TOLD, name, *args)
        if name == "PTTL":
            there, here = (int(answer[2][1]) for answer in (there, here))
            # They may have been apart when the key was given its time, and now again.
            close = ROUNDED + 2 * self._apart
            same = there == here if min(there, here) < 0 else abs(there - here) <= close
        else:
            same = name == "TIME" or there[2] == here[2]
        assert same, f"{command} answers on the server: {there!r}; in memory: {here!r}"

    def advance(self, ms):
        self._server.shift += ms / 1000
        self._server.shift_clock(self._server.shift)


def _error(error):
    return str(error).removeprefix("ERR ").partition(" script: ")[0]  # redis-py drops it too.


@pytest.fixture(scope="module", params=["redis", "valkey"])
def movable(request):
    """A server whose clock can be moved, for all examples of this module."""
    kind = request.param
    if reason := missing(kind):
        pytest.skip(reason)
    with Server(kind, movable_clock=True) as server:
        server.shift = 0.0
        yield server


# --- commands ----------------------------------------------------------------------------------

WORDS = {
    "key": ["one", "one", "two", "three"],
    "value": ["", "0", "7", "-1", "lottery", "a|b|c"],
    "member": ["ann", "bob", "cid", "0"],
    "score": ["1", "2", "2", "-1", "+inf", "-inf", "inf", "1763750000123456", "soon"],
    "bound": ["1", "2", "-1", "+inf", "-inf", "1763750000123456", "soon"],
    "index": ["0", "1", "2", "-1", "-2", "-4", "9", "x"],
    "offset": ["0", "1", "5"],
    "count": ["1", "2", "9"],
    "bell": [HEARD, "bell:not-heard"],
    # So far from all sums of advances that it does not matter how long an example takes.
    "lifetime": ["270", "1270", "4270", "0", "-5", "x"],
}
COMMANDS = """
TIME; PUBLISH bell value; DEL key; EXISTS key; TYPE key
PEXPIRE key lifetime; PEXPIRE key lifetime GT; PTTL key
GET key; MGET key; SET key value; SET key value PX lifetime
STRLEN key; GETRANGE key offset offset; SETRANGE key offset value
HGET key member; HMGET key member member; HSET key member value; HGETALL key; HLEN key
HDEL key member; HDEL key member member; HINCRBY key member index
LLEN key; LINDEX key index; LRANGE key index index; RPUSH key value
LSET key index value; LTRIM key index index; SCARD key; XLEN key
ZADD key score member; ZADD key NX score member; ZADD key GT score member
ZADD key GT CH score member; ZADD key score member score member
ZADD key GT CH score member score member; ZREM key member; ZREM key member member
ZPOPMIN key count; ZSCORE key member; ZCARD key; ZCOUNT key bound bound
ZRANGE key index index; ZRANGE key index index WITHSCORES; ZREVRANGE key index index WITHSCORES
ZRANGE key bound bound BYSCORE; ZRANGE key bound bound BYSCORE LIMIT offset offset
ZRANGE key bound bound BYSCORE REV LIMIT offset offset
ZREMRANGEBYSCORE key bound bound; ZREMRANGEBYRANK key index index
"""
FORMS = {
    form: st.tuples(*(st.sampled_from(WORDS.get(word, [word])) for word in form.split()))
    for form in re.split(r"[;\n]\s*", COMMANDS.strip())
}
# Commands on one type in a row tell more than those that meet the wrong one.
FAMILIES = [st.one_of(*(FORMS[one] for one in FORMS if one[0] == letter)) for letter in "HLZ"]
advances = st.tuples(st.just("advance"), st.sampled_from([500, 1000, 3000]))


def test_the_keyspace_has_the_commands_that_the_scripts_use():
    assert {name.decode().lower() for name in Interpreter().commands} == called_by_scripts()


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@example([("SET", "one", "", "PX", "270"), ("advance", 500), ("EXISTS", "one"), ("PTTL", "one")])
@example([("SET", "one", "7", "PX", "270"), ("SET", "one", "7"), ("PTTL", "one")])
@example([("SET", "one", "7", "PX", "4270"), ("SETRANGE", "one", "9", "x"), ("PTTL", "one")])
@example([("SET", "one", "7"), ("PEXPIRE", "one", "1270", "GT"), ("PTTL", "one")])
@example([("HSET", "one", "0", "x"), ("HDEL", "one", "0"), ("SET", "one", "7"), ("TYPE", "one")])
@example([("ZADD", "one", "2", "bob"), ("ZADD", "one", "GT", "1", "bob"), ("ZSCORE", "one", "bob")])
@example(
    [
        *[("ZADD", "one", score, member) for member, score in zip("abcd", "1223", strict=True)],
        ("ZRANGE", "one", "2", "+inf", "BYSCORE", "LIMIT", "1", "1"),
        ("ZRANGE", "one", "+inf", "2", "BYSCORE", "REV", "LIMIT", "0", "2"),
        ("ZRANGE", "one", "2", "+inf", "BYSCORE", "LIMIT", "0", "0"),
        ("ZRANGE", "one", "2", "+inf", "BYSCORE", "REV", "LIMIT", "0", "5"),
    ]
)
@given(
    commands=st.lists(
        st.one_of(*FORMS.values(), *FAMILIES, *FAMILIES, advances, advances),
        min_size=5,
        max_size=40,
    )
)
def test_every_command_answers_as_on_a_server(movable, commands):
    with Twins(movable) as twins:
        for one in commands:
            if one[0] == "advance":
                twins.advance(one[1])
            else:
                twins.compare(one)
        for key in ("one", "two", "three"):
            for name in ("TYPE", "PTTL", "GET", "HGETALL"):
                twins.compare((name, key))
            twins.compare(("LRANGE", key, "0", "-1"))
            twins.compare(("ZRANGE", key, "0", "-1", "WITHSCORES"))


# --- scripts -----------------------------------------------------------------------------------

ANSWERS = [
    "return 3.99",
    "return -3.99",
    "return 1763750000123456",
    "return 'lottery'",
    "return ''",
    "return true",
    "return false",
    "return nil",
    "return { 1, 2.5, 'x', true, false, { 'y' }, nil, 'beyond' }",
    "return { ok = 'FINE' }",
    "return { err = 'ODD it is' }",
    "return { 1, { ok = 'FINE' } }",
    "return { #KEYS, #ARGV, ARGV[1], ARGV[2], KEYS[3] == nil }",
    "return { tostring(ARGV[1]), ARGV[1] + 1 }",
    "return redis.sha1hex('lottery')",
    "return redis.call('SET', KEYS[1], 'x')",
    "return redis.call('TYPE', KEYS[1])",
    "return redis.call('GET', KEYS[1]) == false",
    "return redis.call('ZSCORE', KEYS[1], 'x') or 'none'",
    # Numbers as arguments: more digits than Lua prints.
    "redis.call('SET', KEYS[1], 1763750000123456) return redis.call('GET', KEYS[1])",
    "redis.call('SET', KEYS[1], 0.5) return redis.call('GET', KEYS[1])",
    "redis.call('ZADD', KEYS[1], 1763750000123456, 'x') return redis.call('ZSCORE', KEYS[1], 'x')",
    # Errors: caught, returned, raised; what was written before one stays.
    "redis.call('RPUSH', KEYS[1], 'x') return redis.pcall('GET', KEYS[1])",
    "redis.call('RPUSH', KEYS[1], 'x') return { redis.pcall('GET', KEYS[1]).err }",
    "redis.call('RPUSH', KEYS[1], 'x') return redis.call('GET', KEYS[1])",
    "return redis.call('SET', KEYS[1], 'x', 'PX', 0)",
    "return redis.call('PEXPIRE', KEYS[1], 1.5)",
]


def test_a_script_is_given_and_answers_the_same(movable):
    for source in ANSWERS:
        with Twins(movable) as twins:
            there, here = twins.both(script(source), "17", "two", keys=("one", "two"))
        assert type(there) is type(here), source
        assert there == here, source


def test_an_error_of_lua_is_an_error_reply_and_undoes_nothing(movable):
    breaks = script("redis.call('SET', KEYS[1], 'x') return nil .. 'x'")
    with Twins(movable) as twins:
        for answer in twins.both(breaks, keys=("one",)):
            assert "attempt to concatenate a nil value" in answer
        there, here = twins.both(script("return redis.call('GET', KEYS[1])"), keys=("one",))
    assert there == here == b"x"


def test_a_key_is_there_until_its_last_millisecond_is_over():
    interpreter = Interpreter()
    interpreter.perform("SET", "one", "x", "PX", 10)
    assert interpreter.perform("PTTL", "one", us=10_999) == 0
    assert interpreter.perform("PTTL", "one", us=11_000) == -2


def test_an_interpreter_that_nobody_needs_is_collected():
    interpreter = Interpreter()
    assert interpreter.run(script("return redis.call('GET', KEYS[1])"), 0, ["one"], [])[0] is None
    with pytest.raises(ReplyError):
        interpreter.run(script("return redis.call('NONE')"), 0, [], [])
    left = weakref.ref(interpreter)
    del interpreter
    gc.collect()
    assert left() is None
