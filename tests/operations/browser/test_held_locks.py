"""What scripts and styles make of the pages of held locks, under a strict Content-Security-Policy.

What is on the pages is in tests/operations/test_admin.py and tests/golden.
"""

import re

import pytest

from django_redislock.rules.keys import lock_keys
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def seconds_in(text):
    """The number in "4.2 s"."""
    found = re.fullmatch(r"([\d.]+) s", text)
    assert found, text
    return float(found[1])


# --- the list ------------------------------------------------------------------------------------


def test_clocks_count_without_a_reload(stage, visit):
    stage.hold("lottery", ttl=55, renew=False)
    here = visit()
    page = here.list()
    here.mark()
    clock, gauge = page.locator("[data-redislock-down]"), page.locator(".redislock-gauge")
    held_for = page.locator("[data-redislock-up]")
    page.click("text=Stop refreshing")  # So that only the clocks can do it.
    first, width = seconds_in(clock.inner_text()), gauge.evaluate("gauge => gauge.value")
    begun = seconds_in(held_for.inner_text())
    here.until(lambda: seconds_in(clock.inner_text()) <= first - 0.5, "counts down")
    # It was read later than the first, so it may not have moved since.
    here.until(lambda: seconds_in(held_for.inner_text()) > begun, "counts up")
    assert gauge.evaluate("gauge => gauge.value") < width
    assert here.same_page()


def test_the_list_brings_itself_up_to_date(stage, visit):
    first = stage.hold("first")
    here = visit()
    page = here.list()
    here.mark()
    stage.hold("second")
    here.until(lambda: sorted(here.names()) == ["first", "second"], "the new lock appears")
    first.send("release")
    here.until(lambda: here.names() == ["second"], "the released one goes")
    assert "1 held lock" in page.locator(".paginator").inner_text()
    assert here.same_page()


def test_a_refresh_keeps_what_is_ticked_and_where_one_was(stage, visit):
    stage.machine("web-1", 1, *({"name": f"lock:{number:02}"} for number in range(30)))
    here = visit(viewport={"width": 1200, "height": 500})
    page = here.list()
    here.mark()
    here.row("lock:07").locator("input").check()
    here.row("lock:21").locator("input").check()
    here.row("lock:21").locator("input").focus()
    scrolled = page.evaluate("window.scrollY")
    assert scrolled > 0
    stage.hold("new")
    here.until(lambda: here.row("new").count() == 1)
    ticked = page.locator("#result_list tr.selected .redislock-name").all_inner_texts()
    assert sorted(ticked) == ["lock:07", "lock:21"]
    assert page.locator(".action-counter").inner_text() == "2 of 31 selected"
    assert "lock:21" in page.evaluate("document.activeElement.closest('tr').innerText")
    assert abs(page.evaluate("window.scrollY") - scrolled) < 60  # A line was added above.
    assert here.same_page()
    # Django's own handling of the boxes goes on with the new ones.
    page.check("#action-toggle")
    assert page.locator(".action-counter").inner_text() == "31 of 31 selected"
    page.uncheck("#action-toggle")
    here.row("new").locator("input").check()
    assert page.locator(".action-counter").inner_text() == "1 of 31 selected"


@pytest.mark.proves("P9")
def test_a_tick_does_not_pass_to_a_newer_lease(stage, visit):
    first = stage.hold("lottery")
    stage.hold("other")
    here = visit()
    page = here.list()
    here.row("lottery").locator("input").check()
    first.send("release")
    assert first.read() == "released"
    newer = stage.hold("lottery")
    box = f'input[value$=":{newer.lease}"]'
    page.wait_for_selector(box)
    assert not page.is_checked(box)
    assert page.locator(".action-counter").inner_text() == "0 of 2 selected"


def marked_in(page):
    """The text that the reader has marked."""
    return page.evaluate("getSelection().toString()")


def test_marked_text_is_not_taken_away_wherever_it_is(stage, visit):
    stage.machine("web-1", 1, {"name": "pay", "task": "pay", "seconds": 0.01, "skipped": 2})
    stage.hold("lottery")
    here = visit()
    page = here.list()
    before = as_of(page)
    for what in ("#redislock-skipped li", "#result_list tbody tr"):  # Its clocks stand still, too.
        page.locator(what).select_text()
        marked = marked_in(page)
        page.wait_for_timeout(1500)  # A refresh, and six ticks of the clocks.
        assert marked_in(page) == marked
    assert as_of(page) == before
    page.evaluate("getSelection().removeAllRanges()")
    here.until(lambda: as_of(page) != before)


def test_marked_text_is_not_taken_away_by_an_answer_that_was_under_way(stage, visit):
    stage.hold("lottery")
    here = visit()
    page = here.list()
    asked = []

    def keep_waiting(route):
        asked.append(route)

    page.route("**/heldlock/", keep_waiting)
    here.until(lambda: page.wait_for_timeout(50) or asked, "a refresh")
    page.locator(".redislock-name").select_text()
    with page.expect_event("requestfinished"):
        asked[0].continue_()
    page.wait_for_timeout(1000)
    assert marked_in(page) == "lottery"


def test_refreshing_can_be_stopped_and_begun_again(stage, visit):
    stage.hold("first")
    here = visit()
    page = here.list()
    page.click("text=Stop refreshing")
    stage.hold("second")
    page.wait_for_timeout(1500)  # A refresh.
    assert here.names() == ["first"]
    page.reload()
    here.sees("Refresh again")  # It is remembered.
    assert sorted(here.names()) == ["first", "second"]
    stage.hold("third")
    page.click("text=Refresh again")
    here.until(lambda: len(here.names()) == 3)


def test_typed_text_and_the_focus_stay_when_the_first_lock_comes_and_the_last_one_goes(
    stage, visit
):
    here = visit()
    page = here.list()
    here.sees("No lock is held right now.")
    here.mark()
    page.type("#searchbar", "lott")
    holder = stage.hold("lottery")
    here.until(lambda: here.names() == ["lottery"])
    here.row("lottery").locator("input").check()  # Django's script counts what has come since.
    assert page.locator(".action-counter").inner_text() == "1 of 1 selected"
    page.select_option("select[name=action]", index=1)
    page.focus("#searchbar")
    stage.hold("another")
    here.until(lambda: here.names() == ["another", "lottery"])
    assert page.input_value("select[name=action]") == "force_release"
    holder.send("release")
    here.until(lambda: here.names() == ["another"])
    page.type("#searchbar", "ery")
    assert page.input_value("#searchbar") == "lottery"
    stage.clear()
    here.sees("No lock is held right now.")
    page.type("#searchbar", ":7")
    assert page.input_value("#searchbar") == "lottery:7"
    assert page.evaluate("document.activeElement.id") == "searchbar"
    assert here.same_page()


def test_a_refresh_leaves_the_focus_and_what_is_folded_where_they_are(stage, visit):
    stage.machine("web-1", 1, {"name": "pay", "task": "pay", "seconds": 0.01, "skipped": 2})
    holder = stage.hold("lottery")
    here = visit()
    page = here.list()
    page.locator("#changelist-filter summary").first.click()
    assert not page.locator("#changelist-filter details").first.evaluate("one => one.open")
    for focused in ("#redislock-skipped a", "#result_list tbody a"):
        page.focus(focused)
        refreshed(here)
        assert page.evaluate("one => document.activeElement.matches(one)", focused)
    assert not page.locator("#changelist-filter details").first.evaluate("one => one.open")
    # The link leads to the lock, whoever has it now.
    stage.machine("web-2", 2, {"name": "lottery"})
    page.locator("#result_list tbody a").focus()
    holder.send("release")
    here.until(lambda: "web-2" in here.row("lottery").inner_text())
    assert page.evaluate("document.activeElement.innerText") == "lottery"
    page.click("#result_list tbody a")
    page.focus("text=Force release…")
    refreshed(here)
    assert page.evaluate("document.activeElement.innerText") == "Force release…"


def refreshed(here):
    """Wait until the page was brought up to date."""
    before = as_of(here.page)
    here.until(lambda: as_of(here.page) != before, "a refresh")


def test_a_free_lock_is_found_and_opened(stage, visit):
    run = {"task": "shop.pay", "task_id": "7", "seconds": 0.01}
    stage.machine("web-1", 1, {"name": "payments", **run}, {"name": "lottery"})
    here = visit()
    page = here.list()
    page.click("#changelist-filter >> text=free")
    here.sees("Free right now")
    here.mark()
    stage.machine("web-2", 2, {"name": "invoices", **run})
    here.until(lambda: page.locator("#redislock-free li").count() == 2)
    assert here.same_page()
    page.click("#redislock-free >> text=payments")
    here.sees("Nobody holds this lock right now.")
    here.sees("Last success")


@pytest.mark.parametrize("width", [320, 1360])
def test_a_name_breaks_between_its_words_and_not_within_one(stage, visit, width):
    words = [*["customers:", "reconciliation:", "invoices:", "exporting:"] * 4, "again"]
    stage.hold("".join(words))
    here = visit(viewport={"width": width, "height": 900})
    here.list()
    lines = here.page.locator("#result_list .redislock-name").evaluate(
        """name => Array.from(name.childNodes).filter(node => node.data).map(node => {
            const range = document.createRange();
            range.selectNode(node);
            return [node.data, ...Array.from(range.getClientRects(), line => line.top)];
        })"""
    )
    assert [line[0] for line in lines] == words
    assert all(len(line) == 2 for line in lines), "a word goes over two lines"
    assert len({line[1] for line in lines}) > 1, "there was room for all"


@pytest.mark.parametrize("width", [390, 1280, 1600])
def test_a_click_on_a_head_sorts(stage, visit, width):
    stage.machine("web-1", 1, {"name": "b", "ttl": 30}, {"name": "a", "ttl": 90})
    here = visit(viewport={"width": width, "height": 900})
    page = here.list()
    assert here.names() == ["a", "b"]  # By name: a renewal moves no row.
    page.click("th.column-expires_in a")
    here.until(lambda: here.names() == ["b", "a"])
    page.check("#action-toggle")
    assert page.locator(".action-counter").inner_text() == "2 of 2 selected"


# --- force release -------------------------------------------------------------------------------


def test_a_lock_held_by_another_process_is_released_by_force(stage, visit):
    holder = stage.hold("lottery", ttl=6)
    stage.hold("other")
    here = visit()
    page = here.list()
    here.row("lottery").locator("input").check()
    page.select_option("select[name=action]", label="Force release selected held locks")
    page.click(".actions button[name=index]")
    here.sees("The holder is not stopped.")
    here.sees(holder.lease)
    page.fill("#id_reason", "stuck since noon")
    page.click("text=Yes, release it")
    assert "“lottery” was released" in page.locator(".messagelist").inner_text()
    here.sees("Nobody holds this lock right now.")
    holder.send("lost?")
    assert holder.read() == "forced"  # Within one renewal: a third of six seconds.
    page.click("text=History")
    here.sees("stuck since noon")
    here.list()
    assert here.names() == ["other"]


@pytest.mark.proves("P9")
def test_a_stale_confirmation_frees_nobody_newer(stage, visit):
    first = stage.hold("lottery")
    here = visit()
    page = here.list()
    page.click("text=lottery")
    page.click("text=Force release…")
    first.send("release")
    assert first.read() == "released"
    newer = stage.hold("lottery")
    page.click("text=Yes, release it")
    assert "Somebody else holds it now" in page.locator(".messagelist").inner_text()
    assert newer.lease in page.locator("#redislock-lease").inner_text()


def test_those_who_may_only_look_see_no_way_to_release(stage, visit):
    stage.hold("lottery")
    here = visit("looker")
    page = here.list()
    assert here.names() == ["lottery"]
    assert page.locator("select[name=action], input.action-select").count() == 0
    here.mark()
    stage.hold("second")
    here.until(lambda: len(here.names()) == 2)
    assert here.same_page()
    page.click("text=lottery")
    here.sees("Lease")
    assert page.locator("text=Force release").count() == 0


# --- names ---------------------------------------------------------------------------------------

NAMES = {
    "<script>alert(1)</script>": "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>': '"><img src=x onerror=alert(1)>',
    "a\u202eb": r"a\u202eb",
    "javascript:alert(1)": "javascript:alert(1)",
}


def test_any_name_leads_to_its_page_and_can_be_released(stage, visit):
    stage.machine("web-1", 1, *({"name": name} for name in NAMES))
    here = visit()
    page = here.list()
    assert sorted(here.names()) == sorted(NAMES.values())
    for shown in NAMES.values():
        page.locator(".redislock-name", has_text=shown).click()
        here.sees("Lease")
        assert page.locator("#content h1").inner_text() == shown
        page.click("text=Force release…")
        page.click("text=Yes, release it")
        here.sees("Nobody holds this lock right now.")
        here.list()
    here.sees("No lock is held right now.")


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "after"),
    [("list", "No lock is held right now."), ("lock", "Nobody holds this lock right now.")],
)
def test_a_server_that_goes_is_a_message_and_what_was_known_stays(stage, visit, where, after):
    stage.machine("web-3", 4711, {"name": "lottery", "ttl": 600})
    here = visit()
    page = here.list()
    if where == "lock":
        page.click("text=lottery")
    here.mark()
    stage.server.kill()
    here.sees("The locks of default cannot be shown")
    here.sees(stage.server.url.removeprefix("redis://").partition("/")[0])
    nothing_is_brought_up_to_date(here)
    assert "web-3" in page.locator("#result_list, #redislock-lease").inner_text()
    stage.server.start()
    here.sees(after)
    assert page.locator(".redislock-stale").count() == 0


@pytest.mark.parametrize("answer", ["nothing", "bad gateway"])
def test_a_site_that_goes_is_a_message_and_what_was_known_stays(stage, visit, answer):
    stage.hold("lottery", ttl=600)
    here = visit()
    page = here.list()
    here.mark()

    def without_a_site(route):
        if answer == "nothing":
            route.abort()
        else:
            route.fulfill(status=502, body="<h1>Bad gateway</h1>")

    page.route("**/heldlock/", without_a_site)
    here.sees("the site cannot be reached")
    assert here.names() == ["lottery"]
    nothing_is_brought_up_to_date(here)
    page.unroute("**/heldlock/")
    before = as_of(page)
    here.until(lambda: as_of(page) != before)
    assert page.locator("text=cannot be reached").count() == 0
    assert page.locator(".redislock-stale").count() == 0
    assert here.same_page()


def as_of(page):
    """Of when the page says that what it shows is."""
    return str(page.locator("#redislock-as-of").inner_text())


def nothing_is_brought_up_to_date(here):
    """Two more tries leave the time that is shown, and clocks go on from there."""
    page = here.page
    assert page.locator(".redislock-stale").count() == 1
    shown, clock = as_of(page), page.locator("[data-redislock-down]").first
    assert re.fullmatch(r"as of \d\d:\d\d:\d\d", shown)
    tries = 0

    def tried(request):
        nonlocal tries
        tries += 1

    page.on("requestfinished", tried)
    page.on("requestfailed", tried)
    left = [clock.inner_text()]
    while tries < 3:
        page.wait_for_timeout(100)
        left.append(clock.inner_text())
    assert as_of(page) == shown
    assert left == sorted(left, reverse=True)
    assert left[-1] < left[0]
    assert here.same_page()


def test_after_signing_out_elsewhere_the_page_asks_to_sign_in(stage, visit):
    here = visit()
    page = here.list()
    page.context.clear_cookies()
    page.wait_for_selector("#id_username")


def test_everything_works_without_javascript(stage, visit):
    stage.hold("lottery")
    here = visit(java_script_enabled=False)
    page = here.list()
    assert here.names() == ["lottery"]
    assert page.get_by_role("button", name="Stop refreshing").count() == 0
    page.locator("input.action-select").check()
    page.select_option("select[name=action]", label="Force release selected held locks")
    page.click(".actions button[name=index]")
    page.click("text=Yes, release it")
    here.sees("Nobody holds this lock right now.")


# --- looks ---------------------------------------------------------------------------------------


def luminance(page, selector, what):
    """How bright a colour on the page is, from 0 to 1."""
    script = f"one => getComputedStyle(one).{what}"
    # An element that a refresh of the list replaces just now has none.
    colour = wait_until(lambda: page.locator(selector).first.evaluate(script))
    red, green, blue = (
        value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
        for value in (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_badges_and_bars_can_be_read_in_both_themes(stage, visit, scheme):
    stage.machine("web-1", 1, {"name": "lottery", "seconds": 0.01, "min_hold": 60})
    stage.machine("web-1", 1, {"name": "prizes"})
    stage.machine("web-2", 1, {"name": "prizes"})
    here = visit(color_scheme=scheme)
    page = here.list()
    ground = luminance(page, "body", "backgroundColor")
    assert (ground < 0.1) is (scheme == "dark")
    text = luminance(page, ".redislock-held", "color")
    badge = luminance(page, ".redislock-held", "backgroundColor")
    assert contrast(text, badge) >= 4.5
    assert contrast(luminance(page, ".redislock-cooling", "color"), ground) >= 4.5
    page.click("text=prizes")
    here.sees("The last hour")
    for bar in ("held", "wait"):
        assert contrast(luminance(page, f".redislock-bar-{bar}", "fill"), ground) >= 3


def test_the_policy_forbids_what_is_inline_and_a_violation_is_noticed(visit):
    here = visit()
    page = here.list()
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">x</p>')")
    here.until(lambda: here.trouble)
    assert "Content Security Policy" in here.trouble.pop()


def contrast(one, other):
    """As WCAG counts it."""
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


# --- pictures ------------------------------------------------------------------------------------

# On a phone there are no heads above the facts.
LABELS = """row => Array.from(row.children)
    .map(cell => getComputedStyle(cell, "::before").content).join(" ")"""


def busy_site(stage):
    """As many kinds of locks as a busy day has."""
    ids = [f"{number}f5e7a1c-3b0d-4c52-9a41-2f6d8c7b90e{number}" for number in range(10)]
    stage.machine(
        "web-1",
        4711,
        {"name": "payments:reconcile", "task": "shop.tasks.reconcile", "task_id": ids[0]}
        | {"seconds": 0.01, "skipped": 7},
        {"name": "lottery", "task": "lottery.tasks.draw", "task_id": ids[1], "seconds": 0.4}
        | {"min_hold": 600},
        {"name": "report:2026-11", "path": "/reports/2026-11/"},
        {"name": "thumbnails", "task": "media.tasks.shrink", "task_id": ids[7], "limit": 4},
        {"name": "customer:77", "task": "crm.tasks.sync", "task_id": ids[2], "turns": None}
        | {"seconds": 0.9, "ttl": 6},
    )
    stage.machine(
        "web-2",
        4713,
        {"name": "report:2026-11", "path": "/reports/2026-11/"},
        {"name": "customer:77", "task": "crm.tasks.sync", "task_id": ids[3], "turns": None}
        | {"seconds": 0.5, "ttl": 6},
        {"name": "thumbnails", "task": "media.tasks.shrink", "task_id": ids[8], "limit": 4},
        {"name": "orders:import", "task": "shop.tasks.import_orders", "task_id": ids[4]}
        | {"ttl": 60},
    )
    stage.machine(
        "web-3",
        4716,
        {"name": "report:2026-11", "path": "/reports/2026-11/"},
        {"name": "search-index", "ttl": 90},
        {"name": "customer:77", "task": "crm.tasks.sync", "task_id": ids[5], "turns": None}
        | {"seconds": 0.3, "ttl": 6},
    )
    frozen = stage.machine(
        "batch-1",
        982,
        {"name": "invoices:nightly", "task": "billing.tasks.invoices", "task_id": ids[6]}
        | {"ttl": 60},
    )
    client = stage.server.client()
    invoices = lock_keys("redislock", "invoices:nightly").lock
    history = lock_keys("redislock", "customer:77").past
    frozen.stop()
    # It was granted 35 s earlier, and has missed its first renewal.
    value = wait_until(lambda: client.get(invoices)).decode()
    head, fence, since, *rest = value.split("|", 6)
    granted = "|".join([head, fence, str(int(since) - 35_000), *rest])
    client.set(invoices, granted, px=client.pttl(invoices) - 35_000)
    wait_until(lambda: client.llen(history) > 24)


def set_back(stage):
    """From now on: its runs were a while ago, and the frozen holder is overdue."""
    client = stage.server.client()
    client.pexpire(lock_keys("redislock", "invoices:nightly").lock, 24_900)
    runs, (now, _) = lock_keys("redislock", "payments:reconcile").runs, client.time()
    for what, ago in (("success", 26 * 3600), ("skip", 12 * 60)):
        _, _, rest = (client.hget(runs, what) or b"").decode().partition("|")
        client.hset(runs, what, f"{(now - ago) * 1000}|{rest}")


def test_pictures_for_the_docs(stage, visit, picture):
    busy_site(stage)
    wide = {"viewport": {"width": 1360, "height": 900}}
    for scheme in ("light", "dark"):
        set_back(stage)  # For each picture anew.
        here = visit(color_scheme=scheme, **wide)
        page = here.list()
        page.click("#toggle-nav-sidebar")
        page.click("text=Stop refreshing")
        here.sees("was skipped 7 times, the last time 12 min")
        assert {"held", "cooling down", "overdue", "permit 1/4", "permit 2/4"} == set(
            page.locator("#result_list .redislock-badge").all_inner_texts()
        )
        picture(page, f"list-{scheme}")
        page.click("text=customer:77")
        here.sees("Lease")
        assert page.locator(".redislock-bar").count() > 8
        assert page.locator("#nav-sidebar").is_hidden()
        picture(page, f"detail-{scheme}")
    here.list()
    page.click("text=report:2026-11")
    page.click("text=Force release…")
    here.sees("The holder is not stopped.")
    picture(page, "force-release-dark")
    here = visit(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    page = here.list()
    page.click("text=Stop refreshing")
    for label in ("held for", "expires in", "waiters", "fence"):
        assert label in page.locator("#result_list tr").nth(1).evaluate(LABELS)
    picture(page, "list-phone")
