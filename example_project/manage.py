#!/usr/bin/env python
"""Django's command-line utility for the example project."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    """Run the command. The demo brings its own database and server, hence settings of its own."""
    settings = "demo_settings" if sys.argv[1:2] == ["demo"] else "settings"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", f"example_project.{settings}")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
