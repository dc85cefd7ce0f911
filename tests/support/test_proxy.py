"""The fault proxy breaks what it is told to break, and nothing else, in RESP2 and in RESP3."""

import io
import itertools
import socket
import threading
import time

import pytest
import redis

from tests.support.proxy import Proxy, read_frame
from tests.support.waiting import HUNG, eventually, wait_until
from tests.support.ways import in_thread

SCRIPT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
OTHER = "return 'other'"


@pytest.fixture
def direct(server):
    """A client past the proxy: what is really on the server."""
    with server.client() as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def connect(proxy, direct, request):
    """Make clients that go through the proxy and are connected, with no retries of their own.

    With little time for what is not answered, they connect however long it takes. What a busy
    machine shall answer them is asked by eventually().
    """
    clients = []

    def make(through=proxy, **options):
        client = through.client(protocol=request.param, **options)
        clients.append(client)
        eventually(client.ping, redis.TimeoutError)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect):
    return connect()


@pytest.fixture
def impatient(connect):
    return connect(socket_timeout=0.1)


@pytest.fixture
def dial(proxy):
    """Connect without a client, which would hide what a socket sees."""
    made = []

    def make():
        made.append(socket.create_connection(("127.0.0.1", proxy.port), 5))
        return made[-1]

    yield make
    for bare in made:
        bare.close()


# --- what passes ---------------------------------------------------------------------------------


def test_replies_of_every_type_pass_untouched(client, server):
    same = server.client(protocol=client.get_connection_kwargs()["protocol"])
    client.hset("hash", mapping={"a": 1, "b": b"\r\n\x00"})
    client.rpush("list", "x", "y" * 100_000)
    client.sadd("set", "m")
    client.zadd("zset", {"n": 1.5})
    for command in (
        ("HGETALL", "hash"),
        ("LRANGE", "list", 0, -1),
        ("SMEMBERS", "set"),
        ("ZRANGE", "zset", 0, -1, "WITHSCORES"),
        ("GET", "nothing"),
        ("EVAL", "return {1, {'two', {}}, false, redis.status_reply('OK')}", 0),
        ("COMMAND", "INFO", "get"),
    ):
        assert client.execute_command(*command) == same.execute_command(*command)


def test_what_passed_is_logged_and_a_client_that_leaves_is_gone_from_the_server(
    proxy, client, direct
):
    before = time.monotonic()
    client.set("key", "value", px=100)
    command = proxy.log[-1]
    assert (command.name, command.action) == ("SET", "pass")
    assert command.args == (b"key", b"value", b"PX", b"100")
    assert before <= command.time <= time.monotonic()
    assert proxy.commands("SET", "GET") == [command]
    assert proxy.report(1) == f"{command.link}: SET key value PX 100 -> pass"
    own = client.client_id()
    client.close()
    wait_until(
        lambda: own not in {int(one["id"]) for one in direct.client_list()},
        message="the server has closed the connection",
    )


# --- actions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "error", "ran"),
    [
        ("cut_before", redis.ConnectionError, None),
        ("cut_after", redis.ConnectionError, b"1"),
        ("hang_before", redis.TimeoutError, None),
        ("hang_after", redis.TimeoutError, b"1"),
    ],
)
def test_before_the_command_nothing_runs_and_after_it_it_has_run(
    proxy, impatient, direct, action, error, ran
):
    rule = proxy.rule("INCRBY", action)
    with pytest.raises(error):
        impatient.incr("n")
    rule.wait()
    assert direct.get("n") == ran
    assert rule.hits == 1


@pytest.mark.parametrize(("action", "ran"), [("cut_before", b"2"), ("cut_after", b"3")])
def test_the_client_sees_a_reset_after_the_replies_to_what_was_pipelined_before(
    proxy, direct, dial, action, ran
):
    calls = itertools.count(1)
    proxy.rule("INCR", action, match=lambda args: next(calls) == 3)
    bare = dial()
    bare.sendall(b"INCR n\r\n" * 4)
    with bare.makefile("rb") as replies:
        assert [replies.readline(), replies.readline()] == [b":1\r\n", b":2\r\n"]
        with pytest.raises(ConnectionResetError):
            replies.readline()
    assert direct.get("n") == ran


@pytest.mark.parametrize("action", ["hang_before", "hang_after"])
def test_nothing_later_passes_on_a_connection_that_hangs(proxy, direct, dial, action):
    rule = proxy.rule("PING", action)
    bare = dial()
    bare.sendall(b"PING\r\n")
    rule.wait()
    bare.sendall(b"INCR n\r\n")
    bare.settimeout(0.1)
    with pytest.raises(TimeoutError):
        bare.recv(100)
    assert not direct.exists("n")


@pytest.mark.parametrize(("action", "meanwhile"), [("delay:2", None), ("delayreply:2", b"value")])
def test_a_command_or_its_reply_can_arrive_late_while_other_connections_pass(
    proxy, connect, direct, action, meanwhile
):
    client, other = connect(socket_timeout=HUNG), connect()
    rule = proxy.rule("SET", action)
    begin = time.monotonic()
    late = in_thread(lambda: client.set("key", "value"))
    rule.wait()
    assert direct.get("key") == meanwhile
    assert other.ping()
    assert not late.done()
    assert late.result(HUNG)
    assert time.monotonic() - begin >= 2
    assert direct.get("key") == b"value"


def test_a_zombie_lands_long_after_its_client_gave_up(proxy, impatient, direct):
    rule = proxy.rule("SET", "hold")
    with pytest.raises(redis.TimeoutError):
        impatient.set("key", "zombie")
    rule.wait()
    direct.set("key", "newer")
    assert proxy.forward_held() == 1
    assert direct.get("key") == b"zombie"
    assert proxy.forward_held() == 0


def test_a_client_that_waited_for_what_is_held_gets_its_reply(proxy, client):
    rule = proxy.rule("INCRBY", "hold")
    answers = in_thread(lambda: (client.incr("n"), client.ping()))
    rule.wait()
    assert proxy.forward_held() == 1
    assert answers.result(HUNG) == (1, True)


def test_what_is_never_forwarded_never_runs_and_closing_ends_every_thread(server, connect, direct):
    before = set(threading.enumerate())
    with Proxy(server) as proxy:
        clients = [connect(proxy, socket_timeout=0.1) for _ in range(4)]
        rules = [
            proxy.rule(name, action)
            for name, action in (("GET", "hang_after"), ("SET", "hold"), ("DEL", "delay:60"))
        ]
        for client, command in zip(clients, ("GET key", "SET key 1", "DEL key"), strict=False):
            with pytest.raises(redis.TimeoutError):
                client.execute_command(*command.split())
        for rule in rules:
            rule.wait()
        proxy.blackhole()
    assert direct.get("key") is None
    assert set(threading.enumerate()) <= before


# --- rules ---------------------------------------------------------------------------------------


def test_a_rule_acts_by_an_argument_a_number_of_times_or_until_further_notice(proxy, client):
    rules = [proxy.rule("SET", "cut_before", match="lottery")]
    assert client.set("other", 1)
    rules.append(proxy.rule("GET", "cut_before", times=2))
    rules.append(proxy.rule("INCRBY", "cut_before", times=None))
    for command in ("SET prefix:lottery:lock 1", *["GET n"] * 2, *["INCRBY n 1"] * 3):
        with pytest.raises(redis.ConnectionError):
            client.execute_command(*command.split())
    assert [rule.hits for rule in rules] == [1, 2, 3]
    assert client.set("prefix:lottery:lock", 1)
    assert client.get("n") is None
    proxy.clear_rules()
    assert client.incr("n") == 1


def test_the_oldest_rule_that_applies_acts_on_any_command(proxy, client):
    proxy.rule("*", "delay:0")
    proxy.rule("PING", "cut_before")
    assert client.ping()
    with pytest.raises(redis.ConnectionError):
        client.ping()


def test_a_rule_that_never_acted_is_found(proxy, client):
    idle = proxy.rule("INCR", "cut_before")
    client.incr("n")  # INCRBY, as redis-py has it.
    assert proxy.idle_rules() == [idle]
    proxy.clear_rules()


@pytest.mark.parametrize("action", ["explode", "delay", "cut_after:1", "delay:soon"])
def test_an_unknown_action_is_refused(proxy, action):
    with pytest.raises(ValueError, match=r"action|float"):
        proxy.rule("SET", action)


def test_a_share_of_the_commands_the_same_for_a_seed(server, make_proxy):
    def actions(seed):
        proxy = make_proxy(server, seed=seed)
        proxy.rule("PING", "delay:0", times=None, probability=0.3)
        with proxy.client() as client:
            for _ in range(200):
                client.ping()
        return [command.action for command in proxy.commands("PING")]

    assert actions(1) == actions(1) != actions(2)
    assert 30 < actions(1).count("delay") < 90


@pytest.mark.parametrize("by", ["its SHA", "its text"])
def test_a_rule_is_for_one_script(proxy, client, direct, by):
    sha, other = direct.script_load(SCRIPT), direct.script_load(OTHER)
    run = client.eval if by == "its text" else client.evalsha
    proxy.rule_for_script(sha, "cut_after")
    assert run(OTHER if by == "its text" else other, 0) == b"other"
    with pytest.raises(redis.ConnectionError):
        run(SCRIPT if by == "its text" else sha, 1, "n", 1)
    assert direct.get("n") == b"1"


@pytest.mark.parametrize("action", ["cut_after", "hang_after", "delayreply:0.05"])
def test_a_script_that_is_not_loaded_has_not_run(proxy, connect, direct, action):
    client = connect(socket_timeout=3)
    sha = direct.script_load(SCRIPT)
    direct.script_flush()
    rule = proxy.rule_for_script(sha, action)
    with pytest.raises(redis.exceptions.NoScriptError):
        client.evalsha(sha, 1, "n", 1)
    assert (rule.hits, proxy.log[-1].action) == (0, "pass")
    try:
        client.eval(SCRIPT, 1, "n", 1)
    except (redis.ConnectionError, redis.TimeoutError):
        assert action != "delayreply:0.05"
    assert rule.hits == 1
    assert direct.get("n") == b"1"


# --- pushes --------------------------------------------------------------------------------------


@pytest.fixture
def subscriber(client):
    with client.pubsub() as subscriber:
        subscriber.subscribe("bell", "other")
        assert [next_of(subscriber)["type"] for _ in range(2)] == ["subscribe"] * 2
        yield subscriber


def next_of(subscriber, timeout=HUNG):
    return subscriber.get_message(timeout=timeout)


def test_a_message_passes_at_any_moment(subscriber, proxy, direct):
    for number in range(3):
        assert direct.publish("bell", number) == 1
        assert next_of(subscriber)["data"] == str(number).encode()
    assert [push[:2] for push in proxy.pushes] == [[b"message", b"bell"]] * 3
    late = proxy.rule("PING", "hold")
    subscriber.ping()
    late.wait()
    direct.publish("bell", "now")
    assert next_of(subscriber)["data"] == b"now"
    proxy.forward_held()
    assert next_of(subscriber)["type"] == "pong"


def test_messages_can_be_lost_and_confirmations_are_none(proxy, subscriber, direct):
    proxy.drop_pushes(2)
    for number in range(3):
        assert direct.publish("bell", number) == 1
    assert next_of(subscriber)["data"] == b"2"
    proxy.drop_pushes(1)
    subscriber.subscribe("third")
    assert next_of(subscriber)["type"] == "subscribe"
    subscriber.unsubscribe()
    assert [next_of(subscriber)["type"] for _ in range(3)] == ["unsubscribe"] * 3
    assert proxy.pushes_dropped == 2


def test_a_subscription_can_be_cut_after_it_took_hold(proxy, client):
    rule = proxy.rule("SUBSCRIBE", "cut_after")
    with client.pubsub() as subscriber:
        subscriber.subscribe("bell")
        with pytest.raises(redis.ConnectionError):
            next_of(subscriber)
    assert rule.hits == 1


def test_a_half_open_connection_rings_no_bell(proxy, subscriber, direct):
    rule = proxy.rule("PING", "hang_before")
    subscriber.ping()
    rule.wait()
    assert direct.publish("bell", "unheard") == 1
    assert next_of(subscriber, timeout=0.1) is None


def test_a_push_between_command_and_reply_is_no_reply(proxy, dial):
    """Only RESP3 can subscribe and run commands on one connection; a raw socket shows it."""
    bare = dial()
    with bare.makefile("rb") as stream:

        def ask(*lines):
            bare.sendall(b"".join(line + b"\r\n" for line in lines))

        def hear():
            return read_frame(stream).value

        ask(b"HELLO 3")
        hear()
        ask(b"SUBSCRIBE own", b"PUBLISH own hi", b"ECHO done")
        heard = [hear() for _ in range(4)]
        assert [b"message", b"own", b"hi"] in heard
        proxy.rule("ECHO", "cut_after")
        ask(b"PUBLISH own again", b"ECHO never")
        # The bell, the reply to PUBLISH; then the cut hits ECHO, not one of those two.
        assert sorted(map(str, (hear(), hear()))) == ["[b'message', b'own', b'again']", "b'1'"]
        with pytest.raises(ConnectionResetError):
            hear()


# --- the whole network ---------------------------------------------------------------------------


def test_a_black_hole_accepts_and_never_answers(proxy, impatient, direct):
    new = proxy.client(socket_timeout=0.1)
    proxy.blackhole()
    for client in (impatient, new):
        with pytest.raises(redis.TimeoutError):
            client.set("key", "value")
    proxy.heal()
    assert eventually(lambda: new.get("key"), redis.TimeoutError) is None
    assert eventually(impatient.ping, redis.TimeoutError)
    assert direct.get("key") is None


def test_what_fell_into_it_can_arrive_late(proxy, impatient, direct):
    proxy.blackhole()
    with pytest.raises(redis.TimeoutError):
        impatient.set("key", "value")
    assert direct.get("key") is None
    proxy.heal(deliver=True)
    wait_until(lambda: direct.get("key") == b"value", message="the command arrives")


@pytest.mark.parametrize("is_black", [False, True])
def test_refusing_resets_all_connections_also_in_a_black_hole_and_refuses_new_ones(
    proxy, impatient, dial, is_black
):
    connected = [dial(), dial()]
    for bare in connected:
        bare.sendall(b"PING\r\n")
        assert bare.recv(100) == b"+PONG\r\n"
    if is_black:
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            impatient.ping()
    proxy.refuse()
    for bare in connected:
        with pytest.raises(ConnectionResetError):
            bare.recv(100)
    with pytest.raises(ConnectionRefusedError):
        dial()
    proxy.heal()
    assert eventually(impatient.ping, redis.TimeoutError)


# --- frames --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        (b"+OK\r\n", b"+", b"OK"),
        (b"$3\r\na\r\n\r\n", b"$", b"a\r\n"),
        (b"$-1\r\n", b"$", b"-1"),
        (b"*2\r\n:1\r\n*1\r\n$0\r\n\r\n", b"*", [b"1", [b""]]),
        (b"*-1\r\n", b"*", b"-1"),
        (b"%1\r\n+a\r\n_\r\n", b"%", [b"a", b""]),
        (b"~1\r\n#t\r\n", b"~", [b"t"]),
        (b">2\r\n+message\r\n,1.5\r\n", b">", [b"message", b"1.5"]),
        (b"=7\r\ntxt:abc\r\n", b"=", b"txt:abc"),
        (b"|1\r\n+ttl\r\n:1\r\n$1\r\nx\r\n", b"$", b"x"),
    ],
)
def test_a_frame_is_read_whole(raw, kind, value):
    stream = io.BufferedReader(io.BytesIO(raw + b"+NEXT\r\n"))
    frame = read_frame(stream)
    assert (frame.raw, frame.kind, frame.value) == (raw, kind, value)
    assert stream.read() == b"+NEXT\r\n"


@pytest.mark.parametrize("raw", [b"", b"+O", b"$3\r\nab", b"*2\r\n:1\r\n"])
def test_half_a_frame_is_the_end(raw):
    assert read_frame(io.BufferedReader(io.BytesIO(raw))) is None
