"""The servers of the suite are real, break as asked, and are never left behind."""

import asyncio
import shutil
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.support.matrix import everywhere
from tests.support.processes import hear, runs, say
from tests.support.servers import Server, ServerStartError, binary
from tests.support.waiting import await_until, eventually, wait_until

pytestmark = everywhere


def can_shift_clocks():
    return sys.platform == "linux" and shutil.which("cc") is not None


def folder_of(server):
    return Path(str(server.client().config_get("dir")["dir"]))


def start_and_report(kind):
    """In a child: start a server, and tell its pid and its folder."""
    server = Server(kind).start()
    say([server.pid, str(folder_of(server))])
    hear()


def test_each_kind_is_what_it_says_and_a_client_of_it_does_not_retry(own_server, server_kind):
    client = own_server.client()
    assert client.info("server").get("server_name", "redis") == server_kind
    own_server.kill()
    begin = time.monotonic()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert time.monotonic() - begin < 1.8  # With its default retries it takes two to four.


def test_a_server_keeps_its_data_if_asked_to_loses_it_in_a_crash_and_starts_again_on_its_port(
    own_server,
):
    client, folder, port = own_server.client(), folder_of(own_server), own_server.port
    client.set("key", "value", px=60_000)
    own_server.restart(keep_data=True)
    assert client.get("key") == b"value"
    assert 0 < client.pttl("key") <= 60_000
    own_server.restart()
    assert client.get("key") is None
    client.set("key", "value")
    pid = own_server.pid
    own_server.stop()
    assert not own_server.running
    assert not runs(pid)
    assert list(folder.iterdir()) == []
    own_server.start()
    assert own_server.port == port
    assert client.ping()


def test_it_is_configured_by_name_or_by_arguments_and_an_append_only_file_survives_a_kill(
    make_server, server_kind
):
    on_disk = {"appendonly": "yes", "appendfsync": "always"}
    server = make_server(server_kind, "--maxclients", "7", maxmemory="20mb", **on_disk)
    client = server.client()
    wanted = {"maxclients": "7", "maxmemory": "20971520", **on_disk}
    assert client.config_get(*wanted) == wanted
    client.set("key", "value")
    server.kill()
    server.start()
    assert client.get("key") == b"value"


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


def test_a_server_that_cannot_start_shows_why_and_one_that_is_closed_leaves_no_files(server_kind):
    with (
        pytest.raises(ServerStartError, match=r"(?i)bad directive|wrong number|argument"),
        Server(server_kind, maxmemory_policy="no-such-policy"),
    ):
        pass
    with Server(server_kind) as server:
        folder = folder_of(server).parent
    assert not folder.exists()


def test_a_port_taken_in_between_is_replaced(own_server):
    late = Server(own_server.kind)
    late.port = own_server.port
    with late:
        assert late.port != own_server.port
        assert late.client().ping()


def test_a_server_can_be_caught_loading(make_server, server_kind):
    # 5,000 keys take at least 0.6 ms each; after every KB of them the server looks at its clients.
    slow = {"key_load_delay": 600, "loading_process_events_interval_bytes": 1024}
    server = make_server(server_kind, **slow)
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
def test_time_is_ours_until_it_is_shifted_and_keys_expire_by_it(make_server, server_kind):
    server = make_server(server_kind, movable_clock=True)
    client = server.client()
    for seconds in (0, 3600, -3600):
        if seconds:
            server.shift_clock(seconds)
        before = time.time()
        there = client.time()[0] - seconds
        assert before - 2 < there < time.time() + 2
    client.set("key", "value", ex=30)
    server.shift_clock(-7200)
    assert 3_600_000 < client.pttl("key") <= 3_630_000
    server.shift_clock(0)  # Ahead of the 30 seconds.
    assert client.get("key") is None


def test_by_tls_neither_strangers_nor_plain_text_get_through(make_server):
    """Only Redis: the Valkey of the wheel is built without TLS."""
    server = make_server("redis", tls=True)
    with pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        server.client(ssl_ca_certs=None).ping()
    with pytest.raises(redis.ConnectionError):
        server.client(ssl=False).ping()


async def test_waiting_returns_the_first_true_answer_and_in_vain_says_for_what():
    answers = iter([0, None, "yes", "no"])
    assert wait_until(lambda: next(answers)) == "yes"
    with pytest.raises(AssertionError, match=r"the moon is full: not so within 0\.05 s, .* 0$"):
        wait_until(lambda: 0, 0.05, "the moon is full")
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, done.set)
    assert await await_until(done.is_set)

    async def never():
        return False

    with pytest.raises(AssertionError, match="never: not so within"):
        await await_until(never, 0.05)
