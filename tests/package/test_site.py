"""The site that `make docs` makes: nothing from outside, every public name, llms.txt."""

import re
from html import unescape

import pytest

pytest.importorskip("sphinx")

from sphinx.util.inventory import InventoryFile

import django_redislock
from django_redislock import backends, management, signals
from tests import ROOT
from tests.support import docs_site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(docs_site.LONGEST)]

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(made_once):
    return made_once("docs-site", docs_site.build)


def test_a_page_loads_nothing_from_another_site(site):
    loads = re.compile(r"<(?:script|img|iframe)[^>]+src=\"([^\"]+)|<link[^>]+href=\"([^\"]+)")
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        loaded = ["".join(found) for found in loads.findall(page.read_text())]
        assert loaded
        assert [one for one in loaded if re.match(r"[a-z]+:|//", one)] == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:|//)", style.read_text()), style.name


def public_names():
    for of in (django_redislock, management, backends):
        yield from (f"{of.__name__}.{name}" for name in of.__all__)
    for name, value in vars(signals).items():
        if isinstance(value, signals.Signal):
            yield f"django_redislock.signals.{name}"
    of_held = "list get force_release pause resume records"
    more = [*(f"held.{act}" for act in of_held.split()), "celery.RunAbandoned"]
    more += ["jobs.current_lease", "monitors.Sentry", "monitors.Ping"]
    yield from (f"django_redislock.{name}" for name in more)


def test_every_public_name_is_in_the_reference(site):
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {
        name for kind, found in inventory.data.items() if kind.startswith("py:") for name in found
    }
    assert set(public_names()) - described == set()


PAGES = sorted(str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md"))


def test_llms_txt_lists_each_page_once_with_its_title_and_a_line(site):
    listed = re.findall(
        r"^- \[(.+)\]\((.+)\.md\): (.+)$", (site / "llms.txt").read_text(), re.MULTILINE
    )
    assert sorted(page for _, page, _ in listed) == [page for page in PAGES if page != "index"]
    for title, page, line in listed:
        heading = re.search(r"^# (.+)$", (site / f"{page}.md").read_text(), re.MULTILINE)
        assert title == re.sub(r"`|\\", "", heading[1])
        assert len(line.split()) > 2, page


def test_llms_txt_leads_to_the_sources_and_to_all_of_them_in_one(site):
    together = (site / "llms-full.txt").read_text()
    for page in PAGES:
        text = (site / f"{page}.md").read_text()
        assert text.startswith("# "), page
        assert "toctree" not in text
        assert text in together


def test_the_reference_for_programs_has_the_docstrings(site):
    text = " ".join((site / "reference" / "locks.md").read_text().split())
    docstring = django_redislock.distributed_lock.__doc__ or ""
    assert " ".join(docstring.split("\n\n")[0].split()) in text


@pytest.mark.parametrize("name", ["celery", "guarantees", "servers"])
def test_a_diagram_is_a_picture_with_its_title_its_bars_and_its_words(site, name):
    page = (site / f"{name}.html").read_text()
    source = (DOCS / f"{name}.md").read_text()
    drawn = re.findall(r"^```\{diagram\} ([^\n]+)\n(.*?)^```", source, re.MULTILINE | re.DOTALL)
    pictures = re.findall(r'<svg class="diagram".*? aria-label="(.+?)">(.*?)</svg>', page)
    assert drawn
    assert [title for title, _ in pictures] == [title for title, _ in drawn]
    for (_, picture), (_, text) in zip(pictures, drawn, strict=True):
        words = re.findall(r"<text[^>]*>([^<]+)</text>", unescape(picture))
        assert sorted(" ".join(words).split()) == sorted(
            re.sub(r"[^\x20-\x7e\s]", "", text).split()
        )
        assert picture.count('<rect class="held"') == len(re.findall(r"█[^█░▒\n]+█", text))
