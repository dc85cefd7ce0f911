"""The doctor: what makes a server unfit to keep locks is found, and said with a remedy."""

import io
import json
import re
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from django_redislock import LockUnavailable, distributed_lock, doctor, held, task_runs
from django_redislock.backends import RedisBackend
from django_redislock.backends.base import Backend
from django_redislock.backends.quorum import backend as quorum_backend
from django_redislock.checks import check_servers
from django_redislock.completed_runs import CompletedRun
from django_redislock.doctor import keyspace, rights
from django_redislock.doctor import rights as reach
from django_redislock.fences import Fence
from django_redislock.findings import Finding
from django_redislock.rules.keys import index_key, lock_keys, ran_index_key
from django_redislock.testing import IN_MEMORY
from tests.support.matrix import everywhere
from tests.support.others import held_by, held_by_other, waiters
from tests.support.servers import free_port
from tests.support.stored import immortal, newer_lease
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

pytestmark = [pytest.mark.usefixtures("locks"), pytest.mark.django_db]

SLOW = reach.SLOW_ROUND_TRIP


@pytest.fixture(autouse=True)
def no_server_is_slow(monkeypatch):
    """A busy machine is no slow server."""
    monkeypatch.setattr(reach, "SLOW_ROUND_TRIP", HUNG)


def findings(using="default"):
    """What is found, by what it is about; all but "ok" comes with a remedy."""
    found = {finding.about: finding for finding in doctor.examine(using)}
    assert all(one.advice for one in found.values() if one.level != "ok")
    return found


def level(about):
    return findings()[about].level


def troubles(found=None):
    """The levels of what is not fit, but for the persistence, which most servers here have not."""
    found = findings() if found is None else found
    levels = {about: one.level for about, one in found.items() if one.level != "ok"}
    return {about: level for about, level in levels.items() if about != "persistence"}


def comes(about, level, part=""):
    """Wait until that is found; while the machine is busy, something else may be."""

    def is_found():
        finding = findings().get(about)
        return finding is not None and finding.level == level and part in finding.says

    wait_until(is_found, message=f"{about}: {level} {part}")


@everywhere
def test_a_plain_server_is_fit_but_for_its_persistence(locks):
    found = findings()
    assert troubles(found) == {}
    assert found["persistence"].level == "warn"
    assert " ".join(found) == (
        "server version start cluster rights scripting eviction persistence replication clock"
        " locks keys index cache"
    )
    # The examination leaves nothing that stays.
    assert held.list() == []
    assert immortal(locks) == []


def test_wrong_settings_of_one_alias_hide_no_other(locks, settings):
    settings.REDISLOCK = {"wrong": {"TTL": "soon"}, **settings.REDISLOCK}
    assert run()[0] == 1
    status, out = run("--json")
    assert status == 1
    found = {(one["alias"], one["about"]): one for one in json.loads(out)}
    assert found["wrong", "settings"]["level"] == "fail"
    assert "TTL" in found["wrong", "settings"]["says"]
    assert found["default", "server"]["level"] == "ok"


def test_a_server_that_refuses_connections_fails(locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    proxy.refuse()
    (finding,) = findings().values()
    assert (finding.about, finding.level) == ("server", "fail")


UNTRUSTED = r"certificate verify failed.*\(set OPTIONS\['ssl_ca_certs'\] to a file with"


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"requirepass": "right"}, {}, r"NOAUTH .*set OPTIONS\['password'\]"),
        (
            {"requirepass": "right"},
            {"password": "wr0ng"},
            r"WRONGPASS .*correct OPTIONS\['username",
        ),
        ({"databases": 3}, {"db": 3}, "out of range .*the number of the database, 3, in LOCATION"),
        ({"tls": True}, {"ssl_ca_certs": None}, UNTRUSTED),
    ],
    ids=["no password", "wrong password", "no such database", "untrusted"],
)
def test_what_a_server_refuses_is_the_only_finding_and_says_what_to_write(
    config, options, says, locks, make_server
):
    locks.on(make_server("redis", **config))
    location = locks.server.url.removesuffix("/0")
    locks.configure(LOCATION=location, OPTIONS=options)
    (finding,) = findings().values()
    assert (finding.about, finding.level, finding.id) == ("server", "fail", "E020")
    assert re.match(f"refused: .*{says}", finding.says)
    assert "network" not in finding.advice
    assert "wr0ng" not in repr(finding)


def test_a_server_that_cannot_serve_now_is_said_to_be_not_ready(locks, own_server):
    locks.on(own_server, OPTIONS={"socket_timeout": HUNG})
    client = own_server.client()
    client.config_set("maxclients", 1)
    (finding,) = findings().values()
    assert finding.says.startswith("not ready: ERR max number of clients reached (raise its maxc")
    client.config_set("maxclients", 100)
    client.config_set("lua-time-limit", 10)
    endless = in_thread(lambda: own_server.client().eval("while true do end", 0))
    wait_until(lambda: findings()["server"].says.startswith("not ready: BUSY "))
    (finding,) = findings().values()
    assert "mostly this passes" in finding.says
    assert "network" not in finding.advice
    client.script_kill()
    with pytest.raises(redis.ResponseError):
        endless.result(HUNG)
    assert level("server") == "ok"


def test_a_server_that_is_slow_and_a_ttl_too_short_for_that_are_warned_of(
    locks, make_proxy, monkeypatch
):
    monkeypatch.setattr(reach, "SLOW_ROUND_TRIP", SLOW)
    proxy = make_proxy(locks.server)
    locks.on(proxy, TTL=1)
    proxy.rule("PING", "delayreply:0.3", times=None)
    found = findings()
    assert (found["server"].level, found["ttl"].level) == ("warn", "warn")
    assert (least := re.search(r"Set TTL to ([\d.]+) or more", found["ttl"].advice))
    assert float(least[1]) >= 1.8
    locks.configure(TTL=HUNG)
    assert "ttl" not in findings()


def test_a_server_that_falls_silent_half_way_is_a_finding(locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy, OPTIONS={"socket_timeout": 2.0})
    proxy.rule("INFO", "hang_before", times=None)
    assert level("server") == "fail"


@pytest.mark.proves("N2")
@everywhere
def test_eviction_fails_with_any_policy_but_noeviction(locks, own_server):
    locks.on(own_server)
    client = own_server.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    assert level("eviction") == "ok"  # Without a limit nothing is evicted.
    client.config_set("maxmemory", "50mb")
    for policy in ("allkeys-lru", "volatile-ttl"):
        client.config_set("maxmemory-policy", policy)
        assert level("eviction") == "fail"
    client.config_set("maxmemory-policy", "noeviction")
    assert level("eviction") == "ok"


def test_a_server_that_is_nearly_full_is_warned_of(locks, own_server):
    locks.on(own_server)
    client = own_server.client()
    client.config_set("maxmemory-policy", "noeviction")
    for number in range(10):
        client.set(f"other:{number}", "x" * 2_000_000, px=600_000)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory", used * 2)
    assert "memory" not in findings()
    client.config_set("maxmemory", int(used * 1.15))
    comes("memory", "warn", "% of maxmemory are in use")
    client.config_set("maxmemory", 0)
    assert "memory" not in findings()


def test_more_names_than_records_are_warned_of(locks, own_server):
    locks.on(own_server, RECORDS=10, RECORDS_FOR=3600)
    for number in range(7):
        task_runs.note_skip(f"order:{number}", "busy", using="default")
    assert "records" not in findings()
    task_runs.note_skip("order:8", "busy", using="default")
    comes("records", "warn", "8 locks of tasks have records, and those of 10 are kept")
    assert "before 1 h 00 min are over" in findings()["records"].says


def test_memory_that_will_not_suffice_for_the_records_is_warned_of(locks, own_server):
    locks.on(own_server, RECORDS=100_000)
    now = time.time() * 1000
    locks.redis.zadd(ran_index_key(locks.prefix), {f"order:{pk}": now for pk in range(9_999)})
    client = own_server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "100mb")
    assert "records" not in findings()  # A few are no sign that there will be more.
    task_runs.note_skip("order", "busy", using="default")
    comes("records", "warn", "MB of maxmemory are lacking")
    client.config_set("maxmemory", "500mb")
    assert "records" not in findings()


def test_an_append_only_file_is_persistence_enough(locks, make_server):
    locks.on(make_server(appendonly="yes"))
    assert level("persistence") == "ok"


def test_a_server_that_cannot_write_to_disk_is_examined_although_it_refuses_even_a_ping(
    locks, make_server
):
    server = make_server(dbfilename="a-folder")
    locks.on(server)
    client = server.client()
    (Path(client.config_get("dir")["dir"]) / "a-folder").mkdir()  # In place of the file.
    client.config_set("save", "1 1")
    client.set("written", 1, px=600_000)

    def is_refused():
        try:
            return not client.ping()
        except redis.ResponseError as error:
            return "MISCONF" in str(error)

    wait_until(is_refused)
    found = findings()
    assert (found["persistence"].level, found["persistence"].id) == ("fail", "E026")
    assert (found["rights"].level, "MISCONF" in found["rights"].says) == ("fail", True)


@pytest.mark.slow
def test_a_replica_fails_and_a_primary_wants_acknowledgement(locks, own_server, make_server):
    replica = make_server(own_server.kind, replicaof=f"{own_server.host} {own_server.port}")
    locks.on(own_server)
    wait_until(lambda: own_server.client().info("replication")["connected_slaves"] == 1)
    assert level("replication") == "warn"
    locks.configure(REPLICAS_ACK=1)
    assert level("replication") == "ok"
    locks.configure(REPLICAS_ACK=2, OPTIONS={"socket_timeout": 2.0})
    assert level("replication") == "fail"
    locks.on(replica)
    found = findings()
    assert found["replication"].level == "fail"
    assert found["rights"].level == "fail"


@everywhere
def test_more_acknowledgements_than_replicas_fails(locks):
    locks.configure(REPLICAS_ACK=1, OPTIONS={"socket_timeout": 2.0})
    assert level("replication") == "fail"


@pytest.mark.slow
def test_a_clock_that_is_far_off_is_warned_of(locks, make_server):
    from tests.support.servers import Server

    with Server(make_server().kind, movable_clock=True) as server:
        locks.on(server)
        assert level("clock") == "ok"
        server.shift_clock(30)
        finding = findings()["clock"]
        assert finding.level == "warn"
        (ahead,) = re.findall(r"([\d.]+) s ahead", finding.says)
        assert float(ahead) == pytest.approx(30, abs=2)
        # A steady difference is harmless; while a clock is set back, locks outlive their ttl.
        assert "steady difference does not matter to locks" in finding.advice
        assert "held beyond their ttl" in finding.advice


@pytest.mark.no_permit("there is no slot yet in which a bystander could stand")
def test_a_server_in_cluster_mode_fails(locks, make_server):
    bus = free_port()  # By default it is 10,000 higher, which may be too high.
    locks.on(make_server(cluster_enabled="yes", cluster_port=bus))
    assert level("cluster") == "fail"


def test_a_key_that_never_expires_is_found(locks):
    with distributed_lock("lottery"):
        pass
    assert level("keys") == "ok"
    locks.redis.rpush(lock_keys(locks.prefix, "lottery").past, "x")
    finding = findings()["keys"]
    assert finding.level == "fail"
    assert finding.says.startswith("1 key never expires: ")
    assert "lottery" in finding.says


def test_locks_that_will_never_become_free_are_named(locks):
    with held_by_other("lottery"):
        assert level("locks") == "ok"
        locks.redis.persist(lock_keys(locks.prefix, "lottery").lock)
        locks.redis.rpush(lock_keys(locks.prefix, "a list").lock, "x")
        locks.redis.set(lock_keys(locks.prefix, "passing").lock, "x", px=60_000)
        finding = findings()["locks"]
        assert finding.level == "fail"
        assert finding.says.startswith("2 locks will never become free: ")
        assert "1 lock held by a value that is not ours: 'passing'" in finding.says
        assert "'lottery'" in finding.says
        assert "'a list'" in finding.says
        assert "manage.py locks release NAME shows" in finding.advice
        call_command(
            "locks", "release", "a list", "passing", "lottery", "--yes", stdout=io.StringIO()
        )
        assert level("locks") == "ok"


def test_locks_that_a_newer_version_holds_are_named(locks):
    assert "versions" not in findings()
    locks.redis.set(lock_keys(locks.prefix, "lottery").lock, newer_lease(), px=60_000)
    distributed_lock("lottery", wait=0).acquire()
    finding = findings()["versions"]
    assert (finding.level, finding.id) == ("warn", "W040")
    assert finding.says == (
        "1 lock is held by a newer version of django_redislock, which this one cannot read:"
        " 'lottery'"
    )
    assert finding.advice.startswith("Update every program that uses these locks")
    assert level("locks") == "ok"


def test_of_many_locks_the_first_are_named_and_of_another_alias_the_remedy_names_it(
    locks, settings
):
    settings.REDISLOCK = {**settings.REDISLOCK, "other": settings.REDISLOCK["default"]}
    for number in range(7):
        locks.redis.set(lock_keys(locks.prefix, f"odd:{number}").lock, "x")
    finding = findings("other")["locks"]
    several = r"7 locks will never become free: ('odd:\d', ){4}'odd:\d' and 2 more$"
    assert re.search(several, finding.says)
    assert "release NAME --alias other shows" in finding.advice


@pytest.mark.no_permit("all of the index is deleted, with the bystander in it")
def test_a_held_lock_that_is_not_in_the_index_is_found(locks):
    with distributed_lock("lottery"):
        assert level("index") == "ok"
        locks.redis.delete(index_key(locks.prefix))
        finding = findings()["index"]
        assert finding.level == "warn"
        assert finding.says.startswith("1 held lock is missing in the index, so lists do not show")


def test_a_name_that_is_used_by_several_limits_is_found(locks):
    waits = distributed_lock("gpu", wait=HUNG)
    with held_by("gpu", limit=2), held_by("gpu", limit=2):
        assert "limits" not in findings()
        with held_by("gpu", limit=3):
            comes("limits", "warn", "'gpu' (limit=2 and limit=3)")
        waiting = in_thread(waits.acquire)
        wait_until(lambda: waiters("gpu"))
        comes("limits", "warn", "'gpu' (no limit and limit=2)")
    assert waiting.result(HUNG)
    waits.release()


def test_the_look_at_the_keys_is_bounded(locks, monkeypatch):
    monkeypatch.setattr(keyspace, "MOST_KEYS", 1000)
    pipeline = locks.redis.pipeline(transaction=False)
    for number in range(20_000):
        pipeline.set(f"other:{number}", "x", ex=60)
    pipeline.execute()
    assert "among the first 1000 keys" in findings()["keys"].says


def test_a_cache_in_the_same_database_is_warned_of(locks, settings):
    """Which ones are that: see test_checks.py."""
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache"}
    settings.CACHES = {"default": {**cache, "LOCATION": f"redis://localhost:{locks.server.port}"}}
    assert level("cache") == "warn"


def test_locks_in_memory_are_one_warning(settings):
    settings.REDISLOCK = {"default": IN_MEMORY}
    (finding,) = findings().values()
    assert (finding.about, finding.level) == ("server", "warn")


# --- a backend of somebody else -------------------------------------------------------------------


class Theirs(Backend):
    """One that knows nothing of ours, but has one inside to keep its locks."""

    def _start(self):
        super()._start()
        self.inside = RedisBackend(self.conf)
        self.watchdog = self.inside.watchdog

    def session(self, form=None):
        return self.inside.session(form)

    def async_session(self, form=None):
        return self.inside.async_session(form)

    def call_many(self, calls):
        return self.inside.call_many(calls)

    def examine(self):
        yield Finding("mirror", "ok", "both halves are equal")
        yield Finding("tape", "warn", "it is nearly full", "Change it.", id="shop.W001")


class OfOneProcess(Theirs):
    supports_processes = False


class WithServers(Theirs):
    @contextmanager
    def servers(self):
        yield {"one": self.inside, "two": self.inside}


class Silent(Theirs):
    def examine(self):
        raise LockUnavailable(self.prefix, "the tape is torn")


def examined_as(backend, locks, **settings):
    locks.configure(BACKEND=f"{__name__}.{backend.__name__}", **settings)
    return findings()


def test_a_backend_of_somebody_else_tells_its_findings_and_has_a_lock_tried(locks):
    found = examined_as(Theirs, locks)
    assert list(found) == ["mirror", "tape", "rights"]
    assert (found["rights"].level, found["rights"].says) == ("ok", "a lock was taken and released")
    assert "tape" in run()[1]
    (warning,) = check_servers()
    assert (warning.id, warning.hint) == ("shop.W001", "Change it.")
    assert warning.msg == "REDISLOCK['default'], tape: it is nearly full."
    nobody = examined_as(Theirs, locks, LOCATION="redis://127.0.0.1:1/0")
    assert nobody["rights"].level == "fail"
    checked = check_servers()
    assert [one.id for one in checked] == ["shop.W001", "django_redislock.E023"]
    # The error in it is a sentence, and the check makes one of the whole.
    assert checked[1].msg.endswith(f"{nobody['rights'].says}.")
    assert not nobody["rights"].says.endswith(".")


def test_a_backend_of_somebody_else_within_one_process_is_said_to_be_that(locks):
    found = examined_as(OfOneProcess, locks)
    assert list(found) == ["server", "mirror", "tape"]
    assert found["server"].says == "OfOneProcess keeps locks within one process"
    assert [one.id for one in check_servers()] == ["shop.W001"]


def test_servers_of_somebody_elses_backend_are_examined_like_ours(locks):
    found = examined_as(WithServers, locks)
    assert {"mirror", "server", "version", "rights", "persistence", "keys"} <= set(found)
    assert found["persistence"].says.startswith("all servers: a restart of the server frees locks")
    assert "django_redislock.W026" in [one.id for one in check_servers()]


def test_a_backend_of_somebody_else_that_does_not_answer_is_a_finding(locks):
    (finding,) = examined_as(Silent, locks).values()
    assert (finding.about, finding.level, finding.id) == ("server", "fail", "E020")
    assert "the tape is torn" in finding.says


# --- rights ---------------------------------------------------------------------------------------


@pytest.fixture
def used_by(locks):
    """Let the locks of this test be used by a user with these rules and no others."""

    def used_by(rules):
        of_user = ("reset", "on", ">pass-word", *rules.split())
        locks.redis.execute_command("ACL", "SETUSER", "locker", *of_user)
        locks.configure(OPTIONS={"username": "locker", "password": "pass-word"})

    yield used_by
    locks.redis.execute_command("ACL", "DELUSER", "locker")


def test_the_minimal_rights_suffice_for_everything(locks, used_by):
    """Locks, waiters, lists and force release work; nothing of other prefixes can be touched."""
    used_by(doctor.minimal_acl(locks.prefix))
    assert troubles() == {}
    with distributed_lock("lottery", min_hold=60) as lease:
        lease.renew()
        assert held.list()[0].renewals == 1
    assert held.detail("lottery").lock is not None
    assert held.force_release("lottery", lease.id)
    denied = locks.redis.execute_command("ACL", "DRYRUN", "locker", "GET", "other:key")
    assert b"key" in denied
    dangerous = locks.redis.execute_command("ACL", "DRYRUN", "locker", "FLUSHALL")
    assert b"permissions" in dangerous


@pytest.mark.parametrize(
    ("right", "instead", "lacking"),
    [
        ("+set ", "", {"rights": "fail"}),
        ("+ping ", "", {}),
        ("~{prefix}", "~elsewhere", {"rights": "fail"}),
        ("+info ", "", {"version": "warn", "eviction": "warn"}),
    ],
    ids=["no set", "no ping", "other keys", "no info"],
)
def test_without_a_right_that_locks_need_it_fails_once_and_the_rules_are_printed(
    locks, used_by, right, instead, lacking
):
    rules = doctor.minimal_acl(locks.prefix)
    right = right.format(prefix=locks.prefix)
    assert right in rules
    used_by(rules.replace(right, instead))
    found = findings()
    fails = [about for about, one in found.items() if one.level == "fail"]
    assert fails == [about for about, level in lacking.items() if level == "fail"]
    assert lacking.items() <= troubles(found).items()
    if fails:
        assert rules in found["rights"].advice
    elif lacking:  # Much is unknown then, and nothing breaks.
        assert not found.keys() & {"replication", "persistence", "cluster"}
    else:
        assert troubles(found) == {}


def test_what_no_right_would_help_against_is_told_without_the_rules(locks, own_server):
    locks.on(own_server)
    client = own_server.client()
    for name, value, said in (
        ("maxmemory", 1, "OOM"),
        ("min-replicas-to-write", 1, "NOREPLICAS"),
    ):
        client.config_set(name, value)
        finding = findings()["rights"]
        client.config_set(name, 0)
        assert (finding.level, said in finding.says) == ("fail", True)
        assert "ACL" not in finding.advice
    assert "ACL SETUSER" in findings()["rights"].advice


@everywhere
def test_forbidden_scripts_are_a_warning(locks, used_by):
    used_by("~* &* +@all -@scripting")
    found = findings()
    assert (found["rights"].level, found["scripting"].level) == ("ok", "warn")


def test_rights_that_another_doctor_keeps_from_being_tried_are_not_said_to_be_fine(locks):
    with held_by_other(rights.PROBE):
        finding = findings()["rights"]
    assert finding.level == "warn"
    assert finding.says.startswith("not tried: lock 'django_redislock.doctor' is held")


def test_a_user_who_may_not_choose_the_database_is_told_the_rules(locks, used_by):
    rules = doctor.minimal_acl(locks.prefix)
    used_by(rules.replace("+select ", ""))
    locks.configure(LOCATION=locks.server.url.replace("/0", "/1"))
    (finding,) = findings().values()
    assert "NOPERM" in finding.says
    assert rules in finding.advice


@pytest.mark.parametrize("database", [0, 3])
def test_the_rules_name_the_database_where_rights_are_for_some_databases(
    database, locks, make_server, used_by
):
    locks.on(make_server("valkey"))
    location = locks.server.url.replace("/0", f"/{database}")
    locks.configure(LOCATION=location)
    (line,) = re.findall("ACL SETUSER redislock on >PASSWORD (.*)", findings()["rights"].advice)
    assert line == f"{doctor.minimal_acl(locks.prefix)} resetdbs db={database}"
    used_by(f"{line} resetdbs db=2")
    said = {one.says: one.advice for one in findings().values() if one.level == "fail"}
    ((says, advice),) = said.items()
    assert f"No permissions to access database (let ACL SETUSER say db={database})" in says
    assert advice.endswith(line)
    used_by(line)
    assert not [one for one in findings().values() if one.level == "fail"]


# --- the admin's permissions ----------------------------------------------------------------------


def rename(table):
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO elsewhere")


def test_permissions_that_migrate_has_not_made_are_warned_of():
    (finding,) = doctor.examine_admin()
    assert (finding.about, finding.level) == ("permissions", "ok")
    Permission.objects.filter(content_type__app_label="django_redislock").delete()
    (finding,) = doctor.examine_admin()
    assert (finding.level, finding.advice) == ("warn", "Run manage.py migrate.")
    status, out = run()
    assert status == 0
    assert "The admin\n  warn  permissions" in out
    assert "permissions" not in run("--alias", "default")[1]
    rename("auth_permission")
    (finding,) = doctor.examine_admin()
    assert finding.level == "warn"
    assert "migrate" in finding.advice


@pytest.mark.parametrize(
    ("model", "what"), [(Fence, "fences"), (CompletedRun, "completed runs")], ids=["fences", "runs"]
)
def test_a_table_that_migrate_has_not_made_is_warned_of(model, what):
    (finding,) = doctor.examine_tables()
    assert (finding.about, finding.level) == ("tables", "ok")
    rename(model._meta.db_table)
    (finding,) = doctor.examine_tables()
    assert finding.says.startswith(f"database 'default' has no table of {what}, ")
    assert (finding.level, finding.advice) == ("warn", "Run manage.py migrate django_redislock.")
    status, out = run()
    assert status == 0
    assert "The database\n  warn  tables" in out
    assert "tables" not in run("--alias", "default")[1]


@pytest.mark.parametrize(
    ("error", "level"),
    [(ImproperlyConfigured("no ENGINE"), "ok"), (OperationalError("no route to host"), "warn")],
    ids=["no database", "no answer"],
)
def test_a_default_database_that_cannot_tell_of_its_tables_is_never_said_to_have_them(
    error, level, monkeypatch
):
    def fails(*args):
        raise error

    monkeypatch.setattr(connection.introspection, "table_names", fails)
    (finding,) = doctor.examine_tables()
    assert (finding.about, finding.level) == ("tables", level)
    assert not finding.says.startswith("database 'default' has")


# --- manage.py locks doctor -----------------------------------------------------------------------


def run(*args):
    """Exit status and output of the command."""
    out = io.StringIO()
    try:
        call_command("locks", "doctor", *args, stdout=out, stderr=out, no_color=True)
    except CommandError as error:
        return error.returncode, out.getvalue()
    return 0, out.getvalue()


def test_the_command_prints_each_finding_and_the_minimal_rules_also_as_json(locks):
    status, out = run()
    assert status == 0
    for finding in findings().values():
        assert f"{finding.level:4}  {finding.about}" in out
    assert doctor.minimal_acl(locks.prefix) in out
    status, out = run("--json")
    assert status == 0
    assert {" ".join(one) for one in json.loads(out)} == {"alias about level says advice"}


# --- sentinels -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_sentinels_are_fit_that_all_answer_and_agree(watched, settings, key_prefix):
    watched.locks(settings, key_prefix)
    found = findings()
    assert found["sentinels"].level == "ok"
    master = f"{watched.master.host}:{watched.master.port}"
    assert found["sentinels"].says == f"all 3 answer, and call {master} the master"
    assert found["replication"].level == "warn"
    assert found["isolation"].level == "warn"
    assert "min-replicas-to-write" in found["isolation"].advice
    client = watched.client(watched.master)
    client.config_set("min-replicas-to-write", 1)
    try:
        assert level("isolation") == "ok"
    finally:
        client.config_set("min-replicas-to-write", 0)


@pytest.mark.slow
@pytest.mark.parametrize("named", [1, 2])
def test_too_few_sentinels_are_warned_of(named, watched, settings, key_prefix):
    locks = watched.locks(settings, key_prefix)
    locks.configure(LOCATION=watched.setting()["LOCATION"][:named])
    finding = findings()["sentinels"]
    assert (finding.level, "three or five" in finding.advice) == ("warn", True)


@pytest.mark.slow
def test_sentinels_that_are_silent_or_could_not_agree_are_found(make_watched, settings, key_prefix):
    # As long as that they may stand still without a failover.
    watched = make_watched(down_after=3.0)
    watched.locks(settings, key_prefix)
    first, second, _ = watched.sentinels
    first.kill()
    comes("sentinels", "warn", f"1 of 3 cannot be asked: {first.host}:{first.port}")
    second.kill()
    comes("sentinels", "fail", "NOQUORUM")
    for replica in watched.replicas:
        watched.client(replica).replicaof("NO", "ONE")
    comes("replication", "warn", "no server can take over")


@pytest.mark.slow
def test_sentinels_that_name_no_master_are_a_finding_and_a_sentence_for_lists(
    watched, settings, key_prefix
):
    locks = watched.locks(settings, key_prefix)
    locks.configure(**watched.setting(service_name="nobody"))
    (finding,) = findings().values()
    assert (finding.about, finding.level) == ("server", "fail")
    assert "knows no 'nobody'" in finding.says
    with pytest.raises(CommandError, match=r"The server nobody, of the sentinels 127\.0\.0\.1:"):
        call_command("locks", "list", stderr=io.StringIO())


# --- a quorum ------------------------------------------------------------------------------------


def test_a_quorum_is_fit_while_a_majority_answers(make_quorum):
    quorum = make_quorum()
    quorum.configure(socket_timeout=5.0)
    found = findings()
    # They are on one machine, as no quorum should be.
    assert (found["quorum"].level, "on one machine" in found["quorum"].says) == ("warn", True)
    assert (
        found["persistence"].says
        == "all servers: a server that is restarted has forgotten its locks"
    )
    assert (found["replication"].level, found["rights"].level) == ("ok", "ok")
    quorum.servers[1].kill()
    found = findings()
    assert found["quorum"].level == "warn"
    assert (
        f"127.0.0.1:{quorum.proxies[1].port} of 3 servers cannot be asked" in found["quorum"].says
    )
    quorum.servers[2].kill()
    found = findings()
    assert found["quorum"].level == "fail"
    assert found["quorum"].says == "2 of 3 servers cannot be asked, so no lock can be taken"


@pytest.mark.parametrize("protocol", [3, 2])
def test_of_a_quorum_an_append_only_file_may_not_lack_the_last_second(protocol, make_quorum):
    quorum = make_quorum(appendonly="yes")
    quorum.configure(OPTIONS={"socket_timeout": 5.0, "protocol": protocol})
    clients = [server.client() for server in quorum.servers]
    for client in clients:
        client.config_set("appendfsync", "always")
    finding = findings()["persistence"]
    assert (finding.level, "appendfsync always" in finding.says) == ("ok", True)
    clients[1].config_set("appendfsync", "everysec")
    found = [one for one in doctor.examine("default") if one.about == "persistence"]
    assert {one.level for one in found} == {"ok", "warn"}
    (warning,) = [one for one in found if one.level == "warn"]
    assert f"127.0.0.1:{quorum.proxies[1].port}: a server that is restarted" in warning.says
    clients[2].execute_command("ACL", "SETUSER", "default", "-config")
    found = [one for one in doctor.examine("default") if one.about == "persistence"]
    assert [one.level for one in found].count("ok") == 2


@pytest.mark.parametrize("ends_early", [False, True])
def test_no_connection_to_a_server_of_a_quorum_stays(ends_early, make_quorum, monkeypatch):
    quorum = make_quorum()
    quorum.configure(OPTIONS={"socket_timeout": 5.0, "client_name": "ours"})
    with distributed_lock("lottery"):
        pass
    before = [quorum.clients(server, "ours") for server in range(3)]
    make, made = quorum_backend.Server, []

    def make_and_keep(*args):
        made.append(make(*args))  # Or their connections would go when they are collected.
        return made[-1]

    monkeypatch.setattr(quorum_backend, "Server", make_and_keep)
    examination = doctor.examine("default")
    next(examination)
    assert [len(quorum.clients(server, "ours")) for server in range(3)] == [2, 2, 2]
    if ends_early:
        examination.close()
    else:
        assert list(examination)
    wait_until(lambda: [quorum.clients(server, "ours") for server in range(3)] == before)


def test_one_server_by_two_names_is_no_quorum(make_quorum, settings):
    quorum = make_quorum()
    url = quorum.servers[0].url
    twice = [url, url.replace("127.0.0.1", "localhost"), quorum.servers[1].url]
    quorum.configure(socket_timeout=5.0, LOCATION=twice)
    finding = findings()["quorum"]
    assert (finding.level, "are the same server" in finding.says) == ("fail", True)
