"""The arguments of a call, as the server of the locks keeps them for the announced call.

They are serialized as the message of the call would be, and read with the same care: a worker takes
only content that accept_content allows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery.utils.saferepr import saferepr
from kombu.serialization import dumps, loads, prepare_accept_content

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery import Celery, Task

MOST_BYTES = 65_536
TOO_LONG = b"-"  # As announce.lua takes it.


class Arguments(NamedTuple):
    """The arguments of the body of a run."""

    args: list[Any]
    kwargs: dict[str, Any]
    shown: dict[str, str]  # argsrepr and kwargsrepr: their form in logs and events.


def packed(task: Task, args: Any, kwargs: Any, options: Mapping[str, Any]) -> bytes:
    """The arguments of a call that is made with these options of apply_async().

    Returns:
        TOO_LONG if they are too long for the server to keep.

    Raises:
        TypeError: The task does not take them.
        EncodeError: They cannot be serialized.
    """
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    # From here on: as Celery does with a call that it publishes.
    if task.typing and (check := getattr(task, "__header__", None)):
        check(*args, **kwargs)
    serializer = options.get("serializer") or task.serializer
    dump = getattr(task, "_dump_pydantic_arguments", None)  # Celery 5.5 has none.
    if dump is not None and serializer != "pickle":
        args, kwargs = dump(args, kwargs)
    longest = task.app.amqp.argsrepr_maxsize, task.app.amqp.kwargsrepr_maxsize
    shown = {
        name: saferepr(value, most) if options.get(name) is None else options[name]
        for name, value, most in zip(
            ("argsrepr", "kwargsrepr"), (args, kwargs), longest, strict=True
        )
    }
    content_type, encoding, body = dumps((args, kwargs, shown), serializer)  # type: ignore[no-untyped-call]
    if isinstance(body, str):
        body = body.encode(encoding)
    whole = b"\n".join([content_type.encode(), encoding.encode(), body])
    return whole if len(whole) <= MOST_BYTES else TOO_LONG


def unpacked(app: Celery, whole: bytes) -> Arguments:
    """Read the result of packed().

    Raises:
        ContentDisallowed: They are serialized in a way that accept_content does not name.
        DecodeError: They cannot be read.
    """
    content_type, encoding, body = whole.split(b"\n", 2)
    kind = content_type.decode(), encoding.decode()
    accept = prepare_accept_content(app.conf.accept_content)  # type: ignore[no-untyped-call]
    args, kwargs, shown = loads(body, *kind, accept=accept)  # type: ignore[no-untyped-call]
    return Arguments(list(args), kwargs, shown)
