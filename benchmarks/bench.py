"""What every measurement gets: the server, how much effort to spend, and whose turn it is."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import contender
from benchmarks.placement import ALL_CORES, confine, placements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.server import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to measure: sizes of one contender's turn."""

    rounds: int
    cycle_rounds: int  # More and shorter ones, so that the median passes over a noisy second.
    cycle_seconds: float
    hand_offs: int
    relay_seconds: float  # A turn of the hand-off ends then, also with fewer hand-offs.
    contended_seconds: float
    idle_seconds: float
    watchdog_seconds: float
    tasks: int
    effect_seconds: float


FULL = Effort(
    rounds=4,
    cycle_rounds=20,
    cycle_seconds=0.12,
    hand_offs=250,
    relay_seconds=1.5,
    contended_seconds=1.5,
    idle_seconds=10,
    watchdog_seconds=20,
    tasks=300,
    effect_seconds=0.15,
)
QUICK = Effort(
    rounds=1,
    cycle_rounds=5,
    cycle_seconds=0.05,
    hand_offs=80,
    relay_seconds=0.3,
    contended_seconds=0.5,
    idle_seconds=2,
    watchdog_seconds=10,
    tasks=100,
    effect_seconds=0.1,
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender, about to be measured in one placement."""

    name: str
    placement: str
    cores: set[int]


@dataclass(frozen=True, slots=True)
class Bench:
    """The workbench."""

    server: Server
    effort: Effort
    names: Sequence[str]  # The contenders asked for.
    placements: dict[str, set[int]] = field(default_factory=placements)

    def contender(self, name: str) -> Any:
        """This process's contender of that name."""
        return contender(name, self.server.port)

    def among(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that were asked for."""
        return [name for name in names if name in self.names]

    def turns(self, names: Sequence[str], rounds: int = 0) -> Iterator[Turn]:
        """Everybody's turns: interleaved in rounds, so that a noisy minute hits all alike.

        There are as many rounds as most measurements have, unless told otherwise.

        This process and the server are confined to the placement's cores during the turn.
        """
        names = self.among(names)
        try:
            for nth in range(rounds or self.effort.rounds):
                for placement, cores in self.placements.items():
                    self._confine(cores)
                    for at in range(len(names)):
                        gc.collect()
                        # Each round begins with somebody else.
                        yield Turn(names[(nth + at) % len(names)], placement, cores)
        finally:
            self._confine(self.placements[ALL_CORES])

    def _confine(self, cores: set[int]) -> None:
        confine(os.getpid(), cores)
        confine(self.server.pid, cores)
