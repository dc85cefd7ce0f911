"""What breaks servers and clients, in an order that a seed decides."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from tests.jepsen.crew import Crew
    from tests.jepsen.places import Place

UNHARMED = 30  # Writes between one harm and the next, so that most clients have had their turn.


class Nemesis:
    """Breaks one server at a time, and a client beside it.

    Args:
        place: The servers.
        crew: The clients.
        dice: For the order of what happens.
    """

    def __init__(self, place: Place, crew: Crew, dice: Random) -> None:
        self.done: Counter[str] = Counter()  # How often it did what.
        self._dice = dice
        self._crew = crew
        to_clients: dict[str, Callable[[], None]] = {
            "client paused": lambda: crew.pause(dice),
            "client stopped": lambda: crew.stop(dice),
            "client killed": lambda: crew.kill(dice),
        }
        self._to_clients = self._deal(to_clients)
        self._to_servers = self._deal(place.faults)

    def strike(self) -> None:
        """Do the next harm to a client and to a server; return once work goes on as before."""
        for deal in (self._to_clients, self._to_servers):
            name, act = next(deal)
            act()
            self.done[name] += 1
        self._crew.await_writes(UNHARMED)

    def _deal(
        self, acts: dict[str, Callable[[], None]]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """All of them in a random order, and then in another one."""
        while True:
            yield from self._dice.sample(list(acts.items()), len(acts))
