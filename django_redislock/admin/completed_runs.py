"""The admin's page of completed runs (once="database"), with a way to forget them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.shortcuts import redirect
from django.urls import reverse

from django_redislock.admin import markup
from django_redislock.admin.changelist import PlainList
from django_redislock.completed_runs import CompletedRun
from django_redislock.fences import missing_table
from django_redislock.humanize import visible

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse
    from django.utils.safestring import SafeString

    from django_redislock.completed_runs import CompletedRuns


@admin.register(CompletedRun)
class CompletedRunAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """See docs/admin.md. To delete a row is to forget its run."""

    list_display = fields = readonly_fields = (
        "lock",
        "completed_at",
        "of_task",
        "of_task_id",
        "ran_on",
        "token",
        "in_redislock",
    )
    list_filter = ("completed_at", "alias")
    search_fields = ("name", "task", "task_id")
    ordering = ("-completed_at", "-pk")
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The list. Without its table, as a router may have it, a message says what to do."""
        database = self.get_queryset(request).db
        if self.has_view_permission(request) and (problem := missing_table(CompletedRun, database)):
            messages.error(request, problem[0].upper() + problem[1:])
            return redirect(reverse("admin:index", current_app=self.admin_site.name))
        return super().changelist_view(request, extra_context)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[PlainList]:
        """Most sites have no such runs."""
        return PlainList

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Only a run can complete itself."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes the past."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether this user may see runs and forget them. Django asks for the second alone."""
        return self.has_view_permission(request, obj) and super().has_delete_permission(
            request, obj
        )

    def delete_model(self, request: HttpRequest, obj: CompletedRun) -> None:
        """Forget one run."""
        self._forget(request, self.get_queryset(request).filter(pk=obj.pk))

    def delete_queryset(self, request: HttpRequest, queryset: CompletedRuns) -> None:  # type: ignore[override]
        """Forget the ticked runs."""
        self._forget(request, queryset)

    def _forget(self, request: HttpRequest, runs: Any) -> None:
        runs.forget(by=f"{request.user.get_username()} in the admin")

    # Anybody may write names and ids: unprintable characters are written out.

    @admin.display(description="name", ordering="name")
    def lock(self, obj: CompletedRun) -> SafeString:
        """The name of the lock."""
        return markup.name(obj.name)

    @admin.display(description="alias", ordering="alias")
    def in_redislock(self, obj: CompletedRun) -> str:
        """The alias of the lock."""
        return visible(obj.alias)

    @admin.display(description="task", ordering="task")
    def of_task(self, obj: CompletedRun) -> SafeString:
        """The full name of the task."""
        return markup.name(obj.task)

    @admin.display(description="task id", ordering="task_id")
    def of_task_id(self, obj: CompletedRun) -> SafeString:
        """The id of the call."""
        return markup.name(obj.task_id)

    @admin.display(description="ran on", ordering="place")
    def ran_on(self, obj: CompletedRun) -> SafeString:
        """Host and pid."""
        return markup.name(obj.place)

    @admin.display(description="fence", ordering="fence")
    def token(self, obj: CompletedRun) -> str:
        """To be compared, so without thousands separators."""
        return str(obj.fence)
