"""The stage of a demo: a Redis, a database and child processes that exist for one run of it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from lottery.demo.patience import Interrupted, Patience
from lottery.demo.processes import ChildDied, Children
from lottery.demo.servers import RedisServer
from lottery.demo.topologies import TOPOLOGIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from django.core.management.base import CommandParser

    from lottery.demo.processes import Child
    from lottery.demo.topologies import Topology

ELIGIBLE, INELIGIBLE = 1000, 50


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a demo has for itself."""

    patience: Patience
    redis: RedisServer
    topology: Topology | None  # Where locks are kept, if not on that Redis.
    children: Children
    environment: dict[str, str]  # Of the children.

    def start(
        self, name: str, command: Sequence[str], *, abrupt: bool = False, **env: str
    ) -> Child:
        """Start a child that finds the Redis and the database; see Children.start()."""
        return self.children.start(name, command, {**self.environment, **env}, abrupt=abrupt)

    def check(self) -> None:
        """Raise ChildDied if a server has died that was not killed."""
        self.redis.check()
        if self.topology is not None:
            self.topology.check()

    def machine(self, name: str, command: Sequence[str], *, abrupt: bool = False) -> Child:
        """Start a child on a machine of its own, as far as owners of locks can tell."""
        settings = "example_project.machine_settings"
        return self.start(
            name, command, abrupt=abrupt, DEMO_MACHINE=name, DJANGO_SETTINGS_MODULE=settings
        )


class DemoCommand(BaseCommand):
    """A command that sets the stage, says what it does, and leaves nothing behind."""

    requires_system_checks = ()

    def add_backend(self, parser: CommandParser) -> None:
        """Add the option that says where locks are kept."""
        parser.add_argument(
            "--backend",
            choices=["redis", *TOPOLOGIES],
            default="redis",
            help="where locks are kept; default: %(default)s",
        )

    @contextmanager
    def stage(self, seconds: float, backend: str = "redis") -> Iterator[Stage]:
        """Set the stage for the block, which may take so long; however it ends, clear it away.

        Args:
            seconds: How long the block may take.
            backend: Where locks are kept, see add_backend().

        Raises:
            SystemExit: A signal has asked the demo to stop.
            CommandError: A child has died, or it took too long.
        """
        self._began = time.monotonic()
        try:
            # Children are ended in reverse: Redis is the last to go.
            with (
                Patience(seconds) as patience,
                _home() as home,
                Children(home) as redis_children,
                Children(home) as children,
            ):
                redis = RedisServer(home, redis_children)
                while not redis.is_up():
                    patience.pause("starting Redis")
                self.progress("redis", redis)
                topology = None
                if backend in TOPOLOGIES:
                    topology = TOPOLOGIES[backend](home, redis_children)
                    while not topology.is_ready():
                        topology.check()
                        patience.pause("starting the servers of the locks", 0.1)
                    self.progress(backend, topology)
                call_command("migrate", run_syncdb=True, verbosity=0)
                call_command("populate", eligible=ELIGIBLE, ineligible=INELIGIBLE, verbosity=0)
                self.progress("database", f"{ELIGIBLE} eligible participants, {INELIGIBLE} others")
                yield Stage(
                    patience=patience,
                    redis=redis,
                    topology=topology,
                    children=children,
                    environment=_environment(redis, topology),
                )
        except Interrupted as interrupted:
            self.stderr.write(str(interrupted))
            raise SystemExit(interrupted.exit_status) from None
        except (ChildDied, TimeoutError) as error:
            raise CommandError(str(error)) from error

    def progress(self, who: str, what: object) -> None:
        """Say what has happened, and when."""
        self.say(f"{time.monotonic() - self._began:5.1f} s  {who:10} {what}".rstrip())

    def say(self, *lines: str) -> None:
        """Write the lines where they are seen at once."""
        for line in lines:
            self.stdout.write(line)
        self.stdout.flush()


@contextmanager
def _home() -> Iterator[Path]:
    """The directory for all files of this run."""
    home: Path = settings.DEMO_HOME
    home.mkdir(mode=0o700)
    try:
        yield home
    finally:
        connections.close_all()
        shutil.rmtree(home)


def _environment(redis: RedisServer, topology: Topology | None) -> dict[str, str]:
    path = [str(settings.BASE_DIR), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "REDIS_URL": redis.url,
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "PYTHONPATH": os.pathsep.join(path),
        **(topology.environment if topology else {}),
    }
