"""Held locks where Django's changelist expects the rows of a database."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, overload

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured

from django_redislock import held
from django_redislock.admin import markup
from django_redislock.conf import aliases
from django_redislock.held import Selection
from django_redislock.humanize import visible
from django_redislock.models import LockPage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from django.http import HttpRequest

    from django_redislock.held import HeldLock

LOADED = 1000  # Up to so many locks are loaded at once; if there are more, page by page.
SORTED = 5000  # If there are more, at most so many are loaded for a filter or an order.
MOST_CHOICES = 50
FREE = "free"  # A choice beside the states of held locks.

Order = list[tuple[str, bool]]  # Column, and whether descending; the first counts most.


class Column:
    """A column of the list, as Django takes it: a function that shows it.

    Args:
        name: In addresses and classes of HTML; also its head.
        show: What stands in it.
        key: What it is sorted by.
    """

    def __init__(
        self, name: str, show: Callable[[HeldLock], Any], key: Callable[[HeldLock], Any]
    ) -> None:
        self.__name__ = self.admin_order_field = name
        self.short_description = name.replace("_", " ")
        self._show, self.key = show, key

    def __call__(self, page: LockPage) -> Any:
        return self._show(page.lock)


COLUMNS = {
    one.__name__: one
    for one in (
        Column("name", lambda lock: markup.name(lock.name), lambda lock: lock.name.casefold()),
        Column("state", markup.state, lambda lock: lock.state),
        Column("holder", markup.holder, lambda lock: str(lock.owner).casefold()),
        Column(
            "expires_in",
            markup.expiry,
            lambda lock: math.inf if lock.expires_in is None else lock.expires_in,
        ),
        Column(
            "held_for",
            lambda lock: markup.counting(lock.held_for, "up"),
            lambda lock: lock.held_for or 0.0,
        ),
        Column("waiters", lambda lock: markup.waiters(lock.waiters), lambda lock: lock.waiters),
        Column("renewals", lambda lock: lock.renewals, lambda lock: lock.renewals),
        # Readers compare it, so it has no thousands separators.
        Column("fence", lambda lock: lock.fence and str(lock.fence), lambda lock: lock.fence or 0),
        Column("alias", lambda lock: visible(lock.alias), lambda lock: lock.alias),
        Column("where", lambda lock: visible(lock.where), lambda lock: lock.where),
    )
}


class Rows:
    """The locks of one page. To ChangeList and its paginator they look like a queryset.

    Attributes:
        aliases: All known aliases, chosen or not.
        problems: Why locks are missing, by their alias or by their silent server.
        order: The chosen columns, else the name. If there are too many locks, the time left of
            their leases: the server lists them in that order.
        as_of: When the locks were read, in seconds since the epoch; None if no server answered.
        partial: Whether only a part of the locks was filtered and sorted.
        seconds: How long it took to load them.
    """

    def __init__(self, chosen: str, only: Selection, order: Order) -> None:
        started = time.monotonic()
        self.as_of: float | None = None
        self.problems: dict[str, str] = {}
        self.partial = False
        self.locks: list[held.HeldLock] = []
        self.aliases = self._known_aliases()
        using = [alias for alias in self.aliases if chosen in {"", alias}]
        self._offered: list[held.HeldLock] = []  # The filters offer their hosts and tasks.
        self._latest_first = order[:1] == [("expires_in", True)]
        self._paged = ""  # The alias whose server gives one page at a time.
        self._total = 0  # How many that alias has.
        # The locks of one server come in the order in which they end.
        by_end = len(using) <= 1 and all(column == "expires_in" for column, _ in order)
        now = time.time()
        for alias in using:
            try:
                self._load(alias, only, pageable=by_end and only == Selection())
            except held.PROBLEMS as error:
                self.problems[alias] = held.problem(error, alias)
            else:
                self.as_of = now
        # By name, no row changes its place when a lease is renewed.
        self.order = order or [("expires_in" if self._paged else "name", False)]
        if not self._paged:
            for column, descending in reversed(self.order):
                self.locks.sort(key=COLUMNS[column].key, reverse=descending)
        self.seconds = time.monotonic() - started

    def _load(self, alias: str, only: Selection, *, pageable: bool) -> None:
        """Load all locks of an alias if they are few, else the selected ones."""
        found = held.list(using=alias, limit=LOADED, latest_first=self._latest_first)
        self.problems |= held.silence(found.silent, alias)
        self._offered += found
        if found.partial and pageable:
            self._paged, self._total = alias, found.total
        elif found.partial and only.state in {"", *held.STATES}:  # No held lock is FREE.
            found = held.list(using=alias, limit=SORTED, only=only, latest_first=self._latest_first)
            self.partial = self.partial or found.partial
        self.locks += filter(only.admits, found)

    def _known_aliases(self) -> list[str]:
        try:
            return aliases()
        except ImproperlyConfigured as error:
            self.problems["REDISLOCK"] = held.problem(error, "")
            return []

    def choices(self, field: str) -> list[str]:
        """The owners' values of this field, to filter by."""
        found = {getattr(lock.owner, field) for lock in self._offered}
        return sorted(found - {""})[:MOST_CHOICES]

    def count(self) -> int:
        """How many there are."""
        return self._total if self._paged else len(self.locks)

    def __len__(self) -> int:
        return len(self.locks)

    def __iter__(self) -> Iterator[LockPage]:
        return map(LockPage.of, self.locks)

    @overload
    def __getitem__(self, part: int) -> LockPage: ...
    @overload
    def __getitem__(self, part: slice) -> list[LockPage]: ...
    def __getitem__(self, part: int | slice) -> LockPage | list[LockPage]:
        if isinstance(part, int):
            return LockPage.of(self.locks[part])
        beyond = self._paged and part.stop > len(self.locks)
        locks = self._fetch(part.start, part.stop) if beyond else self.locks[part]
        return [LockPage.of(lock) for lock in locks]

    def _fetch(self, start: int, stop: int) -> Sequence[held.HeldLock]:
        try:
            return held.list(
                using=self._paged,
                limit=stop - start,
                offset=start,
                latest_first=self._latest_first,
            )
        except held.PROBLEMS as error:
            self.problems[self._paged] = held.problem(error, self._paged)
            self.as_of = None
            return []

    def _clone(self) -> Rows:
        return self

    def filter(self, *, pk__in: list[str]) -> Rows:
        """For the action. It uses the leases in the ticked boxes instead."""
        return self


class PlainList(ChangeList):
    """An empty list offers no actions. A list of all rows counts them only once, below."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        self.show_admin_actions = bool(self.result_count)
        if not (self.query or self.has_active_filters):
            self.full_result_count = self.result_count


class HeldLockList(PlainList):
    """Filters, sorts and pages held locks."""

    queryset: Rows

    def get_queryset(  # type: ignore[override]
        self, request: HttpRequest, exclude_parameters: Any = None
    ) -> Rows:
        asked = {name: self.params.get(name, "") for name in ("state", "host", "task")}
        rows = Rows(
            self.params.get("alias", ""),
            Selection(search=self.query.strip(), **asked),
            self._order(),
        )
        request.held_locks = rows  # type: ignore[attr-defined] # For the filters' choices
        (self.filter_specs, self.has_filters, _, _, self.has_active_filters) = self.get_filters(
            request
        )
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        return rows

    def get_ordering_field_columns(self) -> dict[int, Any]:
        """The order in the column heads: the chosen one, else the one in use."""
        columns: dict[int, Any] = super().get_ordering_field_columns()
        if columns or not hasattr(self, "queryset"):
            return columns
        return {
            self.list_display.index(COLUMNS[column]): "desc" if descending else "asc"
            for column, descending in self.queryset.order
        }

    def _order(self) -> Order:
        columns = self.get_ordering_field_columns()
        return [
            (column.__name__, direction == "desc")
            for index, direction in columns.items()
            if 0 <= index < len(self.list_display)
            and isinstance(column := self.list_display[index], Column)
        ]


class LockFilter(SimpleListFilter):
    """Offers the values of the locks on the page."""

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        found = self.offered(request.held_locks)
        chosen = request.GET.get(self.parameter_name, "")
        if chosen and chosen not in found:
            found.append(chosen)
        return [(value, self.label(value)) for value in found]

    def offered(self, rows: Rows) -> list[str]:
        """The values to choose from."""
        return rows.choices(str(self.parameter_name))

    def label(self, value: str) -> str:
        """The text of a choice."""
        return markup.breakable(visible(value))

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset  # HeldLockList has filtered already.


class StateFilter(LockFilter):
    title = parameter_name = "state"

    def offered(self, rows: Rows) -> list[str]:
        return [*held.STATES, FREE]

    def label(self, value: str) -> str:
        return markup.STATES[value][0] if value in markup.STATES else visible(value)


class HostFilter(LockFilter):
    title = parameter_name = "host"


class TaskFilter(LockFilter):
    title = parameter_name = "task"


class AliasFilter(LockFilter):
    title = parameter_name = "alias"

    def offered(self, rows: Rows) -> list[str]:
        return rows.aliases if len(rows.aliases) > 1 else []
