"""A server as if it were on another machine: each reply is kept back for a while.

As a program, `python -m benchmarks.distant PORT SERVER_PORT`, it is that machine's network.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

AWAY = 0.0003  # Seconds: a round trip within a data centre.


@contextmanager
def distant(port: int) -> Iterator[str]:
    """The URL of the server at *port*, AWAY from here, during the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), str(port)],
            pass_fds=[listener.fileno()],
        )
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        finally:
            relay.kill()
            relay.wait()


def main(listening: str, port: str) -> None:
    """Relay each connection until the process is ended."""
    with socket.socket(fileno=int(listening)) as listener:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_relay, args=(client, int(port)), daemon=True).start()


def _relay(client: socket.socket, port: int) -> None:
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while asked := client.recv(65536):
            server.sendall(asked)
            reply = server.recv(65536)
            time.sleep(AWAY)
            client.sendall(reply)


if __name__ == "__main__":
    main(*sys.argv[1:])
