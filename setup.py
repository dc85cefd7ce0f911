"""What setup.cfg cannot say: README.md as the package index shows it, away from its neighbours."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

RELATIVE = r"\]\((?![a-z]+:)([^)]+)\)"


def for_index(readme: str, repository: str) -> str:
    """Let relative links lead into *repository*; where none is known, leave their text alone."""
    if repository:
        readme = re.sub(rf"(!\[[^]]*){RELATIVE}", rf"\1]({repository}/raw/HEAD/\2)", readme)
        return re.sub(rf"(\[[^]]*){RELATIVE}", rf"\1]({repository}/blob/HEAD/\2)", readme)
    readme = re.sub(rf"!\[[^]]*{RELATIVE}\n*", "", readme)
    return re.sub(rf"\[([^]]*){RELATIVE}", r"\1", readme)


if __name__ == "__main__":
    here = Path(__file__).parent
    config = ConfigParser(interpolation=None)
    config.read(here / "setup.cfg", encoding="utf-8")
    setup(
        long_description=for_index(
            (here / "README.md").read_text(encoding="utf-8"),
            config.get("metadata", "url", fallback=""),
        )
    )
