"""Several servers that keep the same locks: a master, its replicas, and the sentinels.

    with Watched("valkey") as watched:
        locks.configure(**watched.setting())
        watched.master.kill()
        watched.await_failover()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tests.support.servers import Sentinel, Server
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers import Kind

SERVICE = "mymaster"


class Watched:
    """A master with replicas, watched by sentinels: two replicas and three sentinels.

    Args:
        kind: See Server.
        down_after: Seconds after which the sentinels take a silent master for dead.
        password: What clients of the servers must know.
        sentinel_password: What clients of the sentinels must know.
    """

    def __init__(
        self, kind: Kind, *, down_after: float = 0.5, password: str = "", sentinel_password: str = ""
    ) -> None:
        self._password = {"password": password} if password else {}
        self._sentinel_password = {"password": sentinel_password} if sentinel_password else {}
        config: dict[str, Any] = {"repl_diskless_sync_delay": 0}
        if password:
            config |= {"requirepass": password, "masterauth": password}
        self.master = Server(kind, **config)
        self.replicas = [Server(kind, **config) for _ in range(2)]
        self._down_after = down_after
        self.sentinels: list[Sentinel] = []

    def start(self) -> Self:
        """Start all, and return once they know each other and have the same data."""
        for server in self.servers:
            server.start()
        for replica in self.replicas:
            self.client(replica).replicaof(self.master.host, self.master.port)
        self.sentinels = [
            Sentinel(
                self.master.kind,
                SERVICE,
                self.master,
                down_after=self._down_after,
                password=self._sentinel_password.get("password", ""),
                auth=self._password.get("password", ""),
            )
            for _ in range(3)
        ]
        for sentinel in self.sentinels:
            sentinel.start()
        wait_until(lambda: all(self._is_in_step(replica) for replica in self.replicas))
        wait_until(lambda: all(self._knows_all(sentinel) for sentinel in self.sentinels))
        return self

    @property
    def servers(self) -> list[Server]:
        """All that keep data."""
        return [self.master, *self.replicas]

    def setting(self, **options: Any) -> dict[str, Any]:
        """What REDISLOCK says of the default alias; *options* are more of its OPTIONS."""
        mine = {"service_name": SERVICE, **self._password}
        if self._sentinel_password:
            mine["sentinel_kwargs"] = self._sentinel_password
        return {
            "BACKEND": "django_redislock.backends.SentinelBackend",
            "LOCATION": [f"redis://{one.host}:{one.port}" for one in self.sentinels],
            "OPTIONS": {**mine, **options},
        }

    def client(self, server: Server, **options: Any) -> Any:
        """A plain client of one of the servers."""
        return server.client(**{**self._password, **options})

    def ask(self, sentinel: Sentinel, *command: str) -> Any:
        """What a sentinel answers."""
        with sentinel.client(**self._sentinel_password) as client:
            return client.execute_command("SENTINEL", *command)

    def named_by(self, sentinel: Sentinel) -> Server:
        """The server that a sentinel calls the master."""
        _, port = self.ask(sentinel, "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return next(server for server in self.servers if server.port == int(port))

    def await_failover(self) -> Server:
        """Return the new master once all the running sentinels know it."""

        def known() -> Server | None:
            named = {self.named_by(sentinel) for sentinel in self.sentinels if sentinel.running}
            return None if self.master in named or len(named) > 1 else named.pop()

        new = wait_until(known, message="the sentinels agree on a new master")
        assert new is not None
        self.replicas = [server for server in self.servers if server is not new]
        self.master = new
        return new

    def close(self) -> None:
        """End all of them."""
        for server in (*self.sentinels, *self.servers):
            server.close()

    def logs(self) -> Iterator[str]:
        """What they wrote, for people."""
        for server in (*self.servers, *self.sentinels):
            yield f"{server!r}\n{server.log}"

    def _is_in_step(self, replica: Server) -> bool:
        return self.client(replica).info("replication")["master_link_status"] == "up"

    def _knows_all(self, sentinel: Sentinel) -> bool:
        state = self.ask(sentinel, "MASTER", SERVICE)
        if not isinstance(state, dict):  # Of a client that speaks RESP2.
            state = dict(zip(state[::2], state[1::2], strict=True))
        numbers = {name if isinstance(name, str) else name.decode(): state[name] for name in state}
        return int(numbers["num-other-sentinels"]) == 2 and int(numbers["num-slaves"]) == 2

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()
