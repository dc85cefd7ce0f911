"""Checks settings before anything is dialed with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import redis.asyncio
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from django_redislock.backends.redis.async_connection import AsyncConnection
from django_redislock.backends.redis.connection import Connection
from django_redislock.backends.redis.dialing import Dialer, check_version
from django_redislock.backends.redis.location import (
    LOOKS_LIKE,
    check_options,
    check_protocol,
    check_url,
    has_option,
    names_option,
)
from django_redislock.backends.redis.pool import ConnectionPool
from django_redislock.rules.arguments import LONGEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
    try:
        check_url(url)
    except ValueError as error:
        raise ImproperlyConfigured(f"{of_url} {error}.") from None
    try:
        check_options(url, options)
    except ValueError as error:
        raise ImproperlyConfigured(f"{of_options}{error}.") from None
    try:
        check_protocol(url, options, protocols)
    except ValueError as error:
        setting = of_url if names_option(url, "protocol") else of_options
        raise ImproperlyConfigured(f"{setting}['protocol'] {error}.") from None
    try:
        return Dialer(url, options, check, types)
    except TypeError as error:
        # Its text names the option, not its value.
        setting = of_url if has_option(url, error) else of_options
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
