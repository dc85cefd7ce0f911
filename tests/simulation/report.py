"""How much was simulated, and what happened while what went on."""

from collections import Counter

from tests.simulation.plan import KINDS, OF_CLIENTS, TROUBLES

PHASES = ("idle", "asking", "waiting", "holding", "releasing")
OUTCOMES = (
    *("acquired", "busy", "done", "unavailable", "a circle", "not taken up", "interrupted"),
    *("started", "came back for a start", "replaced"),
)
ENDS = (
    *("released", "released after an error", "handed to whoever has the baton", "not released"),
    *("release unavailable", "release interrupted", "lost: expired", "lost: unreachable"),
    *("lost: forced", "lost: taken", "lost: replaced"),
)
ON_SERVER = (
    *("granted", "handed over", "confirmed", "released by force", "granted a start"),
    *("waited for a start", "replaced a run", "ended a replaced run", "replaced a waiter"),
)


class Report:
    """What some worlds came to."""

    def __init__(self):
        self.worlds = 0
        self.hours = 0.0  # Virtual ones.
        self.steps = 0  # Of their plans.
        self.events = 0
        self.seconds = 0.0  # Of processor time.
        self.counts = Counter()
        self.longest = {}

    def add(self, run):
        """Add a world that has come to its end."""
        self.worlds += 1
        self.hours += run.hours
        self.steps += run.steps
        self.events += run.events
        self.seconds += run.seconds
        self.counts += run.counts
        for what, seconds in run.longest.items():
            self.longest[what] = max(seconds, self.longest.get(what, seconds))

    def times(self, kind):
        """How often something went wrong, or an operator acted."""
        return sum(self.counts[f"{kind} | {phase}"] for phase in PHASES)

    @property
    def missing(self):
        """What never happened, and should have, for the simulation to prove anything."""
        wanted = [*OUTCOMES, *ENDS, *ON_SERVER]
        missing = [one for one in wanted if not self.counts[one]]
        for kind in KINDS:
            phases = PHASES if kind in OF_CLIENTS else ("idle",)
            missing += [
                f"{kind} while {phase}" for phase in phases if not self.counts[f"{kind} | {phase}"]
            ]
        return missing

    def told(self, processes):
        """All of it, and how much so many processes simulate in a night of eight hours."""
        counts = self.counts
        runs = sum(times for what, times in counts.items() if what.startswith("ran "))
        a_night = self.hours / max(self.seconds, 1e-9) * 8 * 3600 * processes
        lines = [
            f"{self.hours:,.1f} virtual hours in {self.worlds} worlds",
            f"{self.seconds:,.0f} s of processor time",
            f"at that rate {a_night:,.0f} virtual hours a night, processes: {processes}",
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

    def _on_commands(self, kind):
        """Which commands something has befallen."""
        befell = [
            (times, what.partition(" | ")[2])
            for what, times in self.counts.items()
            if what.startswith(f"{kind} | ") and what.partition(" | ")[2] not in PHASES
        ]
        return ", ".join(f"{times} {script}" for times, script in sorted(befell, reverse=True))

    def _listed(self, names):
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)
