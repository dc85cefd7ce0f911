"""docs/migrating.md: old and new code side by side, with the real old library on a real server."""

import importlib
import json
import os
import re
import shutil
import signal
import sys
import textwrap
from functools import partial

import pytest
import redis
from celery import Celery
from celery.signals import beat_init, before_task_publish, task_postrun
from django.test import override_settings

from django_redislock import held
from tests import ROOT
from tests.samples.pages import sections_of
from tests.samples.side_by_side import STOCK, enters, leave, pairs_together, sell
from tests.support.matrix import QUORUM, places
from tests.support.processes import hear, python, say
from tests.support.waiting import wait_until

VERSIONS = ("before", "meanwhile", "after")
SERVER = "redis://127.0.0.1:6379/0"
NO_WAIT = {"blocking_timeout=5": "blocking_timeout=0"}


def test_every_library_is_tried():
    tried = set(re.findall(r'"migrating\.md#(from-[\w-]+)"', (ROOT / __file__).read_text()))
    assert tried == {one for one in sections_of("migrating.md") if one.startswith("from-")}


NEXT_BUT_ONE = {("before", "after"), ("after", "before")}


@pytest.fixture
def paste_lock(paste):
    """Paste the old lock of a library, and the code that uses it in each version."""

    def pasted(path, changes):
        paste("migrating.md#what-replaces-a-lock", STOCK, {"wait=5": "wait=0"})
        return paste(path, changes=changes)

    return pasted


def check(spawn, folder, **settings):
    """Check what the page says of two processes with the versions of its code."""
    pairs = pairs_together(VERSIONS, lambda: spawn(sell, str(folder), **settings))
    assert pairs == NEXT_BUT_ONE


def test_redis_py(paste_lock, locks, spawn, tmp_path):
    paste_lock("migrating.md#from-redis-pys-lock", {SERVER: locks.server.url, **NO_WAIT})
    check(spawn, tmp_path)


def test_python_redis_lock(paste_lock, locks, spawn, tmp_path):
    paste_lock("migrating.md#from-python-redis-lock", {SERVER: locks.server.url})
    check(spawn, tmp_path)


def test_django_redis(paste_lock, locks, spawn, tmp_path):
    paste_lock("migrating.md#from-django-redis-cachelock", NO_WAIT)
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": locks.server.url}
    check(spawn, tmp_path, CACHES={"default": cache})


@places(QUORUM)
def test_pottery(paste_lock, place, spawn, settings, tmp_path):
    servers = settings.REDISLOCK["default"]["LOCATION"]
    page = paste_lock(
        "migrating.md#from-potterys-redlock",
        {f"redis://locks-{number}:6379/0": url for number, url in enumerate(servers, start=1)},
    )
    ours = page.settings()["REDISLOCK"]["default"]
    assert {**settings.REDISLOCK["default"], **ours} == settings.REDISLOCK["default"]
    check(spawn, tmp_path)


# Tasks


def test_the_snippet(paste, locks, spawn, tmp_path):
    page = paste("migrating.md#from-the-well-known-snippet", STOCK)
    before = (page.folder / "shop/before.py").read_text()
    decorator = before.partition("@shared_task(")[0].replace("def single_", "def old_single_")
    page.write("shop/locks.py", decorator)
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache"}
    check(spawn, tmp_path, CACHES={"default": {**cache, "LOCATION": locks.server.url}})


# The body: it tells in which worker it has begun, and whether another run was under way. It lasts
# until the test says so. The worker tells of its end, once the libraries have put away their locks.
CRM = {
    "shop/crm.py": """
        import os

        import redis

        server = redis.Redis.from_url(os.environ["SHOP_SERVER"])

        def pull(customer_id):
            if server.incr("inside") > 1:
                server.incr("together")
            server.rpush("begun", os.environ["SHOP_VERSION"])
            server.blpop("end", 60)
            server.decr("inside")
        """
}


def shop_app(folder, version, url):
    """In a child: the application of a process that has that version of the task."""
    sys.path.insert(0, folder)
    os.environ |= {"SHOP_SERVER": url, "SHOP_VERSION": version}
    app = Celery("shop", broker=url, backend=url)
    app.conf.update(
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url}},
        broker_connection_retry_on_startup=True,
    )
    importlib.import_module(f"shop.{version}")
    return app


def work(folder, version, url):
    """In a child: a worker, for calls in the queue that is named after its version."""
    app = shop_app(folder, version, url)
    server = redis.Redis.from_url(url)

    def ended(state, **_):
        if state == "SUCCESS":  # And no retry.
            server.rpush("ended", version)

    task_postrun.connect(ended, weak=False)
    alone = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["worker", "--pool", "solo", "--queues", version, "--loglevel", "INFO", *alone])


def publish(folder, version, url):
    """In a child: call the task for the queue that it is told, and say whether it was published."""
    task = shop_app(folder, version, url).tasks["shop.sync"]
    published = []
    before_task_publish.connect(lambda headers, **_: published.append(headers["id"]), weak=False)
    while queue := hear():
        published.clear()
        task.apply_async((7,), queue=queue)
        say(bool(published))


class Shop:
    """Publishers and workers, one of each for each version of the code."""

    def __init__(self, spawn, locks, folder):
        self.redis = locks.redis
        where = {"folder": str(folder), "url": locks.server.url}
        for version in VERSIONS:
            spawn(work, version=version, **where)
        self.publishers = {one: spawn(publish, version=one, **where) for one in VERSIONS}

    def calls(self, version, queue):
        """Whether a call by that version is published, for the worker of another."""
        publisher = self.publishers[version]
        publisher.send(queue)
        return bool(publisher.read())

    def begins(self, *versions):
        """Return once runs have begun in the workers of these versions."""
        assert self._told("begun", len(versions)) == sorted(versions)

    def have_all_calls(self):
        """Return once the workers have taken each call from its queue."""
        wait_until(lambda: not any(self.redis.llen(version) for version in VERSIONS))

    def end(self, *versions):
        """End the runs under way in the workers of these versions."""
        for _ in versions:
            self.redis.rpush("end", 1)
        assert self._told("ended", len(versions)) == sorted(versions)

    def _told(self, key, times):
        told = [wait_until(lambda: self.redis.lpop(key), message=key) for _ in range(times)]
        return sorted(str(one.decode()) for one in told)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("path", "old_keys"),
    [
        ("migrating.md#from-celery-once", "qo_*"),
        ("migrating.md#from-celery-singleton", "SINGLETONLOCK_*"),
        ("migrating.md#from-celery-heimdall", "*sync-7"),
    ],
)
def test_libraries_that_lock_when_a_call_is_published(
    path, old_keys, paste, locks, spawn, tmp_path
):
    paste("migrating.md#what-replaces-a-lock-at-publishing", CRM)
    paste(path)
    shop = Shop(spawn, locks, tmp_path)

    def old_locks():
        return [key for key in locks.redis.keys(old_keys) if b"redislock" not in key]

    for one, other in (("before", "meanwhile"), ("meanwhile", "before")):
        assert shop.calls(one, queue=other)
        shop.begins(other)
        assert not shop.calls(other, queue=one)
        shop.end(other)
        wait_until(lambda: not old_locks())

    # Release 1 and 2: whichever runs first, the other one comes afterwards.
    for one, other in (("meanwhile", "after"), ("after", "meanwhile")):
        assert shop.calls("after", queue=one)
        shop.begins(one)
        assert shop.calls("after", queue=other)
        shop.have_all_calls()
        shop.end(one)
        shop.begins(other)
        shop.end(other)
    assert not locks.redis.get("together")

    # Today's code and release 2: two at the same time.
    assert shop.calls("before", queue="before")
    shop.begins("before")
    assert shop.calls("after", queue="after")
    shop.begins("after")
    assert locks.redis.get("together") == b"1"
    shop.end("before", "after")
    wait_until(lambda: not old_locks())

    # A worker of release 2 does not delete the old lock.
    assert shop.calls("meanwhile", queue="after")
    shop.begins("after")
    shop.end("after")
    assert not shop.calls("meanwhile", queue="meanwhile")
    (left,) = old_locks()
    assert locks.redis.ttl(left) > 1000


# Beats


def beat(folder, version, url):
    """In a child: ``celery beat`` with the settings of that version."""
    sys.path.insert(0, folder)
    app = importlib.import_module(f"shop.{version}").app
    tidy = {"task": "tidy", "schedule": 0.1, "options": {"queue": "tidy"}}
    app.conf.update(broker_url=url, beat_schedule={"tidy": tidy}, beat_max_loop_interval=0.2)
    app.conf.redbeat_lock_timeout = 60  # By default five times that, which is short.
    begun = partial(redis.Redis.from_url(url).rpush, "begun", os.getpid())
    beat_init.connect(lambda **_: begun(), weak=False)
    # It says that before it asks for the lock of RedBeat, whose receiver comes with its module.
    importlib.import_module("redbeat.schedulers")
    app.start(["beat", "--loglevel", "INFO", "--pidfile", ""])


class Beats:
    """Beats, and what they send."""

    def __init__(self, spawn, locks, folder):
        self.redis = locks.redis
        self._start = partial(spawn, beat, folder=str(folder), url=locks.server.url)

    def start(self, version):
        child = self._start(version=version)
        assert wait_until(lambda: self.redis.lpop("begun")) == str(child.pid).encode()
        return child

    def sender(self):
        """The process that has sent the next message."""
        message = wait_until(lambda: self.redis.lpop("tidy"), message="a beat sends")
        origin = json.loads(message)["headers"]["origin"]
        return int(re.match(r"gen(\d+)@", origin)[1])

    def leads(self, child):
        """Return once this beat has sent ten messages one after the other."""
        row = 0
        while row < 10:
            row = row + 1 if self.sender() == child.pid else 0

    def only(self, child):
        """Check that of the next messages all are of this beat."""
        assert {self.sender() for _ in range(10)} == {child.pid}


def end(child):
    os.kill(child.pid, signal.SIGTERM)
    child.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_celery_redbeat(paste, locks, spawn, tmp_path):
    changes = {"redis://127.0.0.1:6379/1": locks.server.url, "leader_ttl=15": "leader_ttl=60"}
    paste("migrating.md#from-celery-redbeats-lock", None, changes)
    beats = Beats(spawn, locks, tmp_path)
    before = beats.start("before")
    beats.leads(before)

    meanwhile = beats.start("meanwhile")  # Release 1 stands by: RedBeat's lock is taken.
    beats.only(before)
    end(before)
    beats.leads(meanwhile)

    after = beats.start("after")  # Release 2 stands by: ours is taken.
    wait_until(lambda: (lock := held.get("celery-beat:shop")) and lock.waiters == 1)
    beats.only(meanwhile)
    end(meanwhile)
    beats.leads(after)
    assert held.record("celery-beat:shop:tidy") is None  # RedBeat keeps its own.

    before = beats.start("before")  # What no longer stands side by side: both send.
    senders = set()
    wait_until(lambda: senders.add(beats.sender()) or senders == {before.pid, after.pid})


def test_what_redbeat_does_by_default():
    code = """
        from celery import Celery
        from redbeat.schedulers import RedBeatScheduler
        app = Celery("shop", broker="redis://127.0.0.1:1/0")
        app.conf.update(redbeat_redis_url=app.conf.broker_url)
        RedBeatScheduler.setup_schedule = lambda self: None
        scheduler = RedBeatScheduler(app)
        print(scheduler.lock_key, scheduler.max_interval, scheduler.lock_timeout)
    """
    assert python("-c", textwrap.dedent(code)).stdout == "redbeat::lock 300 1500\n"


# A cache

SALES = {
    "shop/models.py": "from tests.effects.models import Order",
    "shop/sales.py": """
        from tests.support.processes import hear, say

        def count_sales():
            say("in the block")
            return hear()
        """,
}


def read_sales(folder, url):
    """In a child: call sales() of the versions that it is told, and say what becomes of it."""
    sys.path.insert(0, folder)
    with override_settings(CACHEOPS_REDIS=url, CACHEOPS={"effects.*": {"timeout": 300}}):
        from cacheops.query import install_cacheops

        install_cacheops()
        while version := hear():
            sample = importlib.import_module(f"shop.{version}")
            try:
                say(sample.sales())
            except Exception as error:
                say(type(error).__name__)


def test_django_cacheops(paste, locks, spawn, tmp_path):
    page = paste("migrating.md#from-django-cacheops-locktrue", SALES)
    careless = page.folder / "careless"
    shutil.copytree(page.folder / "shop", careless / "shop")
    source = careless / "shop/before.py"
    source.write_text(source.read_text().replace(", lock=True", ""))
    url = locks.server.url
    one, other = (spawn(read_sales, str(page.folder), url) for _ in range(2))

    def fills(child, version):
        child.send(version)
        assert child.read() == "in the block"

    # One fills, the other waits for it.
    fills(one, "after")
    other.send("after")
    wait_until(lambda: (lock := held.get("sales")) and lock.waiters == 1)
    one.send(30)
    assert (one.read(), other.read()) == (30, 30)

    # Old and new code fill at the same time, and each has its entry.
    locks.redis.flushall()
    fills(one, "before")
    fills(other, "after")
    other.send(40)
    assert other.read() == 40
    spoilt = spawn(read_sales, str(careless), url)
    spoilt.send("before")  # Without lock=True, the same entry.
    assert spoilt.read() == "UnpicklingError"
    one.send(50)
    assert one.read() == 50


# A pause


def test_a_hold_keeps_new_code_waiting_until_the_old_has_ended(paste_lock, locks, spawn, tmp_path):
    page = paste_lock("migrating.md#from-redis-pys-lock", {SERVER: locks.server.url, **NO_WAIT})
    index = (ROOT / "docs/migrating.md").read_text()
    pause, resume = re.findall(r"^manage\.py .*", index, re.MULTILINE)
    old, new = (spawn(sell, str(tmp_path)) for _ in range(2))
    assert page.manage(pause)[0] == 0
    assert enters(old, "before")
    assert not enters(new, "after")
    leave(old)
    assert page.manage(resume)[0] == 0
    assert enters(new, "after")
