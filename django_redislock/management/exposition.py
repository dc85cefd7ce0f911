"""Prometheus's text format, and a file that is whole whenever it is read.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Sample(NamedTuple):
    """One number of a metric."""

    metric: str
    value: float
    labels: Mapping[str, str]


def text(helps: Mapping[str, str], samples: Iterable[Sample]) -> str:
    """The *samples*, all of them gauges, in the order of their metrics in *helps*."""
    lines: dict[str, list[str]] = {metric: [] for metric in helps}
    for metric, value, labels in samples:
        told = ",".join(f'{key}="{said.translate(_ESCAPED)}"' for key, said in labels.items())
        braced = f"{{{told}}}" if told else ""
        lines[metric].append(f"{metric}{braced} {round(value, 3):.16g}")
    return "".join(
        "\n".join([f"# HELP {metric} {helps[metric]}", f"# TYPE {metric} gauge", *some, ""])
        for metric, some in lines.items()
        if some
    )


def write(content: str, path: Path) -> None:
    """Put *content* into a file in one step, so that no reader sees a part of it.

    Raises:
        OSError: There is no such directory, it cannot be written, or *path* is no regular file.
    """
    if path.exists() and not path.is_file():  # As root, /dev/null would become a file.
        raise OSError(f"{path} is no regular file, so it cannot be replaced in one step.")
    path = Path(os.path.realpath(path))  # A link stays one, and does not become the file.
    # Not *.prom: node_exporter would read that. Not by mkstemp: node_exporter could not read it
    # later. Not by the process id: containers that share a volume may have the same.
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        new.write_text(content, encoding="utf-8")
        with suppress(OSError):  # It keeps a mode that it was given: cron has a umask of its own.
            new.chmod(stat.S_IMODE(path.stat().st_mode))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
