"""What came out of a run of the demo, and whether the database agrees with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lottery.demo.tables import table
from lottery.drawing import PRIZES
from lottery.models import Draw, Winner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lottery.demo.servers import Report


class Results:
    """The outcomes that the servers reported, beside the draws in the database."""

    def __init__(self, reports: Iterable[Report]) -> None:
        self._reports = sorted(reports)
        self._draws = list(Draw.objects.order_by("pk"))
        self._winners = list(Winner.objects.order_by("pk").select_related("participant"))

    def __str__(self) -> str:
        return (
            f"RESULT servers={len(self._reports)} draws={len(self._draws)} "
            f"winners={len(self._winners)} skipped={len(self._with_outcome('skipped'))}"
        )

    def table(self) -> str:
        """One line per server."""
        header = ["server", "pid", "clock", "outcome", "fence"]
        return table(header, [self._row(report) for report in self._reports])

    def winners(self) -> Iterator[str]:
        """The winners of each draw, line by line."""
        for draw in self._draws:
            yield f"Winners drawn by {draw.server}:"
            for place, winner in enumerate(self._winners_of(draw), 1):
                yield f"{place:4}. {winner.participant} (no. {winner.participant_id})"
            yield ""

    def damage(self) -> str:
        """What comes of several draws, in one line."""
        people = len({winner.participant_id for winner in self._winners})
        return (
            f"No server knew of the others: after {len(self._draws)} draws, "
            f"{people} people have been promised one of {PRIZES} prizes."
        )

    def contradictions(self, *, draws: int) -> Iterator[str]:
        """Everything that is not as it should be when that many draws are expected."""
        for failed in self._with_outcome("failed"):
            yield f"{failed.server} failed: {failed.details['error']}"
        if len(self._draws) != draws:
            yield f"There are {len(self._draws)} draws in the database, not {draws}."
        reported = sorted(drew.details["draw"] for drew in self._with_outcome("drew"))
        if reported != [draw.pk for draw in self._draws]:
            yield "The servers have reported other draws than the database has."
        if len(self._with_outcome("skipped")) != len(self._reports) - draws:
            yield "Not every other server has skipped."
        for draw in self._draws:
            winners = self._winners_of(draw)
            if not len(winners) == len({winner.participant_id for winner in winners}) == PRIZES:
                yield f"{draw} does not have {PRIZES} different winners."
            if not all(winner.participant.eligible for winner in winners):
                yield f"{draw} has a winner who was not eligible."

    def _with_outcome(self, outcome: str) -> list[Report]:
        return [report for report in self._reports if report.outcome == outcome]

    def _winners_of(self, draw: Draw) -> list[Winner]:
        return [winner for winner in self._winners if winner.draw_id == draw.pk]

    def _row(self, report: Report) -> list[object]:
        server, pid, late, outcome, details = report
        if outcome == "skipped":
            outcome += f", {self._because(details)}"
        return [server, pid, f"+{late * 1000:.0f} ms", outcome, details.get("fence") or "-"]

    def _because(self, skip: dict[str, Any]) -> str:
        """Which server drew, or had drawn."""
        if skip["skipped"] == "busy":
            return f"held by {self._name(skip['holder'])}"
        return f"drawn by {self._name(skip['by'])} {skip['ago']:.1f} s ago"

    def _name(self, holder: str) -> str:
        """The server meant by a holder, such as "host:pid task-id"."""
        process = holder.partition(" ")[0]
        pid = process.rpartition(":")[2]
        server = next((report.server for report in self._reports if str(report.pid) == pid), "")
        return f"{server} ({process})" if server else holder
