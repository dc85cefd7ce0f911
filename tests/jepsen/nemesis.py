"""What breaks servers and clients, in an order that a seed decides."""

from collections import Counter
from contextlib import ExitStack

from tests.jepsen.history import NEMESIS, Event

UNHARMED = 30  # Writes between one harm and the next, so that most clients have had their turn.


class Nemesis:
    """Breaks one server at a time, and a client beside it.

    Args:
        place: The servers.
        crew: The clients.
        desk: Where it writes down what it does.
        dice: For the order of what happens.
    """

    def __init__(self, place, crew, desk, dice):
        self.done = Counter()  # How often it did what.
        self._dice = dice
        self._crew = crew
        self._desk = desk
        self._place = place
        to_clients = {
            "client paused": lambda: crew.pause(dice),
            "client stopped": lambda: crew.stop(dice),
            "client killed": lambda: crew.kill(dice),
            "client cut off": self._cut_off,
            "holder cut off": self._cut_off_holder,
        }
        self._to_clients = self._deal(to_clients)
        self._to_servers = self._deal(place.faults)

    def strike(self):
        """Do the next harm to a client and to a server; return once work goes on as before."""
        for deal in (self._to_clients, self._to_servers):
            name, act = next(deal)
            self._note(name)
            act()
            self._note(name)
            self.done[name] += 1
        self._crew.await_writes(UNHARMED)

    def _cut_off(self):
        """Let a client reach no server for a while, whatever it is about."""
        with self._place.network.cut(f"client {self._crew.choose(self._dice)}"):
            self._place.a_while()

    def _cut_off_holder(self):
        """Let a holder reach no server, until another client has written; then it writes too."""
        client = self._crew.choose(self._dice)
        with ExitStack() as cut:
            with self._desk.detained(client):
                cut.enter_context(self._place.network.cut(f"client {client}"))
                self._crew.await_writes(1)
            self._place.a_while()

    def _note(self, harm):
        """Write down that it begins or ends."""
        self._desk.note(Event(NEMESIS, "info", harm.replace(" ", "-")))

    def _deal(self, acts):
        """All of them in a random order, and then in another one."""
        while True:
            yield from self._dice.sample(list(acts.items()), len(acts))
