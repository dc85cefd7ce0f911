"""The lottery in the admin: participants are kept here, draws and winners are only looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.db.models import Count, QuerySet

from lottery.models import Draw, Participant, Winner

if TYPE_CHECKING:
    from django.http import HttpRequest


class ReadOnly:
    """Mixed into an admin: what the lottery has recorded is not edited by hand."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody adds."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody changes."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody deletes."""
        return False


@admin.register(Participant)
class ParticipantAdmin(admin.ModelAdmin):
    """Who takes part."""

    list_display = ["name", "eligible", "wins"]
    list_editable = ["eligible"]
    list_filter = ["eligible"]
    search_fields = ["name"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Participant]:
        """Count the wins along with the rest."""
        return super().get_queryset(request).annotate(win_count=Count("wins"))

    @admin.display(ordering="win_count")
    def wins(self, participant: Any) -> int:
        """How often the participant has won."""
        return participant.win_count


class WinnerInline(ReadOnly, admin.TabularInline):
    """The winners of a draw."""

    model = Winner
    fields = ["participant"]
    extra = 0


@admin.register(Draw)
class DrawAdmin(ReadOnly, admin.ModelAdmin):
    """What was drawn."""

    list_display = ["__str__", "drawn_at", "server", "fence", "winner_count"]
    list_filter = ["server"]
    date_hierarchy = "drawn_at"
    fields = ["drawn_at", "server", "fence"]
    inlines = [WinnerInline]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Draw]:
        """Count the winners along with the rest."""
        return super().get_queryset(request).annotate(winner_total=Count("winners"))

    @admin.display(description="winners", ordering="winner_total")
    def winner_count(self, draw: Any) -> int:
        """How many won."""
        return draw.winner_total


@admin.register(Winner)
class WinnerAdmin(ReadOnly, admin.ModelAdmin):
    """Who won."""

    list_display = ["participant", "draw", "drawn_at"]
    list_filter = ["draw__server"]
    list_select_related = ["participant", "draw"]
    search_fields = ["participant__name"]

    @admin.display(ordering="draw__drawn_at")
    def drawn_at(self, winner: Winner) -> Any:
        """When the draw was."""
        return winner.draw.drawn_at
