"""No secret leaves through a page, a command, a log, a check, an exception or a repr."""

import io
import logging
import re
import traceback

import pytest
from django.core import checks
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from django_redislock import LockError, distributed_lock, doctor, held
from django_redislock.admin.page import HeldLockAdmin
from django_redislock.backends.registry import backends
from django_redislock.conf import conf
from django_redislock.models import LockPage
from django_redislock.rules.keys import lock_keys
from tests import ROOT
from tests.support import site
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

SECRET = "s3cr3t-pa55"
LIST = "/admin/django_redislock/heldlock/"


@pytest.fixture
def ears(caplog):
    caplog.set_level(logging.DEBUG)
    return Ears(caplog)


class Ears:
    """Everything that was said anywhere."""

    def __init__(self, caplog):
        self._log = caplog
        self._heard = []

    def hear(self, *things):
        self._heard += [str(thing) for thing in things] + [repr(thing) for thing in things]

    def attempt(self, act):
        """Do it; hear what it returns, or the whole traceback of what it raises."""
        try:
            self.hear(act())
        except Exception as error:
            self.hear(error, error.args, "".join(traceback.format_exception(error)))

    def command(self, *args):
        """Run ``manage.py locks``."""
        out = io.StringIO()
        try:
            call_command("locks", *args, stdout=out, stderr=out)
        except CommandError as error:
            self.hear("".join(traceback.format_exception(error)))
        self.hear(out.getvalue())

    def heard(self, *secrets):
        """What has any of these secrets in it."""
        everything = [*self._heard, self._log.text]
        assert len(everything) > 40
        return [one for one in everything if any(secret in one for secret in secrets)]


ACTS = (
    *("list", "list --json", "show lottery", "show lottery --json", "doctor", "doctor --json"),
    *("watch", "runs", "runs lottery --json", "explain lottery", "explain never-seen --json"),
    "clean --all --dry-run",
)


def listen_everywhere(ears, client):
    """Use every way that shows something of locks or of their server."""
    lock = distributed_lock("lottery", ttl=30, wait=0)
    for look in (
        lambda: conf("default"),
        lambda: backends["default"],
        lambda: vars(backends["default"].conf).keys(),
        lock.acquire,
        lambda: lock,
        lambda: lock.lease,
        held.list,
        lambda: held.detail("lottery"),
        lambda: list(doctor.examine("default")),
    ):
        ears.attempt(look)
    for deploy in (False, True):
        for message in checks.run_checks(include_deployment_checks=deploy):
            ears.hear(message, message.msg, message.hint, message.obj)
    for act in ACTS:
        ears.command(*act.split())
    page = LockPage.named("lottery", "default")
    address = reverse("admin:django_redislock_heldlock_change", args=[page.key])
    lease = {"lease": f"{page.key}:{lock.lease.id if lock.lease else '0' * 16}"}
    for response in (
        client.get(LIST),
        client.get(address),
        client.post(f"{LIST}force-release/", lease),
        client.post(f"{LIST}force-release/", {**lease, "confirmed": "yes"}, follow=True),
    ):
        ears.hear(response.content.decode())
    ears.command("release", "lottery", "--yes", "--json")
    ears.attempt(lock.release)


@pytest.fixture
def operator(db):
    client = Client()
    client.force_login(site.add_user("operator"))
    return client


@pytest.mark.proves("P10")
@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("url", "right"),
        ("url", "wrong"),
        ("url", "silent"),
        ("options", "right"),
        ("options", "refused"),
        ("options", "cut"),
    ],
)
def test_a_password_never_appears(locks, make_server, make_proxy, ears, operator, place, answer):
    server = make_server(requirepass="other" if answer == "wrong" else SECRET)
    proxy = make_proxy(server)
    options = {"socket_timeout": 0.2} if answer == "silent" else {}
    if place == "url":
        locks.configure(LOCATION=f"redis://:{SECRET}@127.0.0.1:{proxy.port}/0", OPTIONS=options)
    else:
        options = {**options, "username": "default", "password": SECRET}
        locks.configure(LOCATION=f"redis://127.0.0.1:{proxy.port}/0", OPTIONS=options)
    if answer == "refused":
        proxy.refuse()
    elif answer == "silent":
        proxy.blackhole()
    elif answer == "cut":
        proxy.rule("EVAL*", "cut_before", times=None)
    listen_everywhere(ears, operator)
    assert ears.heard(SECRET) == []


@pytest.mark.parametrize(
    "setting",
    [
        {"LOCATION": f"redis://:{SECRET}@host:port/0"},
        {"LOCATION": f"reddis://:{SECRET}@host"},
        {"LOCATION": [f"redis://:{SECRET}@a", f"redis://:{SECRET}@b"]},
        {"LOCATION": ("redis://a", 1, SECRET)},
        {"LOCATION": f"redis://:{SECRET}@a", "TTL": "x"},
        {"OPTIONS": {"password": SECRET, "no_such_option": SECRET}},
        {"OPTIONS": {"password": SECRET, "socket_timeout": "x"}},
        {"OPTIONS": [SECRET]},
        {"PASSWORD": SECRET},
    ],
)
def test_a_malformed_setting_is_reported_without_its_secrets(settings, ears, operator, setting):
    settings.REDISLOCK = {"default": setting}
    listen_everywhere(ears, operator)
    assert ears.heard(SECRET) == []


@pytest.mark.proves("P10")
def test_a_token_never_appears(locks, ears, operator):
    other = distributed_lock("lottery:2")
    with pytest.raises(LockError), other:  # noqa: PT012 - at its end: it is lost
        tokens = {locks.redis.get(lock_keys(locks.prefix, "lottery:2").lock)[:32].decode()}
        listen_everywhere(ears, operator)
        ears.command("clean", "--all", "--yes", "--json")
    forced = locks.redis.get(lock_keys(locks.prefix, "lottery").forced)
    if forced is not None:
        tokens.add(forced[16:48].decode())
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
    assert ears.heard(*tokens) == []


def test_waiters_are_shown_without_their_tokens(locks):
    waiting = distributed_lock("lottery", wait=HUNG)
    with distributed_lock("lottery"):
        acquired = in_thread(waiting.acquire)
        wait_until(lambda: waiters("lottery") == 1)
        token, _ = locks.redis.zrange(lock_keys(locks.prefix, "lottery").queue, 0, -1)
        assert token.decode() not in repr(held.detail("lottery"))
    assert acquired.result(HUNG)
    waiting.release()


def test_names_that_forge_log_lines_are_refused_or_escaped(locks, ears, caplog):
    with pytest.raises(LockError):
        distributed_lock("lottery\nWARNING root: all is well")
    with distributed_lock("lottery") as lease:
        held.force_release("lottery", "0" * 16, by="ann\nroot: all is well", reason="\x1b[2J\n")
        assert lease.held
    for record in caplog.records:
        assert "\n" not in record.getMessage()
        assert "\x1b" not in record.getMessage()


PACKAGE = ROOT / "django_redislock"


@pytest.mark.proves("P10")
def test_nothing_is_unpickled_and_nothing_is_marked_as_safe_html():
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        assert not re.search(r"^\s*(import|from) (pickle|marshal|shelve)\b", source, re.MULTILINE)
        assert "mark_safe" not in source
        assert not re.search(r"\b(eval|exec)\(", source)
    for file in PACKAGE.rglob("*.html"):
        source = file.read_text()
        assert "|safe" not in source
        assert "autoescape" not in source


@pytest.mark.proves("R12")
def test_scripts_take_what_comes_from_outside_as_arguments_only():
    """No script is put together from names or values; each is the same for every call."""
    for file in (PACKAGE / "lua").glob("*.lua"):
        assert "loadstring" not in file.read_text()
    source = (PACKAGE / "rules/scripts.py").read_text()
    assert ".format(" not in source
    assert "% (" not in source


def test_certificates_are_never_left_unchecked():
    for file in PACKAGE.rglob("*.py"):
        assert not re.search(r"ssl_cert_reqs|CERT_NONE|check_hostname", file.read_text())


def test_the_admin_offers_two_acts_and_each_needs_its_own_permission():
    assert HeldLockAdmin.actions == ("force_release", "pause")
    assert HeldLockAdmin.force_release.allowed_permissions == ["force_release"]
    assert HeldLockAdmin.pause.allowed_permissions == ["pause"]


def test_each_point_of_the_security_list_is_answered_in_the_docs():
    page = (ROOT / "SECURITY.md").read_text()
    answered = re.findall(r"^- (S\d+), ", page, re.MULTILINE)
    assert answered == [f"S{number}" for number in range(1, 23)]
    # Tests that are named there exist.
    for test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page):
        file, name = test
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), name
