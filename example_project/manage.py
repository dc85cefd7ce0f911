#!/usr/bin/env python
"""Django's command-line utility for the example project."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    """Run the command. The demos have a database and a server, hence settings, of their own."""
    demos = {"demo", "demo_admin", "demo_chaos", "demo_jobs", "demo_stale_holder"}
    settings = "demo_settings" if demos.intersection(sys.argv[1:2]) else "settings"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", f"example_project.{settings}")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
