"""The site of docs/ in a browser: the questions that readers bring are answered by its search."""

import re

import pytest

pytest.importorskip("sphinx")

from tests import ROOT
from tests.support import docs_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(docs_site.LONGEST)]

DOCS = ROOT / "docs"
IDS = re.findall(r"^### ([EW]\d{3}): (.+)$", (DOCS / "checks.md").read_text(), re.MULTILINE)
QUOTED = re.findall(r"^> (.+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


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


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items(), ids=QUESTIONS)
def test_a_question_is_answered_by_one_of_the_first_results(page, question, answer):
    first = typed(page, question)[:5]
    assert answer in first + [address.partition("#")[0] for address in first]


def test_a_result_shows_the_words_and_leads_to_the_section(page):
    typed(page, "ElastiCache cluster mode TLS")
    first = page.locator("#search-results li").first
    assert "TLS" in first.locator("p.context").inner_text()
    first.locator("a").click()
    page.wait_for_url("**/servers.html*#amazon-elasticache")


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
