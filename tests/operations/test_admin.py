"""The admin's pages of held locks: who may see them, what they show, and what they do.

tests/golden has the texts of these pages, with all that a list can show.
"""

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
NOWHERE = "redis://127.0.0.1:1/0"


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


@pytest.fixture
def lock_key(locks):
    """The key of the lock "lottery"."""
    return lock_keys(locks.prefix, "lottery").lock


def key_of(name, alias="default", permit=1):
    """What stands for a lock, or for one of its permits, in forms and addresses."""
    return LockPage.named(name, alias, permit).key


def detail(*lock):
    """The address of a lock's page, or of one of its permits."""
    return reverse("admin:django_redislock_heldlock_change", args=[quote(key_of(*lock))])


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


def no_lease(name, alias="default"):
    """A lease that this lock never had, as forms carry it."""
    return f"{key_of(name, alias)}:{'0' * 16}"


def confirm(client, *names):
    """Tick locks in the list and press Go."""
    return ticked(client, *map(reference, names))


def ticked(client, *leases, **more):
    """Tick leases in the list, which may be an old one, and press Go."""
    action = {"action": "force_release", "_selected_action": leases, "index": "0", **more}
    return client.post(LIST, action)


def leases_in(page):
    """The leases in the form of a page."""
    return re.findall(r'name="lease" value="([^"]+)"', text(page))


def release(client, *leases, **more):
    """Answer Yes to the question."""
    return client.post(RELEASE, {"lease": leases, "confirmed": "Yes", **more})


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
    """What a strict Content-Security-Policy forbids, and what somebody's name has put there."""

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        if (tag == "script" and "src" not in names) or tag in {"style", "iframe", "object"}:
            self.found.append(tag)
        self.found += [name for name in names if name == "style" or name.startswith("on")]
        if tag == "img" and names.get("src") == "x":
            self.found.append("injected image")


def assert_harmless(page):
    """It is there, with nothing inline, and nothing that is not seen."""
    assert page.status_code == 200
    assert Inline(text(page)).found == []
    # But in the form fields that carry back what the user has sent.
    shown = re.sub(r'<input [^>]*value="[^"]*"', "", text(page))
    assert "\u202e" not in shown
    assert "\u200b" not in shown


def test_no_page_has_scripts_or_styles_in_it(sign_in):
    root = sign_in("root")
    with held_by("lottery", task="lottery.tasks.draw"):
        for page in (
            root.get(LIST),
            root.post(RELEASE, {"lease": reference("lottery")}),
            confirm(root, "lottery"),
            root.post(f"{LIST}pause/", {"lock": key_of("lottery")}),
            root.get(detail("lottery").replace("/change/", "/history/")),
            root.get("/admin/django_redislock/completedrun/"),
            shown := root.get(detail("lottery")),
        ):
            assert_harmless(page)
    assert "redislock-hour" in text(shown)


# --- who may what --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "sees", "releases"),
    [
        ("root", True, True),
        ("operator", True, True),
        ("looker", True, False),
        ("clerk", False, False),
        ("clerk force_release_heldlock", False, False),
    ],
)
def test_each_right_opens_its_own_pages(sign_in, user, sees, releases):
    user, _, right = user.partition(" ")
    client = sign_in(user)
    rights = Permission.objects.filter(codename=right)
    User.objects.get(username=user).user_permissions.add(*rights)
    with held_by("lottery"):
        pages = {address: client.get(address) for address in (LIST, detail("lottery"))}
        for page in pages.values():
            assert page.status_code == (200 if sees else 403)
        assert ("force_release" in text(pages[LIST])) is releases
        assert ("Force release" in text(pages[detail("lottery")])) is releases
        assert ("Held locks" in text(client.get("/admin/"))) is sees
        lease = reference("lottery")
        assert client.post(RELEASE, {"lease": lease}).status_code == (200 if releases else 403)
        ticked(client, lease)
        assert client.get(f"{LIST}add/").status_code == 403
        if not releases:
            assert release(client, lease).status_code == 403
        assert held.get("lottery") is not None


def test_nobody_signed_out_sees_anything():
    client = Client()
    for address in (LIST, detail("lottery"), RELEASE):
        assert client.get(address).status_code == 302


def test_nobody_adds_changes_or_deletes(sign_in):
    client = sign_in("root")
    for address in (f"{LIST}add/", f"{LIST}{key_of('lottery')}/delete/"):
        assert client.get(address).status_code == 403
        assert client.post(address, {"post": "yes"}).status_code == 403
    with held_by("lottery"):
        before = held.get("lottery")
        client.post(detail("lottery"), {"key": "x"})
        assert held.get("lottery").id == before.id


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


def test_an_empty_list_says_so(operator):
    assert "No lock is held right now." in text(operator.get(LIST))
    shown = text(operator.get(LIST, {"q": "lottery"}))
    assert "No held lock matches." in shown
    assert "Similar names" not in shown


def test_of_a_misspelt_name_similar_ones_are_shown(operator):
    run_task("lottery")
    with held_by("lottery:1"):
        for state, query in (("held", {}), ("free", {"state": "free"})):
            page = operator.get(LIST, {"q": "lotery", **query})
            assert f"No {state} lock matches." in text(page)
            assert re.findall("<bdi>(.*?)</bdi></a>", text(page)) == ["lottery", "lottery:1"]
            assert detail("lottery:1") in text(page)
    assert "Nothing is known of it" in text(operator.get(detail("lotery")))
    assert "Nothing is known of it" not in text(operator.get(detail("lottery")))


def test_rows_stand_in_the_order_of_their_names_whenever_they_end(operator, locks):
    """So no row changes its place with a renewal. Of too many locks the server has one order."""

    def sorted_by(page):
        """The heads that say that the list is sorted by their column."""
        return re.findall(r'class="sortable column-(\w+) sorted', text(page))

    with held_by("b", ttl=50), held_by("A", ttl=60), held_by("c", ttl=40):
        page = operator.get(LIST)
        assert (rows(page), sorted_by(page)) == (["A", "b", "c"], ["name"])
        assert rows(operator.get(LIST, {"o": "4"})) == ["c", "b", "A"]
        fill(locks, 1000)
        page = operator.get(LIST)
        assert (rows(page)[:3], sorted_by(page)) == (["c", "b", "A"], ["expires_in"])


def test_each_state_has_its_badge(operator, locks):
    with distributed_lock("cooling", min_hold=60):
        pass
    overdue = distributed_lock("overdue", ttl=60)
    assert overdue.acquire()
    keys = {
        name: lock_keys(locks.prefix, name).lock for name in ("overdue", "foreign", "no-expiry")
    }
    locks.redis.pexpire(keys["overdue"], 20_000)
    locks.redis.set(keys["foreign"], "x", px=60_000)
    locks.redis.zadd(index_key(locks.prefix), {keys["foreign"]: 9e15})
    with held_by("held"), held_by("no-expiry"):
        locks.redis.persist(keys["no-expiry"])
        shown = text(operator.get(LIST))
        for state in ("held", "cooling", "overdue", "no-expiry", "foreign"):
            assert f"redislock-badge redislock-{state}" in shown
            assert rows(operator.get(LIST, {"state": state})) == [state]
    overdue.release()


def test_a_permit_says_which_one_of_how_many_it_is_and_whether_it_was_handed_over(operator):
    with held_by("report", limit=5), held_by("report", "web-4", limit=5), held_by("lottery"):
        shown = text(operator.get(LIST))
        assert "redislock-permit" in shown
        assert "permit 2/5" in shown
        assert rows(operator.get(LIST, {"state": "permit"})) == ["report", "report#2"]
        shown = text(operator.get(detail("report", "default", 2)))
        assert "permit 2/5" in shown
        assert "web-4:4711" in shown
        # Those beside it are named, each with a link to its own page.
        assert detail("report") in shown
        assert detail("report", "default", 2) in text(operator.get(detail("report")))
    with distributed_lock("report", limit=5, wait=0) as lease:
        lease.hand_over()
        assert ">handed over<" in text(operator.get(LIST)).replace("\n", "")


def test_a_lock_that_is_called_as_a_permit_has_a_page_and_an_end_of_its_own(operator):
    with (
        held_by("report", limit=5),
        held_by("report", "permits-host", limit=5),
        held_by("report#2", "locks-host"),
    ):
        assert rows(operator.get(LIST)) == ["report", "report#2", "report#2"]
        assert rows(operator.get(LIST, {"state": "permit"})) == ["report", "report#2"]
        assert "permits-host" in text(operator.get(detail("report", "default", 2)))
        assert "locks-host" in text(operator.get(detail("report#2")))
        release(operator, reference("report#2", 1))
        assert [lock.owner.host for lock in held.list()] == ["web-3", "permits-host"]
        release(operator, reference("report", 2))
        assert [lock.owner.host for lock in held.list()] == ["web-3"]


ALL = ["a:1", "a:2", "b:1"]
QUERIES = [
    ("", ALL),
    ("q=a:", ["a:1", "a:2"]),
    ("q=B:1", ["b:1"]),
    ("q=web-2", ["a:2", "b:1"]),
    ("q=tasks.pay", ["b:1"]),
    ("q=nothing", []),
    ("host=web-1", ["a:1"]),
    ("task=shop.tasks.pay", ["b:1"]),
    ("host=web-2&q=a:", ["a:2"]),
    ("state=held", ALL),
    ("state=overdue", []),
    ("alias=default", ALL),
    ("o=-1", ALL[::-1]),
    ("o=-4", ALL[::-1]),
    ("o=3.1", ALL),
    # What there is not.
    *((f"{name}=nope", []) for name in ("host", "task", "state", "alias")),
    # What no link leads to is put up with.
    *((odd, ALL) for odd in ("unknown=x&e=1", "o=99.x.-", "o=x", "o=999.-7.", "p=999", "p=-1")),
    *((odd, ALL) for odd in ("p=x", "all=")),
]


def test_the_list_can_be_searched_filtered_and_sorted(operator):
    with (
        held_by("a:1", "web-1", ttl=50),
        held_by("a:2", "web-2", ttl=60),
        held_by("b:1", "web-2", task="shop.tasks.pay", ttl=70),
    ):
        found = {query: rows(operator.get(f"{LIST}?{query}", follow=True)) for query, _ in QUERIES}
    assert found == dict(QUERIES)


def test_locks_of_all_aliases_are_shown(operator, settings):
    one = settings.REDISLOCK["default"]
    settings.REDISLOCK = {"default": one, "other": {**one, "KEY_PREFIX": "test-other"}}
    with held_by("lottery"), distributed_lock("prizes", using="other", ttl=90):
        page = operator.get(LIST)
        assert rows(page) == ["lottery", "prizes"]
        assert "By alias" in text(page)
        assert "?alias=other" in text(page)
        assert rows(operator.get(LIST, {"alias": "other"})) == ["prizes"]
        assert operator.get(detail("prizes", "other")).status_code == 200


@pytest.mark.parametrize("mistake", [{"LOCATION": "localhost"}, {"LOCATION": NOWHERE}])
def test_an_alias_with_a_mistake_or_without_a_server_does_not_hide_the_others(
    operator, settings, mistake
):
    settings.REDISLOCK = {**settings.REDISLOCK, "down": mistake}
    with held_by("lottery"):
        page = operator.get(LIST)
        assert rows(page) == ["lottery"]
        assert "column-alias" in text(page)  # Of which one a lock is, is not hidden either.
        assert "The locks of down cannot be shown" in text(page)
        assert re.search(r"as of \d\d:\d\d:\d\d, without down<", text(page))
        # Nor does it hold up the release of the others.
        page = operator.post(RELEASE, {"lease": [no_lease("prizes", "down"), reference("lottery")]})
        assert leases_in(page) == [reference("lottery")]
        assert "The locks of down cannot be shown" in text(page)


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


def test_the_list_has_pages(operator, locks):
    fill(locks, 250)
    names = [f"lock:{number:06}" for number in range(250)]
    page = operator.get(LIST)
    assert rows(page) == names[:100]
    assert "250 held locks" in text(page)
    assert rows(operator.get(LIST, {"p": "3"})) == names[200:]
    assert operator.get(LIST, {"p": "9"}).status_code == 302  # As Django does.
    assert operator.get(LIST, {"p": "x"}).status_code == 200
    assert rows(operator.get(LIST, {"q": "lock:00017"})) == names[170:180]


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
    assert "only some" in text(operator.get(LIST, {"o": "-1"}))
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


def test_an_address_that_is_none_leads_back_and_an_alias_that_is_none_is_a_message(operator):
    for key in ("x", "____", "bG90dGVyeQ", "%00", "..", "a" * 3000):
        assert operator.get(f"{LIST}{key}/change/").status_code in {302, 404}
    page = operator.get(detail("lottery", "nope"))
    assert page.status_code == 200
    assert "no alias" in text(page)


# --- force release -------------------------------------------------------------------------------


def test_the_confirmation_shows_exactly_what_will_be_freed_and_frees_nothing(operator):
    with held_by("a"), held_by("b"), held_by("c"):
        page = confirm(operator, "a", "c")
        assert leases_in(page) == [reference("a"), reference("c")]
        assert "The holders are not stopped." in text(page)
        assert "web-3:4711" in text(page)
        # An action on all that there are frees only what was ticked.
        assert leases_in(ticked(operator, reference("a"), select_across="1")) == [reference("a")]
        # The button on the page of a lock leads to the same question.
        (lease,) = leases_in(operator.get(detail("b")))
        assert leases_in(operator.post(RELEASE, {"lease": lease})) == [lease]
        assert [lock.name for lock in held.list()] == ["a", "b", "c"]


def test_a_confirmed_release_ends_the_lease_and_is_logged(operator, caplog):
    with held_by("lottery"):
        lock = held.get("lottery")
        leases = leases_in(confirm(operator, "lottery"))
        page = release(operator, *leases, reason="stuck since noon")
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
    assert operator.get(entry.get_admin_url()).status_code == 200
    history = detail("lottery").replace("/change/", "/history/")
    assert "stuck since noon" in text(operator.get(history))
    assert "lottery" in text(operator.get("/admin/"))


def test_many_are_released_at_once(operator):
    with held_by("a"), held_by("b"), held_by("c"):
        page = release(operator, *leases_in(confirm(operator, "a", "b")))
        assert page["Location"] == LIST
        assert [lock.name for lock in held.list()] == ["c"]
    assert LogEntry.objects.count() == 2


@pytest.mark.proves("P9")
def test_a_stale_confirmation_frees_nobody_newer(operator):
    with distributed_lock("lottery"):
        leases = leases_in(confirm(operator, "lottery"))
    assert "was not released. Nobody holds it." in told(release(operator, *leases))
    with distributed_lock("lottery") as newer:
        assert "Somebody else holds it now" in told(release(operator, *leases))
        newer.ensure_held(verify=True)
    assert not LogEntry.objects.exists()


@pytest.mark.proves("P9")
def test_a_stale_list_frees_nobody_newer(operator):
    """What was ticked is the lease, not the name."""
    with distributed_lock("lottery"):
        (lease,) = re.findall(r'name="_selected_action" value="([^"]+)"', text(operator.get(LIST)))
    assert "is free already" in text(ticked(operator, lease))
    with distributed_lock("lottery"):
        page = ticked(operator, lease)
        assert "has changed hands" in text(page)
        assert leases_in(page) == []


def test_of_a_lock_that_cools_down_nobody_is_said_to_be_at_work(operator):
    with distributed_lock("lottery", min_hold=60):
        pass
    with held_by("prizes"):
        assert "The holders are not stopped." in text(confirm(operator, "lottery", "prizes"))
    page = confirm(operator, "lottery")
    assert "The work is done." in text(page)
    assert "not stopped" not in text(page)
    assert "was done with it" in told(release(operator, *leases_in(page)))
    assert held.get("lottery") is None


def test_the_next_waiter_gets_the_lock_and_the_message_names_it(operator, spawn):
    with pytest.raises(LockLost), distributed_lock("lottery"):  # noqa: PT012 - at its end
        child = spawn(wait_for, "lottery")
        wait_until(lambda: waiters("lottery") == 1)
        assert f":{child.pid}" in told(release(operator, reference("lottery")))


def test_a_get_never_changes_anything(operator):
    with held_by("lottery"):
        lease = reference("lottery")
        assert operator.get(RELEASE, {"lease": lease, "confirmed": "Yes"}).status_code == 405
        query = {"action": "force_release", "_selected_action": lease, "index": "0"}
        operator.get(LIST, query)
        assert held.get("lottery") is not None


def test_a_post_from_elsewhere_is_refused(sign_in):
    client = sign_in("operator", enforce_csrf_checks=True)
    with held_by("lottery"):
        assert release(client, reference("lottery")).status_code == 403
        assert held.get("lottery") is not None


def test_a_lease_that_is_none_releases_nothing(operator):
    key = key_of("lottery")
    odd = ["", ":", "x", "x:y", "bG90dGVyeQ:0", "\x00", key, f"{key}:", f"{key}:{'x' * 5000}"]
    with held_by("lottery"):
        for lease in odd:
            assert operator.post(RELEASE, {"lease": lease}).status_code in {200, 302}
            assert release(operator, lease).status_code in {200, 302}
        assert release(operator).status_code == 302
        assert held.get("lottery") is not None


def test_a_release_is_logged_even_if_the_server_goes_right_after_it(operator, locks, make_proxy):
    proxy = make_proxy(locks.server)
    locks.on(proxy)
    with held_by("lottery"):
        lock_force_released.connect(refuse := lambda **event: proxy.refuse())
        try:
            page = release(operator, reference("lottery"))
        finally:
            lock_force_released.disconnect(refuse)
        proxy.heal()
        assert "“lottery” was released" in told(page)
        assert held.get("lottery") is None
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("act", ["release", "pause", "resume"])
def test_a_silent_server_is_not_asked_for_each_lock_and_holds_up_no_other_alias(
    sign_in, settings, locks, make_proxy, monkeypatch, act
):
    monkeypatch.setattr(held_locks, "MOST_SECONDS_UNANSWERED", 0.01)
    root, proxy = sign_in("root"), make_proxy(locks.server)
    silent = {"LOCATION": proxy.url, "OPTIONS": {"socket_timeout": 0.1}}
    settings.REDISLOCK = {"default": settings.REDISLOCK["default"], "archive": silent}
    proxy.blackhole()
    keys = [*(key_of(name, "archive") for name in "abc"), key_of("lottery")]
    if act == "pause":
        page = root.post(f"{LIST}pause/", {"lock": keys, "for": "1h", "confirmed": "Yes"})
        assert "“lottery” is paused" in told(page)
    elif act == "resume":
        held.pause("lottery", 3600, by="ann")
        page = root.post(f"{LIST}pause/", {"lock": keys, "resume": ""})
        assert "The pause of “lottery” was ended." in told(page)
    else:
        with held_by("lottery"):
            silent = [no_lease(name, "archive") for name in "abc"]
            page = release(root, *silent, reference("lottery"))
        assert "“a” was not released" in told(page)
        assert "“lottery” was released" in told(page)
    assert "“a”" in told(page)
    assert "“b”" not in told(page)
    assert "2 locks more: not tried, since the server is silent (archive)." in told(page)


def test_a_release_whose_answer_is_lost_is_told_and_logged_as_not_known(
    operator, locks, make_proxy
):
    proxy = make_proxy(locks.server)
    with held_by("lottery"):
        lease = reference("lottery")
        locks.on(proxy, OPTIONS={"socket_timeout": 1})
        proxy.rule_for_script(scripts.FORCE_RELEASE.sha, "hang_after", times=None)
        page = release(operator, lease, reason="it hangs")
        assert "“lottery” may have been released. The server 127.0.0.1" in told(page)
        assert held.get("lottery") is None
    change = LogEntry.objects.get().get_change_message()
    assert "was released by force is not known. it hangs" in change


@pytest.mark.parametrize(
    ("strange", "put"),
    [
        ("a string of 9000 bytes", lambda client, key: client.set(key, b"\xff" * 9000, px=60_000)),
        ("a list of 3 elements", lambda client, key: client.rpush(key, "a", "b", "c")),
        ("a hash of 1 element", lambda client, key: client.hset(key, "a", "b")),
    ],
)
def test_what_is_foreign_says_what_it_is_and_can_be_deleted(
    operator, locks, lock_key, strange, put
):
    put(locks.redis, lock_key)
    with suppress(LockUnavailable):
        distributed_lock("lottery", wait=0).acquire()  # From now on it is listed.
    page = operator.get(LIST, {"state": "foreign"})
    assert rows(page) == ["lottery"]
    assert strange in text(page)
    page = operator.get(detail("lottery"))
    assert f"foreign Not a lock of ours but {strange}, which" in facts_in(page, "lease")["State"]
    page = confirm(operator, "lottery")
    assert strange in facts_in(page)["State"]
    assert "What stands at its key will be deleted" in text(page)
    assert "What is foreign is deleted." in text(page)
    assert "not stopped" not in text(page)
    page = release(operator, *leases_in(page))
    assert f"What stood at its key, {strange}, is deleted." in told(page)
    assert strange in LogEntry.objects.get().change_message
    assert not locks.redis.exists(lock_key)


def test_what_is_foreign_and_has_changed_since_is_left_alone(operator, locks, lock_key):
    locks.redis.rpush(lock_key, "a")
    lease = reference("lottery")
    locks.redis.rpush(lock_key, "b")
    page = operator.post(RELEASE, {"lease": lease})
    assert leases_in(page) == []
    assert "a list of 2 elements" in text(page)
    assert "Its key now holds a list of 2 elements" in told(release(operator, lease))
    assert locks.redis.llen(lock_key) == 2
    assert not LogEntry.objects.exists()


def test_what_a_newer_version_holds_is_held_and_can_be_released(operator, locks, lock_key):
    locks.redis.set(lock_key, newer_lease(), px=60_000)
    distributed_lock("lottery", wait=0).acquire()  # From now on it is listed.
    page = operator.get(LIST, {"state": "held"})
    assert rows(page) == ["lottery"]
    assert "newer version" in text(page)
    facts = facts_in(operator.get(detail("lottery")), "lease")
    assert "runs a newer version of django_redislock" in facts["State"]
    assert (facts["Holder"], facts["Lease"]) == ("web-9:4711", NEWER_ID)
    page = confirm(operator, "lottery")
    assert "The holder is not stopped." in text(page)
    page = release(operator, *leases_in(page))
    assert "The code of web-9:4711 id-9 is not stopped" in told(page)
    assert not locks.redis.exists(lock_key)


def test_a_lock_that_ends_late_or_never_says_why_and_can_be_freed(operator, locks, lock_key):
    with held_by("lottery", ttl=60):
        assert "redislock-late" not in text(operator.get(LIST))
        locks.redis.pexpire(lock_key, 3_600_000)
        assert "redislock-late" in text(operator.get(LIST))
        late = "held ends late Somebody holds it. It ends later than its ttl allows"
        state = facts_in(operator.get(detail("lottery")), "lease")["State"]
        assert state.startswith(late)
        locks.redis.persist(lock_key)
        page = confirm(operator, "lottery")
        assert "The holder is not stopped." in text(page)
        assert "the lock would never become free" in facts_in(page)["State"]
        page = release(operator, *leases_in(page))
        assert "The code of web-3:4711 is not stopped" in told(page)
        assert held.get("lottery") is None


@pytest.mark.waits
@pytest.mark.no_permit("a circle needs all holders to wait, and the bystander does not")
def test_holders_who_wait_for_each_other_are_seen(operator, locks):
    locks.configure(TTL=30, WAIT=HUNG)
    with a_circle("a", "b"):
        assert text(operator.get(LIST)).count("redislock-circle") == 2
        facts = facts_in(operator.get(detail("a")), "lease")
        circle = "held circle Somebody holds it. Its holder waits, and that"
        assert facts["State"].startswith(circle)
        assert facts["Waits for"] == "b"


# --- trouble with the server ---------------------------------------------------------------------


@pytest.fixture(params=["refused", "silent", "broken", "read-only", "full of garbage"])
def trouble(request, locks, make_proxy):
    """A server that cannot be used, in one of several ways, while "lottery" is held."""
    proxy = make_proxy(locks.server)
    assert distributed_lock("lottery", ttl=60, renew=False).acquire()
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
        for key in (keys.held, keys.queue, keys.past):
            locks.redis.set(key, "x")
    yield request.param
    if request.param == "read-only":
        locks.redis.replicaof("no", "one")


def test_trouble_with_the_server_is_a_message_on_every_page(operator, trouble):
    lease = no_lease("lottery")
    page = operator.get(LIST)
    assert page.status_code == 200
    if trouble != "read-only":  # Then it still can be looked at.
        assert "cannot be shown" in text(page)
    assert operator.get(detail("lottery")).status_code == 200
    for act in (release, ticked, lambda client, lease: client.post(RELEASE, {"lease": lease})):
        assert act(operator, lease).status_code in {200, 302}
    if trouble == "read-only":
        assert "“lottery” was not released" in told(release(operator, reference("lottery")))
        assert held.get("lottery") is not None
    assert not LogEntry.objects.exists()


def test_a_message_names_the_server_that_does_not_answer_and_no_secret(
    operator, locks, make_proxy, settings
):
    proxy = make_proxy(locks.server)
    proxy.blackhole()
    url = proxy.url.replace("redis://", "redis://scott:tiger@")
    settings.REDISLOCK = {"default": {"LOCATION": url, "OPTIONS": {"socket_timeout": 0.1}}}
    lease = {"lease": no_lease("lottery")}
    pages = [operator.get(LIST), operator.get(detail("lottery"))]
    for page in pages:  # What was never read is as of no time.
        assert "as of" not in text(page)
    answers = (lease, {**lease, "confirmed": "Yes"})
    pages += [operator.post(RELEASE, answer, follow=True) for answer in answers]
    for page in pages:
        assert f"The server 127.0.0.1:{proxy.port} (default) cannot answer" in text(page)
        assert "tiger" not in text(page)


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


NUMBERS = ["9" * 16, "9" * 30, "9" * 400, "9" * 5000, "٣", "-1", ""]
OWNERS = ["{}", "[" * 100_000, '{"host": "\\ud800"}']


def test_times_and_owners_that_there_are_not_spoil_no_page(operator, locks):
    keys = lock_keys(locks.prefix, "lottery")
    with held_by("lottery"):
        value = locks.redis.get(keys.lock).decode()
        head, fence, _, *rest = value.split("|", 6)
        for number in NUMBERS:
            for times in (f"1|{number}|2", f"1|2|{number}", f"{number}|1|2"):
                locks.redis.rpush(keys.past, f"{'a' * 16}|{times}|done|{{}}")
            run = f"{number}|{number}||{{}}"
            skip = {"skip": f"{number}|1|busy|{{}}", "skips": number}
            locks.redis.hset(keys.runs, mapping={"success": run, "failure": run, **skip})
            locks.redis.zadd(keys.ran, {keys.lock: 1})
            for owner in OWNERS:
                forged = "|".join([head, fence, number or "1", *rest[:-1], owner])
                locks.redis.set(keys.lock, forged, keepttl=True)
                for address in (LIST, detail("lottery")):
                    assert "lottery" in text(operator.get(address))
        locks.redis.set(keys.lock, value, keepttl=True)


# --- other sites ---------------------------------------------------------------------------------

other_site = admin.AdminSite(name="ops")
other_site.register(LockPage, held_locks.HeldLockAdmin)
urlpatterns = [*site.urlpatterns, path("staff/ops/", other_site.urls)]


def test_another_admin_site_leads_to_its_own_pages_only(operator, locks, make_proxy, settings):
    settings.ROOT_URLCONF = __name__

    def there(address):
        return address.replace("/admin/", "/staff/ops/")

    with held_by("lottery"):
        lease = {"lease": reference("lottery")}
        pages = [operator.get(there(LIST)), operator.get(there(detail("lottery")))]
        pages.append(operator.post(there(RELEASE), lease))
        for page in pages:
            assert page.status_code == 200
            assert not re.search('(href|action)="/admin/', text(page))
        page = operator.post(there(RELEASE), {**lease, "confirmed": "Yes"})
        assert page["Location"] == there(detail("lottery"))
        proxy = make_proxy(locks.server)
        locks.on(proxy)
        proxy.refuse()
        assert operator.post(there(RELEASE), lease)["Location"] == there(LIST)
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
        fence = str(held.get("lottery").fence)
        for page in (
            operator.get(LIST),
            operator.get(detail("lottery")),
            confirm(operator, "lottery"),
        ):
            assert page.status_code == 200
            # What scripts read, and what is compared elsewhere, is written as it is everywhere.
            assert fence in text(page)
            assert re.search(r'data-redislock-up="\d+\.\d+"', text(page))
        release(operator, reference("lottery"))
        history = detail("lottery").replace("/change/", "/history/")
        for address in (detail("lottery"), history, "/admin/"):
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
    address = detail(name)
    assert re.fullmatch(r"/admin/django_redislock/heldlock/[\w-]+/change/", address)
    with LockTestKit().simulate_held_by_other(name, owner=owner):
        assert name in operator.get(LIST, {"q": name}).context["cl"].queryset.locks[0].name
        page = operator.get(LIST)
        assert address in text(page)
        question = confirm(operator, name)
        for one in (page, operator.get(LIST, {"host": name}), operator.get(address), question):
            assert_harmless(one)
        answer = {"lease": leases_in(question), "confirmed": "Yes", "reason": name}
        assert_harmless(operator.post(RELEASE, answer, follow=True))
        for where in ("/admin/", address.replace("/change/", "/history/")):
            assert_harmless(operator.get(where))
        assert held.get(name) is None


def test_hostile_names_of_tasks_and_of_free_locks_do_no_harm(operator):
    for number, name in enumerate(HOSTILE):
        with busy_with(Activity(task=name, task_id=str(number))):
            task_runs.note_skip(name, name, using="default")
    page = operator.get(LIST)
    assert "and 10 more" in panel(page)
    assert_harmless(page)
    for name in HOSTILE:
        run_task(name)
    page = operator.get(LIST, {"state": "free"})
    assert len(free(page)) == len(HOSTILE)
    assert_harmless(page)
    for name in HOSTILE:
        assert_harmless(operator.get(detail(name)))
        page = operator.get(LIST, {"q": name})
        assert_harmless(page)
        assert detail(name) in text(page)


# --- tasks ---------------------------------------------------------------------------------------


def run_task(name, *, success=True, **options):
    """A run of the task shop.tasks.pay under the lock *name*."""
    run = uuid.uuid4().hex
    with busy_with(Activity(task="shop.tasks.pay", task_id=run)):
        lock = Lock(name, Options(**options), run=RunMarker(run, 0))
        assert lock.acquire()
        lock.release(success=success)


@contextmanager
def run_under_way(name, **options):
    """A run of that task during a block."""
    run = f"id-3-{uuid.uuid4().hex}"
    with (
        busy_with(Activity(task="shop.tasks.pay", task_id=run)),
        Lock(name, Options(**options), RunMarker(run, options.get("min_hold", 0))),
    ):
        yield


def skip_task(name, why="busy"):
    with busy_with(Activity(task="shop.tasks.pay", task_id="id-2")):
        task_runs.note_skip(name, why, using="default")


def panel(page):
    """The panel above the list; "" if there is none."""
    found = re.search(
        r'<section class="module redislock-panel".*?</section>', text(page), re.DOTALL
    )
    return " ".join(re.sub("<[^>]*>", "", found[0]).split()) if found else ""


def test_the_page_of_a_lock_shows_the_run_that_is_under_way(operator):
    run_task("payments", success=False)
    with run_under_way("payments"):
        page = operator.get(detail("payments"))
        under_way = facts_in(page, "record")["Under way"]
        assert re.fullmatch(r"for \d.* s , .*:\d+ id-3-.*", under_way)
        assert "data-redislock-up" in text(page).partition("redislock-record")[2]  # It counts on.
        assert "payments" not in free(operator.get(LIST, {"q": "payments"}))
    ends = {"Last success", "Last failure"}
    assert set(facts_in(operator.get(detail("payments")), "record")) == ends


def run_until_told(name):
    """In a child."""
    with run_under_way(name, ttl=60):
        say("running")
        hear()


def test_a_run_whose_process_was_killed_is_shown_to_be_gone_and_never_to_have_ended(
    operator, lock_key, locks, spawn
):
    child = spawn(run_until_told, "lottery")
    child.read()
    assert "redislock-gone" not in text(operator.get(detail("lottery")))
    child.kill()
    page = operator.get(detail("lottery"))
    assert facts_in(page, "record")["Under way"].endswith(" gone")
    gone = "The process that took it does not exist on this host any more."
    assert facts_in(page, "lease")["State"] == f"held Somebody holds it. {gone}"
    assert "redislock-gone" in text(operator.get(LIST))
    locks.redis.delete(lock_key)  # As when its ttl is over.
    shown = facts_in(operator.get(detail("lottery")), "record")
    assert set(shown) == {"Never ended"}
    assert re.fullmatch(rf"began \d.* ago, .*:{child.pid} .*id-3-.*", shown["Never ended"])
    page = operator.get(LIST, {"q": "lottery"})
    assert free(page) == ["lottery"]
    assert re.search(r"one that began .* ago never ended", text(page))


def test_of_many_runs_under_way_some_are_named(operator, monkeypatch):
    monkeypatch.setattr("django_redislock.admin.markup.MOST_RUNS", 2)
    run_task("report", limit=4)
    with run_under_way("report", limit=4), run_under_way("report", limit=4):
        with run_under_way("report", limit=4):
            for permit in (1, 2):
                shown = facts_in(operator.get(detail("report", "default", permit)), "record")
                assert shown["Under way"].count("id-3") == 2
                assert shown["Under way"].endswith("and 1 more")
                assert "Last success" in shown
        assert "Last success" not in text(operator.get(detail("report#2")))


@pytest.fixture
def each_skip_counts(monkeypatch):
    """Or a run and a skip within one millisecond would be of the same occasion."""
    monkeypatch.setattr("django_redislock.admin.panels.SAME_OCCASION", -1.0)


@pytest.mark.usefixtures("each_skip_counts")
def test_a_task_that_is_only_skipped_stands_above_the_list(operator):
    run_task("payments")
    assert panel(operator.get(LIST)) == ""
    for _ in range(3):
        skip_task("payments")
    skip_task("never ran")
    shown = panel(operator.get(LIST))
    assert re.search(r"payments was skipped 3 times, .* it last succeeded .* ago", shown)
    assert re.search(r"never ran was skipped once, .* it has not succeeded yet", shown)
    run_task("payments")
    for why in ("done", "duplicate"):  # That is what locks are for.
        skip_task("payments", why)
    assert "payments" not in panel(operator.get(LIST))


def test_a_task_whose_run_died_and_that_is_only_skipped_since_is_said_to_have_one_that_never_ended(
    operator, locks, lock_key
):
    with suppress(LockLost), run_under_way("lottery"):
        locks.redis.delete(lock_key)
        skip_task("lottery")
        shown = panel(operator.get(LIST))
    assert re.search(r"not succeeded yet; one that began .* s ago never ended\.", shown)


def test_skips_on_the_occasion_of_a_success_are_what_locks_are_for(operator):
    run_task("lottery")
    for _ in range(3):  # The other servers.
        skip_task("lottery")
    assert panel(operator.get(LIST)) == ""


@pytest.mark.usefixtures("each_skip_counts")
def test_skips_while_a_run_is_at_work_are_no_alarm_until_it_is_in_trouble(
    operator, locks, lock_key
):
    run_task("lottery")
    with busy_with(Activity(task="shop.tasks.pay")), distributed_lock("lottery", ttl=60):
        skip_task("lottery")
        assert panel(operator.get(LIST)) == ""
        locks.redis.pexpire(lock_key, 10_000)  # Its renewals have been missed.
        assert "lottery" in panel(operator.get(LIST))
    assert "lottery" in panel(operator.get(LIST))


@pytest.mark.usefixtures("each_skip_counts")
@pytest.mark.parametrize("why", ["cooling", "busy"])
def test_skips_while_a_task_cools_down_are_no_alarm(operator, why):
    """Workers of an earlier version call it busy."""
    with run_under_way("nightly", min_hold=60):
        pass
    skip_task("nightly", why)
    assert panel(operator.get(LIST)) == ""
    (lock,) = held.list()
    assert lock.state == "cooling"
    held.force_release("nightly", lock.id)
    assert ("nightly" in panel(operator.get(LIST))) == (why == "busy")


@pytest.mark.usefixtures("each_skip_counts")
def test_skips_because_of_a_holder_that_is_no_run_are_an_alarm(operator):
    with distributed_lock("nightly"):  # A command, forgotten in some terminal.
        skip_task("nightly")
        assert "nightly" in panel(operator.get(LIST))


@pytest.mark.usefixtures("each_skip_counts")
def test_a_run_at_work_under_any_permit_is_enough(operator, locks):
    skip_task("report")
    with run_under_way("report", limit=3), run_under_way("report", limit=3):
        locks.redis.persist(lock_keys(locks.prefix, "report").lock)
        assert panel(operator.get(LIST)) == ""
    with held_by("report#2", task="shop.tasks.pay"):  # A lock that is only called so.
        skip_task("report")
        assert "report" in panel(operator.get(LIST))


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
    with held_by("pay:3"), run_under_way("report", limit=5):
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
    other = {**one, "KEY_PREFIX": "test-other"}
    settings.REDISLOCK = {"default": one, "other": other, "down": {"LOCATION": NOWHERE}}
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
    with held_by("pay:99"), held_by("draw"), run_under_way("pay:report", limit=5):
        trips.clear()
        page = operator.get(LIST, {"q": "pay"})
        assert len(free(page)) == panels.FREE_LINES
        assert "and 49 more" in text(page)
        assert len(trips) < 20
        page = operator.get(LIST, {"state": "overdu"})  # There is no such state.
        assert page.status_code == 200
        assert rows(page) == []
    assert "and 51 more" in text(operator.get(LIST, {"q": "pay"}))
