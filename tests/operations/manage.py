"""What `python -m django` does, in a fork of the nursery: a command as from a shell."""

import sys

from django.core.management import execute_from_command_line


def main():
    """In a child: run the command that the arguments name."""
    # A fork has the streams that the nursery has opened, which were on files of another kind.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(number, old.mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
    sys.argv[0] = "django/__main__.py"
    execute_from_command_line(sys.argv)
