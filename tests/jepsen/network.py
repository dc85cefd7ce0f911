"""The network of a trial: it carries every connection of a client, and can be cut anywhere.

    with network.cut("client 3"):               # from all servers
    with network.cut("server 10001"):           # from all clients; it is the port that is named
    with network.cut("client 3", "server 10001"):  # from each other only

The nodes of a cluster talk to each other through it too ("node 127.0.0.11"). Nothing passes a cut,
in neither direction. Its connections stay, half-open; when it heals, what was sent arrives late.
"""

import asyncio
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TypeVar

from tests.support.waiting import HUNG

HOST = "127.0.0.1"

Ends = frozenset[str]
T = TypeVar("T")


class Network:
    """Relays in one thread. To be entered before use; the end of the block ends them."""

    def __init__(self):
        self.port = 0  # Where clients come in; see lead_through().
        self._cuts = []  # Changed and read in the thread only.
        self._servers = []
        self._tasks = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def lead_to(self, node, port):
        """Return a port that leads to the bus of a cluster's node, for the other nodes.

        Args:
            node: The address that the node's own connections come from.
            port: Of its bus, asked anew for each connection.
        """

        async def link(reader, writer):
            source, _ = writer.get_extra_info("peername")
            await self._link(frozenset({f"node {source}", f"node {node}"}), reader, writer, port())

        return self._do(self._listen(link))

    @contextmanager
    def cut(self, *ends):
        """Let nothing pass during the block on connections that have all of these ends."""
        cut = frozenset(ends)
        self._do(self._change(self._cuts.append, cut))
        try:
            yield
        finally:
            self._do(self._change(self._cuts.remove, cut))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(HUNG), "the network does not start"
        return self

    def __exit__(self, *exc_info):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(HUNG)

    # In the thread

    async def _run(self):
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._changed = asyncio.Condition()
        self.port = await self._listen(self._link_client)
        self._ready.set()
        await self._over.wait()
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # A transport closes its socket in the next round of the loop.

    async def _listen(self, link):
        def begin(reader, writer):
            task = asyncio.create_task(self._lead(link, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(begin, HOST, 0)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def _lead(self, link, reader, writer):
        try:
            await link(reader, writer)
        finally:
            writer.transport.abort()

    async def _link_client(self, reader, writer):
        if words := (await reader.readline()).split():
            client, port = map(int, words)
            ends = frozenset({f"client {client}", f"server {port}"})
            await self._link(ends, reader, writer, port)

    async def _link(self, ends, reader, writer, port):
        await self._pass(ends)
        try:
            answers, requests = await asyncio.open_connection(HOST, port)
        except OSError:  # No server is there.
            writer.transport.abort()
            return
        try:
            await asyncio.gather(
                self._carry(ends, reader, requests), self._carry(ends, answers, writer)
            )
        finally:
            requests.transport.abort()

    async def _carry(self, ends, reader, writer):
        with suppress(OSError):  # One of the two is gone.
            while some := await reader.read(65536):
                await self._pass(ends)
                writer.write(some)
                await writer.drain()
        await self._pass(ends)  # Nor does anybody hear through a cut that a connection has ended.
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()  # It sends what is left.

    async def _pass(self, ends):
        """Return once no cut is between these ends."""
        async with self._changed:
            await self._changed.wait_for(lambda: not any(cut <= ends for cut in self._cuts))

    async def _change(self, how, cut):
        async with self._changed:
            how(cut)
            self._changed.notify_all()

    def _do(self, work):
        """From another thread: have it done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HUNG)


def lead_through(port, client):
    """In a client: have all new connections of this process go through a network at that port."""
    connect = socket.socket.connect

    def connect_through(self, address):
        if self.family is not socket.AF_INET:
            connect(self, address)
            return
        connect(self, (HOST, port))
        self.sendall(f"{client} {address[1]}\n".encode())

    socket.socket.connect = connect_through
