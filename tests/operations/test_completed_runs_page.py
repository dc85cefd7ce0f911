"""The admin's page of completed runs: who may see and forget them, and what it shows."""

import logging

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import RequestFactory

from django_redislock.admin import CompletedRunAdmin
from django_redislock.models import CompletedRun
from tests.operations.test_admin import HOSTILE, sign_in, text
from tests.operations.test_once_command import DAY, add_run, known
from tests.support.databases import on_sqlite

__all__ = ["sign_in"]  # A fixture.

pytestmark = pytest.mark.django_db

LIST = "/admin/django_redislock/completedrun/"


def page_of(run):
    return f"{LIST}{run.pk}/change/"


def forgetting(run):
    """The form of the list that deletes a row, as it is sent after the question."""
    return {"action": "delete_selected", "_selected_action": run.pk, "post": "yes"}


@pytest.mark.parametrize("user", ["root", "forgetter", "auditor"])
def test_those_with_the_right_to_view_see_the_runs(sign_in, user):
    client = sign_in(user)
    run = add_run("lottery")
    for address in (LIST, page_of(run)):
        shown = text(client.get(address))
        for fact in ("lottery", "lottery.tasks.draw", run.task_id, "web-1:7", str(run.fence)):
            assert fact in shown
    assert "Completed runs" in text(client.get("/admin/"))


@pytest.mark.parametrize("user", ["clerk", "operator"])
def test_others_see_nothing(sign_in, user):
    client = sign_in(user)
    run = add_run("lottery")
    for address in (LIST, page_of(run), f"{LIST}{run.pk}/delete/"):
        assert client.get(address).status_code == 403
    assert "Completed runs" not in text(client.get("/admin/"))


def test_an_empty_page_says_why(sign_in):
    client = sign_in("auditor")
    says = "The database “default” has no completed run."
    shown = text(client.get(LIST))
    assert says in shown
    assert "durable=True" in shown
    add_run("lottery")
    assert says not in text(client.get(LIST))
    shown = text(client.get(LIST, {"q": "raffle"}))
    assert "No completed run matches." in shown
    assert says not in shown


def test_an_empty_page_offers_no_actions_and_counts_no_results(sign_in):
    client = sign_in("forgetter")
    actions, results = '<div class="actions">', "0 results"
    empty = text(client.get(LIST))
    assert actions not in empty
    assert results not in empty
    assert "0 completed runs" not in empty
    add_run("lottery")
    shown = text(client.get(LIST))
    assert actions in shown
    assert "Show all" not in shown
    in_vain = text(client.get(LIST, {"q": "raffle"}))
    assert actions not in in_vain
    assert f"{results} (<a" in in_vain  # Which leads back to all.


def test_nobody_adds_or_changes(sign_in):
    client = sign_in("root")
    run = add_run("lottery")
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(page_of(run), {"name": "raffle"}).status_code == 403
    assert known() == ["lottery"]


def test_those_who_may_only_look_cannot_forget(sign_in):
    client = sign_in("auditor")
    run = add_run("lottery")
    assert "delete_selected" not in text(client.get(LIST))
    client.post(LIST, forgetting(run))
    assert client.post(f"{LIST}{run.pk}/delete/", {"post": "yes"}).status_code == 403
    assert known() == ["lottery"]


def test_the_right_to_forget_alone_shows_and_forgets_nothing(sign_in):
    client, run = sign_in("clerk"), add_run("lottery")
    right = Permission.objects.get(codename="delete_completedrun")
    User.objects.get(username="clerk").user_permissions.add(right)
    address = f"{LIST}{run.pk}/delete/"
    assert client.get(address).status_code == 403
    assert client.post(address, {"post": "yes"}).status_code == 403
    assert known() == ["lottery"]


@pytest.mark.parametrize("how", ["in the list", "on its page"])
def test_to_delete_a_row_is_to_forget_it_after_a_question_and_is_logged(sign_in, how, caplog):
    client = sign_in("forgetter")
    run = add_run("lottery")
    add_run("raffle")
    address, form = (LIST, forgetting(run))
    if how == "on its page":
        address, form = f"{LIST}{run.pk}/delete/", {"post": "yes"}
    del form["post"]
    assert "Are you sure" in text(client.post(address, form))
    assert known() == ["lottery", "raffle"]
    with caplog.at_level(logging.WARNING, "django_redislock.audit"):
        client.post(address, {**form, "post": "yes"})
    assert known() == ["raffle"]
    (line,) = (one.getMessage() for one in caplog.records if "audit" in one.name)
    assert line.startswith("Lock 'lottery' (default): run ")
    assert "forgotten by 'forgetter in the admin'" in line
    assert LogEntry.objects.get().object_repr == "lottery"


def test_a_stale_page_forgets_no_newer_run(sign_in):
    client = sign_in("forgetter")
    run = add_run("lottery")
    stale = forgetting(run)
    run.delete()
    add_run("lottery")
    client.post(LIST, stale)
    assert known() == ["lottery"]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("?q=lott", ["lottery"]),
        ("?q=raffle.draw", ["raffle"]),
        ("?q=id-of-the-raffle", ["raffle"]),
        ("?alias=other", ["raffle"]),
        ("?completed_at__gte=2020-01-01 00:00%2B00:00", ["lottery", "raffle"]),
        ("?completed_at__lt=2020-01-01 00:00%2B00:00", []),
    ],
)
def test_runs_are_searched_and_filtered(sign_in, query, found):
    add_run("raffle", 2 * DAY, alias="other", task="raffle.draw", task_id="id-of-the-raffle")
    add_run("lottery")
    shown = sign_in("auditor").get(f"{LIST}{query}")
    assert [run.name for run in shown.context["cl"].result_list] == found


@on_sqlite
def test_without_its_table_the_page_says_what_to_do(sign_in, make_database, settings):
    """A router may keep the tables out of a database, and the site's index names the page."""
    bare = make_database("bare", migrate=False)

    class Bare:
        def db_for_read(self, model, **hints):
            return bare if model is CompletedRun else None

    settings.DATABASE_ROUTERS = [Bare()]
    shown = text(sign_in("auditor").get(LIST, follow=True))
    assert "&#x27;bare&#x27; has no table of completed runs. Run `manage.py migrate" in shown
    assert sign_in("clerk").get(LIST).status_code == 403


@on_sqlite
def test_the_page_of_another_database_is_a_subclass(make_database):
    """As docs/admin.md has it."""
    archive = make_database("archive")

    class ArchiveRunsAdmin(CompletedRunAdmin):
        def get_queryset(self, request):
            return super().get_queryset(request).using(archive)

    add_run("lottery:0")
    runs = [add_run(f"lottery:{number}", using=archive) for number in range(3)]
    page = ArchiveRunsAdmin(CompletedRun, admin.site)
    request = RequestFactory().get(LIST)
    request.user = User(username="forgetter")
    page.delete_model(request, runs[0])
    page.delete_queryset(request, page.get_queryset(request).filter(pk=runs[1].pk))
    assert (known(), known(archive)) == (["lottery:0"], ["lottery:2"])


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_somebody_wrote_is_shown_harmlessly(sign_in, name):
    client = sign_in("forgetter")
    run = add_run(name, task=name, task_id=name, place=name)
    for address in (LIST, page_of(run), f"{LIST}{run.pk}/delete/"):
        shown = text(client.get(address))
        assert "<script>alert" not in shown
        assert "<img src=x" not in shown
        assert not {"\u202e", "\x07", "\x1b", "\u2028"} & set(shown)
