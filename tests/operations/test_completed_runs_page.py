"""The admin's page of completed runs: who may see and forget them, and what it shows."""

import logging

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import RequestFactory

from django_redislock.admin import CompletedRunAdmin
from django_redislock.models import CompletedRun
from tests.operations.test_admin import HOSTILE, assert_harmless, sign_in, text
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


@pytest.mark.parametrize(
    ("user", "sees", "forgets"),
    [
        ("root", True, True),
        ("forgetter", True, True),
        ("auditor", True, False),
        ("clerk", False, False),
        ("operator", False, False),
        ("clerk delete_completedrun", False, False),
    ],
)
def test_each_right_opens_its_own_pages(sign_in, user, sees, forgets):
    user, _, right = user.partition(" ")
    client, run = sign_in(user), add_run("lottery")
    rights = Permission.objects.filter(codename=right)
    User.objects.get(username=user).user_permissions.add(*rights)
    for address in (LIST, page_of(run)):
        page = client.get(address)
        assert page.status_code == (200 if sees else 403)
        if sees:
            for fact in ("lottery", "lottery.tasks.draw", run.task_id, "web-1:7", str(run.fence)):
                assert fact in text(page)
    assert ("Completed runs" in text(client.get("/admin/"))) is sees
    assert ("delete_selected" in text(client.get(LIST))) is forgets
    delete = f"{LIST}{run.pk}/delete/"
    assert client.get(delete).status_code == (200 if forgets else 403)
    if not forgets:
        client.post(LIST, forgetting(run))
        assert client.post(delete, {"post": "yes"}).status_code == 403
    # Nobody adds or changes.
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(page_of(run), {"name": "raffle"}).status_code == 403
    assert known() == ["lottery"]


def test_an_empty_page_says_why_offers_no_actions_and_counts_no_results(sign_in):
    client = sign_in("forgetter")
    why = "The database “default” has no completed run."
    actions, results = '<div class="actions">', "0 results"
    empty = text(client.get(LIST))
    assert why in empty
    assert "durable=True" in empty
    for other in (actions, results, "0 completed runs"):
        assert other not in empty
    add_run("lottery")
    shown = text(client.get(LIST))
    assert actions in shown
    for other in (why, "Show all"):
        assert other not in shown
    in_vain = text(client.get(LIST, {"q": "raffle"}))
    assert "No completed run matches." in in_vain
    assert f"{results} (<a" in in_vain  # Which leads back to all.
    for other in (why, actions):
        assert other not in in_vain


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


QUERIES = {
    "?q=lott": ["lottery"],
    "?q=raffle.draw": ["raffle"],
    "?q=id-of-the-raffle": ["raffle"],
    "?alias=other": ["raffle"],
    "?completed_at__gte=2020-01-01 00:00%2B00:00": ["lottery", "raffle"],
    "?completed_at__lt=2020-01-01 00:00%2B00:00": [],
}


def test_runs_are_searched_and_filtered(sign_in):
    add_run("raffle", 2 * DAY, alias="other", task="raffle.draw", task_id="id-of-the-raffle")
    add_run("lottery")
    client = sign_in("auditor")
    shown = {query: client.get(f"{LIST}{query}").context["cl"].result_list for query in QUERIES}
    assert {query: [run.name for run in runs] for query, runs in shown.items()} == QUERIES


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


def test_whatever_somebody_wrote_is_shown_harmlessly(sign_in):
    client = sign_in("forgetter")
    runs = [add_run(name, task=name, task_id=name, place=name) for name in HOSTILE]
    addresses = [LIST, *map(page_of, runs), *(f"{LIST}{run.pk}/delete/" for run in runs)]
    for address in addresses:
        assert_harmless(client.get(address))
