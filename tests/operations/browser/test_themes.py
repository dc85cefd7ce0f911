"""The pages within admins of another look: all that matters is seen, and can be used.

These packages replace Django's templates and styles, so the pages look plainer there.
"""

import contextlib
import importlib.util

import pytest

from tests.conftest import skip_or_fail
from tests.operations.browser.conftest import Stage

pytestmark = pytest.mark.slow

WINDOWS = {
    "light": {"viewport": {"width": 1360, "height": 900}},
    "dark": {"viewport": {"width": 390, "height": 844}, "has_touch": True},
}


@pytest.fixture(scope="module", params=["unfold", "jazzmin"])
def theatre(request, tmp_path_factory):
    if importlib.util.find_spec(request.param) is None:
        skip_or_fail(f"this needs django-{request.param} from PyPI")
    settings = {
        "DJANGO_SETTINGS_MODULE": "tests.operations.browser.themed_settings",
        "TESTS_THEME": request.param,
    }
    prelude = f"import os; os.environ |= {settings}"
    stage = Stage(tmp_path_factory.mktemp("site"), prelude=prelude)
    yield stage
    stage.close()


# Of these texts, those that nobody sees: they are missing, cut or covered.
UNSEEN = """
texts => texts.filter(text => {
    const has = one => one.textContent.includes(text);
    const innermost = Array.from(document.body.querySelectorAll("*:not(script, style, option)"))
        .filter(one => has(one) && one.checkVisibility() && !Array.from(one.children).some(has));
    return !innermost.some(one => {
        one.scrollIntoView({behavior: "instant", block: "center", inline: "center"});
        const rect = one.getClientRects()[0];
        const top = rect && document.elementFromPoint(
            rect.left + rect.width / 2, rect.top + rect.height / 2
        );
        return top && (one.contains(top) || top.contains(one));
    });
})
"""


def sees_all(here, *texts):
    """Soon: on a phone, a menu of the theme covers the page until its script has closed it."""
    page = here.page
    with contextlib.suppress(AssertionError):
        here.until(lambda: page.evaluate(UNSEEN, texts) == [])
    assert page.evaluate(UNSEEN, texts) == []


def test_what_matters_is_seen_and_can_be_done_in_a_window_and_on_a_phone(stage, visit):
    stage.machine(
        "web-1", 1, {"name": "lottery", "task": "lottery.tasks.draw", "task_id": "7" * 36}
    )
    stage.machine("web-1", 1, {"name": "prizes", "task": "t", "seconds": 0.01, "turns": 3})
    stage.machine("web-2", 2, {"name": "lottery"})
    for scheme, window in WINDOWS.items():
        here = visit("root", color_scheme=scheme, **window)
        page = here.list()
        sees_all(here, "lottery", "held", "web-1:1", "lottery.tasks.draw", "7" * 36)
        sees_all(here, "as of", "Stop refreshing")
        here.row("lottery").locator("input").check()
        assert page.locator(".actions").locator("select:visible, .select2:visible").count()
        page.locator("#result_list").get_by_role("link", name="lottery").click()
        here.sees("Lease of lottery")
        sees_all(here, "Lease of lottery", "Force release…", "Pause…")
        sees_all(here, "Waiting, the next first", "web-2:2", "waiting now")
        page.get_by_role("button", name="Force release…").click()
        here.sees("No, take me back")
        sees_all(here, "The holder is not stopped.", "Reason, for the log")
    page.get_by_role("button", name="Yes, release it").click()
    here.sees("was released.")


def test_the_list_brings_itself_up_to_date(stage, visit):
    here = visit("root")
    here.list()
    here.mark()
    newer = stage.hold("newer")
    here.until(lambda: "newer" in here.names())
    newer.send("release")
    here.until(lambda: "newer" not in here.names())
    assert here.same_page()
