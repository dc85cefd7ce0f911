"""The pages fit the window, whatever its width and however long the names are.

A page is loaded once and its window made wider and narrower: what counts is where things are then.
"""

from types import SimpleNamespace

import pytest

from django_redislock.admin.changelist import COLUMNS
from django_redislock.rules.keys import index_key, lock_keys
from tests.operations.browser.conftest import Stage
from tests.operations.test_admin import fill
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

WIDTHS = (360, 480, 640, 768, 800, 1024, 1280, 1440, 1600, 1920)
FACTS = [name for name in COLUMNS if name != "where"]

# Where anything is that the window, its container or the filter cuts, and what is not seen.
FAULTS = """
([outer, facts]) => {
    const faults = new Set();
    const side = (one, rect) => {
        const what = one.className || one.id || one.localName;
        return `${one.localName}.${what} at ${Math.round(rect.left)}..${Math.round(rect.right)}`;
    };
    const root = document.scrollingElement;
    if (root.scrollWidth > innerWidth) {
        faults.add(`the page is ${root.scrollWidth} wide`);
    }
    const filter = document.getElementById("changelist-filter");
    const meets = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
        && one.top < other.bottom - 1 && other.top < one.bottom - 1;
    for (const box of document.querySelectorAll(outer)) {
        const bounds = box.getBoundingClientRect();
        if (box.scrollWidth > box.clientWidth + 1) {
            faults.add(`${side(box, bounds)} scrolls: ${box.scrollWidth}`);
        }
        const kinds = NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT;
        const inside = document.createTreeWalker(box, kinds);
        while (inside.nextNode()) {
            const node = inside.currentNode;
            const one = node.parentElement;
            const text = node.nodeType === Node.TEXT_NODE;
            if (one.closest("svg, select, .visually-hidden") || (text && !node.data.trim())) {
                continue;
            }
            const range = document.createRange();
            range.selectNode(node);
            const cell = one.closest("td, th");
            const within = text && cell ? cell.getBoundingClientRect() : bounds;
            for (const rect of text ? range.getClientRects() : node.getClientRects()) {
                if (!rect.width || !rect.height) {
                    continue;
                }
                const about = text ? `“${node.data.trim().slice(0, 20)}” in ${side(one, rect)}`
                    : side(node, rect);
                if (rect.left < within.left - 1 || rect.right > within.right + 1) {
                    faults.add(`${about} leaves ${side(text && cell ? cell : box, within)}`);
                }
                if (rect.left < -1 || rect.right > innerWidth + 1) {
                    faults.add(`${about} leaves the window`);
                }
                if (filter && !filter.contains(node) && !node.contains(filter)
                    && meets(rect, filter.getBoundingClientRect())) {
                    faults.add(`${about} is under the filter`);
                }
            }
            if (!text && !node.matches("progress, .visually-hidden")
                && getComputedStyle(node).overflowX !== "visible"
                && node.scrollWidth > node.clientWidth + 1) {
                faults.add(`${side(node, node.getBoundingClientRect())} is cut`);
            }
        }
    }
    for (const row of document.querySelectorAll("#result_list tbody tr")) {
        for (const fact of facts) {
            const cell = row.querySelector(`.field-${fact}`);
            const shown = cell?.querySelector("bdi, span") ?? cell;
            if (!shown?.innerText.trim()) {
                faults.add(`no ${fact}`);
                continue;
            }
            shown.scrollIntoView({block: "center"});
            const rect = shown.getClientRects()[0];
            const top = rect && document.elementFromPoint(
                rect.left + rect.width / 2, rect.top + Math.min(rect.height / 2, 8)
            );
            if (!top || !(cell.contains(top) || top.contains(cell))) {
                faults.add(`${fact} is not seen, but ${top?.className || top?.localName}`);
            }
        }
    }
    return Array.from(faults).slice(0, 12);
}
"""


def faults(page, *outer, facts=()):
    """What is wrong with the page, by the width of the window; {} is good."""
    found = {}
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        if wrong := page.evaluate(FAULTS, [", ".join(outer), facts]):
            found[width] = wrong
    return found


@pytest.fixture(scope="module")
def theatre(tmp_path_factory):
    """A site with two aliases, so that each column is there."""
    stage = Stage(tmp_path_factory.mktemp("site"), "archive")
    yield stage
    stage.close()


POD = "payments-reconciliation-worker-7d9f8b6c5d-x2x4z.production.svc.cluster.local"
TASK = "company.platform.billing.reconciliation.tasks.reconcile_payments_of_all_tenants"
ID = "1f5e7a1c-3b0d-4c52-9a41-2f6d8c7b90e1"


def crowded(stage):
    """Long names, of one word and of many, and each kind of state."""
    stage.machine(
        POD,
        4194304,
        {"name": "x" * 200, "task": TASK, "task_id": ID},
        {"name": "report " * 28, "path": f"/{'tenants/' * 20}"},
        {"name": "cooling", "task": TASK, "task_id": ID, "seconds": 0.1, "min_hold": 86400},
        {"name": "skipped:" * 25, "task": TASK, "task_id": ID, "seconds": 0.1, "skipped": 3},
        {"name": "lottery", "ttl": 86400},
        {"name": "y" * 200, "task": TASK, "task_id": ID, "seconds": 0.1, "turns": 3},
    )
    stage.machine(
        "web-1",
        1,
        {"name": "x" * 200, "task": TASK, "task_id": ID},
        {"name": "lottery"},
        {"name": "y" * 200, "task": TASK, "task_id": ID},
    )
    stage.machine(POD, 2, {"name": "y" * 200, "task": TASK, "task_id": ID})
    stage.machine("web-2", 2, {"name": "lottery"}, {"name": "x" * 200})
    in_trouble(stage)


def in_trouble(stage):
    """What operators look for, with names as long."""
    long, client = {"ttl": 86400, "renew": False}, stage.server.client()
    names = {what: f"{what}:{'z' * 150}" for what in ("never", "late", "gone", "list", "huge")}
    keys = {what: lock_keys("redislock", name).lock for what, name in names.items()}
    stage.machine(POD, 3, {"name": names["never"], "task": TASK, "task_id": ID, **long})
    stage.machine(POD, 4, {"name": names["late"], "task": TASK, "task_id": ID, **long})
    stage.hold(names["gone"], **long).kill()
    wait_until(lambda: client.persist(keys["never"]))
    wait_until(lambda: client.pexpire(keys["late"], 9 * 86_400_000))
    client.rpush(keys["list"], "a", "b", "c")
    client.set(keys["huge"], "y" * 20_000_000)
    client.zadd(index_key("redislock"), dict.fromkeys(keys.values(), 9e15))  # As an acquire does.


# Where each head begins, and where its facts begin in the first row.
COLUMNS_AT = """
() => {
    const found = {};
    const row = document.querySelector("#result_list tbody tr");
    for (const head of document.querySelectorAll("#result_list thead th[class*='column-']")) {
        const name = head.className.match(/column-(\\w+)/)?.[1];
        const cell = row.querySelector(`.field-${name}`);
        if (cell) {
            const range = document.createRange();
            range.selectNodeContents(head.querySelector(".text :is(a, span)"));
            const inside = parseFloat(getComputedStyle(cell).paddingLeft);
            const fact = cell.getBoundingClientRect().left + inside;
            found[name] = [range.getBoundingClientRect().left, fact];
        }
    }
    return found;
}
"""


def heads_beside_their_facts(page):
    """Which heads do not stand above their facts, by the width of the window; {} is good."""
    found = {}
    for width in (1280, 1440, 1920):
        page.set_viewport_size({"width": width, "height": 900})
        at = page.evaluate(COLUMNS_AT)
        assert set(at) == {*FACTS}
        if off := {name: (one, other) for name, (one, other) in at.items() if abs(one - other) > 1}:
            found[width] = off
    return found


def test_the_list_fits_every_width_and_each_head_stands_above_its_facts(stage, visit):
    crowded(stage)
    here = visit()
    page = here.list("?o=1.-2.3.4.5.6.7.8.9")  # Each head has the marks of the order.
    page.click("text=Stop refreshing")
    badges = page.locator("#result_list .redislock-badge").all_inner_texts()
    assert {"held", "no expiry", "ends late", "gone", "foreign"} <= set(badges)
    assert page.locator("#nav-sidebar").is_visible()
    assert page.locator("#changelist-filter").is_visible()
    everything = ("#changelist", ".redislock-live", "#redislock-skipped")
    assert faults(page, *everything, facts=FACTS) == {}
    assert heads_beside_their_facts(page) == {}
    from_right_to_left(page)
    assert faults(page, *everything, facts=FACTS) == {}
    page.set_viewport_size({"width": 1280, "height": 900})
    page.click("#toggle-nav-sidebar")
    assert not page.locator("#nav-sidebar").is_visible()
    assert faults(page, *everything, facts=FACTS) == {}


def test_a_page_that_stands_still_looks_as_before(stage, visit):
    stage.hold("lottery")
    here = visit()
    page = here.list()
    bar = page.locator(".redislock-live")
    ground = "bar => getComputedStyle(bar).backgroundColor"
    before = bar.evaluate(ground)
    page.click("text=Stop refreshing")
    here.sees("Refresh again")
    assert bar.evaluate(ground) == before


def test_the_page_of_a_lock_in_trouble_and_its_release_fit_every_width(stage, visit):
    in_trouble(stage)
    here = visit()
    for what in ("never", "late", "gone", "list", "huge"):
        page = here.list()
        page.click(f"text={what}:")
        here.sees("Lease")
        assert faults(page, "#content", ".breadcrumbs") == {}
        page.click("text=Force release…")
        here.sees("No, take me back")
        assert faults(page, "#content", ".breadcrumbs") == {}
        page.click("text=Yes, release it")
        here.sees("Nobody holds this lock right now.")
        assert "was released" in page.locator(".messagelist").inner_text()


def from_right_to_left(page):
    """As Django shows the page in Arabic or Hebrew."""
    page.evaluate("document.documentElement.dir = 'rtl'")
    for style in ("rtl", "responsive_rtl"):
        page.add_style_tag(url=f"/static/admin/css/{style}.css")


def test_the_list_fits_every_width_for_those_who_may_only_look(stage, visit):
    here = visit("looker")
    page = here.list()
    here.sees("No lock is held right now.")
    assert faults(page, "#changelist") == {}
    crowded(stage)
    here.list()
    page.click("text=Stop refreshing")
    assert page.locator(".action-checkbox, .actions").count() == 0
    assert faults(page, "#changelist", facts=FACTS) == {}
    here.list("?state=free")
    here.sees("Free right now")
    assert faults(page, "#changelist") == {}


# All rows are alike, and to look at a hundred takes a second for each width.
FEW_ROWS = """
for (const row of document.querySelectorAll("#result_list tbody tr:nth-child(n + 6)")) row.remove()
"""


def test_the_pages_of_a_long_list_fit_every_width(stage, visit):
    fill(SimpleNamespace(redis=stage.server.client(), prefix="redislock"), 950)
    page = visit().list("?p=5")
    page.click("text=Stop refreshing")
    assert page.locator(".paginator a").count() > 5
    page.evaluate(FEW_ROWS)
    assert faults(page, "#changelist") == {}


def test_the_page_of_a_lock_and_the_confirmation_fit_every_width(stage, visit):
    crowded(stage)
    here = visit()
    page = here.list()
    here.row("y" * 200).locator("a").click()
    here.sees("Waiting, the next first")
    assert page.locator(".redislock-past tbody tr").count() == 3
    assert faults(page, "#content", ".breadcrumbs") == {}
    from_right_to_left(page)
    assert faults(page, "#content", ".breadcrumbs") == {}
    page.click("text=Force release…")
    here.sees("The holder is not stopped.")
    assert faults(page, "#content", ".breadcrumbs") == {}
    page.fill("#id_reason", "r" * 200)
    page.click("text=Yes, release it")
    assert "was released" in page.locator(".messagelist").inner_text()
    assert faults(page, "#content", ".messagelist") == {}
    page.click("text=History")
    here.sees("Released by force")
    assert faults(page, "#content", ".breadcrumbs") == {}
