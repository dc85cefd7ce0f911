"""How much was simulated, and what happened while what went on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.plan import KINDS, OF_CLIENTS, TROUBLES

if TYPE_CHECKING:
    from tests.simulation.world import World

PHASES = ("idle", "asking", "waiting", "holding", "releasing")
OUTCOMES = ("acquired", "busy", "done", "unavailable", "a circle", "not taken up", "interrupted")
ENDS = (
    *("released", "released after an error", "handed to whoever has the baton", "not released"),
    *("release unavailable", "release interrupted", "lost: expired", "lost: unreachable"),
    *("lost: forced", "lost: taken"),
)
ON_SERVER = ("granted", "handed over", "confirmed", "released by force")


class Report:
    """What some worlds came to."""

    def __init__(self) -> None:
        self.worlds = 0
        self.hours = 0.0  # Virtual ones.
        self.steps = 0  # Of their plans.
        self.events = 0
        self.counts: Counter[str] = Counter()
        self.longest: dict[str, float] = {}

    def add(self, world: World) -> None:
        """Add a world that has come to its end."""
        self.worlds += 1
        self.hours += world.timeline.now / 3600
        self.steps += len(world.plan.steps)
        self.events += world.timeline.events
        self.counts += world.counts
        for what, seconds in world.watch.longest.items():
            self.longest[what] = max(seconds, self.longest.get(what, seconds))

    def times(self, kind: str) -> int:
        """How often something went wrong, or an operator acted."""
        return sum(self.counts[f"{kind} | {phase}"] for phase in PHASES)

    @property
    def missing(self) -> list[str]:
        """What never happened, and should have, for the simulation to prove anything."""
        wanted = [*OUTCOMES, *ENDS, *ON_SERVER]
        missing = [one for one in wanted if not self.counts[one]]
        for kind in KINDS:
            phases = PHASES if kind in OF_CLIENTS else ("idle",)
            missing += [
                f"{kind} while {phase}" for phase in phases if not self.counts[f"{kind} | {phase}"]
            ]
        return missing

    def told(self, seconds: float) -> str:
        """All of it, after so many seconds of processor time."""
        counts = self.counts
        runs = sum(times for what, times in counts.items() if what.startswith("ran "))
        a_night = self.hours / max(seconds, 1e-9) * 8 * 3600
        lines = [
            f"{self.hours:,.1f} virtual hours in {self.worlds} worlds",
            f"{seconds:,.0f} s of processor time; at that rate {a_night:,.0f} hours a night",
            f"{self.steps:,} steps were planned; {self.events:,} events; {runs:,} scripts ran",
            "acquires: " + self._listed(OUTCOMES),
            "ends: " + self._listed(ENDS),
            "on the server: " + self._listed(ON_SERVER),
            "longest, less what is allowed: "
            + ", ".join(f"{what} {seconds:+.3f} s" for what, seconds in self.longest.items()),
            "",
            f"{'what went wrong':16}" + "".join(f"{phase:>11}" for phase in PHASES),
        ]
        for kind in KINDS:
            if kind in OF_CLIENTS:
                cells = [f"{counts[f'{kind} | {phase}']:11,}" for phase in PHASES]
            else:
                cells = [f"{self.times(kind):11,}"]
            lines.append(f"{kind:16}{''.join(cells)}")
        lines += [f"{kind}: {self._on_commands(kind)}" for kind in TROUBLES]
        return "\n".join([*lines, f"never happened: {', '.join(self.missing) or 'nothing'}"])

    def _on_commands(self, kind: str) -> str:
        """Which commands something has befallen."""
        befell = [
            (times, what.partition(" | ")[2])
            for what, times in self.counts.items()
            if what.startswith(f"{kind} | ") and what.partition(" | ")[2] not in PHASES
        ]
        return ", ".join(f"{times} {script}" for times, script in sorted(befell, reverse=True))

    def _listed(self, names: tuple[str, ...]) -> str:
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)
