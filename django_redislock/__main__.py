"""``python -m django_redislock run``: a command under a lock, without a Django project."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

if TYPE_CHECKING:
    from django.core.management.base import CommandParser

VARIABLE = "REDISLOCK_URL"  # In the environment: other users see the arguments of a process.


def main() -> None:
    """Do what ``manage.py locks run`` does, with settings made of --redis."""
    settings.configure(INSTALLED_APPS=["django_redislock"])
    django.setup()
    # These import models.
    from django_redislock.management import arguments
    from django_redislock.management.commands import locks
    from django_redislock.management.console import USAGE

    class Command(locks.Command):
        help = "Run a command under a lock on Redis or Valkey."
        suppressed_base_arguments = {
            *("--version", "--verbosity", "--settings", "--pythonpath"),
            *("--traceback", "--no-color", "--force-color"),
        }

        def add_arguments(self, parser: CommandParser) -> None:
            parser.set_defaults(alias=None, json=False)
            acts = parser.add_subparsers(
                title="acts", metavar="run", required=True, parser_class=arguments.ActParser
            )
            act = arguments.add_run(acts, self.get_version())
            act.add_argument(
                "--redis",
                metavar="URL",
                default=os.environ.get(VARIABLE),
                help=f"of the server: redis://, rediss:// or unix:// (${VARIABLE})",
            )

        def handle(self, *args: Any, act: str, **options: Any) -> None:
            if not (url := options.pop("redis")):
                self.stderr.write(f"Say where locks are kept: --redis URL, or ${VARIABLE}.")
                sys.exit(USAGE)
            settings.REDISLOCK = {"default": {"LOCATION": url}}
            super().handle(*args, act=act, **options)

    Command().run_from_argv(["python", "-m django_redislock", *sys.argv[1:]])


if __name__ == "__main__":
    main()
