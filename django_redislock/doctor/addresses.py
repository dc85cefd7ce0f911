"""Where settings lead: how redis-py reads addresses and options. Nothing is dialed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.connection import parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from django_redislock.conf import Conf


def of_servers(conf: Conf) -> list[dict[str, Any]]:
    """The servers that keep the locks, as keyword arguments of redis-py's connections.

    Behind sentinels, the name of the service stands for the host, as it does in django-redis.
    """
    options = dict(conf.options)
    service = options.pop("service_name", None)
    if not isinstance(service, str):
        return list(parsed(conf.location, options))
    scheme = "rediss" if options.pop("ssl", False) else "redis"
    return list(parsed(f"{scheme}://{service}", options))


def of_sentinels(conf: Conf) -> list[dict[str, Any]]:
    """The sentinels, see of_servers(); none where there are none."""
    if "service_name" not in conf.options:
        return []
    return list(parsed(conf.location, conf.options.get("sentinel_kwargs", {})))


def parsed(location: Any, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One URL, or several, as redis-py reads it; a URL wins over the options.

    Anything that is not a URL (None from an unset variable) is skipped.
    """
    for url in [location] if isinstance(location, str) else location or ():
        with suppress(ValueError, TypeError, AttributeError):
            yield {**options, **parse_url(url)}  # type: ignore[no-untyped-call]


def is_this_machine(host: str) -> bool:
    """Whether *host* is a name of this machine's own loopback."""
    return host.lower() in {"localhost", "::1"} or host.startswith("127.")
