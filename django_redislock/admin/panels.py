"""The panels beside the list of held locks: tasks that are only skipped, and free locks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.contrib.admin.utils import quote

from django_redislock import held, task_runs
from django_redislock.admin import markup
from django_redislock.admin.changelist import FREE
from django_redislock.exceptions import InvalidLockName
from django_redislock.humanize import duration, visible
from django_redislock.models import LockPage
from django_redislock.rules.names import Permit, normalized

if TYPE_CHECKING:
    from django_redislock.admin.changelist import Rows

RECORDS = 500
SKIPPED_LINES, FREE_LINES = 5, 50
SAME_OCCASION = 60.0  # Seconds.


def beside(rows: Rows, query: str, chosen: dict[str, str]) -> dict[str, Any]:
    """Both panels, as the template of the list shows them."""
    skipped, free = _skipped(rows), _free(rows, query, chosen)
    return {
        "skipped": skipped[:SKIPPED_LINES],
        "more_skipped": len(skipped[SKIPPED_LINES:]),
        "free": free[:FREE_LINES],
        "more_free": len(free[FREE_LINES:]),
        "similar": [] if len(rows) or free else _similar(rows, query),
        "unrecorded": _unrecorded(rows),
        "only_free": chosen.get("state") == FREE,
        "most_records": RECORDS,
    }


def _unrecorded(rows: Rows) -> list[str]:
    """A sentence about each alias that keeps no records."""
    return [says for one in _answering(rows) if (says := task_runs.unrecorded(one))]


def _skipped(rows: Rows) -> list[dict[str, Any]]:
    """Tasks that have only been skipped since their last success, the longest ago first."""
    found = [one for alias in _answering(rows) for one in _skipped_at(alias)]
    found.sort(key=lambda one: one.last_success.at if one.last_success else 0.0)
    return [
        {
            **_link(one.name, one.alias),
            "skips": one.skips,
            "last_success": one.last_success and duration(one.last_success.ago),
            "last_skip": one.last_skip and duration(one.last_skip.ago),
            "never_ended": markup.never_ended(one),
        }
        for one in found
    ]


def _skipped_at(alias: str) -> list[held.Record]:
    with suppress(*held.PROBLEMS):  # The next page will say so.
        stuck = [one for one in held.records(using=alias, limit=RECORDS) if _is_stuck(one)]
        # While a run is at work, the others are skipped, as they should be.
        at_work = _at_work(stuck, alias)
        return [one for one in stuck if one.name not in at_work]
    return []


def _free(rows: Rows, query: str, chosen: dict[str, str]) -> list[dict[str, Any]]:
    """Known locks that nobody holds, if the page asks for them: those that match, or all."""
    search = normalized(query.strip())
    state, only = chosen.get("state", ""), chosen.get("alias", "")
    if not (state == FREE or (search and not state)) or chosen.keys() & {"host", "task"}:
        return []
    found = []
    for alias in _answering(rows):
        if only in {"", alias}:
            try:
                found += [(alias, *one) for one in _free_at(alias, search).items()]
            except held.PROBLEMS as error:
                rows.problems[alias] = held.problem(error, alias)
    return [
        {
            **_link(name, alias),
            "alias": visible(alias) if len(rows.aliases) > 1 else "",
            "last": last,
        }
        for alias, name, last in found
    ]


def _similar(rows: Rows, query: str) -> list[dict[str, Any]]:
    """Known locks with similar names, if a search finds nothing."""
    found = []
    for alias in _answering(rows) if query.strip() else ():
        with suppress(*held.PROBLEMS):  # The next page will say so.
            names = held.similar(query.strip(), using=alias)
            found += [{**_link(name, alias), "name": visible(name)} for name in names]
    return found


def _answering(rows: Rows) -> list[str]:
    """The aliases that have answered so far: a silent server is asked once."""
    return [alias for alias in rows.aliases if alias not in rows.problems]


def _link(name: str, alias: str) -> dict[str, Any]:
    return {"key": quote(LockPage.named(name, alias).key), "name": markup.name(name)}


def _is_stuck(record: held.Record) -> bool:
    skip = record.last_skip
    if skip is None or not record.skips:
        return False
    # The work was done by then, or an operator wanted the skip.
    if skip.why in {"cooling", "done", "duplicate", "paused", "replaced"}:
        return False
    ended = max(run.at if run else 0.0 for run in (record.last_success, record.last_failure))
    # Runs of other hosts on the same occasion are skipped, as they should be.
    return skip.at > ended + SAME_OCCASION


def _at_work(records: list[held.Record], alias: str) -> set[str]:
    """The names among these under which a run is at work.

    A run is at work if it holds the lock, or one of the permits, and renews it in time. A lock that
    cools down counts too: its run has succeeded. A command that somebody forgot in a terminal is no
    run.
    """
    permits = (Permit(one.name, number) for one in records for number in range(1, one.limit + 1))
    return {
        lock.key.name
        for lock in held.look_at(permits, using=alias)
        if lock.state in {"held", "cooling"} and lock.owner.task
    }


def _free_at(alias: str, search: str) -> dict[str, str]:
    """The free locks of one alias, by name, each with its last runs or lease."""
    found = {
        one.name: markup.last_runs(one)
        for one in held.records(using=alias, limit=RECORDS)
        if search.casefold() in one.name.casefold() and not one.under_way
    }
    for lock in held.look_at(map(Permit, [*found]), using=alias):
        del found[lock.name]
    with suppress(InvalidLockName):  # The search may be no name.
        detail = held.detail(search, using=alias)
        if detail.past and detail.number == 1 and not (detail.lock or detail.others):
            found.setdefault(detail.name, markup.last_lease(detail))
    return found
