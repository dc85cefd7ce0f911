"""`manage.py demo_admin`: the page of held locks with much going on, until Ctrl-C.

Starts a Valkey server, a database, three machines with workers, two more on which somebody runs
commands, and the site, all of them for this run only.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from lottery.demo.patience import Interrupted
from lottery.demo.shop import MACHINES, Shop
from lottery.demo.site import OPERATOR, PASSWORD, VIEWER, Site, add_users
from lottery.demo.stage import DemoCommand

if TYPE_CHECKING:
    from lottery.demo.stage import Stage

STARTS_WITHIN = 120  # seconds
LOOK_EVERY = 0.2  # seconds

WELCOME = """
The page of held locks is at

    {page}

    {operator:6} / {password}   may do everything
    {viewer:6} / {password}   may only look

What goes on there:

    catalogue:import      takes minutes; its lease is renewed all the while
    customer:77           runs that stand in line: open it to see the queue
    sales-report          three permits (the others are #2 and #3), and more runs than permits
    lottery               started by three at once, drawn by one, then cooling down
    subscriptions:charge  fails now and then: see the picture on its page
    warehouse:stock       its holder is killed again and again; overdue until the ttl is over
    payments:reconcile    held by a command that somebody has forgotten. The task under this
                          lock has only been skipped: the page says so above the list

What to try:

    Force release payments:reconcile. The command is not stopped by that; it learns at its
    next renewal that its lease is lost, and gives up, as you will read here. The task
    succeeds within seconds, and the page has nothing to say above the list any more.

    Force release warehouse:stock while it is overdue: who waits for it has it at once.

    Open {export} and see the request in the list.

In another terminal; all this has a server and a database of its own, which are named here:

    {locks} watch

Ctrl-C ends it all.
"""


class Command(DemoCommand):
    """Runs the demo."""

    help = "Show the page of held locks with much going on, until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        """Where the site is."""
        parser.add_argument(
            "--port",
            type=int,
            default=8000,
            help="of the site; another one if this is taken; default: %(default)s",
        )

        self.add_backend(parser)

    def handle(self, *, port: int, backend: str, **options: Any) -> None:
        """Run it; the exit status is 0 if nothing but a signal has ended it."""
        if not 0 < port < 2**16:
            raise CommandError("A port is a number from 1 to 65535.")
        with self.stage(STARTS_WITHIN, backend) as stage:
            add_users()
            site, shop = Site(stage, port), Shop(stage)
            while not (shop.is_ready() and site.is_up()):
                _pause(stage, site, shop)
            if site.port != port:
                self.progress("site", f"port {port} is taken; {site.port} is free")
            self.progress("machines", f"{', '.join(MACHINES)} are ready")
            self.say(_welcome(stage, site))
            self._go_on(stage, site, shop)
        self.say("Stopped; nothing is left running.")

    def _go_on(self, stage: Stage, site: Site, shop: Shop) -> None:
        stage.patience.last(math.inf)
        try:
            while True:
                for who, news in shop.attend():
                    self.progress(who, news)
                _pause(stage, site, shop)
        except Interrupted:  # As it was meant to end.
            self.say("")


def _pause(stage: Stage, site: Site, shop: Shop) -> None:
    """Wait a moment; raise ChildDied if one runs no more that should."""
    for part in (stage, site, shop):
        part.check()
    stage.patience.pause("starting the machines and the site", LOOK_EVERY)


def _welcome(stage: Stage, site: Site) -> str:
    python, manage = (_shortest(path) for path in (sys.executable, settings.BASE_DIR / "manage.py"))
    names = ("REDIS_URL", "DATABASE_PATH")
    where = {name: stage.environment[name] for name in names}
    if stage.topology is not None:
        where |= stage.topology.environment
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in where.items())
    locks = f"{variables} {shlex.join([python, manage, 'locks'])}"
    return WELCOME.format(
        page=site.url("admin:django_redislock_heldlock_changelist"),
        export=site.url("export-orders"),
        operator=OPERATOR,
        viewer=VIEWER,
        password=PASSWORD,
        locks=locks,
    )


def _shortest(path: str | os.PathLike[str]) -> str:
    """The path as one would type it here."""
    return min(os.fspath(path), os.path.relpath(path), key=len)
