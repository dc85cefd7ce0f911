"""Errors of a Redis or Valkey server, and their meaning (rule R13)."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import hiredis
from redis import exceptions as redis_errors

from django_redislock.process import chain_of

if TYPE_CHECKING:
    from django_redislock.exceptions import UnavailableReason

# Error codes of a server that cannot serve us, or not now. After a failover its address may lead to
# another server, which only a new connection reaches.
_WRONG_SERVER = frozenset(
    {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "UNBLOCKED"}
)
_WRONG_SERVER_TEXT = "WAIT cannot be used with replica"
# A script met a key that is not here while its slot is on its way to another node: see TRYAGAIN.
ON_ITS_WAY_TEXT = "access a non local key"

# Error codes after which trying again may help. All others are refusals: rights, types, memory.
_TRANSIENT = _WRONG_SERVER | {"BUSY", "TRYAGAIN"}
# Error codes of a node of a cluster. They concern one slot; the connection is as good as before.
_OF_CLUSTERS = frozenset({"ASK", "CROSSSLOT", "MOVED"})
_TRANSIENT_TEXT = ("max number of clients", _WRONG_SERVER_TEXT, ON_ITS_WAY_TEXT)


def _code_in(text: str) -> str:
    return text.partition(" ")[0]


class Exhausted(Exception):
    """No connection became free in time."""


class Crowded(Exhausted):
    """There is a connection, but none that a waiter may keep."""


class TooOld(redis_errors.RedisError):
    """The server lacks what the scripts need."""


class NoResp3(TooOld):
    """The server, or a proxy before it, does not speak RESP3."""


class NotOneCluster(redis_errors.RedisError):
    """LOCATION does not lead to nodes of one cluster."""


class TlsRefusal(redis_errors.ConnectionError):
    """TLS could not begin: a certificate is not trusted, say."""


class ReplyError(redis_errors.ResponseError):
    """An error reply of the server; its first word is the code."""

    @property
    def code(self) -> str:
        return _code_in(str(self).removeprefix("EXECABORT Transaction discarded because of: "))


class NotAcknowledged(ReplyError):
    """The error reply to the WAIT behind a command. The command may have been carried out."""


class NotSent(ConnectionError):
    """The connection was cut before all of a command was sent: the server did not carry it out."""


class TooLate(redis_errors.TimeoutError):
    """A connection was there, but too late to send a command on it."""


# The errors that a client raises about a server. Any other comes from outside: a signal handler,
# Celery's soft time limit, a cancellation. One of these may do so, too: see
# process.pass_on_interrupt().
CLIENT_ERRORS = (OSError, EOFError, redis_errors.RedisError, hiredis.HiredisError, Exhausted)


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help (R13)."""
    if isinstance(error, Exhausted):
        return True
    if isinstance(error, ReplyError):
        return error.code in _TRANSIENT or any(text in str(error) for text in _TRANSIENT_TEXT)
    if isinstance(
        error, TlsRefusal | redis_errors.AuthenticationError | redis_errors.AuthorizationError
    ):
        return False
    # In a reply to the handshake, redis-py leaves a code that it does not know in the text.
    if isinstance(error, redis_errors.ReadOnlyError | redis_errors.MasterDownError) or (
        _code_in(str(error)) in _TRANSIENT or any(text in str(error) for text in _TRANSIENT_TEXT)
    ):
        return True
    return _is_of_connection(error) or isinstance(error, redis_errors.BusyLoadingError)


def is_wrong_server(said: object) -> bool:
    """Whether it is an error after which only a new connection may lead to the right server."""
    return isinstance(said, ReplyError) and (
        said.code in _WRONG_SERVER or _WRONG_SERVER_TEXT in str(said)
    )


def reason_of(error: BaseException) -> UnavailableReason:
    """The reason that LockUnavailable gives for an error."""
    if not is_transient(error):
        return "refused"
    if isinstance(error, Exhausted):
        return "pool"
    if isinstance(error, NotAcknowledged):
        return "replicas"
    if isinstance(error, redis_errors.ResponseError) or not _is_of_connection(error):
        return "not_ready"
    is_timeout = isinstance(error, TimeoutError | redis_errors.TimeoutError)
    return "timeout" if is_timeout else "connection"


def _is_of_connection(error: BaseException) -> bool:
    # An SSLError is an OSError, and one of hiredis means that a reply was none: either way a
    # connection broke that was open before. The command on it may have been carried out.
    kinds = OSError | EOFError | redis_errors.ConnectionError | redis_errors.TimeoutError
    return isinstance(error, kinds | hiredis.HiredisError) and not isinstance(
        error, redis_errors.BusyLoadingError
    )


def check_tls(error: BaseException, handled: BaseException | None) -> None:
    """Raise TlsRefusal if a dial has ended by *error* because TLS could not begin.

    Args:
        error: What redis-py made of it.
        handled: What the program was handling at the time of the dial; Python chains it, too.
    """
    if not isinstance(error, Exception):  # A cancellation or Ctrl-C, whatever it interrupted.
        return
    for one in chain_of(error):
        if one is handled or isinstance(one, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return
        if isinstance(one, ssl.SSLError):
            raise TlsRefusal(str(error)) from error


def described(error: BaseException) -> str:
    """The text of an error, for the middle of a sentence."""
    text = (str(error) or type(error).__name__).rstrip(".")
    if isinstance(error, ReplyError) and error.code in _OF_CLUSTERS:
        return f"{text} (this server is a node of a cluster, which ClusterBackend is for)"
    return text
