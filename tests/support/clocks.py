"""A wall clock that a test sets, for processes that it starts; see clock_shim.c."""

import struct
import subprocess
from pathlib import Path


class WallClock:
    """The clock of all processes that are started with its environment."""

    def __init__(self, folder):
        """Compile the shim, in a folder of its own."""
        library, self._offset = folder / "clock.so", folder / "clock"
        self._offset.write_bytes(bytes(8))
        source = Path(__file__).with_name("clock_shim.c")
        command = ["cc", "-shared", "-fPIC", "-Wall", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIM": str(self._offset)}

    def shift(self, seconds):
        """Let it be so many seconds ahead of ours, or behind if negative."""
        with self._offset.open("r+b") as file:  # In place: the processes have it mapped.
            file.write(struct.pack("=q", round(seconds * 1_000_000)))
