"""The clients of a trial: paused, stopped, killed and replaced."""

import os
import signal
import threading

from tests.jepsen.workload import clock
from tests.support.waiting import HUNG, wait_until

LOOKS = 0.02  # Seconds between two looks at who stands still.
# Seconds that a client stands still at most. One that was stopped within a transaction of SQLite
# keeps all others from writing, so for that one nobody would ever be there to overtake it.
LONGEST_STOP = 10.0


class Crew:
    """The clients. One that was killed is replaced.

    Who stands still is continued once somebody else has written, and so is certainly too late; a
    thread sees to that.

    Args:
        start: Starts a client by its number.
        size: How many there are at a time.
        desk: How clients are told to stand still between reading and writing.
        writes: Counts the writes of all clients so far.
    """

    def __init__(self, start, size, desk, writes):
        self._start = start
        self._desk = desk
        self._writes = writes
        self._lock = threading.Lock()
        self._clients = {}
        self._size = size
        self._started = 0
        self._gone = threading.Event()
        self._watching = threading.Thread(target=self._continue_the_late, daemon=True)

    def await_writes(self, count):
        """Return once the clients have written so often again.

        Raises:
            AssertionError: A client has ended, or nobody writes.
        """
        enough = self._writes() + count

        def are_enough():
            for number, client in self._clients.items():
                assert client.process.poll() is None, f"client {number} ended:\n{client.stderr}"
            return self._writes() >= enough

        wait_until(are_enough, message="clients are at work", every=LOOKS)

    def choose(self, dice):
        """The number of one of them."""
        return dice.choice(sorted(self._clients))

    def pause(self, dice):
        """Have a client stand still between reading and writing."""
        self._desk.order_pause(self.choose(dice))

    def stop(self, dice):
        """Stop a client wherever it is."""
        with self._lock:
            os.kill(self._clients[self.choose(dice)].pid, signal.SIGSTOP)

    def kill(self, dice):
        """Kill a client wherever it is, and start another one."""
        with self._lock:
            self._clients.pop(self.choose(dice)).close()
        self._add()

    def finish(self):
        """Return once all have ended, as they should.

        Raises:
            AssertionError: One did not, or not well.
        """
        for number, client in self._clients.items():
            assert client.wait(HUNG) == 0, f"client {number}:\n{client.stderr}"

    def __enter__(self):
        try:
            while len(self._clients) < self._size:
                self._add()
        except BaseException:
            self.__exit__()
            raise
        self._watching.start()
        return self

    def __exit__(self, *exc_info):
        self._gone.set()
        if self._watching.is_alive():
            self._watching.join(HUNG)
        for client in self._clients.values():
            client.close()

    def _add(self):
        self._started += 1
        client = self._start(self._started)
        with self._lock:
            self._clients[self._started] = client

    def _continue_the_late(self):
        still = {}  # Who stands: writes at that time, and when.
        while not self._gone.wait(LOOKS):
            writes, now = self._writes(), clock()
            with self._lock:
                standing = {n: one for n, one in self._clients.items() if _stands_still(one)}
                running = [one for one in self._clients.values() if one.process.poll() is None]
                nobody_else = len(standing) == len(running)
                still = {number: still.get(number, (writes, now)) for number in standing}
                for number, (before, since) in list(still.items()):
                    if writes > before or now - since > LONGEST_STOP or nobody_else:
                        standing[number].cont()
                        del still[number]


def _stands_still(client):
    how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, client.pid, how) is not None
    except ChildProcessError:  # It has ended.
        return False
