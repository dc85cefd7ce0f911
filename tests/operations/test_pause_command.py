"""A pause: an operator keeps a lock from everybody, by the command and in the admin."""

import io
import re
import time

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.messages import get_messages
from django.test import Client

from django_redislock import (
    LockLost,
    LockTimeout,
    distributed_lock,
    held,
    single_instance,
    take_up,
)
from django_redislock.models import LockPage
from django_redislock.rules import flows, scripts
from tests.operations.commands import locks_command, ran
from tests.support import site
from tests.support.matrix import QUORUM, in_turn, places, unscripted
from tests.support.others import held_by, waiters
from tests.support.stored import keys_of, newer_lease
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

WHO = "ann in the admin"
PAUSE = "/admin/django_redislock/heldlock/pause/"


def wait_once():
    """Wait for the lock; returns when it was granted."""
    with distributed_lock("lottery", ttl=60, wait=HUNG):
        return time.monotonic()


def wait_in_queue():
    """Let a waiter stand in the queue, after those that stand there."""
    before = waiters("lottery")
    waiting = in_thread(wait_once)
    wait_until(lambda: waiters("lottery") > before)
    return waiting


def holder():
    lock = held.get("lottery")
    return str(lock.owner) if lock else ""


@in_turn
def test_nobody_gets_a_lock_that_is_held_until_the_pause_is_ended(place):
    assert held.pause("lottery", 60, by=WHO, reason="DB upgrade") is True
    with pytest.raises(LockTimeout) as refused:
        distributed_lock("lottery", wait=0).__enter__()
    assert (refused.value.holder, refused.value.reason) == (WHO, "DB upgrade")
    assert f"is busy: paused by {WHO}: DB upgrade; this pause ends in" in str(refused.value)
    assert "lottery" in locks_command("list", "--search", "upgrade").out
    waiting = wait_in_queue()
    assert held.resume("lottery") is True
    waiting.result(HUNG)
    assert held.resume("lottery") is False
    assert distributed_lock("lottery", wait=0).locked() is False


@in_turn
def test_a_pause_begins_after_the_holder_and_before_all_waiters(place, caplog):
    lock = distributed_lock("lottery", ttl=60)
    assert lock.acquire()
    fence = lock.lease.fence
    before = wait_in_queue()
    assert held.pause("lottery", 60, by=WHO) is False
    assert f"'lottery' (default): a pause is pending, for 60 s by '{WHO}'" in caplog.text
    after = wait_in_queue()
    [first, *others] = held.detail("lottery").waiters
    assert str(first.owner) == WHO
    assert first.waiting_for < HUNG
    assert len(others) == 2
    with pytest.raises(LockTimeout, match=WHO):
        held.pause("lottery", 60, by="bob")
    lock.release()
    now = held.get("lottery")
    assert (str(now.owner), now.state, now.waiters) == (WHO, "paused", 2)
    assert now.fence is not None
    assert now.fence > fence
    assert not before.done()
    assert held.resume("lottery")
    assert before.result(HUNG) <= after.result(HUNG)


@in_turn
def test_a_pause_that_has_not_begun_can_be_ended_and_its_holder_never_is(place):
    with held_by("lottery"):
        assert held.pause("lottery", 60, by=WHO) is False
        assert held.resume("lottery") is True
        assert held.resume("lottery") is False
        assert holder().startswith("web-3")
    assert distributed_lock("lottery", wait=0).acquire()


def test_a_pause_begins_when_the_lease_in_its_way_is_over(locks):
    with held_by("lottery"):
        assert held.pause("lottery", 600, by=WHO) is False
        waiting = wait_in_queue()
        # Waiters do not shorten its life.
        assert locks.redis.pttl(keys_of(locks, "lottery").queue) > 500_000
        locks.redis.delete(keys_of(locks, "lottery").lock)  # As when its holder has died.
        assert distributed_lock("lottery", wait=0).acquire() is False
    assert holder() == WHO
    held.resume("lottery")
    waiting.result(HUNG)

    with distributed_lock("lottery", min_hold=60):
        pass
    assert held.pause("lottery", 60, by=WHO) is False
    locks.redis.delete(keys_of(locks, "lottery").lock)
    assert holder() == WHO  # A look begins it, as an acquire would.


@pytest.mark.waits
def test_a_pause_that_is_over_gives_way_to_the_waiters_at_once(locks):
    start = time.monotonic()
    held.pause("lottery", 1.5, by=WHO)
    waiting = wait_in_queue()
    assert 1.4 < waiting.result(HUNG) - start < 10


@in_turn
@pytest.mark.waits
def test_the_list_has_a_pause_after_a_lease_that_ended_sooner_than_was_noted(place):
    for name in ("dead", "resumed"):
        lock = distributed_lock(name, ttl=1.5, renew=False)
        assert lock.acquire()
        lock.lease.renew()
        assert held.pause(name, 60, by=WHO) is False
        lock.lease.renew()
    with distributed_lock("cooled", min_hold=0.5):
        assert held.pause("cooled", 60, by=WHO) is False
    with distributed_lock("offered") as lease:
        assert held.pause("offered", 60, by=WHO) is False
        lease.hand_over(within=0.5)
    with distributed_lock("taken") as lease:
        assert held.pause("taken", 60, by=WHO) is False
        baton = lease.hand_over()
    with pytest.raises(LockLost), take_up(baton, ttl=1, renew=False) as lease:
        wait_until(lambda: not lease.held)

    def is_over(name):
        """Whether the lease has ended; a release that came just in time lets the pause begin."""
        lock = place.read(name)
        return not lock or WHO in lock

    names = ("dead", "cooled", "offered", "taken")
    for name in (*names, "resumed"):
        wait_until(lambda name=name: is_over(name))
    assert held.resume("resumed")
    listed = held.list()
    assert {one.name: str(one.owner) for one in listed} == dict.fromkeys(names, WHO)
    assert listed.total == len(names)


def test_a_skip_says_held_by_whom_and_why(locks):
    @single_instance("lottery")
    def draw():
        return "drawn"

    held.pause("lottery", 60, by=WHO, reason="DB upgrade")
    expected = {"skipped": "paused", "lock": "lottery", "holder": WHO, "reason": "DB upgrade"}
    assert draw() == expected
    record = held.record("lottery")
    assert record.last_skip.why == "paused"
    held.resume("lottery")
    assert draw() == "drawn"


@places(QUORUM)
@pytest.mark.proves("R4")
def test_on_a_quorum_the_command_waits_and_asks_each_time_under_a_new_token_and_id(
    place, monkeypatch
):
    asked, shipped, said = [], flows.pause, io.StringIO()

    def pause(request, now):
        asked.append(request)
        return shipped(request, now)

    with held_by("lottery"):
        with pytest.raises(LockTimeout):
            held.pause("lottery", 60, by=WHO)
        monkeypatch.setattr(flows, "pause", pause)
        waiting = in_thread(lambda: locks_command("pause", "lottery", "--for", "1h", err=said))
        wait_until(lambda: len(asked) > 2)  # It asks, says so, and asks again and again.
        waits = "A quorum keeps no queue, so this command waits until it is free."
        assert waits in said.getvalue()
    outcome = waiting.result(HUNG)
    assert outcome.status == 0
    assert "Paused: lottery, until " in outcome.out
    assert len({one.token for one in asked}) == len({one.id for one in asked}) == len(asked)
    outcome = locks_command("pause", "lottery", "--for", "1h")
    assert (outcome.status, "is paused already until" in outcome.err) == (1, True)
    assert locks_command("resume", "lottery") == (0, "Resumed: lottery.\n", "")
    assert distributed_lock("lottery", wait=0).acquire()


@unscripted
def test_a_server_without_scripts_has_no_holds(place):
    outcome = locks_command("pause", "lottery", "--for", "1h")
    assert outcome.status == 3
    assert "pause and force release of locks need EVAL" in outcome.err


# --- permits -------------------------------------------------------------------------------------


def test_a_pause_has_all_permits_and_a_run_that_has_another_one_goes_on(locks):
    @single_instance("report", limit=2)
    def report():
        return "made"

    first = distributed_lock("report", limit=2)
    assert first.acquire()
    with held_by("report", "web-4", limit=2):
        first.release()
        assert [one.name for one in held.detail("report").others] == ["report#2"]
        says = "report was not released. Nobody holds it. Permits of it are held: report#2."
        assert locks_command("release", "report", "--yes") == (1, "", says)
        outcome = locks_command("pause", "report", "--for", "1m")
        assert outcome.status == 0
        assert "report#2 ends as it would: web-4:4711" in outcome.out
        assert report()["skipped"] == "paused"
        assert locks_command("pause", "report#2", "--for", "1m").status == 2
        assert locks_command("pause", "report#3", "--for", "1m").status == 0  # A lock of that name.
    assert held.get("report", permit=2) is None
    assert report()["skipped"] == "paused"
    (ended,) = locks_command("resume", "report", "--json").json
    assert (ended["name"], ended["ended"]) == ("report", True)
    assert report() == "made"


# --- the admin -----------------------------------------------------------------------------------


def client_of(name):
    client = Client()
    client.force_login(site.add_user(name))
    return client


@pytest.mark.django_db
def test_a_pause_of_a_newer_version_is_ended_by_that_alone(locks):
    value = newer_lease()
    locks.redis.set(keys_of(locks).lock, value, px=60_000)
    keeper, page = client_of("keeper"), LockPage.named("lottery", "default")
    answer = keeper.post(PAUSE, {"lock": page.key, "resume": ""}, follow=True)
    assert b"Its holder runs a newer version of django_redislock" in answer.content
    assert locks.redis.get(keys_of(locks).lock) == value.encode()


@pytest.mark.django_db
def test_the_admin_pauses_and_ends_with_a_permission_of_its_own(locks):
    page = LockPage.named("lottery", "default")
    address = f"/admin/django_redislock/heldlock/{quote(page.key)}/change/"
    asked = {"lock": page.key, "for": "1h", "reason": "DB upgrade", "confirmed": ""}
    operator, keeper = client_of("operator"), client_of("keeper")
    assert operator.post(PAUSE, asked).status_code == 403
    assert b"Pause\xe2\x80\xa6" not in operator.get(address).content
    assert keeper.get(PAUSE).status_code == 405
    assert b"Pause\xe2\x80\xa6" in keeper.get(address).content
    assert b"is no duration" in keeper.post(PAUSE, {**asked, "for": "soon"}).content
    assert held.get("lottery") is None
    assert keeper.post(PAUSE, asked).status_code == 302
    assert holder() == "keeper in the admin"
    assert b"DB upgrade" in keeper.get(address).content
    assert b"End the pause" in keeper.get(address).content
    assert operator.post(PAUSE, {"lock": page.key, "resume": ""}).status_code == 403
    assert b"was not paused" in keeper.post(PAUSE, asked, follow=True).content
    assert keeper.post(PAUSE, {"lock": page.key, "resume": ""}).status_code == 302
    assert held.get("lottery") is None
    notes = LogEntry.objects.order_by("pk").values_list("change_message", flat=True)
    assert [*notes] == ["Paused for 1 h 00 min. DB upgrade", "The pause was ended."]


@pytest.mark.django_db
def test_who_releases_a_pause_by_force_is_not_told_of_code_that_goes_on(locks):
    operator = client_of("operator")
    assert held.pause("lottery", 3600, by=WHO)
    lock = held.get("lottery")
    lease = {"lease": f"{LockPage.of(lock).key}:{lock.id}"}
    address = f"{PAUSE.removesuffix('pause/')}force-release/"
    shown = operator.post(address, lease).content.decode()
    assert "It is an operator's pause." in shown
    assert "not stopped" not in shown
    page = operator.post(address, {**lease, "confirmed": "Yes"})
    (told,) = map(str, get_messages(page.wsgi_request))
    assert told == f"The lock “lottery” was released. That was the pause of {WHO}."
    assert held.get("lottery") is None


@pytest.mark.django_db
def test_an_end_of_a_pause_whose_answer_is_lost_is_audited_and_logged_as_not_known(
    locks, make_proxy, caplog
):
    proxy, keeper = make_proxy(locks.server), client_of("keeper")
    assert held.pause("lottery", 3600, by=WHO)
    locks.on(proxy, OPTIONS={"socket_timeout": 1})
    proxy.rule_for_script(scripts.RESUME.sha, "hang_after", times=None)
    lock = LockPage.named("lottery", "default").key
    page = keeper.post(PAUSE, {"lock": lock, "resume": ""})
    (told,) = map(str, get_messages(page.wsgi_request))
    assert told.startswith("The lock “lottery” may be unchanged.")
    locks.on(locks.server)
    assert held.get("lottery") is None
    assert LogEntry.objects.get().change_message == "Whether the pause was ended is not known."
    assert "whether its pause was ended is unknown, by 'keeper in the admin'" in caplog.text


@pytest.mark.django_db
def test_a_pause_whose_answer_is_lost_is_audited_and_logged_as_not_known(locks, make_proxy, caplog):
    proxy, keeper = make_proxy(locks.server), client_of("keeper")
    locks.on(proxy, OPTIONS={"socket_timeout": 1})
    granted = proxy.rule_for_script(scripts.ACQUIRE.sha, "hang_after")
    lock = LockPage.named("lottery", "default").key
    asked = {"lock": lock, "for": "1h", "reason": "DB upgrade", "confirmed": ""}
    answer = in_thread(granted.wait)
    answer.add_done_callback(lambda _: proxy.refuse())  # Nor can the pause be undone.
    keeper.post(PAUSE, asked)
    locks.on(locks.server)
    assert holder() == "keeper in the admin"
    says = "Whether it is paused for 1 h 00 min is not known. DB upgrade"
    assert LogEntry.objects.get().change_message == says
    assert "is paused for 3600 s is unknown, by 'keeper in the admin', reason 'DB" in caplog.text


@pytest.mark.django_db
def test_the_action_of_the_list_asks_before_it_pauses_a_lock_with_all_its_permits(locks):
    keeper, whole = client_of("keeper"), LockPage.named("report", "default").key
    second = LockPage.named("report", "default", 2).key
    with held_by("report", limit=2), held_by("report", limit=2):
        ticked = [f"{LockPage.of(lock).key}:{lock.id}" for lock in held.list()]
        action = {"action": "pause", "_selected_action": ticked, "index": 0}
        shown = keeper.post("/admin/django_redislock/heldlock/", action).content.decode()
        assert "Nobody gets this lock" in shown
        assert re.findall(r'name="lock" value="([^"]+)"', shown) == [whole]
        keeper.post(PAUSE, {"lock": whole, "for": "1h", "confirmed": ""})
        assert str(held.detail("report").waiters[0].owner) == "keeper in the admin"
        shown = keeper.get(f"/admin/django_redislock/heldlock/{quote(second)}/change/").content
        assert b"End the pause" in shown
        keeper.post(PAUSE, {"lock": second, "resume": ""})
    assert held.list() == []


def test_a_pause_of_a_name_of_which_nothing_is_known_says_so_and_names_similar_ones(locks):
    ran("nightly:2026-11-28")
    for name, told in (
        ("nightly:2026-11-28", ""),
        ("nightly", "Nothing else is known of nightly. Did you mean nightly:2026-11-28?\n"),
        ("weekly", "Nothing else is known of weekly.\n"),
    ):
        paused = locks_command("pause", name, "--for", "1h")
        assert (paused.status, paused.err) == (0, told)
