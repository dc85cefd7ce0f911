"""The panel of the debug toolbar, within the toolbar itself."""

import re

import pytest
from django.dispatch import Signal
from django.test import AsyncClient, Client, modify_settings, override_settings

from django_redislock import signals
from tests.support.others import held_by
from tests.support.servers import KIND, Server

pytest.importorskip("debug_toolbar")
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("locks")]


@pytest.fixture(autouse=True)
def toolbar():
    """A site with the toolbar, and in it this panel alone."""
    with (
        modify_settings(
            INSTALLED_APPS={"append": "debug_toolbar"},
            MIDDLEWARE={"prepend": "debug_toolbar.middleware.DebugToolbarMiddleware"},
        ),
        override_settings(
            ROOT_URLCONF="tests.contrib.site",
            DEBUG_TOOLBAR_PANELS=["django_redislock.contrib.debug_toolbar.LocksPanel"],
            DEBUG_TOOLBAR_CONFIG={
                "SHOW_TOOLBAR_CALLBACK": "tests.contrib.test_debug_toolbar.shown",
                "RENDER_PANELS": True,
            },
        ),
    ):
        yield


def shown(request):
    return True


def rows(content):
    """The cells of the panel."""
    lines = re.findall(r"<tr>(<td>.*?)</tr>", content.decode(), re.DOTALL)
    return [re.findall("<td>(.*?)</td>", line) for line in lines]


def receivers():
    every = (one for one in vars(signals).values() if isinstance(one, Signal))
    return sum(len(signal.receivers) for signal in every)


def test_the_panel_shows_each_lock_of_the_request():
    before = receivers()
    with held_by("<b>busy</b>", task="lottery.tasks.draw"):
        answer = Client().get("/draw/")
    lottery, report, busy = rows(answer.content)
    assert (*lottery[:2], *lottery[5:7]) == ("lottery", "default", "released", "2")
    assert all(re.fullmatch(r"\d+\.\d s", time) for time in lottery[2:4])
    assert (report[0], report[5]) == ("report", "released after an error")
    assert (busy[0], busy[3], busy[5], busy[6]) == ("&lt;b&gt;busy&lt;/b&gt;", "", "busy", "1")
    assert busy[4] == "web-3:4711 id-1"
    assert "5 round trips at least" in answer.content.decode()
    assert re.search(r"3 locks, waited \d\.\d s", answer.content.decode())
    assert receivers() == before


def test_other_requests_are_not_in_the_panel():
    answer = Client().get("/nothing/")
    assert "This request has asked for no lock." in answer.content.decode()
    assert rows(answer.content) == []


def test_a_server_that_cannot_answer_is_in_the_panel(settings):
    settings.REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:1/0"}}
    (lottery,) = rows(Client(raise_request_exception=False).get("/tried/").content)
    assert (lottery[0], lottery[5]) == ("lottery", "unavailable: connection")


def test_a_release_that_the_server_does_not_answer_is_in_the_row_of_its_lock(settings, monkeypatch):
    with Server(KIND) as server:
        settings.REDISLOCK = {"default": {"LOCATION": server.url}}
        monkeypatch.setattr("tests.contrib.site.at_work", server.kill)
        (lottery,) = rows(Client().get("/cut/").content)
    assert (lottery[0], lottery[5]) == ("lottery", "unavailable: connection, at the release")
    assert lottery[6] == "2"


async def test_the_panel_shows_the_locks_of_a_coroutine():
    (lottery,) = rows((await AsyncClient().get("/adraw/")).content)
    assert (lottery[0], lottery[5]) == ("lottery", "released")


def test_a_coroutine_within_a_blocking_site_is_shown_too():
    (lottery,) = rows(Client().get("/adraw/").content)
    assert (lottery[0], lottery[5]) == ("lottery", "released")
