"""The servers of the suite are real, break as asked, and are never left behind."""

import asyncio
import shutil
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.support.matrix import everywhere
from tests.support.servers import Server, ServerStartError, binary
from tests.support.waiting import await_until, eventually, wait_until

pytestmark = everywhere


def runs(pid):
    """Is there such a process, other than as a zombie?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
        return state.rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def can_shift_clocks():
    return sys.platform == "linux" and shutil.which("cc") is not None


def start_and_report(kind):
    """In a child: start a server, and tell its pid and its state."""
    from tests.support.processes import hear, say

    server = Server(kind).start()
    say([server.pid, server.client().config_get("dir")["dir"]])
    hear()


def test_each_kind_is_what_it_says(server, server_kind):
    info = server.client().info("server")
    assert info.get("server_name", "redis") == server_kind


def test_a_client_does_not_retry(own_server):
    client = own_server.client()
    client.ping()
    own_server.kill()
    begin = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert time.monotonic() - begin < 1.8  # With its default retries it takes two to four.


def test_a_stopped_server_is_gone_and_starts_again_on_its_port(own_server):
    pid, port = own_server.pid, own_server.port
    own_server.stop()
    assert not own_server.running
    assert not runs(pid)
    own_server.start()
    assert own_server.port == port
    assert own_server.client().ping()


def test_a_restart_after_a_crash_has_no_data(own_server):
    client = own_server.client()
    client.set("key", "value")
    own_server.restart()
    assert client.get("key") is None


def test_a_restart_can_keep_data_and_ttl(own_server):
    client = own_server.client()
    client.set("key", "value", px=60_000)
    own_server.restart(keep_data=True)
    assert client.get("key") == b"value"
    assert 0 < client.pttl("key") <= 60_000


def test_what_is_in_the_append_only_file_survives_a_kill(make_server, server_kind):
    server = make_server(server_kind, appendonly="yes", appendfsync="always")
    client = server.client()
    client.set("key", "value")
    server.kill()
    server.start()
    assert client.get("key") == b"value"


def test_nothing_is_on_disk_unless_asked_for(own_server):
    client = own_server.client()
    client.set("key", "value")
    folder = Path(str(client.config_get("dir")["dir"]))
    own_server.stop()
    assert list(folder.iterdir()) == []


def test_a_frozen_server_answers_once_it_is_resumed(own_server):
    client = own_server.client(socket_timeout=0.1)
    eventually(lambda: client.set("key", "value"), redis.TimeoutError)
    with own_server.paused():
        assert own_server.running
        with pytest.raises(redis.TimeoutError):
            client.get("key")
    assert eventually(lambda: client.get("key"), redis.TimeoutError) == b"value"


@pytest.mark.parametrize("end", ["stop", "kill", "restart", "close"])
def test_a_frozen_server_can_be_ended(own_server, end):
    pid = own_server.pid
    own_server.pause()
    getattr(own_server, end)()
    assert not runs(pid)


def test_a_server_dies_with_the_process_that_started_it(spawn, server_kind):
    if sys.platform != "linux":
        pytest.skip("only Linux can tie a process to its parent")
    if binary(server_kind) is None:
        pytest.skip("needs a process")
    child = spawn(start_and_report, server_kind)
    pid, data = child.read()
    assert runs(pid)
    child.kill()
    wait_until(lambda: not runs(pid), message="the server is gone")
    shutil.rmtree(Path(data).parent)


def test_closing_a_server_removes_its_files(server_kind):
    with Server(server_kind) as server:
        folder = Path(str(server.client().config_get("dir")["dir"])).parent
    assert not folder.exists()


def test_a_server_that_cannot_start_shows_why(server_kind):
    with (
        pytest.raises(ServerStartError, match=r"(?i)bad directive|wrong number|argument"),
        Server(server_kind, maxmemory_policy="no-such-policy"),
    ):
        pass


def test_a_port_taken_in_between_is_replaced(make_server, own_server):
    late = Server(own_server.kind)
    late.port = own_server.port
    with late:
        assert late.port != own_server.port
        assert late.client().ping()


def test_configuration_is_given_by_name(make_server, server_kind):
    server = make_server(server_kind, maxmemory="20mb", maxmemory_policy="allkeys-lru")
    config = server.client().config_get("maxmemory", "maxmemory-policy")
    assert config == {"maxmemory": "20971520", "maxmemory-policy": "allkeys-lru"}


def test_arguments_go_to_the_command_line(make_server, server_kind):
    server = make_server(server_kind, "--maxclients", "7")
    assert server.client().config_get("maxclients")["maxclients"] == "7"


def test_a_server_can_be_caught_loading(make_server, server_kind):
    # 5,000 keys take at least 0.6 ms each; after every KB of them the server looks at its clients.
    server = make_server(
        server_kind, key_load_delay=600, loading_process_events_interval_bytes=1024
    )
    client = server.client()
    client.mset({f"key:{number}": "value" for number in range(5_000)})
    server.restart(keep_data=True, ready=False)

    def loading():
        try:
            client.ping()
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:  # Not even listening yet.
            pass
        return False

    wait_until(loading, message="the server is loading")
    server.wait_ready()
    assert client.dbsize() == 5_000


@pytest.mark.skipif(not can_shift_clocks(), reason="needs Linux and a C compiler")
class TestClock:
    @pytest.fixture
    def client(self, make_server, server_kind):
        self.server = make_server(server_kind, movable_clock=True)
        return self.server.client()

    def test_time_is_ours_until_it_is_shifted(self, client):
        for seconds in (0, 3600, -3600):
            if seconds:
                self.server.shift_clock(seconds)
            before = time.time()
            there = client.time()[0] - seconds
            assert before - 2 < there < time.time() + 2

    def test_keys_expire_when_the_clock_jumps_ahead(self, client):
        client.set("key", "value", ex=30)
        self.server.shift_clock(40)
        assert client.get("key") is None

    def test_keys_live_longer_when_the_clock_jumps_back(self, client):
        client.set("key", "value", ex=30)
        self.server.shift_clock(-3600)
        assert 3_600_000 < client.pttl("key") <= 3_630_000


class TestTls:
    """Only Redis: the Valkey of the wheel is built without TLS."""

    @pytest.fixture
    def tls_server(self, make_server):
        return make_server("redis", tls=True)

    def test_a_client_that_does_not_is_stopped(self, tls_server):
        ignorant = tls_server.client(ssl_ca_certs=None)
        with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            ignorant.ping()

    def test_plain_text_is_refused(self, tls_server):
        with pytest.raises(redis.ConnectionError):
            tls_server.client(ssl=False).ping()


def test_waiting_returns_the_first_true_answer():
    answers = iter([0, None, "yes", "no"])
    assert wait_until(lambda: next(answers)) == "yes"


def test_waiting_in_vain_says_for_what():
    with pytest.raises(AssertionError, match=r"the moon is full: not so within 0\.05 s, .* 0$"):
        wait_until(lambda: 0, 0.05, "the moon is full")


async def test_async_waiting_lets_the_loop_run():
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, done.set)
    assert await await_until(done.is_set)

    async def never():
        return False

    with pytest.raises(AssertionError, match="never: not so within"):
        await await_until(never, 0.05)
