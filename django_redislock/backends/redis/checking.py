"""Checks settings before anything is dialed with them."""

from __future__ import annotations

import os
import re
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis.asyncio
from django.core.exceptions import ImproperlyConfigured
from redis.connection import parse_url
from redis.exceptions import RedisError

from django_redislock.backends.redis.async_connection import AsyncConnection
from django_redislock.backends.redis.connection import Connection
from django_redislock.backends.redis.dialing import Dialer, check_version
from django_redislock.backends.redis.pool import ConnectionPool
from django_redislock.rules.arguments import LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


# --- what LOCATION may be. redis-py ignores parts that it does not understand, and uses a default
#

# Then each machine would lock for itself on its own localhost, or in the wrong database.

LOOKS_LIKE = "redis://host:6379/0, rediss://host:6379/0 or unix:///path/to/socket?db=0"

_SENTINELS = (
    "use SentinelBackend, with LOCATION a list of redis://host:26379 and OPTIONS['service_name']"
)
_CLUSTER = "for a cluster use ClusterBackend, with LOCATION ['redis://host-1:6379', ...]"
_FOR_TLS = "is for TLS: leave it out, or let LOCATION begin with rediss://"
_NO_DATABASE = "must be the number of a database, 0 or greater"


def check_url(url: str) -> None:
    """Refuse an address if redis-py would ignore a part of it.

    Raises:
        ValueError: Says as a clause what is wrong. It never quotes the URL: any part of it may
            hold a password.
    """
    scheme, _, rest = url.partition("://")
    kind = scheme.lower()
    if "sentinel" in kind:
        raise ValueError(f"leads to Sentinel: {_SENTINELS}")
    if "cluster" in kind:
        raise ValueError(f"is no URL that redis-py understands; {_CLUSTER}")
    if kind in {"valkey", "valkeys"}:
        raise ValueError("must begin with redis:// or rediss://, also for Valkey")
    if not rest or scheme not in {"redis", "rediss", "unix"}:
        raise ValueError(
            f"is not a URL that redis-py understands; it should look like {LOOKS_LIKE}"
        )
    if "#" in url:
        raise ValueError("has a #, and what follows it would be ignored; write it as %23")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("names a host that is malformed") from None
    place = parts.netloc.rpartition("@")[2]
    if scheme == "unix":
        if place or len(parts.path) < 2:
            raise ValueError("names no path; it should look like unix:///path/to/socket?db=0")
    else:
        _check_host(parts, place)
    _check_query(parts)
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        # Its text names the option, not its value.
        raise ValueError(f"is not understood: {str(error).rstrip('.')}") from None


def _check_host(parts: SplitResult, place: str) -> None:
    if "," in place:
        raise ValueError(f"names several hosts; name one, the primary; {_CLUSTER}")
    if not parts.hostname:
        raise ValueError("names no host; in a password, write / as %2F and ? as %3F")
    try:
        unquote(parts.hostname).encode("idna")  # As the look-up of its address does.
    except UnicodeError:
        raise ValueError("names a host that is malformed") from None
    try:
        port = 0 if place.endswith(":") else parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("names no port of 1 to 65535 after the host; it may be left out, for 6379")
    if not re.fullmatch(r"/?|/[0-9]+/?", parts.path):
        raise ValueError(f"has a path that is no database; what follows the host {_NO_DATABASE}")


def _check_query(parts: SplitResult) -> None:
    try:
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ValueError("has options after the ? that are not of the form name=value") from None
    names = [name for name, _ in query]
    if not all(value for _, value in query):
        raise ValueError("has an option after the ? without a value")
    if len(set(names)) < len(names):
        raise ValueError("has an option after the ? twice")
    if parts.scheme != "rediss" and any(name.startswith("ssl") for name in names):
        raise ValueError(f"has an option after the ? that {_FOR_TLS}")
    if "db" in names:
        if not re.fullmatch("[0-9]+", dict(query)["db"]):
            raise ValueError(f"has a db after the ? that {_NO_DATABASE}")
        if parts.scheme != "unix" and parts.path.strip("/"):
            raise ValueError("names a database twice, after the host and after the ?")


def check_options(url: str, options: Mapping[str, Any]) -> None:
    """Refuse client options that lead elsewhere than *url*, or nowhere.

    Raises:
        ValueError: Names the option and says what is wrong.
    """
    address: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    for name in ("host", "port", "path", "db"):
        if name in options and address.get(name, options[name]) != options[name]:
            raise ValueError(f"[{name!r}] contradicts LOCATION, which redis-py would follow")
    for name, least, most in (("db", 0, 2**31), ("port", 1, 65535)):
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"[{name!r}] must be an integer of {least} to {most}, not {value!r}")
    if urlsplit(url).scheme == "rediss":
        _check_tls_options({**options, **address})
    elif name := next((name for name in options if name.startswith("ssl")), ""):
        raise ValueError(f"[{name!r}] {_FOR_TLS} (behind sentinels, set OPTIONS['ssl'] to True)")


def _check_tls_options(options: Mapping[str, Any]) -> None:
    """Refuse options of TLS with which no connection can begin. Files are read at each dial."""
    for name in ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile"):
        value = options.get(name)
        if value is not None and not isinstance(value, str | bytes | os.PathLike):
            raise ValueError(f"[{name!r}] must be a path, not {value!r}")
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise ValueError("['ssl_keyfile'] needs ['ssl_certfile'] beside it")
    password = options.get("ssl_password")
    if not (
        password is None or isinstance(password, str | bytes | bytearray) or callable(password)
    ):
        raise ValueError(f"['ssl_password'] must be a string, not {type(password).__name__}")
    for name in ("ssl_include_verify_flags", "ssl_exclude_verify_flags"):
        flags = options.get(name)
        if flags is not None and not isinstance(flags, list | tuple | set | frozenset):
            raise ValueError(f"[{name!r}] must be a list of ssl.VerifyFlags, not {flags!r}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    version = options.get("ssl_min_version")
    if version is not None:
        try:
            context.minimum_version = version
        except (TypeError, ValueError):
            raise ValueError(
                f"['ssl_min_version'] must be an ssl.TLSVersion, not {version!r}"
            ) from None
    ciphers = options.get("ssl_ciphers")
    if ciphers:
        try:
            context.set_ciphers(ciphers)
        except (TypeError, ssl.SSLError):
            raise ValueError(
                f"['ssl_ciphers'] must be a list of ciphers as OpenSSL takes it, not {ciphers!r}"
            ) from None


def check_protocol(url: str, options: Mapping[str, Any], protocols: Collection[int]) -> None:
    """Refuse a version of RESP that does not exist, or that the backend does not use.

    Raises:
        ValueError: Says as a clause what is wrong.
    """
    address: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    protocol = address.get("protocol", options.get("protocol", 3))
    if type(protocol) is int and protocol in protocols:
        return
    if 2 in protocols:
        raise ValueError(f"must be 3, or 2 for a proxy that does not speak RESP3, not {protocol!r}")
    raise ValueError(
        f"must be 3, not {protocol!r}: RESP2 is for a proxy before a server of RedisBackend or"
        " QuorumBackend"
    )


def names_option(url: str, name: str) -> bool:
    """Whether the URL has the option *name* after its ?."""
    return name in dict(parse_qsl(urlsplit(url).query))


KNOWN_CLIENTS = "6.4 to 8.1"  # Versions of redis-py, of which the first and the last were tried.
DEFAULT_MAX_CONNECTIONS = 128
LEAST_MAX_CONNECTIONS = ConnectionPool.BESIDE + ConnectionPool.KEPT_BACK


def checked_dialer(
    url: str,
    options: Mapping[str, Any],
    of_url: str,
    of_options: str,
    check: Callable[[Any], None] = check_version,
    types: tuple[type[Connection], type[AsyncConnection]] = (Connection, AsyncConnection),
    protocols: tuple[int, ...] = (3,),
) -> Dialer:
    """A dialer, whose *check* judges the server that answers.

    Args:
        url: Where the server is.
        options: Those of redis-py.
        of_url: The setting that *url* comes from, for messages.
        of_options: The setting that *options* come from.
        check: See Dialer.
        types: See Dialer.
        protocols: The versions of RESP that the backend can use.

    Raises:
        ImproperlyConfigured: Names the setting and says what is wrong.
    """
    check_client()
    setting = f"{of_url} "
    try:
        check_url(url)
        setting = of_options
        check_options(url, options)
        setting = f"{of_url if names_option(url, 'protocol') else of_options}['protocol'] "
        check_protocol(url, options, protocols)
    except ValueError as error:
        raise ImproperlyConfigured(f"{setting}{error}.") from None
    try:
        return Dialer(url, options, check, types)
    except TypeError as error:
        # Its text names the option, not its value.
        names = dict(parse_qsl(urlsplit(url).query))
        setting = of_url if any(repr(name) in str(error) for name in names) else of_options
        raise ImproperlyConfigured(
            f"{setting} has an option that redis-py does not accept: {error}"
        ) from error
    except RedisError as error:
        # It quotes no password: redis-py takes any. Options may stand in either setting.
        says = " ".join(str(error).split())
        raise ImproperlyConfigured(
            f"{of_url} with OPTIONS cannot be used, says redis-py: {says}"
        ) from error
    except Exception:  # noqa: BLE001 - whatever a URL parser raises
        # The text may quote a part of the URL, and so of the password: from None.
        raise ImproperlyConfigured(
            f"{of_url} is not a URL that redis-py understands; it should look like {LOOKS_LIKE}."
        ) from None


def check_client() -> None:
    """Refuse a redis-py if its connections lack the private attributes that ours need.

    Raises:
        ImproperlyConfigured: Names the versions that are known to work.
    """
    blocking = redis.Connection()  # type: ignore[no-untyped-call]
    awaiting = redis.asyncio.Connection()
    for connection, names in {blocking: ("_sock",), awaiting: ("_reader", "_writer")}.items():
        for name in ("protocol", *names):
            if not hasattr(connection, name):
                raise ImproperlyConfigured(
                    f"redis-py {redis.__version__} cannot be used: its connections have no {name},"
                    f" which locks need. Versions {KNOWN_CLIENTS} are known to work; install one"
                    " of them."
                )


def checked_options(options: Mapping[str, Any], of_options: str) -> tuple[dict[str, Any], int]:
    """The options for redis-py, and ``max_connections``, which is ours.

    Args:
        options: All that are given.
        of_options: The setting that they come from, for messages.

    Raises:
        ImproperlyConfigured: Names the setting and says what is wrong.
    """
    theirs = dict(options)
    limit = theirs.pop("max_connections", DEFAULT_MAX_CONNECTIONS)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < LEAST_MAX_CONNECTIONS:
        raise ImproperlyConfigured(
            f"{of_options}['max_connections'] must be an integer of at least"
            f" {LEAST_MAX_CONNECTIONS}, not {limit!r}."
        )
    check_timeout(theirs.get("socket_timeout"), f"{of_options}['socket_timeout']")
    return theirs, limit


def check_timeout(value: object, what: str) -> None:
    """Refuse a value that is no number of seconds.

    Raises:
        ImproperlyConfigured: Names the setting.
    """
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value <= LONGEST):  # type: ignore[operator] # Also refuses nan.
        raise ImproperlyConfigured(f"{what} must be a positive number of seconds, not {value!r}.")
