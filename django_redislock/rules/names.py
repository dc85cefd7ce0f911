"""What a lock may be called, and names made from a function's arguments."""

from __future__ import annotations

import inspect
import json
import re
import string
import sys
import unicodedata
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from django_redislock.exceptions import InvalidLockName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


# --- how names of locks show values: equal values look the same in each process -------------------


def delivered(value: Any) -> Any:
    """The value that another process gets for *value*, if JSON carries it there."""
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        return value.value
    if isinstance(value, tuple | list):
        return [delivered(one) for one in value]
    if isinstance(value, dict):
        return {_json_key(name): delivered(one) for name, one in value.items()}
    return value


def _json_key(name: Any) -> str:
    if name is None or isinstance(name, bool):
        return json.dumps(name)
    return str(delivered(name))


def shown(value: Any) -> Any:
    """The form of *value* in a name: the same for equal values, in each process."""
    value = delivered(value)
    return _in_order(value) if isinstance(value, list | dict | set | frozenset) else value


def _in_order(value: Any) -> Any:
    """The same value, without differences between processes, or from the way through a broker."""
    if isinstance(value, list):
        return [_in_order(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_in_order(delivered(one)) for one in value), key=repr)
    if isinstance(value, dict):
        return {name: _in_order(value[name]) for name in sorted(value)}
    return value.isoformat() if isinstance(value, date | time) else value  # A zone is lost.


if sys.version_info >= (3, 14):  # Annotations are evaluated when somebody asks for them.
    from annotationlib import Format

    _signature = partial(inspect.signature, annotation_format=Format.FORWARDREF)  # noqa: TID251
else:
    _signature = inspect.signature  # noqa: TID251

MAX_NAME_BYTES = 200


def check_name(name: object, *, template: bool = False) -> str:
    """Return *name* in NFC, the form in which two equal-looking names are one lock.

    Args:
        name: What the caller gave.
        template: It may still grow or shrink by formatting, so its length is not judged.

    Raises:
        InvalidLockName: It is not a string, is empty, is longer than 200 bytes of UTF-8, or
            has control characters (a line break in a name could forge log lines).
    """
    if not isinstance(name, str):
        several = isinstance(name, list | tuple | set | frozenset)
        cure = '; write several names one by one, ("a", "b"), or *names' if several else ""
        raise InvalidLockName(_shown(name), f"it is {type(name).__name__}, not str{cure}")
    return checked_name(name, template)


@lru_cache(maxsize=4096)  # Programs use few names, many times.
def checked_name(name: str, template: bool = False) -> str:
    """As check_name(), for strings only: for a name seen before, no Python code runs."""
    normal = normalized(name)
    try:
        size = len(normal.encode())
    except UnicodeEncodeError:
        raise InvalidLockName(_shown(name), "it is not valid Unicode (lone surrogate)") from None
    if not normal:
        raise InvalidLockName(_shown(name), "it is empty")
    if size > MAX_NAME_BYTES and not template:
        raise InvalidLockName(
            _shown(name), f"it has {size} bytes of UTF-8, at most {MAX_NAME_BYTES} are allowed"
        )
    if any(unicodedata.category(char) == "Cc" for char in normal):
        raise InvalidLockName(_shown(name), "it contains control characters")
    return normal


def normalized(text: str) -> str:
    """*text* in NFC, as an exact str. The str() of an enum's member may be another text."""
    return unicodedata.normalize("NFC", str.__str__(text))


def in_period(name: str, every: timedelta, moment: datetime) -> str:
    """The name of a lock for the period that a *moment*, in local time, lies in.

    Days begin at midnight, weeks on Mondays. The name of a shorter period has its offset from UTC:
    when clocks are set back, an hour that comes again is another one.

    Args:
        name: That of the lock for all periods.
        every: How long they are, see arguments.period().
        moment: With a time zone.

    Raises:
        InvalidLockName: With its period, the name is too long.
    """
    if every.days:
        today = moment.toordinal() - 1  # Counted from a Monday.
        start = date.fromordinal(today - today % every.days + 1).isoformat()
    else:
        since = timedelta(hours=moment.hour, minutes=moment.minute, seconds=moment.second)
        minutes, seconds = divmod((since - since % every).seconds, 60)
        hours, minutes = divmod(minutes, 60)
        begun = moment.replace(hour=hours, minute=minutes, second=seconds, microsecond=0)
        start = begun.isoformat(timespec="auto" if every.seconds % 60 else "minutes")
    return checked_name(f"{name}:{start}")


def several_names(names: tuple[object, ...]) -> tuple[str, ...]:
    """The names of a joint lock, checked (one with { as a template), in the order of taking.

    Raises:
        InvalidLockName: One of them cannot be a lock's name.
        TypeError: There is none, or one is no string.
    """
    if not names:
        raise TypeError("distributed_lock() needs the name of the lock, or several.")
    return in_order(checked_name(name, template="{" in name) for name in names)  # type: ignore[operator]


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in the order in which all programs take them."""
    return tuple(sorted(set(names)))


class Written(str):
    """A name or template that stands at a decorator: of these there are few."""

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        return super().__new__(cls, str.__str__(text))


_PERMIT = re.compile(r".*#\d+", re.DOTALL)


def check_limited(name: str) -> None:
    """Refuse the name of a lock with several permits if it looks like the label of a permit.

    Raises:
        InvalidLockName: It ends like "gpu#2", which to operators is the second permit of "gpu".
    """
    if _PERMIT.fullmatch(name):
        raise InvalidLockName(
            _shown(name),
            "it ends in # and a number, which is how the permits of a lock with a limit are shown;"
            " end it in another way",
        )


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


def check_shared(name: str) -> str:
    """Return *name*, unless no other process could make the same name.

    Raises:
        InvalidLockName: It shows the address of an object in memory.
    """
    if _ADDRESS.search(name):
        raise InvalidLockName(
            _shown(name),
            "it shows an object's address in memory, which differs from process to process; name"
            " an attribute of the object, such as {order.pk}",
        )
    return name


class _Showing(string.Formatter):
    """Formats the shown form of the value of each field."""

    def get_field(self, field: str, args: Any, kwargs: Any) -> Any:
        """Called by Formatter."""
        value, name = super().get_field(field, args, kwargs)
        return shown(value), name


_SHOWING = _Showing()
_PLAIN = {str, int}  # The usual values, which are shown as they are, at a tenth of the time.


def formatter(
    template: str,
    function: Callable[..., Any],
    *,
    see: Callable[[str, Any], Any] | None = None,
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], str]:
    """How to make a lock's name from a call of *function*: (args, kwargs) -> checked name.

    The fields of *template* are the function's arguments, with their defaults applied. An argument
    that arrives in ``**kwargs`` counts by its own name. Equal values look the same in each process,
    see values.shown().

    Args:
        template: The name, with fields in braces.
        function: The function to be called.
        see: Given an argument's name and value, returns the value to take.

    Raises:
        InvalidLockName: Now: a field names no argument. At the call: the name cannot be made, or is
            not valid.
    """
    signature = signature_of(function)
    called = f"{function.__qualname__}()" if hasattr(function, "__qualname__") else repr(function)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    try:
        written = [field for _, field, _, _ in _SHOWING.parse(template) if field is not None]
        wanted = {_SHOWING.get_field(one, (), _Anything())[1] for one in written}
    except (ValueError, IndexError) as error:
        raise InvalidLockName(
            _shown(template),
            f"it is no format string over the names of arguments: {error}",
        ) from None
    if not wanted:
        name = check_name(template.format())
        return lambda args, kwargs: name
    for field in wanted:
        if field not in signature.parameters and rest is None:
            known = ", ".join(signature.parameters) or "none"
            raise InvalidLockName(
                _shown(template),
                f"it uses the argument {field!r}, which {called} does not take;"
                f" its arguments are: {known}",
            )

    are_whole = wanted == set(written)  # Without parts of arguments, such as {order.pk}.

    def name_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        fields = bound_arguments(signature, args, kwargs)
        if absent := [field for field in wanted if field not in fields]:
            raise InvalidLockName(
                _shown(template),
                f"it uses the argument {min(absent)!r}, which this call of {called} does not"
                f" have; it has: {', '.join(fields) or 'none'}",
            )
        try:
            if see is not None:
                fields |= {field: see(field, fields[field]) for field in wanted}
            if are_whole and all(type(fields[one]) in _PLAIN for one in wanted):
                name = template.format_map(fields)
            else:
                name = _SHOWING.vformat(template, (), fields)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise InvalidLockName(
                _shown(template), f"it cannot be formatted: {type(error).__name__}: {error}"
            ) from error
        return check_shared(check_name(name))

    return name_of


def bound_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, with defaults; each of ``**kwargs`` has its own name.

    Raises:
        TypeError: They cannot be bound, as the call itself would raise it.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    fields = dict(bound.arguments)
    for one in signature.parameters.values():
        if one.kind is one.VAR_KEYWORD:
            fields = {**fields.pop(one.name), **fields}
    return fields


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """How *function* is called.

    Django's method_decorator passes a partial of a bound method, and as_view() a view. Both say
    that they wrap the method in the class, which takes self too. That is not followed.

    An annotation may name what is imported under TYPE_CHECKING.
    """
    if isinstance(function, partial):
        return _signature(partial(function.func, *function.args, **function.keywords))
    return _signature(function, follow_wrapped=not hasattr(function, "view_class"))


class _Anything(dict[str, object]):
    """Lets Formatter.get_field() find every name, however it goes on: {a.b[c]}."""

    def __missing__(self, key: str) -> object:
        return self

    def __getattr__(self, name: str) -> object:
        return self


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else text[:77] + "..."


class Permit(NamedTuple):
    """One of the permits of a name. A lock without a limit is the first, and only, permit."""

    name: str
    number: int = 1

    @property
    def label(self) -> str:
        """What operators see and type: "gpu" is the first permit, "gpu#2" the second."""
        return self.name if self.number == 1 else f"{self.name}#{self.number}"

    @classmethod
    def labelled(cls, label: str, number: int) -> Permit:
        """The permit with this label and number."""
        return cls(label if number == 1 else label.removesuffix(f"#{number}"), number)


_LABEL = re.compile(r"(.+)#([2-9]|[1-9][0-9]{1,3})")


def meant_by(label: str) -> list[Permit]:
    """The permits that a label may stand for: "gpu#2" is a permit, or the name of a lock.

    Raises:
        InvalidLockName: It cannot be either.
    """
    permit = _LABEL.fullmatch(label) if isinstance(label, str) else None
    if permit is None:
        return [Permit(check_name(label))]
    meant = [Permit(check_name(permit[1]), int(permit[2]))]
    with suppress(InvalidLockName):  # It may be too long for a name.
        meant.append(Permit(check_name(label)))
    return meant
