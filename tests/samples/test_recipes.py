"""docs/recipes.md: what each section has you paste does what it says."""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import celery.signals
import pytest
from django.db.models.signals import post_save
from django.http import HttpResponse
from django.test import Client
from django.urls import path

from django_redislock import LockLost, LockTimeout, LockUnavailable, held
from django_redislock.celery.beat import LeaderScheduler
from django_redislock.testing import LockTestKit
from tests import ROOT
from tests.effects.models import Account, Order
from tests.jobs.test_monitors import service
from tests.samples.pages import sections_of
from tests.support.celery_app import celery_app
from tests.support.others import held_by, held_by_other
from tests.support.prometheus import locks_metrics
from tests.support.waiting import wait_until

__all__ = ["service"]  # A fixture.

pytestmark = pytest.mark.usefixtures("locks")


def waiters(name, number):
    """Return once so many wait for a lock."""
    wait_until(lambda: (one := held.get(name)) and one.waiters == number)


def serve(settings, page, *patterns):
    """A client of a site with these addresses and the settings of the page."""
    urls = ModuleType("shop.urls")
    urls.urlpatterns = [*patterns, path("receipt/<int:pk>", HttpResponse, name="receipt")]
    sys.modules["shop.urls"] = urls  # The fixture `paste` removes it.
    settings.ROOT_URLCONF = "shop.urls"
    settings.MIDDLEWARE = page.settings(MIDDLEWARE=[])["MIDDLEWARE"]
    return Client()


def test_every_recipe_is_tried():
    tried = re.findall(r'paste\(\s*"recipes\.md#([\w-]+)"', (ROOT / __file__).read_text())
    assert set(tried) == sections_of("recipes.md")


def test_a_view(paste, settings, monkeypatch):
    page = paste(
        "recipes.md#a-view-one-request-at-a-time",
        {"shop/reports.py": "def build_report(pk): return f'report {pk}'\n"},
        {"wait=5": "wait=0.1"},
    )
    views = page.module("shop.views")
    client = serve(
        settings,
        page,
        path("<int:pk>", views.report),
        path("class/<int:pk>", views.ReportView.as_view()),
    )
    assert client.get("/7").content == b"report 7"
    assert client.post("/class/7").content == b"built"
    with held_by_other("report:7"):
        busy = client.get("/7")
        assert (busy.status_code, "Retry-After" in busy) == (409, True)
        assert client.post("/class/7").status_code == 409
        assert client.get("/8").content == b"report 8"

    def no_answer(*args):
        raise LockUnavailable("report:7", "nobody answers")

    monkeypatch.setattr(views, "build_report", no_answer)
    assert client.get("/7").status_code == 503


class Bank:
    """It charges once for each key, and lets its caller wait."""

    def __init__(self):
        self.charged = {}
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()
        self.fails = False

    def charge(self, total, *, idempotency_key):
        self.asked.release()
        self.answers.wait(60)
        self.charged[idempotency_key] = total
        if self.fails:
            raise ConnectionError
        return f"receipt of {total}"


@pytest.mark.django_db(transaction=True)
def test_pay_is_clicked_twice(paste, settings):
    bank = Bank()
    page = paste(
        "recipes.md#pay-is-clicked-twice",
        {"shop/models.py": "from tests.effects.models import Order\n", "shop/bank.py": ""},
        {"wait=10": "wait=60"},
    )
    page.module("shop.bank").charge = bank.charge
    views = page.module("shop.views")
    client = serve(settings, page, path("pay/<int:order_id>", views.pay))
    order = Order.objects.create(total=30)
    url = f"/pay/{order.pk}"

    def click():
        answer = client.post(url)
        return answer.status_code, answer["Location"]

    receipt = (302, f"/receipt/{order.pk}")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(click)
        bank.asked.acquire()
        second = threads.submit(click)
        waiters(f"pay:{order.pk}", 1)
        bank.answers.set()
        assert [first.result(), second.result()] == [receipt, receipt]
    assert bank.charged == {f"order-{order.pk}": 30}
    assert click() == receipt  # A third one, later.
    assert not bank.asked.acquire(blocking=False)
    assert client.get(url).status_code == 405

    Order.objects.update(receipt="")
    bank.fails = True
    with pytest.raises(ConnectionError):
        click()  # After the bank has charged.
    bank.fails = False
    assert click() == receipt
    assert bank.charged == {f"order-{order.pk}": 30}


def test_pay_answers_409_while_the_first_click_takes_too_long(paste, settings):
    page = paste(
        "recipes.md#pay-is-clicked-twice",
        {"shop/models.py": "from tests.effects.models import Order\n", "shop/bank.py": ""},
        {"wait=10": "wait=0"},
    )
    client = serve(settings, page, path("pay/<int:order_id>", page.module("shop.views").pay))
    with held_by_other("pay:7"):
        busy = client.post("/pay/7")
    assert (busy.status_code, "Retry-After" in busy) == (409, True)


@pytest.mark.django_db(transaction=True)
def test_a_nightly_job(paste, service):
    page = paste(
        "recipes.md#a-nightly-job-with-its-alarm",
        None,
        {"https://hc-ping.com": f"http://{service.address}"},
    )
    tasks = page.module("shop.tasks")
    show, probe = page.blocks()[0].splitlines()
    assert page.manage(probe)[0] == 1
    assert tasks.nightly_report.delay().get() is None
    assert tasks.nightly_report.delay().get()["skipped"] == "done"
    assert service.paths == [f"/0e2f8d52/nightly-report{end}" for end in ("/start", "")]
    assert "shop.tasks.nightly_report" in page.manage(show)[1]
    assert page.manage(probe)[0] == 0
    assert 'job_name="shop.tasks.nightly_report",outcome="success"' in locks_metrics()


@pytest.mark.slow
def test_cron_and_shell(paste, locks, tmp_path):
    page = paste(
        "recipes.md#cron-and-shell-scripts",
        dict.fromkeys(("backup", "fetch.sh", "import.sh"), "#!/bin/sh\n"),
        {"bin/backup": f"{tmp_path}/backup"},
    )
    for name in ("backup", "fetch.sh", "import.sh"):
        (tmp_path / name).chmod(0o755)
    cron, script = page.blocks()

    assert page.manage(cron) == (0, "")
    assert page.manage(cron) == (75, "")  # It cools down.
    assert held.record("backup").skips == 1

    assert page.shell(script).stdout == "imported\n"
    with held_by("import"):
        said = page.shell(script.replace("--wait 5m", "")).stdout
    assert said == "skipped: another server imports, or it is paused\n"


@pytest.mark.slow
def test_a_command_without_a_project(paste, locks, tmp_path):
    page = paste(
        "commands.md",
        {"backup": "#!/bin/sh\n"},
        {"bin/backup": f"{tmp_path}/backup", "redis://127.0.0.1:6379/0": locks.server.url},
    )
    (tmp_path / "backup").chmod(0o755)
    (bare,) = [block for block in page.blocks() if "--redis" in block]
    assert page.shell(bare.replace("python ", f"{sys.executable} ")).returncode == 0
    assert held.record("backup").last_success


@pytest.mark.slow
def test_migrate_on_many_pods(paste):
    page = paste(
        "recipes.md#migrate-on-many-pods",
        None,
        {"-- python manage.py": f"-- {sys.executable} -m django"},
    )
    (command,) = page.blocks()
    command, newer = (command.replace("${RELEASE:?}", one) for one in ("1.4.2", "1.4.3"))
    status, said = page.manage(command)
    assert (status, "Applying django_redislock" in said) == (0, True)
    status, said = page.manage(command)
    assert (status, "Applying" in said) == (0, False)
    record = held.record("migrate:1.4.2")
    assert record.skips == 1
    # If it fails, the pod does, and the release is not done.
    assert page.manage(newer.replace("--noinput", "--no-such"))[0] == 2
    record = held.record("migrate:1.4.3")
    assert (record.last_success, record.last_failure is None) == (None, False)


def test_the_pod_that_migrates_has_the_same_command(paste):
    page = paste("recipes.md#migrate-on-many-pods")
    pod = re.search(r"- exec python (.+\n.+)", page.blocks("yaml")[0])
    assert " ".join(pod[1].split()) == page.blocks()[0].strip()


CELERY_OF_THE_READER = """
from celery import Celery

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
"""


def test_a_beat_with_a_standby(paste, settings):
    page = paste(
        "recipes.md#celerys-beat-with-a-standby",
        {"shop/tasks.py": "", "shop/celery.py": CELERY_OF_THE_READER},
    )
    for name, value in page.settings().items():
        setattr(settings, name, value)
    command, ask = page.blocks()
    name = f"{LeaderScheduler.__module__}:{LeaderScheduler.__name__}"
    assert command.split() == ["celery", "-A", "shop", "beat", "--scheduler", name]
    app = page.module("shop.celery").app
    assert "django_celery_beat" in app.conf.beat_leader_scheduler
    app.conf.update(beat_leader_scheduler="celery.beat:Scheduler", broker_url="memory://")
    leader, standby = LeaderScheduler(app=app), LeaderScheduler(app=app)
    try:
        leader.tick()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(standby.tick).result()
            (lock,) = held.list()
            assert (lock.name, lock.ttl) == ("celery-beat:shop", 15)
            assert "celery-beat:shop" in page.manage(ask.splitlines()[0])[1]
            leader.close()
            thread.submit(standby.tick).result()
            assert held.get("celery-beat:shop").id != lock.id
            thread.submit(standby.close).result()
    finally:
        app.close()


class Geocoder:
    """A service on loopback that counts how many ask at the same time."""

    def __init__(self):
        self.now = self.most = 0
        self.answers = threading.Event()
        mutex, us = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with mutex:
                    us.now += 1
                    us.most = max(us.most, us.now)
                us.answers.wait(60)
                with mutex:
                    us.now -= 1
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self):
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def geocoder():
    geocoder = Geocoder()
    yield geocoder
    geocoder.close()


def test_at_most_n_calls(paste, geocoder):
    page = paste(
        "recipes.md#an-api-that-takes-at-most-three-calls-at-a-time",
        None,
        {"https://geo.example.com/": geocoder.address, "wait=10": "wait=60", "timeout=5": ""},
    )
    locate = page.module("shop.geocoder").locate
    task = page.module("shop.tasks").locate_customer
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(locate, "Rome") for _ in range(3)]
        calls += [threads.submit(task.apply, ["Rome"]) for _ in range(3)]
        wait_until(lambda: geocoder.now == 3)
        waiters("geocoder", 3)
        geocoder.answers.set()
        for call in calls:
            call.result()
    assert geocoder.most == 3

    export = page.module("shop.exports").export
    assert export("acme") is None
    with held_by_other("export:acme", limit=1):
        assert export("other") is None


def test_a_task_comes_back_if_there_is_no_permit(paste):
    page = paste(
        "recipes.md#an-api-that-takes-at-most-three-calls-at-a-time", None, {"wait=10": "wait=0"}
    )
    tries = []

    @celery.signals.task_prerun.connect
    def count(**_: Any) -> None:
        tries.append(1)

    with ExitStack() as permits:
        for _ in range(3):
            permits.enter_context(held_by_other("geocoder", limit=3))
        result = page.module("shop.tasks").locate_customer.apply(["Rome"])
    assert isinstance(result.result, LockTimeout)
    assert len(tries) == 11  # Eager mode retries at once.


@pytest.mark.django_db(transaction=True)
def test_two_accounts(paste):
    page = paste(
        "recipes.md#money-between-two-accounts",
        {"shop/models.py": "from tests.effects.models import Account\n"},
        {"wait=5": "wait=0"},
    )
    transfers = page.module("shop.transfers")
    one, two = Account.objects.create(balance=10), Account.objects.create(balance=0)

    def balances():
        return [*Account.objects.order_by("pk").values_list("balance", flat=True)]

    transfers.transfer(one.pk, two.pk, 7)
    transfers.transfer(two.pk, one.pk, 1)
    assert balances() == [4, 6]
    with pytest.raises(ValueError, match="not enough"):
        transfers.transfer(one.pk, two.pk, 7)
    with held_by_other(f"account:{one.pk}"), pytest.raises(LockTimeout):
        transfers.transfer(two.pk, one.pk, 1)

    def lose(instance, **_):
        if instance == two:  # Both are written, and nothing is committed.
            LockTestKit().simulate_lost(f"account:{two.pk}")

    post_save.connect(lose, Account)
    try:
        with pytest.raises(LockLost):
            transfers.transfer(one.pk, two.pk, 1)
    finally:
        post_save.disconnect(lose, Account)
    assert balances() == [4, 6]


def test_single_flight(paste, settings):
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    fetched = []
    answers = threading.Event()

    def fetch_token():
        fetched.append("token")
        answers.wait(60)
        return {"access_token": "t", "expires_in": 3600}

    def count_sales():
        fetched.append("sales")
        answers.wait(60)
        return fetched.count("sales")

    page = paste(
        "recipes.md#single-flight-a-token-a-cache",
        {"shop/bank.py": "", "shop/sales.py": ""},
        {"wait=10": "wait=60", "else 30": "else 60"},
    )
    page.module("shop.bank").fetch_token = fetch_token
    page.module("shop.sales").count_sales = count_sales
    oauth, reports = page.module("shop.oauth"), page.module("shop.reports")
    for get, lock, value in ((oauth.token, "bank-token", "t"), (reports.sales, "sales", 1)):
        answers.clear()
        fetched.clear()
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(get) for _ in range(4)]
            waiters(lock, 3)
            answers.set()
            assert [call.result() for call in calls] == [value] * 4
        assert len(fetched) == 1
        assert get() == value
    reports.FRESH = -1
    with held_by_other("sales"):
        assert reports.sales() == 1  # The old value, at once.
    assert reports.sales() == 2


def test_one_task_per_object(paste):
    page = paste("recipes.md#one-task-per-object", {"shop/search.py": ""})
    indexed = []

    def index(product_id):
        indexed.append(product_id)
        if product_id == 7:
            assert page.module("shop.tasks").index_product(8) is None  # Another product.
            assert held.get("index:7")

    page.module("shop.search").index = index
    task = page.module("shop.tasks").index_product
    assert task.delay(7).get() is None
    assert indexed == [7, 8]
    with held_by_other("index:7"):
        assert task.delay(7).get()["skipped"] == "busy"  # In eager mode there is no broker.
        assert task.delay(9).get() is None
    with celery_app(broker_url="memory://") as app:
        task = app.tasks["shop.tasks.index_product"]
        assert task.delay(7).id == task.delay(7).id != task.delay(8).id


def test_rate_limits(paste):
    page = paste(
        "recipes.md#rate-limits",
        {"shop/gateway.py": "def post(number, text):\n    return number\n"},
        {'Rate("sms", "10/s")], wait=30': 'Rate("sms", "1/h")], wait=0'},
    )
    send = page.module("shop.sms").send
    assert send(1, "hi") == 1
    with pytest.raises(LockTimeout) as caught:
        send(2, "hi")
    assert caught.value.rate
    assert page.module("shop.tasks").send_later.autoretry_for == (LockTimeout, LockUnavailable)
