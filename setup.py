"""What setup.cfg cannot say: README.md away from its neighbours, and archives equal to the byte."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
from configparser import ConfigParser
from pathlib import Path
from shutil import copyfile
from typing import Any

from setuptools import setup
from setuptools.command.sdist import sdist

RELATIVE = r"\]\((?![a-z]+:)([^)]+)\)"


def for_index(readme: str, repository: str) -> str:
    """Let relative links lead into *repository*; where none is known, leave their text alone."""
    if repository:
        readme = re.sub(rf"(!\[[^]]*){RELATIVE}", rf"\1]({repository}/raw/HEAD/\2)", readme)
        return re.sub(rf"(\[[^]]*){RELATIVE}", rf"\1]({repository}/blob/HEAD/\2)", readme)
    readme = re.sub(rf"!\[[^]]*{RELATIVE}\n*", "", readme)
    return re.sub(rf"\[([^]]*){RELATIVE}", r"\1", readme)


def links(repository: str) -> dict[str, str]:
    """What the package index shows beside the description, if *repository* is known."""
    if not repository:
        return {}
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/blob/HEAD/SECURITY.md",
    }


class SourceArchive(sdist):
    """With SOURCE_DATE_EPOCH, an archive that depends on the names and contents of files alone.

    setuptools would write who built it, when, and with which umask. A wheel has that date anyway,
    and the modes of the files that it is built from: `python -m build` takes those of this archive.
    """

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        copyfile("setup.cfg", Path(base_dir, "setup.cfg"))  # setuptools took its comments out.

    def make_archive(self, base_name: Any, format: str, *args: Any, **kwargs: Any) -> str:  # noqa: A002
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, *args, **kwargs)

        def alike(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime = int(epoch)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            gzip.GzipFile(path, "wb", mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(kwargs["base_dir"], filter=alike)
        return path


if __name__ == "__main__":
    here = Path(__file__).parent
    if "SOURCE_DATE_EPOCH" in os.environ:
        os.umask(0o022)  # The metadata of a wheel has the mode that it is written with.
    config = ConfigParser(interpolation=None)
    config.read(here / "setup.cfg", encoding="utf-8")
    url = config.get("metadata", "url", fallback="")
    setup(
        cmdclass={"sdist": SourceArchive},
        long_description=for_index((here / "README.md").read_text(encoding="utf-8"), url),
        project_urls=links(url),
    )
