"""RESP, as both kinds of connection speak it: commands, replies, and pushes of the server.

Connections speak RESP3: there the server may ring a waiter on the same connection that carries its
commands. For proxies without RESP3 they speak RESP2: there a connection that is subscribed carries
nothing but rings, so waiters need a second one.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import hiredis

from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules.keys import prefix_in

if TYPE_CHECKING:
    import socket
    from typing import Any

NOTHING = object()  # No whole reply has come yet.
CHUNK = 8192  # Bytes that are read at once.
Push = hiredis.PushNotification  # What the server sends unasked.
# The first word of a push. A channel of a cluster ends when its slot goes to another node.
RUNG = {b"message", b"smessage"}
SUBSCRIBED = {b"subscribe", b"ssubscribe"}
UNSUBSCRIBED = b"sunsubscribe"


def new_reader(database: int) -> hiredis.Reader:
    """A parser of replies of a connection that uses the *database* of that number."""
    error = partial(ReplyError, database=database)
    return hiredis.Reader(replyError=error, notEnoughData=NOTHING)


def rings_as(protocol: int | str) -> type[list[Any]]:
    """The type of a ring on a connection that is subscribed, by its version of RESP."""
    return Push if protocol == 3 else list


def packed(*command: str | bytes | int) -> bytes:
    """A command as the server reads it."""
    # hiredis gets no int: to print one, it runs pending signal handlers. If one of them raises
    # (Ctrl-C, Celery's soft time limit), hiredis 3.5 reads through a null pointer.
    if int in map(type, command):
        command = tuple([b"%d" % item if item.__class__ is int else item for item in command])
    # The stubs of hiredis speak of a tuple of one.
    data: bytes = hiredis.pack_command(command)  # type: ignore[arg-type]
    return data


def subscription(channel: str) -> bytes:
    """The command that subscribes to *channel*."""
    # A channel with a hash tag is on a cluster, see lua/_queue.lua.
    return packed("SSUBSCRIBE" if "{" in channel else "SUBSCRIBE", channel)


def note(item: list[Any], channels: dict[str, str]) -> None:
    """Note in *channels* where a connection is rung, as a push says."""
    if item[0] in SUBSCRIBED:
        channel = item[1].decode()
        channels[prefix_in(channel)] = channel
    elif item[0] == UNSUBSCRIBED:
        channel = item[1].decode()
        if channels.get(prefix_in(channel)) == channel:
            del channels[prefix_in(channel)]


def id_of(ring: bytes) -> str:
    """The id of the lease that a ring is for; "" if it is for none."""
    return ring.partition(b" ")[2].partition(b" ")[0].decode(errors="replace")


def free_copy(sock: socket.socket) -> None:
    """In a forked child: free the copy of a socket, but not its number.

    A signal handler may have forked in the middle of a write to that number. No new connection may
    have the number before that write is over.
    """
    if sock.fileno() >= 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, sock.fileno())
        os.close(null)
