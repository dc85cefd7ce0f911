"""A process killed between any two statements: all of its transaction is there, or nothing of it.

And whoever has the lock next does what is left to do, so that it is done exactly once.
"""

import os
import signal
from itertools import count

import pytest
from django.db import connections

from django_redislock import distributed_lock, held
from django_redislock.models import Fence
from tests.effects.models import Counter, Entry
from tests.support.databases import described, use
from tests.support.processes import hear, say

pytestmark = pytest.mark.slow

NOTHING, ALL = (0, 0), (1, 1)


def draw(database, number):
    """Draw a lottery if nobody has, in two writes; return the fence under which that was decided.

    Each has a lock of its own, so that each time the row of the lock is made, too.
    """
    with distributed_lock(f"lottery:{number}", atomic=database) as lease:
        counter = Counter.objects.using(database).get(name=number)
        if counter.value == 0:
            Entry.objects.using(database).create(fence=lease.fence, value=number)
            counter.value += 1
            counter.save()
    return lease.fence


def drawn(database, number):
    """How often each of the two writes was made."""
    entries = Entry.objects.using(database).filter(value=number).count()
    return entries, Counter.objects.using(database).get(name=number).value


class Killer:
    """Kills its own process at a place: before a statement, or before or after a commit."""

    def __init__(self, database, place):
        self._left = place
        connection = connections[database]
        connection.execute_wrappers.append(self._execute)
        self._commit = connection.commit
        connection.commit = self._kill_around_commit

    def _execute(self, execute, sql, *rest):
        self._may_kill(f"before {sql.split(maxsplit=1)[0]}")
        return execute(sql, *rest)

    def _kill_around_commit(self):
        self._may_kill("before COMMIT")
        self._commit()
        self._may_kill("after COMMIT")

    def _may_kill(self, place):
        if self._left == 0:
            say(place)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


def draw_and_be_killed(databases, database):
    """In a child: let a process draw and be killed, at each place that the test names."""
    use(**databases)
    while True:
        number = hear()
        process = os.fork()  # Nothing is connected yet.
        if not process:
            Killer(database, number)
            draw(database, number)
            say("done")
            os._exit(0)
        os.waitpid(process, 0)
        say("gone")


@pytest.mark.proves("N4")
def test_a_kill_between_any_two_statements_leaves_all_or_nothing_and_the_next_one_does_the_rest(
    locks, database, spawn
):
    child = spawn(draw_and_be_killed, described(database), database)
    states = []
    were_held = 0
    for number in count():
        Counter.objects.using(database).create(name=number)
        child.send(number)
        place = child.read()
        assert child.read() == "gone"
        states.append((place, drawn(database, number)))
        if place == "done":
            break
        name = f"lottery:{number}"
        if lock := held.get(name):  # MariaDB is asked for its storage engine before there is one.
            assert held.force_release(name, lock.id)
            were_held += 1
        fence = draw(database, number)
        assert drawn(database, number) == ALL, f"after a kill {place}"
        entry = Entry.objects.using(database).get(value=number)
        was_drawn = states[-1][1] == ALL
        assert (entry.fence < fence) if was_drawn else (entry.fence == fence)
        assert Fence.objects.using(database).get(name=name).fence == fence
    places = [place for place, _ in states]
    assert were_held >= 10
    # The claim finds no row, which is made outside of the transaction; and then there is one.
    assert places[:-7].count("before INSERT") == 1
    last_statements = ["UPDATE", "SELECT", "INSERT", "UPDATE", "COMMIT"]
    assert places[-7:] == [*(f"before {one}" for one in last_statements), "after COMMIT", "done"]
    assert [state for _, state in states] == [NOTHING] * (len(states) - 2) + [ALL] * 2
