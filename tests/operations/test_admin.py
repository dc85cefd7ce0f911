"""The admin's pages of held locks: who may see them, what they show, and what they do."""

import io
import json
import logging
import re
import uuid
from contextlib import contextmanager, suppress
from html.parser import HTMLParser

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.core.management import call_command
from django.test import Client
from django.urls import path, reverse

from django_redislock import LockLost, LockUnavailable, distributed_lock, held, task_runs
from django_redislock.admin import page as held_locks
from django_redislock.admin import panels
from django_redislock.backends.redis.connection import Connection
from django_redislock.holder import Activity, busy_with
from django_redislock.lock import Lock
from django_redislock.models import LockPage
from django_redislock.rules import scripts
from django_redislock.rules.flows import RunMarker
from django_redislock.rules.keys import index_key, lock_keys
from django_redislock.rules.options import Options
from django_redislock.rules.stored import Owner
from django_redislock.signals import lock_force_released
from django_redislock.testing import LockTestKit
from tests.support import site
from tests.support.circles import a_circle
from tests.support.others import held_by, waiters
from tests.support.processes import hear, say
from tests.support.stored import NEWER_ID, newer_lease
from tests.support.waiting import HUNG, wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks")]

LIST = "/admin/django_redislock/heldlock/"
RELEASE = f"{LIST}force-release/"


@pytest.fixture
def sign_in(db):
    """Return the browser of one of the users in tests/support/site.py."""

    def sign_in(name, **options):
        client = Client(**options)
        client.force_login(site.add_user(name))
        return client

    return sign_in


@pytest.fixture
def operator(sign_in):
    """The browser of a user who may look and release."""
    return sign_in("operator")


def detail(name, alias="default", permit=1):
    """The address of a lock's page, or of one of its permits."""
    key = quote(LockPage.named(name, alias, permit).key)
    return reverse("admin:django_redislock_heldlock_change", args=[key])


def text(page):
    return page.content.decode()


def rows(page):
    """The names in the list, in order."""
    return re.findall(r'<bdi class="redislock-name" title="([^"]*)">', text(page))


def told(page):
    """The messages that the next page will show."""
    return " ".join(str(message) for message in get_messages(page.wsgi_request))


def reference(name, permit=None):
    """The lease of a lock that is held now, as forms carry it."""
    lock = held.get(name, permit=permit)
    return f"{LockPage.of(lock).key}:{lock.id}"


def facts_in(page, part=""):
    """What the page of a lock, or a part of it, or the confirmation says, by label."""
    shown = text(page)
    if part:
        shown = shown.partition(f'id="redislock-{part}"')[2].partition('<div id="redislock-')[0]
    facts = re.findall(
        r'<label>(.*?):</label><div class="readonly">(.*?)</div></div>\s*</div>',
        shown,
        re.DOTALL,
    )
    return {label: " ".join(re.sub("<[^>]*>", " ", shown).split()) for label, shown in facts}


class Inline(HTMLParser):
    """What a strict Content-Security-Policy forbids."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        if tag == "style" or (tag == "script" and not {"src", "type"} & names.keys()):
            self.found.append(tag)
        self.found += [name for name in names if name == "style" or name.startswith("on")]


def test_no_page_has_scripts_or_styles_in_it(sign_in):
    root = sign_in("root")
    with held_by("lottery", task="lottery.tasks.draw"):
        chosen = {"lease": reference("lottery")}
        pages = [
            root.get(LIST),
            root.get(detail("lottery")),
            root.post(RELEASE, chosen),
            root.post(f"{LIST}pause/", {"lock": LockPage.named("lottery", "default").key}),
            root.get(detail("lottery").replace("/change/", "/history/")),
            root.get("/admin/django_redislock/completedrun/"),
        ]
    for page in pages:
        assert page.status_code == 200
        inline = Inline()
        inline.feed(text(page))
        assert inline.found == []
    assert "redislock-hour" in text(pages[1])


# --- who may what --------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["root", "operator", "looker"])
def test_those_with_the_right_to_view_see_locks(sign_in, user):
    client = sign_in(user)
    with held_by("lottery"):
        assert rows(client.get(LIST)) == ["lottery"]
        assert client.get(detail("lottery")).status_code == 200
    assert "Held locks" in text(client.get("/admin/"))


def test_staff_without_it_sees_nothing(sign_in):
    client = sign_in("clerk")
    with held_by("lottery"):
        for address in (LIST, detail("lottery"), f"{LIST}add/"):
            assert client.get(address).status_code == 403
        assert client.post(RELEASE, {"lease": reference("lottery")}).status_code == 403
    assert "Held locks" not in text(client.get("/admin/"))


def test_the_right_to_release_alone_shows_nothing(sign_in):
    client = sign_in("clerk")
    right = Permission.objects.get(codename="force_release_heldlock")
    User.objects.get(username="clerk").user_permissions.add(right)
    assert client.get(LIST).status_code == 403
    assert client.post(RELEASE).status_code == 403


def test_those_who_may_only_look_are_offered_no_release_and_get_none(sign_in):
    client = sign_in("looker")
    with held_by("lottery"):
        assert "force_release" not in text(client.get(LIST))
        assert "Force release" not in text(client.get(detail("lottery")))
        lease = {"lease": reference("lottery"), "confirmed": "yes"}
        assert client.post(RELEASE, lease).status_code == 403
        action = {"action": "force_release", "_selected_action": reference("lottery"), "index": 0}
        client.post(LIST, action)
        assert held.get("lottery") is not None


def test_nobody_signed_out_sees_anything():
    client = Client()
    for address in (LIST, detail("lottery"), RELEASE):
        assert client.get(address).status_code == 302


@pytest.mark.parametrize("what", ["add/", "{key}/delete/"])
def test_nobody_adds_or_deletes(sign_in, what):
    client = sign_in("root")
    address = LIST + what.format(key=LockPage.named("lottery", "default").key)
    assert client.get(address).status_code == 403
    assert client.post(address, {"post": "yes"}).status_code == 403


def test_nobody_changes(sign_in):
    client = sign_in("root")
    with held_by("lottery"):
        before = held.get("lottery")
        client.post(detail("lottery"), {"key": "x"})
        after = held.get("lottery")
        assert before.id == after.id


def test_only_these_permissions_exist():
    names = Permission.objects.filter(content_type__app_label="django_redislock")
    assert {one.codename for one in names} == {
        "view_heldlock",
        "force_release_heldlock",
        "pause_heldlock",
        "view_completedrun",
        "delete_completedrun",
    }


# --- the list ------------------------------------------------------------------------------------


def test_the_list_shows_who_holds_what(operator):
    with held_by("lottery", task="lottery.tasks.draw"):
        shown = text(operator.get(LIST))
        lock = held.get("lottery")
    for part in (
        "web-3:4711",
        "lottery.tasks.draw",
        "id-1",
        str(lock.fence),
        "held",
        "1 held lock",
    ):
        assert part in shown
    assert re.search(r'data-redislock-down="5\d\.\d+"', shown)
    assert re.search(r'<progress class="redislock-gauge" max="60.000" value="5\d', shown)


def test_an_empty_list_says_so(operator):
    assert "No lock is held right now." in text(operator.get(LIST))
    assert "No held lock matches." in text(operator.get(LIST, {"q": "lottery"}))
    assert "Similar names" not in text(operator.get(LIST, {"q": "lottery"}))


def test_of_a_misspelt_name_similar_ones_are_shown(operator):
    run_task("lottery")
    with held_by("lottery:1"):
        page = operator.get(LIST, {"q": "lotery"})
        assert "No held lock matches." in text(page)
        assert re.findall("<bdi>(.*?)</bdi></a>", text(page)) == ["lottery", "lottery:1"]
        assert detail("lottery:1") in text(page)
        page = operator.get(LIST, {"q": "lotery", "state": "free"})
        assert "No free lock matches." in text(page)
        assert re.findall("<bdi>(.*?)</bdi></a>", text(page)) == ["lottery", "lottery:1"]
    assert "Nothing is known of it" in text(operator.get(detail("lotery")))
    assert "Nothing is known of it" not in text(operator.get(detail("lottery")))


def test_a_name_goes_on_in_another_line_between_its_words(operator):
    with held_by("customer:77:in<voice>", task="shop.tasks.pay"):
        shown = text(operator.get(LIST))
    assert "customer:<wbr>77:<wbr>in&lt;voice&gt;<" in shown
    assert shown.count("shop.<wbr>tasks.<wbr>pay<") == 2  # In its row, and in the filter.


def test_rows_stand_in_the_order_of_their_names_whenever_they_end(operator, locks):
    """So no row changes its place with a renewal. Of too many locks the server has one order."""
    with held_by("b", ttl=50), held_by("A", ttl=60), held_by("c", ttl=40):
        page = operator.get(LIST)
        assert rows(page) == ["A", "b", "c"]
        assert sorted_by(page) == ["name"]
        assert rows(operator.get(LIST, {"o": "4"})) == ["c", "b", "A"]
        fill(locks, 1000)
        page = operator.get(LIST)
        assert rows(page)[:3] == ["c", "b", "A"]
        assert sorted_by(page) == ["expires_in"]


def sorted_by(page):
    """The heads that say that the list is sorted by their column."""
    return re.findall(r'class="sortable column-(\w+) sorted', text(page))


def test_each_state_has_its_badge(operator, locks):
    with distributed_lock("cooling", min_hold=60):
        pass
    overdue = distributed_lock("overdue", ttl=60)
    assert overdue.acquire()
    locks.redis.pexpire(lock_keys(locks.prefix, "overdue").lock, 20_000)
    locks.redis.set(lock_keys(locks.prefix, "foreign").lock, "x", px=60_000)
    locks.redis.zadd(index_key(locks.prefix), {lock_keys(locks.prefix, "foreign").lock: 9e15})
    with held_by("held"), held_by("no-expiry"):
        locks.redis.persist(lock_keys(locks.prefix, "no-expiry").lock)
        shown = text(operator.get(LIST))
        for state in ("held", "cooling", "overdue", "no-expiry", "foreign"):
            assert f"redislock-badge redislock-{state}" in shown
            assert rows(operator.get(LIST, {"state": state})) == [state]
        assert "a string of 1 byte, which" in text(operator.get(detail("foreign")))
    overdue.release()


def test_a_permit_says_which_one_of_how_many_it_is(operator):
    with held_by("report", limit=5), held_by("report", "web-4", limit=5), held_by("lottery"):
        shown = text(operator.get(LIST))
        assert "redislock-permit" in shown
        assert "permit 2/5" in shown
        assert rows(operator.get(LIST, {"state": "permit"})) == ["report", "report#2"]
        shown = text(operator.get(detail("report", permit=2)))
        assert "permit 2/5" in shown
        assert "web-4:4711" in shown
        # Those beside it are named, each with a link to its own page.
        assert detail("report") in shown
        assert detail("report", permit=2) in text(operator.get(detail("report")))


def test_a_lock_that_is_called_as_a_permit_has_a_page_and_an_end_of_its_own(operator):
    with (
        held_by("report", limit=5),
        held_by("report", "permits-host", limit=5),
        held_by("report#2", "locks-host"),
    ):
        assert rows(operator.get(LIST)) == ["report", "report#2", "report#2"]
        assert rows(operator.get(LIST, {"state": "permit"})) == ["report", "report#2"]
        assert "permits-host" in text(operator.get(detail("report", permit=2)))
        assert "locks-host" in text(operator.get(detail("report#2")))
        operator.post(RELEASE, {"lease": reference("report#2", 1), "confirmed": "Yes"})
        assert [lock.owner.host for lock in held.list()] == ["web-3", "permits-host"]
        operator.post(RELEASE, {"lease": reference("report", 2), "confirmed": "Yes"})
        assert [lock.owner.host for lock in held.list()] == ["web-3"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["a:1", "a:2", "b:1"]),
        ({"q": "a:"}, ["a:1", "a:2"]),
        ({"q": "B:1"}, ["b:1"]),
        ({"q": "web-2"}, ["a:2", "b:1"]),
        ({"q": "tasks.pay"}, ["b:1"]),
        ({"q": "nothing"}, []),
        ({"host": "web-1"}, ["a:1"]),
        ({"host": "web-9"}, []),
        ({"task": "shop.tasks.pay"}, ["b:1"]),
        ({"host": "web-2", "q": "a:"}, ["a:2"]),
        ({"state": "held"}, ["a:1", "a:2", "b:1"]),
        ({"state": "overdue"}, []),
        ({"alias": "default"}, ["a:1", "a:2", "b:1"]),
        ({"unknown": "x", "e": "1"}, ["a:1", "a:2", "b:1"]),
        ({"o": "-1"}, ["b:1", "a:2", "a:1"]),
        ({"o": "-4"}, ["b:1", "a:2", "a:1"]),
        ({"o": "3.1"}, ["a:1", "a:2", "b:1"]),
        ({"o": "99.x.-"}, ["a:1", "a:2", "b:1"]),
    ],
    ids=str,
)
def test_the_list_can_be_searched_filtered_and_sorted(operator, query, found):
    with (
        held_by("a:1", "web-1", ttl=50),
        held_by("a:2", "web-2", ttl=60),
        held_by("b:1", "web-2", task="shop.tasks.pay", ttl=70),
    ):
        assert rows(operator.get(LIST, query)) == found


@pytest.mark.parametrize("limit", [None, 2])
def test_a_lock_that_was_handed_over_says_so(operator, limit):
    lock = distributed_lock("lottery", limit=limit, wait=0)
    with lock as lease:
        lease.hand_over()
        assert ">handed over<" in text(operator.get(LIST)).replace("\n", "")


def test_filters_offer_what_there_is(operator):
    with held_by("a", "web-1"), held_by("b", "web-2", task="shop.tasks.pay"):
        shown = text(operator.get(LIST, {"host": "web-1"}))
        for choice in ("?host=web-1", "?host=web-2", "task=shop.tasks.pay", "state=cooling"):
            assert choice in shown.replace("&amp;", "?")
        assert "By alias" not in shown


def test_locks_of_all_aliases_are_shown(operator, settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "KEY_PREFIX": "test-other"}}
    with held_by("lottery"), distributed_lock("prizes", using="other", ttl=90):
        assert rows(operator.get(LIST)) == ["lottery", "prizes"]
        assert "By alias" in text(operator.get(LIST))
        assert rows(operator.get(LIST, {"alias": "other"})) == ["prizes"]
        assert operator.get(detail("prizes", "other")).status_code == 200


def test_an_alias_with_a_mistake_does_not_hide_which_alias_a_lock_is_of(operator, settings):
    settings.REDISLOCK = {**settings.REDISLOCK, "wrong": {"LOCATION": "localhost"}}
    with held_by("lottery"):
        assert "column-alias" in operator.get(LIST).content.decode()


def test_one_alias_that_is_down_does_not_hide_the_others(operator, settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "down": {"LOCATION": "redis://127.0.0.1:1/0"}}
    with held_by("lottery"):
        page = operator.get(LIST)
        assert rows(page) == ["lottery"]
        assert "The locks of down cannot be shown" in text(page)
        assert re.search(r"as of \d\d:\d\d:\d\d, without down<", text(page))
        # Nor does it hold up the release of the others.
        silent = f"{LockPage.named('prizes', 'down').key}:{'0' * 16}"
        page = operator.post(RELEASE, {"lease": [silent, reference("lottery")]})
        assert leases_in(page) == [reference("lottery")]
        assert "The locks of down cannot be shown" in text(page)


def test_the_list_has_pages(operator, locks):
    fill(locks, 250)
    names = [f"lock:{number:06}" for number in range(250)]
    assert rows(operator.get(LIST)) == names[:100]
    assert rows(operator.get(LIST, {"p": "3"})) == names[200:]
    assert "250 held locks" in text(operator.get(LIST))
    assert operator.get(LIST, {"p": "9"}).status_code == 302  # As Django does.
    assert operator.get(LIST, {"p": "x"}).status_code == 200
    assert rows(operator.get(LIST, {"q": "lock:00017"})) == names[170:180]


def fill(locks, count, ttl=600):
    """Let there be *count* held locks, lock:000000 being the next to end."""
    owner = Owner(host="web-3", pid=4711, task="t").packed.decode()
    keys = [lock_keys(locks.prefix, f"lock:{number:06}").lock for number in range(count)]
    seconds, us = locks.redis.time()
    now = seconds * 1000 + us // 1000
    index = {}
    pipeline = locks.redis.pipeline(transaction=False)
    for number, key in enumerate(keys):
        px = int(ttl * 1000) + number
        head = f"{number:032x}h-00000{number:016x}"
        pipeline.set(key, f"{head}|{number + 1}|{now}|{px}|0||{owner}", px=px)
        index[key] = now + px
        if len(index) == 5000 or number == count - 1:
            pipeline.zadd(index_key(locks.prefix), index)
            pipeline.execute()
            index = {}


@pytest.mark.slow
def test_a_hundred_thousand_locks_among_a_million_keys_are_listed_in_few_round_trips(
    operator, locks, make_server, monkeypatch
):
    server = make_server(enable_debug_command="yes")
    locks.on(server)
    patient = server.client(socket_timeout=HUNG)
    patient.execute_command("DEBUG", "POPULATE", 1_000_000, "unrelated", 10)
    fill(locks, 100_000)
    trips = count_round_trips(monkeypatch)
    locks.redis.config_resetstat()
    page = operator.get(LIST)
    assert rows(page) == [f"lock:{number:06}" for number in range(100)]
    assert "100000 held locks" in text(page)
    assert len(trips) < 10
    for query, first in (
        ({"p": "700"}, "lock:069900"),
        ({"o": "-4"}, "lock:099999"),
        ({"o": "-4", "p": "2"}, "lock:099899"),
        ({"q": "lock:088888"}, "lock:088888"),
    ):
        assert rows(operator.get(LIST, query))[0] == first
    trips.clear()
    assert operator.get(detail("lock:050000")).status_code == 200
    assert len(trips) < 10
    partial = operator.get(LIST, {"o": "-1"})
    assert "only some" in text(partial)
    used = set(locks.redis.info("commandstats"))
    assert not used & {"cmdstat_scan", "cmdstat_keys"}


def count_round_trips(monkeypatch):
    """What is sent to a server and awaited, from now on."""
    trips = []
    for name in ("execute", "send"):
        send = getattr(Connection, name)

        def counted(connection, *args, _send=send, _name=name):
            trips.append(_name)
            return _send(connection, *args)

        monkeypatch.setattr(Connection, name, counted)
    return trips


# --- one lock ------------------------------------------------------------------------------------


def test_the_page_of_a_lock_shows_waiters_in_order_and_earlier_holders(operator, spawn):
    for success in (True, False):
        lock = distributed_lock("lottery", ttl=10)
        assert lock.acquire()
        lock.lease.renew()  # Long enough to be remembered.
        lock.release(success=success)
    with distributed_lock("lottery"):
        first = spawn(wait_for, "lottery")
        wait_until(lambda: waiters("lottery") == 1)
        second = spawn(wait_for, "lottery")
        wait_until(lambda: waiters("lottery") == 2)
        shown = text(operator.get(detail("lottery")))
        assert shown.index(f":{first.pid}<") < shown.index(f":{second.pid}<")
        assert "Waiting, the next first" in shown
        for ended in ("done", "failed", "held"):
            assert f"redislock-bar-{ended}" in shown
        assert "<svg" in shown


def wait_for(name):
    """In a child."""
    with distributed_lock(name, wait=60):
        hear()


def test_the_page_of_a_free_lock_says_that_nobody_holds_it(operator):
    page = operator.get(detail("lottery"))
    assert page.status_code == 200
    assert "Nobody holds this lock right now." in text(page)
    assert "Force release" not in text(page)


@pytest.mark.parametrize("key", ["x", "____", "bG90dGVyeQ", "%00", "..", "a" * 3000])
def test_an_address_that_is_none_leads_back(operator, key):
    page = operator.get(f"{LIST}{key}/change/")
    assert page.status_code in {302, 404}


@pytest.mark.parametrize("query", ["host", "task", "state", "alias"])
def test_a_filter_value_that_is_none_finds_nothing(operator, query):
    with held_by("lottery"):
        assert rows(operator.get(LIST, {query: "nope"})) == []


@pytest.mark.parametrize(
    "query", ["o=x", "o=999.-7.", "p=999", "p=-1", "p=x", "all=", "e=1", "x=y"]
)
def test_an_odd_query_is_put_up_with(operator, query):
    with held_by("lottery"):
        assert rows(operator.get(f"{LIST}?{query}", follow=True)) == ["lottery"]


def test_an_alias_that_is_none_is_a_message(operator):
    page = operator.get(detail("lottery", "nope"))
    assert page.status_code == 200
    assert "no alias" in text(page)


# --- force release -------------------------------------------------------------------------------


def confirm(client, *names):
    """Tick locks in the list and press Go."""
    ticked = [reference(name) for name in names]
    return client.post(LIST, {"action": "force_release", "_selected_action": ticked, "index": "0"})


def leases_in(page):
    """The leases in the form of a page."""
    return re.findall(r'name="lease" value="([^"]+)"', text(page))


def test_the_confirmation_shows_exactly_what_will_be_freed_and_frees_nothing(operator):
    with held_by("a"), held_by("b"), held_by("c"):
        page = confirm(operator, "a", "c")
        assert leases_in(page) == [reference("a"), reference("c")]
        assert "The holders are not stopped." in text(page)
        assert "web-3:4711" in text(page)
        assert [lock.name for lock in held.list()] == ["a", "b", "c"]


def test_the_button_on_the_page_of_a_lock_leads_to_the_same_confirmation(operator):
    with held_by("lottery"):
        (lease,) = leases_in(operator.get(detail("lottery")))
        page = operator.post(RELEASE, {"lease": lease})
        assert leases_in(page) == [lease]
        assert held.get("lottery") is not None


def test_a_confirmed_release_ends_the_lease_and_is_logged(operator, caplog):
    with held_by("lottery") as _:
        lock = held.get("lottery")
        assert lock is not None
        leases = leases_in(confirm(operator, "lottery"))
        answer = {"lease": leases, "confirmed": "Yes", "reason": "stuck since noon"}
        page = operator.post(RELEASE, answer)
        assert page.status_code == 302
        assert page["Location"] == detail("lottery")
        assert held.get("lottery") is None
        assert "“lottery” was released" in told(page)
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr) == ("operator", "lottery")
    for part in (lock.id, "web-3:4711", "stuck since noon"):
        assert part in entry.change_message
    (record,) = [one for one in caplog.records if one.name == "django_redislock.audit"]
    assert record.levelno == logging.WARNING
    for part in ("'lottery'", lock.id, "operator in the admin", "stuck since noon"):
        assert part in record.getMessage()
    # Django's own pages about it lead back here.
    address = entry.get_admin_url()
    assert address is not None
    assert operator.get(address).status_code == 200
    history = detail("lottery").replace("/change/", "/history/")
    assert "stuck since noon" in text(operator.get(history))
    assert "lottery" in text(operator.get("/admin/"))


def test_many_are_released_at_once(operator):
    with held_by("a"), held_by("b"), held_by("c"):
        leases = leases_in(confirm(operator, "a", "b"))
        page = operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
        assert page["Location"] == LIST
        assert [lock.name for lock in held.list()] == ["c"]
    assert LogEntry.objects.count() == 2


@pytest.mark.proves("P9")
def test_a_stale_confirmation_frees_nobody_newer(operator):
    lock = distributed_lock("lottery")
    assert lock.acquire()
    leases = leases_in(confirm(operator, "lottery"))
    lock.release()
    with distributed_lock("lottery") as newer:
        page = operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
        assert "Somebody else holds it now" in told(page)
        newer.ensure_held(verify=True)
    assert not LogEntry.objects.exists()


@pytest.mark.proves("P9")
def test_a_stale_list_frees_nobody_newer(operator):
    """What was ticked is the lease, not the name."""
    lock = distributed_lock("lottery")
    assert lock.acquire()
    (ticked,) = re.findall(r'name="_selected_action" value="([^"]+)"', text(operator.get(LIST)))
    lock.release()
    action = {"action": "force_release", "_selected_action": ticked, "index": "0"}
    assert "is free already" in text(operator.post(LIST, action))
    with distributed_lock("lottery"):
        page = operator.post(LIST, action)
        assert "has changed hands" in text(page)
        assert leases_in(page) == []


def test_of_a_lock_that_cools_down_nobody_is_said_to_be_at_work(operator):
    with distributed_lock("lottery", min_hold=60):
        pass
    with held_by("prizes"):
        both = text(confirm(operator, "lottery", "prizes"))
        assert "The holders are not stopped." in both
    page = confirm(operator, "lottery")
    assert "The work is done." in text(page)
    assert "not stopped" not in text(page)
    page = operator.post(RELEASE, {"lease": leases_in(page), "confirmed": "Yes"})
    assert "was done with it" in told(page)
    assert held.get("lottery") is None


def test_what_is_free_already_is_said_so(operator):
    with held_by("lottery"):
        leases = leases_in(confirm(operator, "lottery"))
    page = operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
    assert "was not released. Nobody holds it." in told(page)


def test_the_next_waiter_gets_the_lock_and_the_message_names_it(operator, spawn):
    with pytest.raises(LockLost), distributed_lock("lottery"):  # noqa: PT012 - at its end
        child = spawn(wait_for, "lottery")
        wait_until(lambda: waiters("lottery") == 1)
        leases = leases_in(confirm(operator, "lottery"))
        page = operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
        assert f":{child.pid}" in told(page)


def test_a_holder_in_another_process_learns_of_it_at_its_next_renewal(operator, spawn):
    child = spawn(hold_until_lost, "lottery")
    child.read()
    leases = leases_in(confirm(operator, "lottery"))
    operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
    assert child.read() == "forced"


def hold_until_lost(name):
    """In a child."""
    with distributed_lock(name, ttl=6) as lease:
        say("held")
        wait_until(lambda: lease.lost_reason)
        say(lease.lost_reason)
        hear()


def test_a_get_never_changes_anything(operator):
    with held_by("lottery"):
        lease = reference("lottery")
        page = operator.get(RELEASE, {"lease": lease, "confirmed": "Yes"})
        assert page.status_code == 405
        query = {"action": "force_release", "_selected_action": lease, "index": "0"}
        operator.get(LIST, query)
        assert held.get("lottery") is not None


def test_a_post_from_elsewhere_is_refused(sign_in):
    client = sign_in("operator", enforce_csrf_checks=True)
    with held_by("lottery"):
        lease = {"lease": reference("lottery"), "confirmed": "Yes"}
        assert client.post(RELEASE, lease).status_code == 403
        assert held.get("lottery") is not None


@pytest.mark.parametrize(
    "lease", ["", ":", "x", "x:y", "bG90dGVyeQ:0", "\x00", "{key}", "{key}:", "{key}:" + "x" * 5000]
)
def test_a_lease_that_is_none_releases_nothing(operator, lease):
    with held_by("lottery"):
        lease = lease.replace("{key}", LockPage.named("lottery", "default").key)
        for answer in ({"lease": lease}, {"lease": lease, "confirmed": "Yes"}):
            assert operator.post(RELEASE, answer).status_code in {200, 302}
        assert operator.post(RELEASE, {"confirmed": "Yes"}).status_code == 302
        assert held.get("lottery") is not None


def test_an_action_on_all_that_there_are_frees_only_what_was_ticked(operator):
    with held_by("a"), held_by("b"):
        across = {"action": "force_release", "index": "0", "select_across": "1"}
        page = operator.post(LIST, {**across, "_selected_action": reference("a")})
        assert leases_in(page) == [reference("a")]


def test_a_release_is_logged_even_if_the_server_goes_right_after_it(operator, locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    with held_by("lottery"):
        lease = reference("lottery")
        lock_force_released.connect(refuse := lambda **event: proxy.refuse())
        try:
            page = operator.post(RELEASE, {"lease": lease, "confirmed": "Yes"})
        finally:
            lock_force_released.disconnect(refuse)
        proxy.heal()
        assert "“lottery” was released" in told(page)
        assert held.get("lottery") is None
    assert LogEntry.objects.count() == 1


def test_a_silent_server_is_not_asked_for_each_lock(operator, locks, make_proxy, monkeypatch):
    monkeypatch.setattr(held_locks, "MOST_SECONDS_UNANSWERED", 0.01)
    proxy = make_proxy(locks.server)
    with held_by("a"), held_by("b"), held_by("c"):
        leases = [reference(name) for name in "abc"]
        locks.on(proxy, OPTIONS={"socket_timeout": 0.1})
        proxy.blackhole()
        page = operator.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
        locks.on(locks.server)
        assert "“a” was not released" in told(page)
        assert "2 locks more: not tried" in told(page)
        assert [lock.name for lock in held.list()] == ["a", "b", "c"]


@pytest.mark.parametrize("act", ["release", "pause", "resume"])
def test_a_silent_server_is_not_asked_for_each_lock_and_holds_up_no_other_alias(
    sign_in, settings, locks, make_proxy, monkeypatch, act
):
    monkeypatch.setattr(held_locks, "MOST_SECONDS_UNANSWERED", 0.01)
    root, proxy = sign_in("root"), make_proxy(locks.server)
    silent = {"LOCATION": proxy.url, "OPTIONS": {"socket_timeout": 0.1}}
    settings.REDISLOCK = {"default": settings.REDISLOCK["default"], "archive": silent}
    proxy.blackhole()
    keys = [LockPage.named(name, "archive").key for name in "abc"]
    keys.append(LockPage.named("lottery", "default").key)
    if act == "pause":
        page = root.post(f"{LIST}pause/", {"lock": keys, "for": "1h", "confirmed": "Yes"})
        assert "“lottery” is paused" in told(page)
    elif act == "resume":
        held.pause("lottery", 3600, by="ann")
        page = root.post(f"{LIST}pause/", {"lock": keys, "resume": ""})
        assert "The pause of “lottery” was ended." in told(page)
    else:
        with held_by("lottery"):
            leases = [f"{key}:{'0' * 16}" for key in keys[:3]] + [reference("lottery")]
            page = root.post(RELEASE, {"lease": leases, "confirmed": "Yes"})
        assert "“lottery” was released" in told(page)
    assert "“a”" in told(page)
    assert "“b”" not in told(page)
    assert "2 locks more: not tried, since the server is silent (archive)." in told(page)


def test_a_release_whose_answer_is_lost_is_told_and_logged_as_not_known(
    operator, locks, make_proxy
):
    proxy = make_proxy(locks.server)
    with held_by("lottery"):
        lease = {"lease": reference("lottery"), "confirmed": "Yes", "reason": "it hangs"}
        locks.on(proxy, OPTIONS={"socket_timeout": 1})
        proxy.rule_for_script(scripts.FORCE_RELEASE.sha, "hang_after", times=None)
        page = operator.post(RELEASE, lease)
        assert "“lottery” may have been released. The server 127.0.0.1" in told(page)
        assert held.get("lottery") is None
    change = LogEntry.objects.get().get_change_message()
    assert "was released by force is not known. it hangs" in change


STRANGE = {
    "a string of 9 bytes": lambda client, key: client.set(key, b"\xff by hand"),
    "a string of 9000 bytes": lambda client, key: client.set(key, b"y" * 9000, px=60_000),
    "a list of 3 elements": lambda client, key: client.rpush(key, "a", "b", "c"),
    "a hash of 1 element": lambda client, key: client.hset(key, "a", "b"),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_foreign_says_what_it_is_and_can_be_deleted(operator, locks, strange):
    key = lock_keys(locks.prefix, "odd").lock
    STRANGE[strange](locks.redis, key)
    with suppress(LockUnavailable):
        distributed_lock("odd", wait=0).acquire()  # From now on it is listed.
    page = operator.get(LIST, {"state": "foreign"})
    assert rows(page) == ["odd"]
    assert strange in text(page)
    page = operator.get(detail("odd"))
    assert f"foreign Not a lock of ours but {strange}, which" in facts_in(page, "lease")["State"]
    page = confirm(operator, "odd")
    assert strange in facts_in(page)["State"]
    assert "What stands at its key will be deleted" in text(page)
    assert "What is foreign is deleted." in text(page)
    assert "not stopped" not in text(page)
    page = operator.post(RELEASE, {"lease": leases_in(page), "confirmed": "Yes"})
    assert f"What stood at its key, {strange}, is deleted." in told(page)
    assert strange in LogEntry.objects.get().change_message
    assert not locks.redis.exists(key)


def test_what_a_newer_version_holds_is_held_and_can_be_released(operator, locks):
    key = lock_keys(locks.prefix, "lottery").lock
    locks.redis.set(key, newer_lease(), px=60_000)
    distributed_lock("lottery", wait=0).acquire()  # From now on it is listed.
    page = operator.get(LIST, {"state": "held"})
    assert rows(page) == ["lottery"]
    assert "newer version" in text(page)
    facts = facts_in(operator.get(detail("lottery")), "lease")
    assert "runs a newer version of django_redislock" in facts["State"]
    assert (facts["Holder"], facts["Lease"]) == ("web-9:4711", NEWER_ID)
    page = confirm(operator, "lottery")
    assert "The holder is not stopped." in text(page)
    page = operator.post(RELEASE, {"lease": leases_in(page), "confirmed": "Yes"})
    assert "The code of web-9:4711 id-9 is not stopped" in told(page)
    assert not locks.redis.exists(key)


def test_what_is_foreign_and_has_changed_since_is_left_alone(operator, locks):
    key = lock_keys(locks.prefix, "odd").lock
    locks.redis.rpush(key, "a")
    lease = reference("odd")
    locks.redis.rpush(key, "b")
    page = operator.post(RELEASE, {"lease": lease})
    assert leases_in(page) == []
    assert "a list of 2 elements" in text(page)
    page = operator.post(RELEASE, {"lease": lease, "confirmed": "Yes"})
    assert "Its key now holds a list of 2 elements" in told(page)
    assert locks.redis.llen(key) == 2
    assert not LogEntry.objects.exists()


def test_a_lock_without_expiry_can_be_freed(operator, locks):
    with held_by("lottery"):
        locks.redis.persist(lock_keys(locks.prefix, "lottery").lock)
        page = confirm(operator, "lottery")
        assert "The holder is not stopped." in text(page)
        assert "the lock would never become free" in facts_in(page)["State"]
        page = operator.post(RELEASE, {"lease": leases_in(page), "confirmed": "Yes"})
        assert "The code of web-3:4711 is not stopped" in told(page)
        assert held.get("lottery") is None


def test_a_lease_that_ends_later_than_its_ttl_says_why(operator, locks):
    with held_by("lottery", ttl=60):
        assert "redislock-late" not in text(operator.get(LIST))
        locks.redis.pexpire(lock_keys(locks.prefix, "lottery").lock, 3_600_000)
        assert "redislock-late" in text(operator.get(LIST))
        shown = facts_in(operator.get(detail("lottery")), "lease")["State"]
        assert shown.startswith(
            "held ends late Somebody holds it. It ends later than its ttl allows"
        )


@pytest.mark.waits
@pytest.mark.no_permit("a circle needs all holders to wait, and the bystander does not")
def test_holders_who_wait_for_each_other_are_seen(operator, locks):
    locks.configure(TTL=30, WAIT=HUNG)
    with a_circle("a", "b"):
        assert text(operator.get(LIST)).count("redislock-circle") == 2
        facts = facts_in(operator.get(detail("a")), "lease")
        assert facts["State"].startswith(
            "held circle Somebody holds it. Its holder waits, and that"
        )
        assert facts["Waits for"] == "b"


# --- trouble with the server ---------------------------------------------------------------------


@pytest.fixture(params=["refused", "silent", "broken", "read-only", "full of garbage"])
def trouble(request, locks, make_proxy):
    """A server that cannot be used, in one of several ways, while "lottery" is held."""
    proxy = make_proxy(locks.server)
    lock = distributed_lock("lottery", ttl=60, renew=False)
    assert lock.acquire()
    if request.param == "refused":
        locks.on(proxy)
        proxy.refuse()
    elif request.param == "silent":
        locks.on(proxy, OPTIONS={"socket_timeout": 0.1})
        proxy.blackhole()
    elif request.param == "broken":
        locks.configure(TTL="soon")
    elif request.param == "read-only":
        locks.redis.replicaof("127.0.0.1", 1)
    else:
        keys = lock_keys(locks.prefix, "lottery")
        locks.redis.delete(keys.lock, keys.held, keys.queue, keys.past)
        locks.redis.lpush(keys.lock, "x")
        locks.redis.set(keys.held, "x")
        locks.redis.set(keys.queue, "x")
        locks.redis.set(keys.past, "x")
    yield request.param
    if request.param == "read-only":
        locks.redis.replicaof("no", "one")


def test_trouble_with_the_server_is_a_message_on_every_page(operator, trouble):
    operator.raise_request_exception = True
    lease = f"{LockPage.named('lottery', 'default').key}:{'0' * 16}"
    page = operator.get(LIST)
    assert page.status_code == 200
    if trouble != "read-only":  # Then it still can be looked at.
        assert "cannot be shown" in text(page)
    assert operator.get(detail("lottery")).status_code == 200
    for answer in ({"lease": lease}, {"lease": lease, "confirmed": "Yes"}):
        assert operator.post(RELEASE, answer).status_code in {200, 302}
    action = {"action": "force_release", "_selected_action": lease, "index": "0"}
    assert operator.post(LIST, action).status_code in {200, 302}


def test_a_message_names_the_server_that_does_not_answer_and_no_secret(
    operator, locks, make_proxy, settings
):
    proxy = make_proxy(locks.server)
    proxy.blackhole()
    url = proxy.url.replace("redis://", "redis://scott:tiger@")
    settings.REDISLOCK = {"default": {"LOCATION": url, "OPTIONS": {"socket_timeout": 0.1}}}
    lease = f"{LockPage.named('lottery', 'default').key}:{'0' * 16}"
    pages = [operator.get(LIST), operator.get(detail("lottery"))]
    pages.append(operator.post(RELEASE, {"lease": lease}, follow=True))
    pages.append(operator.post(RELEASE, {"lease": lease, "confirmed": "Yes"}, follow=True))
    for page in pages:
        assert f"The server 127.0.0.1:{proxy.port} (default) cannot answer" in text(page)
        assert "tiger" not in text(page)
    for page in pages[:2]:  # What was never read is as of no time.
        assert "as of" not in text(page)


def test_a_release_that_a_read_only_server_refuses_is_a_message(operator, locks):
    with held_by("lottery"):
        lease = {"lease": reference("lottery"), "confirmed": "Yes"}
        locks.redis.replicaof("127.0.0.1", 1)
        try:
            page = operator.post(RELEASE, lease)
        finally:
            locks.redis.replicaof("no", "one")
        assert "“lottery” was not released" in told(page)
        assert held.get("lottery") is not None
    assert not LogEntry.objects.exists()


def test_garbage_in_the_index_spoils_no_list(operator, locks):
    with held_by("lottery"):
        keys = [f"{locks.prefix}:{{{name}}}:lock" for name in ("gone", "%00", "", "%ff%fe")]
        for key in keys[1:]:
            locks.redis.set(key, b"\x00\xff|" * 99, px=60_000)
        garbage = [b"\xff\xfe", b"x", *keys]
        locks.redis.zadd(index_key(locks.prefix), dict.fromkeys(garbage, 9e15))
        page = operator.get(LIST)
        assert page.status_code == 200
        assert "lottery" in rows(page)
        for address in set(re.findall(rf'href="({LIST}[^"?]+/change/)', text(page))):
            assert operator.get(address).status_code in {200, 302}
        for lease in re.findall(r'name="_selected_action" value="([^"]+)"', text(page)):
            assert operator.post(RELEASE, {"lease": lease}).status_code in {200, 302}


@pytest.mark.parametrize(
    "number",
    ["9" * 16, "9" * 30, "9" * 400, "9" * 5000, "٣", "-1", ""],
    ids=lambda number: f"{number[:2]!a}x{len(number)}",
)
def test_times_that_no_calendar_has_spoil_no_page(operator, locks, number):
    with held_by("lottery"):
        keys = lock_keys(locks.prefix, "lottery")
        for times in (f"1|{number}|2", f"1|2|{number}", f"{number}|1|2"):
            locks.redis.rpush(keys.past, f"{'a' * 16}|{times}|done|{{}}")
        run = f"{number}|{number}||{{}}"
        skip = {"skip": f"{number}|1|busy|{{}}", "skips": number}
        locks.redis.hset(keys.runs, mapping={"success": run, "failure": run, **skip})
        locks.redis.zadd(keys.ran, {keys.lock: 1})
        for address in (LIST, detail("lottery")):
            assert "lottery" in text(operator.get(address))


@pytest.mark.parametrize(
    ("since", "owner"),
    [("9" * 400, "{}"), ("٣", "{}"), ("1", "[" * 100_000), ("1", '{"host": "\\ud800"}')],
    ids=["a huge time", "digits of others", "nested deeply", "a lone surrogate"],
)
def test_a_forged_value_of_a_lock_spoils_no_page(operator, locks, since, owner):
    key = lock_keys(locks.prefix, "lottery").lock
    with held_by("lottery"):
        head, fence, _, *rest = (locks.redis.get(key) or b"").decode().split("|", 6)
        forged = "|".join([head, fence, since, *rest[:-1], owner])
        locks.redis.set(key, forged, keepttl=True)
        for address in (LIST, detail("lottery")):
            assert "lottery" in text(operator.get(address))


# --- other sites ---------------------------------------------------------------------------------

other_site = admin.AdminSite(name="ops")
other_site.register(LockPage, held_locks.HeldLockAdmin)
urlpatterns = [*site.urlpatterns, path("staff/ops/", other_site.urls)]


def test_another_admin_site_leads_to_its_own_pages_only(operator, locks, make_proxy, settings):
    settings.ROOT_URLCONF = __name__

    def there(address):
        return address.replace("/admin/", "/staff/ops/")

    with held_by("lottery"):
        pages = [operator.get(there(LIST)), operator.get(there(detail("lottery")))]
        pages.append(operator.post(there(RELEASE), {"lease": reference("lottery")}))
        for page in pages:
            assert page.status_code == 200
            assert not re.search('(href|action)="/admin/', text(page))
        lease = {"lease": reference("lottery"), "confirmed": "Yes"}
        assert operator.post(there(RELEASE), lease)["Location"] == there(detail("lottery"))
        proxy = make_proxy(locks.server)
        locks.on(proxy)
        proxy.refuse()
        asked = {"lease": lease["lease"]}
        assert operator.post(there(RELEASE), asked)["Location"] == there(LIST)
        proxy.heal()


@pytest.mark.parametrize(
    "choice",
    [{"USE_TZ": False}, {"LANGUAGE_CODE": "de"}, {"LANGUAGE_CODE": "fr"}, {"LANGUAGE_CODE": "ar"}],
    ids=str,
)
def test_every_page_is_made_whatever_the_site_has_chosen(operator, settings, choice):
    for name, value in {"USE_THOUSAND_SEPARATOR": True, **choice}.items():
        setattr(settings, name, value)
    with held_by("lottery", task="shop.tasks.draw"):
        lock = held.get("lottery")
        pages = [operator.get(LIST), operator.get(detail("lottery")), confirm(operator, "lottery")]
        for page in pages:
            assert page.status_code == 200
            # What scripts read, and what is compared elsewhere, is written as it is everywhere.
            assert str(lock.fence) in text(page)
            assert re.search(r'data-redislock-up="\d+\.\d+"', text(page))
        operator.post(RELEASE, {"lease": reference("lottery"), "confirmed": "Yes"})
        key = quote(LockPage.named("lottery", "default").key)
        for address in (detail("lottery"), f"{LIST}{key}/history/", "/admin/"):
            assert operator.get(address).status_code == 200


def test_the_model_without_a_table_stands_in_nobodys_way():
    for options in ({}, {"use_base_manager": True}):
        out = io.StringIO()
        call_command("dumpdata", "django_redislock", stdout=out, **options)
        assert json.loads(out.getvalue()) == []
    assert list(LockPage.objects.all()) == []
    call_command("makemigrations", "django_redislock", check=True, dry_run=True, verbosity=0)


# --- hostile text --------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "../../x",
    "..",
    ".",
    "/",
    "a/b?c=d#e&f%00",
    "a\u202eb",
    "\u200b",
    "{{ 7|add:7 }}{% now %}",
    "x" * 200,
    "é" * 100,
    "שלום",
    "a:b",
    "*[a]",
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_any_name_is_shown_harmlessly_and_can_be_released(operator, name):
    owner = Owner(host=name, pid=1, task=name, task_id=name, thread=name, path=name, command=name)
    with LockTestKit().simulate_held_by_other(name, owner=owner):
        pages = [operator.get(LIST), operator.get(LIST, {"host": name})]
        assert name in operator.get(LIST, {"q": name}).context["cl"].queryset.locks[0].name
        address = detail(name)
        assert address in text(pages[0])
        assert re.fullmatch(r"/admin/django_redislock/heldlock/[\w-]+/change/", address)
        pages += [operator.get(address), confirm(operator, name)]
        for page in pages:
            assert page.status_code == 200
            assert_harmless(text(page))
        answer = {"lease": leases_in(pages[-1]), "confirmed": "Yes", "reason": name}
        pages = [operator.post(RELEASE, answer, follow=True), operator.get("/admin/")]
        pages.append(operator.get(address.replace("/change/", "/history/")))
        for page in pages:
            assert page.status_code == 200
            assert_harmless(text(page))
        assert held.get(name) is None


class _Inline(HTMLParser):
    """Finds what a strict policy forbids."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        names = {name for name, _ in attrs}
        if (tag == "script" and "src" not in names) or tag in {"style", "iframe", "object"}:
            self.found.append(tag)
        self.found += [name for name in names if name.startswith("on") or name == "style"]
        if tag == "img" and dict(attrs).get("src") == "x":
            self.found.append("injected image")


def assert_harmless(html):
    """Nothing inline, and nothing that is not seen."""
    parser = _Inline()
    parser.feed(html)
    assert parser.found == []
    # But in the form fields that carry back what the user has sent.
    shown = re.sub(r'<input [^>]*value="[^"]*"', "", html)
    assert "\u202e" not in shown
    assert "\u200b" not in shown


def test_no_page_has_anything_inline(operator):
    with held_by("lottery"):
        assert_harmless(text(operator.get(LIST)))
        assert_harmless(text(operator.get(detail("lottery"))))
        assert_harmless(text(confirm(operator, "lottery")))


# --- tasks ---------------------------------------------------------------------------------------


def run_task(name, *, success=True):
    """A run of the task shop.tasks.pay under the lock *name*."""
    run = uuid.uuid4().hex
    with busy_with(Activity(task="shop.tasks.pay", task_id=run)):
        lock = Lock(name, Options(), run=RunMarker(run, 0))
        assert lock.acquire()
        lock.release(success=success)


@contextmanager
def run_of_permit(name, limit):
    """A run under way of a task with a limit."""
    run = f"id-3-{uuid.uuid4().hex}"
    with (
        busy_with(Activity(task="shop.tasks.pay", task_id=run)),
        Lock(name, Options(limit=limit), RunMarker(run, 0)),
    ):
        yield


def skip_task(name, why="busy"):
    with busy_with(Activity(task="shop.tasks.pay", task_id="id-2")):
        task_runs.note_skip(name, why, using="default")


SOONER_THAN_AT_ONCE = -1.0  # A run and a skip within one millisecond are of the same time.


def panel(page):
    """The panel above the list; "" if there is none."""
    found = re.search(
        r'<section class="module redislock-panel".*?</section>', text(page), re.DOTALL
    )
    return " ".join(re.sub("<[^>]*>", "", found[0]).split()) if found else ""


def test_the_page_of_a_lock_shows_its_run_record(operator):
    run_task("payments")
    run_task("payments", success=False)
    skip_task("payments")
    shown = text(operator.get(detail("payments")))
    for part in ("Last success", "Last failure", "Last skip", "because it was busy", "id-2"):
        assert part in shown
    assert "1 since the last success" in shown


def test_the_page_of_a_lock_shows_the_run_that_is_under_way(operator):
    with busy_with(Activity(task="shop.tasks.pay", task_id="id-4")):
        lock = Lock("payments", Options(), run=RunMarker("id-4", 0))
        assert lock.acquire()
    page = operator.get(detail("payments"))
    assert re.fullmatch(r"for \d.* s , .*:\d+ id-4", facts_in(page, "record")["Under way"])
    assert "data-redislock-up" in text(page).partition("redislock-record")[2]  # It counts on.
    assert "payments" not in free(operator.get(LIST, {"q": "payments"}))
    lock.release()
    assert set(facts_in(operator.get(detail("payments")), "record")) == {"Last success"}


def run_until_told(name):
    """In a child."""
    with busy_with(Activity(task="shop.tasks.pay", task_id="id-5")):
        assert Lock(name, Options(ttl=60), run=RunMarker("id-5", 0)).acquire()
        say("running")
        hear()


def test_a_run_whose_process_was_killed_is_shown_to_be_gone_and_never_to_have_ended(
    operator, locks, spawn
):
    child = spawn(run_until_told, "payments")
    child.read()
    assert "redislock-gone" not in text(operator.get(detail("payments")))
    child.kill()
    page = operator.get(detail("payments"))
    assert facts_in(page, "record")["Under way"].endswith(" gone")
    gone = "The process that took it does not exist on this host any more."
    assert facts_in(page, "lease")["State"] == f"held Somebody holds it. {gone}"
    assert "redislock-gone" in text(operator.get(LIST))
    locks.redis.delete(lock_keys(locks.prefix, "payments").lock)  # As when its ttl is over.
    shown = facts_in(operator.get(detail("payments")), "record")
    assert set(shown) == {"Never ended"}
    assert re.fullmatch(rf"began \d.* ago, .*:{child.pid} .*id-5.*", shown["Never ended"])
    page = operator.get(LIST, {"q": "payments"})
    assert free(page) == ["payments"]
    assert re.search(r"one that began .* ago never ended", text(page))


def test_of_many_runs_under_way_some_are_named(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.markup.MOST_RUNS", 2)
    with (
        run_of_permit("report", 4),
        run_of_permit("report", 4),
        run_of_permit("report", 4),
    ):
        for permit in (1, 2):
            shown = facts_in(operator.get(detail("report", permit=permit)), "record")["Under way"]
            assert (shown.count("id-3"), shown[-10:]) == (2, "and 1 more")


def test_the_page_of_a_permit_shows_the_runs_of_its_task(operator):
    run_task("report")
    with held_by("report", limit=5), held_by("report", limit=5):
        assert "Last success" in text(operator.get(detail("report", permit=2)))
    assert "Last success" not in text(operator.get(detail("report#2")))


def test_a_task_that_is_only_skipped_stands_above_the_list(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    run_task("payments")
    assert panel(operator.get(LIST)) == ""
    for _ in range(3):
        skip_task("payments")
    skip_task("never ran")
    shown = panel(operator.get(LIST))
    assert re.search(r"payments was skipped 3 times, .* it last succeeded .* ago", shown)
    assert re.search(r"never ran was skipped once, .* it has not succeeded yet", shown)
    run_task("payments")
    assert "payments" not in panel(operator.get(LIST))


def test_a_task_whose_run_died_and_that_is_only_skipped_since_is_said_to_have_one_that_never_ended(
    operator, locks
):
    run = Lock("payments", Options(), run=RunMarker("id-6", 0))
    with busy_with(Activity(task="shop.tasks.pay")), suppress(LockLost), run:
        locks.redis.delete(lock_keys(locks.prefix, "payments").lock)
        skip_task("payments")
        shown = panel(operator.get(LIST))
    assert re.search(r"not succeeded yet; one that began .* s ago never ended\.", shown)


def test_skips_on_the_occasion_of_a_success_are_what_locks_are_for(operator):
    run_task("lottery")
    for _ in range(3):  # The other servers.
        skip_task("lottery")
    assert panel(operator.get(LIST)) == ""


def test_skips_while_a_run_is_at_work_are_no_alarm_until_it_is_in_trouble(
    operator, locks, monkeypatch
):
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    run_task("nightly")
    with busy_with(Activity(task="shop.tasks.pay")), distributed_lock("nightly", ttl=60):
        skip_task("nightly")
        assert panel(operator.get(LIST)) == ""
        key = lock_keys(locks.prefix, "nightly").lock
        locks.redis.pexpire(key, 10_000)  # Its renewals have been missed.
        assert "nightly" in panel(operator.get(LIST))
    assert "nightly" in panel(operator.get(LIST))


@pytest.mark.parametrize("why", ["cooling", "busy"])
def test_skips_while_a_task_cools_down_are_no_alarm(operator, monkeypatch, why):
    """Workers of an earlier version call it busy."""
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    with busy_with(Activity(task="shop.tasks.pay", task_id="id-6")):
        with Lock("nightly", Options(min_hold=60), run=RunMarker("id-6", 60)):
            pass
        task_runs.note_skip("nightly", why, using="default")
    assert panel(operator.get(LIST)) == ""
    (lock,) = held.list()
    assert lock.state == "cooling"
    held.force_release("nightly", lock.id)
    assert ("nightly" in panel(operator.get(LIST))) == (why == "busy")


def test_skips_because_of_a_holder_that_is_no_run_are_an_alarm(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    with distributed_lock("nightly"):  # A command, forgotten in some terminal.
        skip_task("nightly")
        assert "nightly" in panel(operator.get(LIST))


def test_a_run_at_work_under_any_permit_is_enough(operator, locks, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    skip_task("report")
    task = "shop.tasks.pay"
    with (
        run_of_permit("report", 3),
        run_of_permit("report", 3),
    ):
        locks.redis.persist(lock_keys(locks.prefix, "report").lock)
        assert panel(operator.get(LIST)) == ""
    with held_by("report#2", task=task):  # A lock that is only called so.
        skip_task("report")
        assert "report" in panel(operator.get(LIST))


@pytest.mark.parametrize("why", ["done", "duplicate"])
def test_skips_of_what_was_done_are_no_alarm(why, operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", SOONER_THAN_AT_ONCE)
    run_task("lottery")
    skip_task("lottery", why)
    assert panel(operator.get(LIST)) == ""


def test_hostile_task_names_do_no_harm_in_the_panel(operator):
    for number, name in enumerate(HOSTILE):
        with busy_with(Activity(task=name, task_id=str(number))):
            task_runs.note_skip(name, name, using="default")
    page = operator.get(LIST)
    assert "and 10 more" in panel(page)
    assert_harmless(text(page))
    for name in HOSTILE:
        page = operator.get(detail(name))
        assert page.status_code == 200
        assert_harmless(text(page))


# --- free locks ----------------------------------------------------------------------------------


def free(page):
    """The locks that the list says are known and free."""
    found = re.search(r'<div id="redislock-free".*?</div>', text(page), re.DOTALL)
    assert found
    return re.findall(r'<bdi class="redislock-name" title="([^"]*)">', found[0])


def remembered(name):
    """A lock of no task that was held long enough to be remembered."""
    lock = distributed_lock(name)
    assert lock.acquire()
    lock.lease.renew()
    lock.release()


def test_a_free_lock_of_a_task_is_found_by_a_part_of_its_name(operator):
    run_task("pay:1")
    run_task("pay:2", success=False)
    run_task("draw")
    skip_task("report")
    with held_by("pay:3"), run_of_permit("report", 5):
        assert free(operator.get(LIST)) == []
        page = operator.get(LIST, {"q": "PAY"})
        assert sorted(free(page)) == ["pay:1", "pay:2"]
        assert detail("pay:1") in text(page)
        assert re.search("last failure .* ago", text(page))
        assert free(operator.get(LIST, {"q": "report"})) == []  # A run of it goes on.
        assert sorted(free(operator.get(LIST, {"state": "free"}))) == ["draw", "pay:1", "pay:2"]
        page = operator.get(LIST, {"state": "free", "q": "aw"})
        assert free(page) == ["draw"]
        assert "0 results" not in text(page)
        assert "0 held locks" not in text(page)
        for other in ({"q": "pay", "state": "held"}, {"q": "pay", "host": "web-1"}):
            assert free(operator.get(LIST, other)) == []
    with held_by("pay:1"):
        assert sorted(free(operator.get(LIST, {"q": "pay"}))) == ["pay:2"]


def test_any_free_lock_is_found_by_its_whole_name(operator):
    remembered("lottery")
    page = operator.get(LIST, {"q": " lottery "})
    assert free(page) == ["lottery"]
    assert "last held by" in text(page)
    assert free(operator.get(LIST, {"q": "lotter"})) == []
    with held_by("lottery"):
        assert free(operator.get(LIST, {"q": "lottery"})) == []
    assert free(operator.get(LIST, {"q": "x" * 201})) == []


def test_free_locks_of_all_aliases_are_found(operator, settings):
    one = settings.REDISLOCK["default"]
    down = {"LOCATION": "redis://127.0.0.1:1/0"}
    other = {**one, "KEY_PREFIX": "test-other"}
    settings.REDISLOCK = {"default": one, "other": other, "down": down}
    remembered("lottery")
    with distributed_lock("lottery", using="other"):
        page = operator.get(LIST, {"q": "lottery"})
        assert free(page) == ["lottery"]
        assert detail("lottery") in text(page)
        assert free(operator.get(LIST, {"q": "lottery", "alias": "other"})) == []
    assert "No free lock is known" not in text(operator.get(LIST, {"state": "free"}))


def test_free_locks_are_found_however_many_are_held_in_few_round_trips(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.changelist.LOADED", 1)
    for number in range(100):
        run_task(f"pay:{number:02}")
    skip_task("pay:report")
    trips = count_round_trips(monkeypatch)
    with held_by("pay:99"), held_by("draw"), run_of_permit("pay:report", 5):
        trips.clear()
        page = operator.get(LIST, {"q": "pay"})
        assert len(free(page)) == panels.FREE_LINES
        assert "and 49 more" in text(page)
        assert len(trips) < 20
    assert "and 51 more" in text(operator.get(LIST, {"q": "pay"}))


def test_a_state_that_there_is_not_shows_no_lock_however_many_are_held(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.changelist.LOADED", 1)
    with held_by("pay:3"), held_by("draw"):
        page = operator.get(LIST, {"state": "overdu"})
    assert page.status_code == 200
    assert "pay:3" not in text(page)


def test_hostile_names_of_free_locks_do_no_harm(operator):
    for name in HOSTILE:
        run_task(name)
    page = operator.get(LIST, {"state": "free"})
    assert len(free(page)) == len(HOSTILE)
    assert_harmless(text(page))
    for name in HOSTILE:
        page = operator.get(LIST, {"q": name})
        assert_harmless(text(page))
        assert detail(name) in text(page)
