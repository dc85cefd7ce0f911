"""The admin's page of held locks: their holders, since when, and a way to free them.

A page is read-only but for two acts, each by POST alone and with a permission of its own. One
releases by force, after a confirmation, only the lease that was shown. The other pauses a lock.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
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
from django_redislock.admin import last_hour, markup, panels
from django_redislock.admin.changelist import (
    COLUMNS,
    AliasFilter,
    HeldLockList,
    HostFilter,
    StateFilter,
    TaskFilter,
)
from django_redislock.exceptions import LockTimeout, LockUnavailable
from django_redislock.humanize import counted, duration, parse_duration, visible
from django_redislock.models import LockPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString

PAST_LINES = 12
REFRESH_SECONDS, MOST_REFRESH_SECONDS = 5, 300
# Refreshing may cost the server this share of its time, per open page.
REFRESH_SHARE = 0.05
# After so long without an answer, the rest of many locks of an alias is not tried.
MOST_SECONDS_UNANSWERED = 10.0


@admin.register(LockPage)
class HeldLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """See docs/admin.md."""

    list_display = (*COLUMNS.values(),)
    list_filter = (StateFilter, HostFilter, TaskFilter, AliasFilter)
    search_fields = ("key",)  # HeldLockList searches; this only shows the search box.
    search_help_text = (
        "Part of a name, host, task, task id, command or path. Free locks are found by name."
    )
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    actions = ("force_release", "pause")
    change_list_template = "admin/django_redislock/heldlock/change_list.html"

    class Media:
        css = {"all": ("django_redislock/held.css",)}
        js = ("django_redislock/held.js",)

    # --- permissions --------------------------------------------------------------------------

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
        return self._has_permission(request, "force_release")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        """Whether this user may see locks and keep them from everybody."""
        return self._has_permission(request, "pause")

    def _has_permission(self, request: HttpRequest, act: str) -> bool:
        codename = get_permission_codename(act, self.opts)
        return self.has_view_permission(request) and request.user.has_perm(
            f"{self.opts.app_label}.{codename}"
        )

    # --- the list -----------------------------------------------------------------------------

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[HeldLockList]:
        """Rows come from the lock servers."""
        return HeldLockList

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Leave out the alias, or the server, if there is only one."""
        is_shown = {"alias": False, "where": False}
        with suppress(ImproperlyConfigured):
            known = conf.aliases()
            is_shown["alias"] = len(known) > 1
            is_shown["where"] = any(map(held.tells_where, known))
        return [column for name, column in COLUMNS.items() if is_shown.get(name, True)]

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
        """The context beside the table."""
        rows, started = cl.queryset, time.monotonic()
        beside = panels.beside(rows, cl.query, cl.params)
        if beside["free"]:
            cl.full_result_count = cl.result_count  # Or it would say "0 results" above a list.
        seconds = rows.seconds + time.monotonic() - started
        bearable = min(round(seconds / REFRESH_SHARE), MOST_REFRESH_SECONDS)
        return {
            "title": "Held locks",
            "as_of": markup.moment(rows.as_of) if rows.as_of else None,
            "refresh": max(REFRESH_SECONDS, bearable),
            "problems": rows.problems,
            "missing": ", ".join(rows.problems),
            "partial": rows.partial,
            **beside,
        }

    @admin.display(description="")
    def action_checkbox(self, obj: LockPage) -> SafeString:
        """The box carries the shown lease, so that no newer one is freed."""
        box = forms.CheckboxInput(
            {"class": "action-select", "aria-label": f"Select lock {visible(obj.name)}"},
            lambda value: False,
        )
        return box.render(helpers.ACTION_CHECKBOX_NAME, _reference(obj.lock))

    # --- one lock -----------------------------------------------------------------------------

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> LockPage | None:
        """The page of a lock, whether it is held or not."""
        return LockPage.with_key(object_id)

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
        page = LockPage.with_key(unquote(object_id))
        if page is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined,no-any-return]
        context: dict[str, Any] = {
            **self._page_context(request, visible(page.name)),
            "page": page,
            "name": markup.name(page.name),
            "refresh": REFRESH_SECONDS,
            "may_release": self.has_force_release_permission(request),
            "may_pause": self.has_pause_permission(request),
        }
        now = time.time()
        try:
            detail = held.detail(**_exactly(page))
            context |= {"as_of": markup.moment(now), **_sections(detail)}
            record = held.record_of(detail)
            context["record"] = markup.facts(record.facts) if record else []
            context["hour"] = last_hour.draw(detail, record, conf.conf(page.alias).timeline)
            context["unknown"] = held.unknown(detail, record)
        except held.PROBLEMS as error:
            context["problems"] = {visible(page.alias): held.problem(error, page.alias)}
        context |= extra_context or {}
        template = "admin/django_redislock/heldlock/detail.html"
        return TemplateResponse(request, template, context)

    def _page_context(self, request: HttpRequest, title: str) -> dict[str, Any]:
        """The context of each page of an admin site."""
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
        """Add two: each is a confirmation and its act."""
        view, pause_view = map(
            self.admin_site.admin_view, (self.force_release_view, self.pause_view)
        )
        return [
            path("force-release/", view, name="django_redislock_heldlock_force_release"),
            path("pause/", pause_view, name="django_redislock_heldlock_pause"),
            *super().get_urls(),
        ]

    @admin.action(
        permissions=["force_release"], description="Force release selected %(verbose_name_plural)s"
    )
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        """Confirm the ticked leases of the list."""
        return self._confirm(request, request.POST.getlist(helpers.ACTION_CHECKBOX_NAME))

    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for confirmation; once confirmed, release exactly the leases that were shown."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_force_release_permission(request):
            raise PermissionDenied
        references = request.POST.getlist("lease")
        if "confirmed" not in request.POST:
            return self._confirm(request, references)
        leases = list(filter(None, map(_referred, references)))
        acts = [(page, partial(self._release, request, page, lease)) for page, lease in leases]
        self._do(request, acts, "was not released")
        if len(leases) == len(references) == 1:
            return self._redirect("change", quote(leases[0][0].key))
        return self._redirect("changelist")

    def _redirect(self, view: str, *args: str) -> HttpResponseRedirect:
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{view}"
        return HttpResponseRedirect(reverse(name, args=args, current_app=self.admin_site.name))

    def _confirm(self, request: HttpRequest, references: list[str]) -> HttpResponse:
        locks, changed, states = [], [], set()
        problems: dict[str, str] = {}
        for page, id in filter(None, map(_referred, references)):  # noqa: A001
            if page.alias in problems:
                continue  # A silent server is asked once.
            try:
                lock = held.get(**_exactly(page))
            except held.PROBLEMS as error:
                problems[page.alias] = held.problem(error, page.alias)
                continue
            if lock is not None and lock.id == id:
                shown = {"title": markup.name(page.name), "reference": _reference(lock)}
                locks.append((shown, markup.facts(lock.facts())))
                states.add(lock.state)
            else:
                changed.append((visible(page.name), lock and _holder(lock)))
        if problems and not (locks or changed):
            for problem in problems.values():
                messages.error(request, problem)
            return self._redirect("changelist")
        context = {
            **self._page_context(request, "Force release"),
            "problems": {visible(alias): problem for alias, problem in problems.items()},
            "locks": locks,
            "changed": changed,
            "at_work": states - {"cooling", "foreign", "paused", "rate"},
            "states": states,
        }
        template = "admin/django_redislock/heldlock/force_release_confirmation.html"
        return TemplateResponse(request, template, context)

    def _do(
        self,
        request: HttpRequest,
        acts: Iterable[tuple[LockPage, Callable[[], object]]],
        failed: str,
    ) -> None:
        """Do each act. A silent server does not hold up those on the locks of other aliases."""
        unanswered: dict[str, float] = defaultdict(float)
        left: Counter[str] = Counter()
        for page, act in acts:
            if unanswered[page.alias] > MOST_SECONDS_UNANSWERED:
                left[page.alias] += 1
                continue
            started = time.monotonic()
            try:
                act()
            except held.PROBLEMS as error:
                unanswered[page.alias] += time.monotonic() - started
                outcome = "may have been released" if isinstance(error, _InDoubt) else failed
                problem = held.problem(error, page.alias)
                messages.error(request, f"The lock “{page}” {outcome}. {problem}")
        for alias, number in left.items():
            more = f"{counted(number, 'lock')} more: not tried, since the server is silent"
            messages.error(request, f"{more} ({visible(alias)}).")

    def _release(self, request: HttpRequest, page: LockPage, id: str) -> None:  # noqa: A002
        """Release one lease, and say how that ended."""
        lock = f"The lock “{page}”"
        reason = request.POST.get("reason", "")[:200]
        by = _operator(request)
        before = held.get(**_exactly(page))
        try:
            is_released = held.force_release(id=id, by=by, reason=reason, **_exactly(page))
        except LockUnavailable as error:
            if _is_there(page, id):
                raise
            note = f"Whether lease {visible(id)} was released by force is not known."
            self.log_change(request, page, f"{note} {visible(reason)}".strip())
            raise _InDoubt(error.name, error.problem) from error
        if is_released:
            seen = before if before is not None and before.id == id else None
            done, effect = _outcome(seen, id)
            self.log_change(request, page, f"Released by force: {done} {visible(reason)}".strip())
            messages.success(request, f"{lock} was released. {effect}{_who_follows(page)}")
        else:
            why = held.why_not_released(**_exactly(page))
            messages.warning(request, f"{lock} was not released. {why}")

    # --- pause --------------------------------------------------------------------------------

    @admin.action(permissions=["pause"], description="Pause selected %(verbose_name_plural)s")
    def pause(self, request: HttpRequest, queryset: Any) -> HttpResponse:
        """Ask how long to pause the ticked locks, and why."""
        references = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
        return self._ask_to_pause(
            request, _with_all_permits(page for page, _ in filter(None, map(_referred, references)))
        )

    def pause_view(self, request: HttpRequest) -> HttpResponse:
        """Ask how long and why; once that is known, pause the locks. Or end a pause."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not self.has_pause_permission(request):
            raise PermissionDenied
        wanted = map(LockPage.with_key, request.POST.getlist("lock"))
        pages = _with_all_permits(filter(None, wanted))
        if "resume" in request.POST:
            act = partial(self._resume, request)
        elif "confirmed" in request.POST:
            try:
                lasts = held.pause_seconds(parse_duration(request.POST.get("for", "").strip()))
            except ValueError as error:
                return self._ask_to_pause(request, pages, str(error))
            act = partial(self._pause, request, lasts)
        else:
            return self._ask_to_pause(request, pages)
        acts = [(page, partial(act, page)) for page in pages]
        self._do(request, acts, "may be unchanged")
        if len(pages) == 1:
            return self._redirect("change", quote(pages[0].key))
        return self._redirect("changelist")

    def _ask_to_pause(
        self, request: HttpRequest, pages: list[LockPage], error: str = ""
    ) -> HttpResponse:
        if not pages:
            return self._redirect("changelist")
        context = {
            **self._page_context(request, "Pause"),
            "pages": [{"title": markup.name(page.name), "key": page.key} for page in pages],
            "error": error,
            "for": request.POST.get("for", "1h"),
            "reason": request.POST.get("reason", ""),
        }
        return TemplateResponse(request, "admin/django_redislock/heldlock/pause.html", context)

    def _pause(self, request: HttpRequest, lasts: float, page: LockPage) -> None:
        """Pause one lock, and say how that ended."""
        reason = request.POST.get("reason", "")[:200]
        lock = f"The lock “{page}”"
        try:
            begun = held.pause(
                page.name, lasts, by=_operator(request), reason=reason, using=page.alias
            )
        except LockTimeout as busy:
            messages.warning(request, visible(f"{lock} was not paused. {busy}"))
            return
        except LockUnavailable:
            note = f"Whether it is paused for {duration(lasts)} is not known."
            self.log_change(request, page, f"{note} {visible(reason)}".strip())
            raise
        self.log_change(request, page, f"Paused for {duration(lasts)}. {visible(reason)}".strip())
        after = "" if begun else " It begins when the lease in its way is over."
        messages.success(request, f"{lock} is paused for {duration(lasts)}.{after}")

    def _resume(self, request: HttpRequest, page: LockPage) -> None:
        """End the pause of one lock."""
        try:
            is_ended = held.resume(page.name, using=page.alias, by=_operator(request))
        except LockUnavailable:
            self.log_change(request, page, "Whether the pause was ended is not known.")
            raise
        if is_ended:
            self.log_change(request, page, "The pause was ended.")
            messages.success(request, f"The pause of “{page}” was ended.{_who_follows(page)}")
            return
        lock = held.get(page.name, using=page.alias)
        newer = lock is not None and lock.newer_format is not None and lock.note
        messages.warning(request, newer or f"No operator had paused the lock “{page}”.")


class _InDoubt(LockUnavailable):
    """Nobody knows whether the server has released the lock before it fell silent."""


def _operator(request: HttpRequest) -> str:
    return f"{request.user.get_username()} in the admin"


def _exactly(page: LockPage) -> dict[str, Any]:
    """The lock of a page, or the permit, as functions of held.py take it."""
    return {"name": page.permit.name, "permit": page.permit.number, "using": page.alias}


def _with_all_permits(pages: Iterable[LockPage]) -> list[LockPage]:
    """The pages of the locks, in place of those of their permits: a pause has all permits."""
    return [*dict.fromkeys(LockPage.named(page.permit.name, page.alias) for page in pages)]


def _is_there(page: LockPage, id: str) -> bool:  # noqa: A002
    """Whether the server says that the lock is still held by the lease *id*."""
    try:
        lock = held.get(**_exactly(page))
    except held.PROBLEMS:
        return False
    return lock is not None and lock.id == id


def _sections(detail: held.Detail) -> dict[str, Any]:
    """The context for the lease, the queue and the past of a lock."""
    lock = detail.lock
    return {
        "detail": detail,
        "facts": markup.facts(lock.facts()) if lock else [],
        "reference": _reference(lock) if lock and lock.state != "rate" else "",
        "others": [
            {
                "key": quote(LockPage.of(one).key),
                "name": markup.name(one.name),
                "state": markup.state(one),
                "holder": markup.holder(one),
                "expires_in": markup.expiry(one),
            }
            for one in detail.others
        ],
        "has_pause": any(
            who.owner.operator for who in (lock, *detail.others, *detail.waiters) if who
        ),
        "waiting": [markup.waiter(one) for one in detail.waiters],
        "unnamed_waiters": lock.waiters - len(detail.waiters) if lock else 0,
        "past": [markup.past(lease) for lease in detail.past[: -PAST_LINES - 1 : -1]],
        "earlier": max(0, len(detail.past) - PAST_LINES),
    }


def _outcome(seen: held.HeldLock | None, id: str) -> tuple[str, str]:  # noqa: A002
    """Say what was released, for the log, and the consequence for its holder.

    *seen* is the lock as it was just before; None if it has changed since.
    """
    holder = _holder(seen) if seen else "its holder"
    done = f"lease {visible(id)} of {holder}."
    if seen and seen.state == "foreign":
        done = f"{holder}, which was not a lock of ours."
        return done, f"What stood at its key, {holder}, is deleted."
    if seen and seen.state == "cooling":
        return done, f"{holder} was done with it."
    if seen and seen.owner.operator:
        return done, f"That was the pause of {holder}."
    return done, (
        f"The code of {holder} is not stopped; it learns of the loss at the next renewal of its"
        " lease, or at its end."
    )


def _reference(lock: held.HeldLock) -> str:
    """One lease of a lock, as forms carry it."""
    return f"{LockPage.of(lock).key}:{lock.id}"


def _referred(reference: str) -> tuple[LockPage, str] | None:
    """The lock and the lease id; None if it is no reference of ours."""
    key, colon, id = reference.partition(":")  # noqa: A001
    page = LockPage.with_key(key)
    return (page, id) if page and colon else None


def _holder(lock: held.HeldLock) -> str:
    return visible(lock.holder)


def _who_follows(page: LockPage) -> str:
    with suppress(LockUnavailable):  # The release is done, even if the server fails now.
        if now := held.get(**_exactly(page)):
            return f" {_holder(now)} has it now."
    return ""
