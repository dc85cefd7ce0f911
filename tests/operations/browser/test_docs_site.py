"""The site of docs/ in a browser: the questions that readers bring are answered by its search."""

import re
from typing import get_args

import pytest

pytest.importorskip("sphinx")

from django_redislock import (
    InvalidLockName,
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
)
from django_redislock.celery.options import TaskArguments
from django_redislock.conf import Conf
from django_redislock.exceptions import LostReason
from django_redislock.management import console, metrics
from django_redislock.options import options_in
from tests import ROOT
from tests.package.test_logs import logged
from tests.package.test_troubleshooting import problems_of
from tests.support import docs_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(docs_site.LONGEST)]

DOCS = ROOT / "docs"
IDS = re.findall(r"^### ([EW]\d{3}): (.+)$", (DOCS / "checks.md").read_text(), re.MULTILINE)
INSTRUMENTS = re.findall(
    r'meter\.create_\w+\(\s*"([a-z.]+)"',
    (ROOT / "django_redislock" / "contrib" / "otel" / "telemetry.py").read_text(),
)
SOURCE = (DOCS / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^> (.+)$", SOURCE, re.MULTILINE)


@pytest.fixture(scope="module")
def site(made_once):
    return made_once("docs-site", docs_site.build)


@pytest.fixture(scope="module")
def window(chromium):
    page = chromium.new_page()
    yield page
    page.close()


@pytest.fixture
def page(window, site):
    window.goto(f"file://{site}/index.html")
    return window


def typed(page, query):
    """The addresses that the search finds, the best first, when this is typed on the start page."""
    page.fill("input[name=q]", query)
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html*")
    page.locator("p.search-summary", has_text=re.compile(".")).wait_for()
    links = page.locator("#search-results li > a").evaluate_all(
        "links => links.map(link => link.getAttribute('href'))"
    )
    return [re.sub(r"\?[^#]*", "", link) for link in links]


QUESTIONS = {
    "two servers run the same cron script, one shall skip": "recipes.html#cron-and-shell-scripts",
    "worker killed while it held a lock": "troubleshooting.html#no-message",
    "did the nightly report run last night": "recipes.html#did-it-run-last-night",
    "user clicks pay twice": "recipes.html#pay-is-clicked-twice",
    "what does the second click get": "recipes.html#what-the-second-click-gets",
    "change ttl from 60 to 600 and deploy": "deploys.html#the-ttl",
    "ElastiCache cluster mode TLS": "servers.html#amazon-elasticache",
    "redis-py Lock, old and new code side by side": "migrating.html",
    "celery-once": "migrating.html#from-celery-once",
    "at most three calls at a time to an API": (
        "recipes.html#an-api-that-takes-at-most-three-calls-at-a-time"
    ),
    "is it safe to write to the database under the lock": "databases.html",
    "my process is paused": "databases.html#what-happens",
}


def test_a_result_shows_the_words_and_leads_to_the_section(page):
    typed(page, "ElastiCache cluster mode TLS")
    first = page.locator("#search-results li").first
    assert "TLS" in first.locator("p.context").inner_text()
    first.locator("a").click()
    page.wait_for_url("**/servers.html*#amazon-elasticache")


def test_a_question_is_answered_by_one_of_the_first_results(page):
    unanswered = {}
    answers = dict(zip(QUESTIONS, found(page, [*QUESTIONS]), strict=True))
    for question, answer in QUESTIONS.items():
        first = answers[question][:5]
        if answer not in first + [address.partition("#")[0] for address in first]:
            unanswered[question] = first
    assert unanswered == {}


def test_what_nobody_wrote_is_not_found(page):
    assert typed(page, "xyzzy") == []
    assert "did not match" in page.locator("p.search-summary").inner_text()


def found(page, queries):
    """The addresses that each of many queries finds."""
    page.goto(page.url.replace("index.html", "search.html"))
    answer = page.evaluate(
        "queries => queries.map(query => Search.find(query).map(one => one.address))", queries
    )
    return list(answer)


def test_the_id_of_a_check_leads_to_its_section(page):
    assert len(IDS) > 50
    results = found(page, [f"django_redislock.{number}" for number, _ in IDS])
    anchors = [first.partition("#")[2][:4].upper() for first, *_ in results]
    assert anchors == [number for number, _ in IDS]


def test_a_pasted_message_leads_to_its_explanation(page):
    assert len(QUOTED) >= 5
    pasted = [re.sub(r"report:7|web-2:4711|28\.6", "invoice-99", one) for one in QUOTED]
    results = found(page, [f"django_redislock.LockError: {one}" for one in pasted])
    pages = [{one.partition("#")[0] for one in first[:2]} for first in results]
    assert [
        one for one, first in zip(QUOTED, pages, strict=True) if "troubleshooting.html" not in first
    ] == []


def test_a_diagram_has_the_colours_of_the_theme_that_the_reader_chose(page, site):
    page.goto(f"file://{site}/guarantees.html")
    colours = set()
    for theme in ("light", "dark"):
        page.evaluate("theme => { document.body.dataset.theme = theme }", theme)
        words = page.locator("svg.diagram text").first
        colours.add(words.evaluate("text => getComputedStyle(text).fill"))
    assert len(colours) == 2


# --- what readers paste ---------------------------------------------------------------------------

# The pages that explain options.
OPTIONS = ("locks", "jobs", "celery", "limits", "databases", "deploys")
TROUBLES = "troubleshooting.html"


def filled(text):
    """A message of the code, as a reader meets it."""
    return text.replace("…", "order-99")


def right(heading):
    """A section of troubleshooting, and the sections to which it sends its readers."""
    after = SOURCE.split(f"# {heading}\n")[1].split("\n#")[0]
    links = re.findall(r"\]\((\w[\w-]*)\.md(#[\w-]+)\)", after)
    own = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
    return [f"{TROUBLES}#{own}", *(f"{page}.html{anchor}" for page, anchor in links)]


def messages():
    """The errors that readers paste, and the heading of each in troubleshooting."""
    name, busy = "order-99", "Lock '…' is busy"
    for cls in (LockMisuse, InvalidLockName):
        for text in problems_of(cls.__name__):
            if text.strip("…"):
                yield cls(name, filled(text)), cls.__name__
    for reason in get_args(LostReason):
        yield LockLost(name, reason), "LockLost"
    yield LockTimeout(name, "web-9:4711", 28.6), f"{busy}: held by …"
    yield LockTimeout(name, "web-9:4711", 2.0, cooling=True), f"{busy}: it cools down after …"
    yield LockTimeout(name, "ops", 9.0, reason="new disk"), f"{busy}: paused by …"
    for problem in ("the server did not answer", "all 128 connections are in use", "NOPERM"):
        yield LockUnavailable(name, problem), "LockUnavailable"


def log_lines():
    return sorted({filled(one.text) for one in logged() if one.text != "…"})


def not_first(page, wanted):
    """Of {query: addresses or pages}, the queries that find another address first, with that."""
    results = zip(wanted.items(), found(page, list(wanted)), strict=True)
    return {
        query: first
        for (query, places), (first, *_) in ((one, addresses or [""]) for one, addresses in results)
        if not {first, first.partition("#")[0]} & set(places)
    }


def test_a_message_of_an_exception_finds_its_section_first(page):
    wanted = {
        f"{type(error).__module__}.{type(error).__name__}: {error}": right(heading)
        for error, heading in messages()
    }
    assert len(wanted) > 50
    assert not_first(page, wanted) == {}


def test_a_line_of_the_log_finds_its_explanation_first(page):
    lines = log_lines()
    assert len(lines) > 40
    places = [TROUBLES, "monitoring.html", *right("Lines about locks and runs")]
    assert not_first(page, dict.fromkeys(lines, places)) == {}


def test_a_setting_an_option_and_a_metric_find_the_page_that_explains_them_first(page):
    settings = [name.upper() for name in Conf.__dataclass_fields__ if name != "alias"]
    options = options_in(TaskArguments)
    metric_names = [*metrics.GAUGES, *INSTRUMENTS]
    assert len(options) > 20 < len(metric_names)
    wanted = {option: [f"{name}.html" for name in OPTIONS] for option in options}
    wanted |= {setting: ["settings.html"] for setting in settings}
    wanted |= {metric: ["monitoring.html"] for metric in metric_names}
    assert not_first(page, wanted) == {}


def test_an_exit_status_finds_its_section_first(page):
    sections = ["commands.html#exit-status", "locks-command.html#exit-statuses"]
    every = {console.FOUND, console.USAGE, console.UNAVAILABLE, console.INTERRUPTED}
    wanted = {f"exit status {status}": sections for status in every}
    wanted |= {f"exit status {status}": sections[:1] for status in (console.BUSY, console.LOST)}
    assert not_first(page, wanted) == {}
