"""The admin's page of held locks: who holds what, since when, and a way to free it.

A page is read-only but for one act: releasing by force, by POST alone, after a confirmation, and
only the lease that was shown.
"""

from __future__ import annotations

import time
import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import django
from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse

from django_redislock import conf, held
from django_redislock.admin import markup, timeline
from django_redislock.admin.changelist import (
    FREE,
    TROUBLE,
    AliasFilter,
    HeldLockList,
    HostFilter,
    Rows,
    StateFilter,
    TaskFilter,
    trouble,
)
from django_redislock.exceptions import InvalidLockName, LockUnavailable
from django_redislock.humanize import counted, duration, visible
from django_redislock.models import HeldLock

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString

PANEL_LINES = 5
PAST_LINES = 12
FREE_LINES = 50
RECORDS = 500
SAME_OCCASION = 60.0  # Seconds.
REFRESH_SECONDS, MOST_REFRESH_SECONDS = 5, 300
# Refreshing may cost the server this share of its time, per open page.
REFRESH_SHARE = 0.05
# Of many locks to release, the rest is not tried after so long without an answer.
MOST_SECONDS_UNANSWERED = 10.0


@admin.register(HeldLock)
class HeldLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """See docs/admin.md."""

    list_display = (
        "name",
        "state",
        "holder",
        "expires_in",
        "held_for",
        "waiters",
        "renewals",
        "fence",
    )
    list_filter = (StateFilter, HostFilter, TaskFilter, AliasFilter)
    search_fields = ("key",)  # HeldLockList searches; this lets the search box appear.
    search_help_text = (
        "Part of a name, host, task, task id, command or path. Free locks are found by name."
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ("force_release",)
    change_list_template = "admin/django_redislock/heldlock/change_list.html"

    class Media:
        css = {"all": ("django_redislock/held.css",)}
        js = ("django_redislock/held.js",)

    # --- who may what -------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody makes locks here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes them here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Force release is another permission."""
        return False

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """Whether this user may see locks and release them by force."""
        codename = get_permission_codename("force_release", self.opts)
        return self.has_view_permission(request) and request.user.has_perm(
            f"{self.opts.app_label}.{codename}"
        )

    # --- the list -----------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[HeldLockList]:
        """Rows come from the lock servers."""
        return HeldLockList

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """With the alias if there are several."""
        many = _has_many_aliases()
        return (*self.list_display, "alias") if many else self.list_display

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The list, and the confirmation of its action."""
        response = super().changelist_view(request, extra_context)
        context = getattr(response, "context_data", None) or {}
        if "cl" in context:
            context.update(self._around(context["cl"]))
        return response

    def _around(self, cl: HeldLockList) -> dict[str, Any]:
        """What the page shows beside the table."""
        rows, started = cl.queryset, time.monotonic()
        skipped = _only_skipped([one for one in rows.aliases if one not in rows.problems])
        free = _free(rows, cl.query, cl.params)
        seconds = rows.seconds + time.monotonic() - started
        bearable = min(round(seconds / REFRESH_SHARE), MOST_REFRESH_SECONDS)
        return {
            "title": "Held locks",
            "as_of": markup.moment(rows.as_of) if rows.as_of else None,
            "refresh": max(REFRESH_SECONDS, bearable),
            "problems": rows.problems,
            "missing": ", ".join(rows.problems),
            "partial": rows.partial,
            "skipped": skipped[:PANEL_LINES],
            "more_skipped": len(skipped[PANEL_LINES:]),
            "most_records": RECORDS,
            "only_free": cl.params.get("state") == FREE,
            "free": free[:FREE_LINES],
            "more_free": len(free[FREE_LINES:]),
        }

    @admin.display(description="")
    def action_checkbox(self, obj: HeldLock) -> SafeString:
        """The box carries the lease that is shown, so that no newer one is freed."""
        box = forms.CheckboxInput(
            {"class": "action-select", "aria-label": f"Select lock {visible(obj.name)}"},
            lambda value: False,
        )
        return box.render(helpers.ACTION_CHECKBOX_NAME, _reference(obj.lock))

    @admin.display(ordering="name")
    def name(self, obj: HeldLock) -> SafeString:
        """The name, with what is not seen written out."""
        return markup.name(obj.name)

    @admin.display(ordering="state")
    def state(self, obj: HeldLock) -> SafeString:
        """Badges."""
        return markup.state(obj.lock)

    @admin.display(ordering="holder")
    def holder(self, obj: HeldLock) -> SafeString:
        """Where the owner is, and what it is busy with."""
        return markup.holder(obj.lock)

    @admin.display(ordering="held_for")
    def held_for(self, obj: HeldLock) -> SafeString:
        """Counts on in the browser."""
        return markup.counting(obj.lock.held_for, "up")

    @admin.display(ordering="expires_in")
    def expires_in(self, obj: HeldLock) -> SafeString:
        """Counts down in the browser, with a gauge."""
        return markup.expiry(obj.lock)

    @admin.display(ordering="renewals")
    def renewals(self, obj: HeldLock) -> int:
        """How often it was renewed."""
        return obj.lock.renewals

    @admin.display(ordering="waiters")
    def waiters(self, obj: HeldLock) -> SafeString:
        """How many wait; stands out if any do."""
        return markup.waiters(obj.lock.waiters)

    @admin.display(ordering="fence")
    def fence(self, obj: HeldLock) -> str | None:
        """The fencing token. It is there to be compared, so it has no thousands separators."""
        return None if obj.lock.fence is None else str(obj.lock.fence)

    @admin.display(ordering="alias")
    def alias(self, obj: HeldLock) -> str:
        """Where it is kept."""
        return visible(obj.alias)

    # --- one lock -----------------------------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> HeldLock | None:
        """The page of a lock, whether it is held or not."""
        return HeldLock.with_key(object_id)

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """All about one lock."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        page = HeldLock.with_key(unquote(object_id))
        if page is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined,no-any-return]
        detail, problem, record, now = None, "", None, time.time()
        try:
            detail = held.detail(page.name, using=page.alias)
            record = _record(detail)
        except TROUBLE as error:
            problem = trouble(error, page.alias)
        lock = detail.lock if detail else None
        context = {
            **self._page_context(request, visible(page.name)),
            "page": page,
            "as_of": markup.moment(now) if detail else None,
            "refresh": REFRESH_SECONDS,
            "problems": {visible(page.alias): problem} if problem else {},
            "detail": detail,
            "facts": markup.facts(lock) if lock else [],
            "reference": _reference(lock) if lock else "",
            "waiting": [markup.waiter(one) for one in detail.waiters] if detail else [],
            "unnamed_waiters": lock.waiters - len(detail.waiters) if detail and lock else 0,
            "past": [markup.past(lease) for lease in detail.past[: -PAST_LINES - 1 : -1]]
            if detail
            else [],
            "earlier": max(0, len(detail.past) - PAST_LINES) if detail else 0,
            "timeline": timeline.draw(detail) if detail else None,
            "record": record,
            "may_release": self.has_force_release_permission(request),
            **(extra_context or {}),
        }
        template = "admin/django_redislock/heldlock/detail.html"
        return TemplateResponse(request, template, context)

    def _page_context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        """What each page of an admin site is made with."""
        request.current_app = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "breadcrumb_list": django.VERSION >= (6, 1),
        }

    # --- force release ------------------------------------------------------------------------

    def get_urls(self) -> list[Any]:
        """One more: the confirmation and the act."""
        view = self.admin_site.admin_view(self.force_release_view)
        return [
            path("force-release/", view, name="django_redislock_heldlock_force_release"),
            *super().get_urls(),
        ]

    @admin.action(
        permissions=["force_release"], description="Force release selected %(verbose_name_plural)s"
    )
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        """From the list: what was ticked, each box for one lease, goes to the confirmation."""
        return self._confirm(request, request.POST.getlist(helpers.ACTION_CHECKBOX_NAME))

    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Asks for confirmation, and having it releases exactly the leases that were shown."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_force_release_permission(request):
            raise PermissionDenied
        references = request.POST.getlist("lease")
        if "confirmed" not in request.POST:
            return self._confirm(request, references)
        leases = list(filter(None, map(_referred, references)))
        self._release_all(request, leases)
        if len(leases) == len(references) == 1:
            return self._redirect("change", quote(leases[0][0].key))
        return self._redirect("changelist")

    def _redirect(self, view: str, *args: str) -> HttpResponseRedirect:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}"
        return HttpResponseRedirect(reverse(name, args=args, current_app=self.admin_site.name))

    def _confirm(self, request: HttpRequest, references: list[str]) -> HttpResponse:
        locks, gone, states = [], [], set()
        problems: dict[str, str] = {}
        for page, id in filter(None, map(_referred, references)):  # noqa: A001
            if page.alias in problems:
                continue  # A silent server is asked once.
            try:
                lock = held.get(page.name, using=page.alias)
            except TROUBLE as error:
                problems[page.alias] = trouble(error, page.alias)
                continue
            if lock is not None and lock.id == id:
                shown = {"title": visible(page.name), "reference": _reference(lock)}
                locks.append((shown, markup.facts(lock)))
                states.add(lock.state)
            else:
                gone.append((visible(page.name), lock and _whose(lock)))
        if problems and not (locks or gone):
            for problem in problems.values():
                messages.error(request, problem)
            return self._redirect("changelist")
        context = {
            **self._page_context(request, "Force release"),
            "problems": {visible(alias): problem for alias, problem in problems.items()},
            "locks": locks,
            "gone": gone,
            "at_work": states - {"cooling", "foreign"},
            "states": states,
        }
        template = "admin/django_redislock/heldlock/force_release_confirmation.html"
        return TemplateResponse(request, template, context)

    def _release_all(self, request: HttpRequest, leases: list[tuple[HeldLock, str]]) -> None:
        unanswered = 0.0
        for number, (page, id) in enumerate(leases):  # noqa: A001
            if unanswered > MOST_SECONDS_UNANSWERED:
                left = counted(len(leases) - number, "lock")
                messages.error(request, f"{left} more: not tried, since the server is silent.")
                break
            started = time.monotonic()
            try:
                self._release(request, page, id)
            except TROUBLE as error:
                unanswered += time.monotonic() - started
                problem = trouble(error, page.alias)
                messages.error(request, f"The lock “{page}” was not released. {problem}")

    def _release(self, request: HttpRequest, page: HeldLock, id: str) -> None:  # noqa: A002
        """Release one lease, and say what came of it."""
        lock = f"The lock “{page}”"
        reason = request.POST.get("reason", "")[:200]
        by = f"{request.user.get_username()} in the admin"
        before = held.get(page.name, using=page.alias)
        if held.force_release(page.name, id, using=page.alias, by=by, reason=reason):
            seen = before if before is not None and before.id == id else None
            holder = _whose(seen) if seen else "its holder"
            done = f"Released by force: lease {visible(id)} of {holder}."
            if seen and seen.state == "foreign":
                done = f"Released by force: {holder}, which was not a lock of ours."
            self.log_change(request, page, f"{done} {visible(reason)}".strip())
            if seen and seen.state == "foreign":
                effect = f"What stood at its key, {holder}, is deleted."
            elif seen and seen.state == "cooling":
                effect = f"{holder} was done with it."
            else:
                effect = (
                    f"The code of {holder} is not stopped; it learns of the loss when it next"
                    " renews or checks its lease."
                )
            messages.success(request, f"{lock} was released. {effect}{_who_follows(page)}")
        elif before is None:
            messages.warning(request, f"{lock} was free already. Nothing was released.")
        elif before.id == id:
            messages.warning(request, f"{lock} was not released: its lease has just ended.")
        else:
            foreign = before.state == "foreign"
            now = "its key now holds" if foreign else "somebody newer holds it now,"
            messages.warning(request, f"{lock} was not released: {now} {_whose(before)}.")


def _reference(lock: held.HeldLock) -> str:
    """One lease of a lock, as forms carry it."""
    return f"{HeldLock.of(lock).key}:{lock.id}"


def _referred(reference: str) -> tuple[HeldLock, str] | None:
    """The lock and the lease id; None if it is no reference of ours."""
    key, colon, id = reference.partition(":")  # noqa: A001
    page = HeldLock.with_key(key)
    return (page, id) if page and colon else None


def _whose(lock: held.HeldLock) -> str:
    """Its owner; of what is not ours, what it is."""
    return lock.strange or visible(str(lock.owner))


def _who_follows(page: HeldLock) -> str:
    with suppress(LockUnavailable):  # The release is done, whether the server goes on or not.
        if now := held.get(page.name, using=page.alias):
            return f" {_whose(now)} has it now."
    return ""


def _has_many_aliases() -> bool:
    try:
        return len(conf.aliases()) > 1
    except ImproperlyConfigured:
        return False


def _record(detail: held.Detail) -> list[tuple[str, Any]]:
    name = detail.name
    if detail.lock and detail.lock.owner.permit:
        name = name.rpartition("#")[0]  # The record is that of all permits.
    found = held.record(name, using=detail.alias)
    return markup.record(found) if found else []


def _only_skipped(aliases: list[str]) -> list[dict[str, Any]]:
    """Tasks that have only been skipped since their last success, the longest ago first."""
    found = []
    for alias in aliases:
        with suppress(LockUnavailable, ImproperlyConfigured):  # The list has said so already.
            stuck = [one for one in held.records(using=alias, limit=RECORDS) if _is_stuck(one)]
            # While a run is at work, the others are skipped: that is what the lock is for.
            at_work = held.at_work([one.name for one in stuck], using=alias)
            found += [one for one in stuck if one.name not in at_work]
    found.sort(key=lambda one: one.last_success.at if one.last_success else 0.0)
    return [
        {
            "key": quote(HeldLock.named(one.name, one.alias).key),
            "name": markup.name(one.name),
            "skips": one.skips,
            "last_success": one.last_success and duration(one.last_success.ago),
            "last_skip": one.last_skip and duration(one.last_skip.ago),
            "never_ended": markup.never_ended(one),
        }
        for one in found
    ]


def _is_stuck(record: held.Record) -> bool:
    skip, success, failure = record.last_skip, record.last_success, record.last_failure
    if skip is None or not record.skips:
        return False
    if skip.why in {"done", "duplicate"}:  # Its work was done by then.
        return False
    done = max(run.at if run else 0.0 for run in (success, failure))
    # The runs of other servers on the same occasion are skipped too: that is what locks are for.
    return skip.at > done + SAME_OCCASION


def _free(rows: Rows, query: str, chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Known locks that nobody holds, if they are looked for: those that match, or all."""
    search = unicodedata.normalize("NFC", query.strip())
    state, only = chosen.get("state", ""), chosen.get("alias", "")
    if not (state == FREE or (search and not state)) or chosen.keys() & {"host", "task"}:
        return []
    found = []
    for alias in rows.aliases:
        if only in {"", alias} and alias not in rows.problems:
            try:
                found += [(alias, *one) for one in _free_at(alias, search).items()]
            except (LockUnavailable, ImproperlyConfigured) as error:
                rows.problems[alias] = trouble(error, alias)
    return [
        {
            "key": quote(HeldLock.named(name, alias).key),
            "name": markup.name(name),
            "alias": visible(alias) if len(rows.aliases) > 1 else "",
            "last": last,
        }
        for alias, name, last in found
    ]


def _free_at(alias: str, search: str) -> dict[str, str]:
    """Those of one alias, and what became of each the last time."""
    found = {
        one.name: markup.last_runs(one)
        for one in held.records(using=alias, limit=RECORDS)
        if search.casefold() in one.name.casefold() and not one.under_way
    }
    for lock in held.look_at([*found], using=alias):
        del found[lock.name]
    with suppress(InvalidLockName):  # What is searched for need not be a name.
        detail = held.detail(search, using=alias)
        if detail.past and not detail.lock:
            found.setdefault(detail.name, markup.last_lease(detail))
    return found
