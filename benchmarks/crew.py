"""Clients side by side: processes or threads that do the same job."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

# Not forked: the parent has threads and connections that a child must not inherit.
PROCESSES = multiprocessing.get_context("spawn")
PATIENCE = 60  # Seconds without an answer after which something hangs.


class Crew(Protocol):
    """A number of clients that outlive a job, and end with the block."""

    size: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def begin(self, job: Callable[..., Any], *args: object) -> None:
        """Have everybody start `job(shared, *args)`, `shared` being what the crew was given."""
        ...

    def check(self) -> None:
        """Raise if somebody has failed at the job."""
        ...

    def results(self) -> list[Any]:
        """What the job returned, one by one."""
        ...


class Threads:
    """See Crew."""

    def __init__(self, size: int, shared: object = None) -> None:
        self.size = size
        self._shared = shared
        self._jobs: list[Future[Any]] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self.size)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def begin(self, job: Callable[..., Any], *args: object) -> None:
        """See Crew."""
        self._jobs = [self._pool.submit(job, self._shared, *args) for _ in range(self.size)]

    def check(self) -> None:
        """See Crew."""
        for job in self._jobs:
            if job.done():
                job.result()

    def results(self) -> list[Any]:
        """See Crew."""
        return [job.result(PATIENCE) for job in self._jobs]


class Processes:
    """See Crew; what is shared may hold semaphores and values made by `PROCESSES`."""

    def __init__(self, size: int, shared: object = None) -> None:
        self.size = size
        self._shared = shared
        self._members: list[tuple[Connection[Any, Any], BaseProcess]] = []

    def __enter__(self) -> Self:
        try:
            for _ in range(self.size):
                ours, theirs = PROCESSES.Pipe()
                member = PROCESSES.Process(target=_serve, args=(theirs, self._shared), daemon=True)
                member.start()
                self._members.append((ours, member))
                theirs.close()  # So that we read end-of-file when the member dies.
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe, member in self._members:
            pipe.close()
            member.terminate()
        for _, member in self._members:
            member.join()

    def begin(self, job: Callable[..., Any], *args: object) -> None:
        """See Crew."""
        for pipe, _ in self._members:
            pipe.send((job, args))

    def check(self) -> None:
        """See Crew."""
        if not all(member.is_alive() for _, member in self._members):
            raise RuntimeError("A process has died; it has said why.")

    def results(self) -> list[Any]:
        """See Crew."""
        results = []
        for pipe, _ in self._members:
            if not pipe.poll(PATIENCE):
                raise RuntimeError("A process hangs.")
            results.append(pipe.recv())  # EOFError: it has died and said why.
        return results

    def perform(self, job: Callable[..., Any], *args: object) -> list[Any]:
        """Begin, and wait for the results."""
        self.begin(job, *args)
        return self.results()


def _serve(pipe: Connection[Any, Any], shared: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us.
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:  # The parent is done, or gone.
            return
        pipe.send(job(shared, *args))
