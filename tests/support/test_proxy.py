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

SCRIPT = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
OTHER = "return 'other'"


@pytest.fixture(params=[2, 3], ids=["resp2", "resp3"])
def protocol(request):
    return int(request.param)


@pytest.fixture
def connect(proxy, server, protocol):
    """Make clients that go through the proxy, with no retries of their own."""
    with server.client() as direct:
        direct.flushall()
        direct.script_flush()
    clients = []

    def make(through=proxy, **options):
        client = through.client(protocol=protocol, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect):
    """A client through the proxy, already connected, so that tests see only their own commands."""
    client = connect()
    client.ping()
    return client


@pytest.fixture
def impatient(connect):
    """Make clients that soon give up what is not answered, but are connected however long it takes.

    What a busy machine shall answer them is asked by eventually().
    """

    def make(through=None):
        client = connect(*filter(None, [through]), socket_timeout=0.1)
        eventually(client.ping, redis.TimeoutError)
        return client

    return make


@pytest.fixture
def direct(server):
    """A client past the proxy: what is really on the server."""
    with server.client() as client:
        yield client


class TestPassing:
    def test_replies_of_every_type_pass_untouched(self, client, server, protocol):
        same = server.client(protocol=protocol)
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

    def test_a_client_that_leaves_is_gone_from_the_server(self, client, direct):
        own = client.client_id()
        client.close()
        wait_until(
            lambda: own not in {int(one["id"]) for one in direct.client_list()},
            message="the server has closed the connection",
        )

    def test_what_passed_is_logged(self, proxy, client):
        before = time.monotonic()
        client.set("key", "value", px=100)
        command = proxy.log[-1]
        assert (command.name, command.action) == ("SET", "pass")
        assert command.args == (b"key", b"value", b"PX", b"100")
        assert before <= command.time <= time.monotonic()
        assert proxy.commands("SET", "GET") == [command]
        assert proxy.report(1) == f"{command.link}: SET key value PX 100 -> pass"


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
    client = impatient()
    rule = proxy.rule("INCRBY", action)
    with pytest.raises(error):
        client.incr("n")
    rule.wait()
    assert direct.get("n") == ran
    assert rule.hits == 1


class TestCut:
    @pytest.mark.parametrize("action", ["cut_before", "cut_after"])
    def test_the_client_sees_a_reset(self, proxy, action):
        proxy.rule("PING", action)
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as bare:
            bare.sendall(b"PING\r\n")
            with pytest.raises(ConnectionResetError):
                bare.recv(100)

    @pytest.mark.parametrize(
        ("action", "ran"), [("cut_before", b"2"), ("cut_after", b"3")], ids=["before", "after"]
    )
    def test_in_a_pipeline_earlier_replies_still_arrive(self, proxy, direct, action, ran):
        direct.delete("n")
        proxy.rule("INCR", action, match=lambda args: next(calls) == 3)
        calls = itertools.count(1)
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as bare:
            bare.sendall(b"INCR n\r\n" * 4)
            with bare.makefile("rb") as replies:
                assert [replies.readline(), replies.readline()] == [b":1\r\n", b":2\r\n"]
                with pytest.raises(ConnectionResetError):
                    replies.readline()
        assert direct.get("n") == ran

    def test_all_connections_can_be_cut_at_once(self, proxy):
        first, second = (socket.create_connection(("127.0.0.1", proxy.port), 5) for _ in range(2))
        with first, second:
            for bare in (first, second):
                bare.sendall(b"PING\r\n")
                assert bare.recv(100) == b"+PONG\r\n"
            proxy.cut()
            for bare in (first, second):
                with pytest.raises(ConnectionResetError):
                    bare.recv(100)


class TestHang:
    @pytest.mark.parametrize("action", ["hang_before", "hang_after"])
    def test_nothing_later_passes_on_that_connection(self, proxy, direct, action):
        direct.delete("n")
        rule = proxy.rule("PING", action)
        with socket.create_connection(("127.0.0.1", proxy.port), 5) as bare:
            bare.sendall(b"PING\r\n")
            rule.wait()
            bare.sendall(b"INCR n\r\n")
            bare.settimeout(0.1)
            with pytest.raises(TimeoutError):
                bare.recv(100)
        assert not direct.exists("n")


class TestDelay:
    def test_a_command_can_arrive_late(self, proxy, connect, direct):
        client = connect(socket_timeout=HUNG)
        proxy.rule("SET", "delay:5")
        begin = time.monotonic()
        thread = threading.Thread(target=client.set, args=("key", "value"))
        thread.start()
        wait_until(lambda: proxy.commands("SET"))
        assert direct.get("key") is None
        thread.join()
        assert time.monotonic() - begin >= 5
        assert direct.get("key") == b"value"

    def test_a_reply_can_arrive_late(self, proxy, connect, direct):
        client = connect(socket_timeout=HUNG)
        rule = proxy.rule("SET", "delayreply:5")
        begin = time.monotonic()
        thread = threading.Thread(target=client.set, args=("key", "value"))
        thread.start()
        rule.wait()
        assert direct.get("key") == b"value"
        assert thread.is_alive()
        thread.join()
        assert time.monotonic() - begin >= 5

    def test_a_late_command_lets_other_connections_pass(self, proxy, connect):
        proxy.rule("GET", "delay:5")
        client, other = connect(socket_timeout=HUNG), connect()
        thread = threading.Thread(target=client.get, args=("key",))
        thread.start()
        wait_until(lambda: proxy.commands("GET"))
        other.set("key", "value")
        assert thread.is_alive()
        thread.join()


class TestHold:
    def test_a_zombie_lands_long_after_its_client_gave_up(self, proxy, impatient, direct):
        client = impatient()
        rule = proxy.rule("SET", "hold")
        with pytest.raises(redis.TimeoutError):
            client.set("key", "zombie")
        rule.wait()
        direct.set("key", "newer")
        assert proxy.forward_held() == 1
        assert direct.get("key") == b"zombie"
        assert proxy.forward_held() == 0

    def test_a_client_that_waited_gets_its_reply(self, proxy, client):
        rule = proxy.rule("INCRBY", "hold")
        answers = []
        thread = threading.Thread(target=lambda: answers.append((client.incr("n"), client.ping())))
        thread.start()
        rule.wait()
        assert proxy.forward_held() == 1
        thread.join()
        assert answers == [(1, True)]

    def test_what_is_never_forwarded_never_runs(self, server, impatient, direct):
        with Proxy(server) as proxy:
            client = impatient(proxy)
            rule = proxy.rule("SET", "hold")
            with pytest.raises(redis.TimeoutError):
                client.set("key", "zombie")
            rule.wait()
        assert direct.get("key") is None


class TestRules:
    def test_by_an_argument(self, proxy, client):
        proxy.rule("SET", "cut_before", match="lottery")
        assert client.set("other", 1)
        with pytest.raises(redis.ConnectionError):
            client.set("prefix:lottery:lock", 1)

    def test_a_number_of_times(self, proxy, client):
        proxy.rule("SET", "cut_before", times=2)
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.set("key", 1)
        assert client.set("key", 1)

    def test_until_further_notice(self, proxy, client):
        rule = proxy.rule("SET", "cut_before", times=None)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                client.set("key", 1)
        assert rule.hits == 3
        proxy.clear_rules()
        assert client.set("key", 1)

    def test_any_command(self, proxy, client):
        proxy.rule("*", "cut_before")
        with pytest.raises(redis.ConnectionError):
            client.ping()

    def test_the_oldest_rule_that_applies_acts(self, proxy, client):
        proxy.rule("PING", "delay:0")
        proxy.rule("PING", "cut_before")
        assert client.ping()
        with pytest.raises(redis.ConnectionError):
            client.ping()

    def test_a_rule_that_never_acted_is_found(self, proxy, client):
        idle = proxy.rule("INCR", "cut_before")
        client.incr("n")  # INCRBY, as redis-py has it.
        assert proxy.idle_rules() == [idle]
        proxy.clear_rules()

    @pytest.mark.parametrize("action", ["explode", "delay", "cut_after:1", "delay:soon"])
    def test_an_unknown_action_is_refused(self, proxy, action):
        with pytest.raises(ValueError, match=r"action|float"):
            proxy.rule("SET", action)

    def test_a_share_of_the_commands_the_same_for_a_seed(self, server, make_proxy):
        def actions(seed):
            proxy = make_proxy(server, seed=seed)
            proxy.rule("PING", "delay:0", times=None, probability=0.3)
            with proxy.client() as client:
                for _ in range(200):
                    client.ping()
            return [command.action for command in proxy.commands("PING")]

        assert actions(1) == actions(1) != actions(2)
        assert 30 < actions(1).count("delay") < 90


class TestScripts:
    def test_a_rule_is_for_one_script(self, proxy, client, direct):
        sha, other = direct.script_load(SCRIPT), direct.script_load(OTHER)
        proxy.rule_for_script(sha, "cut_after")
        assert client.evalsha(other, 0) == b"other"
        with pytest.raises(redis.ConnectionError):
            client.evalsha(sha, 1, "n", 1)
        assert direct.get("n") == b"1"

    def test_it_finds_the_script_by_its_text_too(self, proxy, client, direct):
        sha = direct.script_load(SCRIPT)
        proxy.rule_for_script(sha, "cut_after")
        assert client.eval(OTHER, 0) == b"other"
        with pytest.raises(redis.ConnectionError):
            client.eval(SCRIPT, 1, "n", 1)
        assert direct.get("n") == b"1"

    @pytest.mark.parametrize("action", ["cut_after", "hang_after", "delayreply:0.05"])
    def test_a_script_that_is_not_loaded_has_not_run(self, proxy, connect, direct, action):
        client = connect(socket_timeout=3)
        eventually(client.ping, redis.TimeoutError)
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


class TestPushes:
    @pytest.fixture
    def subscriber(self, connect):
        with connect().pubsub() as subscriber:
            subscriber.subscribe("bell", "other")
            assert [self.next(subscriber)["type"] for _ in range(2)] == ["subscribe"] * 2
            yield subscriber

    @staticmethod
    def next(subscriber, timeout=HUNG):
        return subscriber.get_message(timeout=timeout)

    def test_a_message_passes_at_any_moment(self, subscriber, proxy, direct):
        for number in range(3):
            assert direct.publish("bell", number) == 1
            assert self.next(subscriber)["data"] == str(number).encode()
        assert [push[:2] for push in proxy.pushes] == [[b"message", b"bell"]] * 3

    def test_a_message_passes_while_a_command_is_late(self, proxy, subscriber, direct):
        late = proxy.rule("PING", "hold")
        subscriber.ping()
        late.wait()
        direct.publish("bell", "now")
        assert self.next(subscriber)["data"] == b"now"
        proxy.forward_held()
        assert self.next(subscriber)["type"] == "pong"

    def test_messages_can_be_lost(self, proxy, subscriber, direct):
        proxy.drop_pushes(2)
        for number in range(3):
            assert direct.publish("bell", number) == 1
        assert self.next(subscriber)["data"] == b"2"
        assert proxy.pushes_dropped == 2

    def test_confirmations_are_no_messages(self, proxy, subscriber, direct):
        proxy.drop_pushes(1)
        subscriber.subscribe("third")
        assert self.next(subscriber)["type"] == "subscribe"
        subscriber.unsubscribe()
        left = [self.next(subscriber) for _ in range(3)]
        assert [message["type"] for message in left] == ["unsubscribe"] * 3
        assert proxy.pushes_dropped == 0

    def test_a_subscription_can_be_cut_after_it_took_hold(self, proxy, connect):
        rule = proxy.rule("SUBSCRIBE", "cut_after")
        with connect().pubsub() as subscriber:
            subscriber.subscribe("bell")
            with pytest.raises(redis.ConnectionError):
                self.next(subscriber)
        assert rule.hits == 1

    def test_a_half_open_connection_rings_no_bell(self, proxy, subscriber, direct):
        rule = proxy.rule("PING", "hang_before")
        subscriber.ping()
        rule.wait()
        assert direct.publish("bell", "unheard") == 1
        assert self.next(subscriber, timeout=0.1) is None

    def test_a_push_between_command_and_reply_is_no_reply(self, proxy):
        """Only RESP3 can subscribe and run commands on one connection; a raw socket shows it."""
        with (
            socket.create_connection(("127.0.0.1", proxy.port), 5) as bare,
            bare.makefile("rb") as stream,
        ):

            def ask(*lines):
                bare.sendall(b"".join(line + b"\r\n" for line in lines))

            def hear():
                frame = read_frame(stream)
                return frame.value

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


class TestNetwork:
    def test_a_black_hole_accepts_and_never_answers(self, proxy, impatient, connect, direct):
        old, new = impatient(), connect(socket_timeout=0.1)
        proxy.blackhole()
        for client in (old, new):
            with pytest.raises(redis.TimeoutError):
                client.set("key", "value")
        proxy.heal()
        assert eventually(lambda: new.get("key"), redis.TimeoutError) is None
        assert eventually(old.ping, redis.TimeoutError)
        assert direct.get("key") is None

    def test_what_fell_into_it_can_arrive_late(self, proxy, impatient, direct):
        client = impatient()
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            client.set("key", "value")
        assert direct.get("key") is None
        proxy.heal(deliver=True)
        wait_until(lambda: direct.get("key") == b"value", message="the command arrives")

    def test_refusing_resets_and_refuses(self, proxy, client, server):
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", proxy.port), 5)
        proxy.heal()
        assert client.ping()

    def test_refusing_ends_what_stands_in_a_black_hole(self, proxy, connect):
        client = connect(socket_timeout=0.1)
        proxy.blackhole()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        proxy.refuse()
        proxy.heal()
        assert eventually(client.ping, redis.TimeoutError)

    def test_closing_ends_every_thread(self, server, impatient):
        before = set(threading.enumerate())
        with Proxy(server) as proxy:
            clients = [impatient(proxy) for _ in range(4)]
            proxy.rule("GET", "hang_after")
            proxy.rule("SET", "hold")
            proxy.rule("DEL", "delay:60")
            for client, command in zip(clients, ("GET key", "SET key 1", "DEL key"), strict=False):
                with pytest.raises(redis.TimeoutError):
                    client.execute_command(*command.split())
            proxy.blackhole()
        assert set(threading.enumerate()) <= before


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
