"""A site in a process of its own, a browser that visits it, and others that pause locks.

The test itself only drives the browser: Playwright keeps an event loop running in this thread, in
which locks would behave as in asynchronous code.
"""

import importlib.util
import os
import shutil

import pytest

from tests import ROOT
from tests.conftest import skip_or_fail
from tests.operations.browser import scene
from tests.support import site
from tests.support.processes import Child
from tests.support.servers import KIND, Server
from tests.support.waiting import HUNG, wait_until

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WINDOW = {"width": 1280, "height": 720}


class Stage:
    """A lock server, and a site that shows its locks."""

    def __init__(self, folder, *others, prelude=""):
        self.server = Server(KIND).start()
        self.redislock = {"default": {"LOCATION": self.server.url, "TTL": 30}}
        for alias in others:
            self.redislock[alias] = {**self.redislock["default"], "KEY_PREFIX": alias}
        self._folder = str(folder)
        self._site = Child(site.serve, self._folder, redislock=self.redislock, prelude=prelude)
        self.url = self._site.read(timeout=HUNG)
        self.sessions = {}  # Of each user who has signed in.
        self.windows = {}  # Unused ones, by who looks, and how.
        self._actors = []

    def hold(self, name, **how):
        """Another process takes the lock; see scene.hold()."""
        return self._enter(scene.hold, name, **how)

    def machine(self, host, pid, *locks):
        """A machine of that name takes many locks; see scene.machine()."""
        return self._enter(scene.machine, host, pid, list(locks))

    def complete(self, *runs):
        """Note runs as completed in the database of the site; see scene.complete()."""
        self._enter(scene.complete, self._folder, list(runs))

    def clear(self):
        """All go, and nothing is held."""
        while self._actors:
            self._actors.pop().close()
        if not self.server.running:
            self.server.start()
        self.server.client().flushall()

    def close(self):
        self.clear()
        self._site.close()
        self.server.close()

    def _enter(self, what, *args, **kwargs):
        child = Child(what, *args, redislock=self.redislock, **kwargs)
        self._actors.append(child)
        child.lease = child.read(timeout=HUNG)
        return child


@pytest.fixture(scope="module")
def theatre(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("site"))
    yield stage
    stage.close()


@pytest.fixture
def stage(theatre):
    """The site, with nobody on the stage yet."""
    yield theatre
    theatre.clear()


@pytest.fixture(scope="module")
def chromium():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None or importlib.util.find_spec("playwright") is None:
        skip_or_fail("browser tests need Chromium, and playwright from PyPI")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A window on the admin, signed in; the page is still empty.

    To open one takes the browser a second, so it is kept for the next test that looks in the same
    way. Nothing of a visit stays: cookies, what the window stores, routes, its size and colours.
    """

    def __init__(self, chromium, stage, user, *, viewport=WINDOW, color_scheme="light", **options):
        if user not in stage.sessions:
            stage.sessions[user] = self._sign_in(chromium.new_context(base_url=stage.url), user)
        if options.get("is_mobile"):
            options["viewport"] = viewport  # Which then also is that of the screen.
        self._unused = stage.windows.setdefault(f"{user} {sorted(options.items())}", [])
        if not self._unused:
            self._unused.append(chromium.new_context(base_url=stage.url, **options).new_page())
        self.page = self._unused.pop()
        self.page.context.clear_cookies()
        self.page.context.add_cookies(stage.sessions[user]["cookies"])
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=color_scheme)
        self.page.set_default_timeout(HUNG * 1000)
        self.trouble = []  # What a developer would see in red.
        self._listeners = {
            "pageerror": lambda error: self.trouble.append(str(error)),
            "console": self._heard,
            "dialog": self._asked,
        }
        for event, listener in self._listeners.items():
            self.page.on(event, listener)

    def list(self, query=""):
        """Go to the list of held locks."""
        self.page.goto(f"/admin/django_redislock/heldlock/{query}")
        return self.page

    def names(self):
        """The names in the list now."""
        from playwright.sync_api import Error

        try:
            return self.page.locator("#result_list .redislock-name").all_inner_texts()
        except Error:  # The page was just being loaded anew.
            return []

    def sees(self, text):
        """Wait until this text is on the page."""
        return self.page.get_by_text(text).first.wait_for()

    def row(self, name):
        """The line of a lock."""
        return self.page.locator("#result_list tbody tr").filter(
            has=self.page.locator(f'.redislock-name[title="{name}"]')
        )

    def mark(self):
        """Remember this document: see same_page()."""
        self.page.evaluate("window.marked = true")

    def same_page(self):
        """Whether it was brought up to date without a reload since mark()."""
        return bool(self.page.evaluate("window.marked === true"))

    def until(self, condition, message=""):
        """Poll; the browser goes on meanwhile."""
        return wait_until(condition, message=message, every=0.05)

    def close(self):
        self.page.unroute_all(behavior="ignoreErrors")
        if self.page.url.startswith("http"):
            self.page.evaluate("sessionStorage.clear()")
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)
        self.page.goto("about:blank")
        self._unused.append(self.page)

    def _sign_in(self, context, user):
        page = context.new_page()
        page.goto("/admin/login/?next=/admin/")
        page.fill("[name=username]", user)
        page.fill("[name=password]", site.PASSWORD)
        page.click("[type=submit]")
        page.wait_for_url("**/admin/")
        state = context.storage_state()
        context.close()
        return state

    def _heard(self, message):
        # The network's own complaints are part of the play: a server that is down, no favicon.
        if message.type in {"error", "warning"} and "Failed to load resource" not in message.text:
            self.trouble.append(message.text)

    def _asked(self, dialog):
        self.trouble.append(f"a dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def visit(chromium, stage):
    """Open a window: visit("operator", color_scheme="dark").

    No page may raise an error, open a dialog or break its Content-Security-Policy.
    """
    visits = []

    def open_window(user="operator", **options):
        visits.append(Visit(chromium, stage, user, **options))
        return visits[-1]

    yield open_window
    for one in visits:
        one.close()
    assert [trouble for one in visits for trouble in one.trouble] == []


@pytest.fixture
def picture(tmp_path):
    """Take the picture docs/screenshots/NAME.png: kept if the environment has SCREENSHOTS."""
    folder = ROOT / "docs/screenshots" if os.environ.get("SCREENSHOTS") else tmp_path

    def take(page, name):
        folder.mkdir(exist_ok=True)
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return take
