"""Run programs for as long as any process of a test run uses them, then end them.

``python guardian.py JOB`` returns at once and guards in the background. It needs the standard
library alone, so that it starts in an instant.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ENDED = "the program has ended with"  # In the log.


def main():
    """Guard the programs of the job in the current folder."""
    if os.fork():
        return
    job = json.loads(sys.argv[1])
    folder = Path.cwd()
    with Path("log").open("ab") as log:
        programs = [
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **job["as"],
            )
            for command in job["commands"]
        ]
        running = list(programs)
        with Path(job["users"]).open() as users:
            while not _nobody_has(users):
                for program in running[:]:
                    if program.poll() is not None:
                        running.remove(program)
                        log.write(f"\n{ENDED} {program.returncode}: {program.args}\n".encode())
                        log.flush()
                time.sleep(0.2)
            for program in programs:
                _end(program, job["signal"])
            Path(job["known"]).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def _nobody_has(users):
    """Whether no process holds its shared lock any more; the kernel frees that of a dead one."""
    with suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _end(program, number):
    program.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        program.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)  # And whatever it has started.
    program.wait()


if __name__ == "__main__":
    main()
