"""Errors of a Redis or Valkey server, and their meaning (rule R13)."""

from __future__ import annotations

import re
import ssl
from typing import TYPE_CHECKING

import hiredis
from redis import exceptions as redis_errors

from django_redislock.process import chain_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django_redislock.exceptions import UnavailableReason

# Error codes of a server that cannot serve us, or not now. After a failover its address may lead to
# another server, which only a new connection reaches.
_WRONG_SERVER = frozenset(
    {"CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOREPLICAS", "READONLY", "UNBLOCKED"}
)
_WRONG_SERVER_TEXT = "WAIT cannot be used with replica"
# A script met a key that is not here while its slot is on its way to another node: see TRYAGAIN.
ON_ITS_WAY_TEXTS = (
    "access a non local key",
    "during rehashing of the slot",  # Of Redis 8.2 and Valkey 8.1.
)

# Error codes after which trying again may help. All others are refusals: rights, types, memory.
_TRANSIENT = _WRONG_SERVER | {"BUSY", "TRYAGAIN"}
_TRANSIENT_TEXT = (
    "max number of clients",
    _WRONG_SERVER_TEXT,
    *ON_ITS_WAY_TEXTS,
    # Of what a server asks about a password: ElastiCache (IAM), and a module for LDAP.
    "service is not available",
    "Exceeded limit of IAM",
    "problem with LDAP service",
)

# What a server says that runs no scripts, and what lets it run them.
_FORBIDDEN_SCRIPTS = {
    r"NOPERM .*'eval": "allow +eval and +evalsha",
    r"(?i)(unknown|unsupported) command .?eval|command .?eval\w*.? not support": (
        "let the server's configuration neither rename nor disable EVAL and EVALSHA"
    ),
    r"find scripting engine": "let the server load its Lua module",
    r"bad lua script": "set script_check_enable to 0, see Alibaba in the docs under Services",
}
# What to do about all refusals. A node of a cluster refuses by slot.
_OF_RIGHTS = r"NOPERM|ACL failure in script|The user executing the script"
_ADVICE = {
    **_FORBIDDEN_SCRIPTS,
    r"^NOAUTH": "the server wants a password: set {options}['password'], and ['username'] unless it"
    " is that of the default user",
    r"^WRONGPASS": "correct {options}['username'] and ['password']",
    r"without any password configured": "leave {options}['password'] out, and any in LOCATION",
    r"DB index is out of range": "correct the number of the database, {database}, in LOCATION or"
    " {options}['db']",
    r"SELECT is not allowed in cluster": "leave the number of the database out; only a Valkey with"
    " cluster-databases has more than 0",
    r"access database": "let ACL SETUSER say db={database}",
    _OF_RIGHTS: "`manage.py locks doctor` lists the rights that locks need",
    r"^(ASK|CROSSSLOT|MOVED)": "this server is a node of a cluster, which ClusterBackend is for",
    r"^BUSY": "a script runs there for too long; mostly this passes",
    r"max number of clients": "raise its maxclients, or let programs keep fewer connections",
    r"certificate verify failed: (self|unable)": "set {options}['ssl_ca_certs'] to a file with the"
    " certificate of its authority",
    r"certificate is not valid for": "LOCATION must name the host as its certificate does",
}


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


class AtServers(redis_errors.RedisError):
    """What went wrong at servers, which the text names. It means what its cause means."""


class Refusal(redis_errors.ResponseError):
    """An error reply of the server; its first word is the code.

    Args:
        text: What the server said.
        database: The number of the database that the connection uses.
    """

    def __init__(self, text: str, database: int = 0) -> None:
        # What follows may be a password or a token.
        super().__init__(str(text).partition(", with args beginning with")[0])
        self.database = database

    @property
    def code(self) -> str:
        text = str(self).removeprefix("EXECABORT Transaction discarded because of: ")
        return text.partition(" ")[0]


class LoginError(Refusal):
    """The error reply to a command of the handshake, which redis-py sends."""


class ReplyError(Refusal):
    """The error reply to a command of ours."""


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
    error = meaning_of(error)
    if isinstance(error, Refusal):
        return error.code in _TRANSIENT or any(text in str(error) for text in _TRANSIENT_TEXT)
    return isinstance(error, Exhausted) or (
        _is_of_connection(error) and not isinstance(error, TlsRefusal)
    )


def meaning_of(error: BaseException) -> BaseException:
    """The error itself, or what it only wraps in words about servers."""
    while isinstance(error, AtServers) and error.__cause__ is not None:
        error = error.__cause__
    return error


def at_servers(says: str, errors: Mapping[str, Exception], options: str = "OPTIONS") -> AtServers:
    """The error of servers, by address, none of which could be asked; see described()."""
    problem = AtServers(says + all_described(errors, options))
    # If one of them may be asked later, trying again may help.
    problem.__cause__ = next(filter(is_transient, errors.values()), next(iter(errors.values())))
    return problem


def is_wrong_server(said: object) -> bool:
    """Whether it is an error after which only a new connection may lead to the right server."""
    return isinstance(said, ReplyError) and (
        said.code in _WRONG_SERVER or _WRONG_SERVER_TEXT in str(said)
    )


def reason_of(error: BaseException) -> UnavailableReason:
    """The reason that LockUnavailable gives for an error."""
    error = meaning_of(error)
    if not is_transient(error):
        return "refused"
    if isinstance(error, Exhausted):
        return "pool"
    if isinstance(error, NotAcknowledged):
        return "replicas"
    if isinstance(error, Refusal):
        return "not_ready"
    is_timeout = isinstance(error, TimeoutError | redis_errors.TimeoutError)
    return "timeout" if is_timeout else "connection"


def _is_of_connection(error: BaseException) -> bool:
    # An SSLError is an OSError, and one of hiredis means that a reply was none: either way a
    # connection broke that was open before. The command on it may have been carried out.
    kinds = OSError | EOFError | redis_errors.ConnectionError | redis_errors.TimeoutError
    return isinstance(error, kinds | hiredis.HiredisError)


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


def described(error: BaseException, options: str = "OPTIONS") -> str:
    """The text of an error, for the middle of a sentence; of a refusal, with what to do.

    Args:
        error: The error.
        options: The setting that has the client options.
    """
    text = (str(error) or type(error).__name__).rstrip(". ")
    if not isinstance(error, Refusal | TlsRefusal):
        return text
    database = error.database if isinstance(error, Refusal) else 0
    what = _advice(_ADVICE, error).format(options=options, database=database)
    if text.startswith("NOAUTH"):
        text = "NOAUTH"  # The rest is about HELLO, and of no use.
    if not what and is_transient(error):
        what = "mostly this passes"
    return f"{text} ({what})" if what else text


def all_described(errors: Mapping[str, Exception], options: str = "OPTIONS") -> str:
    """The texts of the errors of several servers, by address; see described()."""
    return "; ".join(f"{place}: {described(error, options)}" for place, error in errors.items())


def is_of_rights(error: BaseException | None) -> bool:
    """Whether a user with more rights would not have been refused."""
    return isinstance(error, Refusal) and bool(re.search(_OF_RIGHTS, str(error)))


def to_allow_scripts(error: BaseException | None) -> str:
    """What to do so that scripts run on the server; "" if it has refused something else."""
    return _advice(_FORBIDDEN_SCRIPTS, error) if isinstance(error, ReplyError) else ""


def _advice(table: Mapping[str, str], error: Exception) -> str:
    return next((what for words, what in table.items() if re.search(words, str(error))), "")
