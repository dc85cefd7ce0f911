"""A side: a process with one version of the package, which does what a test tells it.

old.take("lottery")
waiting = new.begin("take", "lottery", wait=HUNG)
old.free("lottery")
waiting.result()
"""

from __future__ import annotations

import sys
import threading
from functools import partialmethod
from itertools import count

import django_redislock
from django_redislock import distributed_lock, held, single_instance, single_instance_task, take_up
from tests.support.processes import Child, hear, say
from tests.support.waiting import HUNG, wait_until

# --- in the test ----------------------------------------------------------------------------------


class Refused(Exception):
    """What a side raised: the name of the exception, and its text."""

    def __init__(self, kind, text):
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class Order:
    """Something that a side was told to do; result() raises Refused if the side raised."""

    def __init__(self, side, number):
        self._side = side
        self._number = number

    @property
    def done(self):
        return self._side.has_answered(self._number)

    def result(self):
        wait_until(lambda: self.done, HUNG, f"the side answers order {self._number}")
        answer, refusal = self._side.answers[self._number]
        if refusal:
            raise Refused(*refusal)
        return answer


class Side:
    """A process with one version of the package.

    Args:
        package: The folder of that version.
        redislock: The setting REDISLOCK.
        forked: See Child.
    """

    def __init__(self, package, redislock, *, forked=True):
        self.child = Child(serve, redislock=redislock, package=package, forked=forked)
        self.answers = {}
        self._numbers = count(1)
        self.pid = self.child.pid
        found = self.child.read()
        assert found.startswith(package), f"{found} is not of {package}"

    def begin(self, act, *args, **options):
        """Have it begin an act: the name of a function below, and its arguments."""
        number = next(self._numbers)
        self.child.send([number, act, args, options])
        return Order(self, number)

    def does(self, act, *args, **options):
        """Have it do that, and return what came of it."""
        return self.begin(act, *args, **options).result()

    take = partialmethod(does, "take")
    free = partialmethod(does, "free")

    def has_answered(self, number):
        """Read what it has said so far."""
        while number not in self.answers and self.child.has_spoken():
            found, *answer = self.child.read()
            self.answers[found] = answer
        return number in self.answers

    def close(self):
        self.child.close()


# --- in the process -------------------------------------------------------------------------------


def serve():
    """Obey, each order in a thread of its own."""
    say(django_redislock.__file__)
    telling = threading.Lock()

    def obey(number, act, args, options):
        answer, refusal = None, []
        try:
            answer = getattr(sys.modules[__name__], act)(*args, **options)
        except Exception as error:
            refusal = [type(error).__name__, str(error)]
        with telling:
            say([number, answer, refusal])

    while True:
        threading.Thread(target=obey, args=hear(), daemon=True).start()


class _Block:
    """A block under a lock, in a thread of its own."""

    def __init__(self, lock):
        self.lease = None
        self._error = None
        self._entered, self._told, self._left = (threading.Event() for _ in range(3))
        threading.Thread(target=self._run, args=(lock,), daemon=True).start()
        self._entered.wait()
        self._raise()

    def leave(self):
        self._told.set()
        self._left.wait()
        self._raise()

    def _run(self, lock):
        try:
            with lock as self.lease:
                self._entered.set()
                self._told.wait()
        except BaseException as error:
            self._error = error
        self._left.set()
        self._entered.set()

    def _raise(self):
        if self._error is not None:
            raise self._error


_blocks = {}


def take(*names, key="", **options):
    """Enter a block under a lock, or several; its *key*, by default its first name, ends it."""
    return _enter(key or names[0], distributed_lock(*names, **options))


def take_over(baton, key):
    """Enter a block with the lease that was handed over."""
    return _enter(key, take_up(baton))


def _enter(key, lock):
    block = _blocks[key] = _Block(lock)
    lease = block.lease
    return {"id": lease.id, "fence": lease.fence, "permit": lease.permit, "fences": lease.fences}


def free(key):
    _blocks.pop(key).leave()


def state(key):
    """Whether the lease is held, and why it was lost."""
    lease = _blocks[key].lease
    return [lease.held, lease.lost_reason]


def hand_over(key):
    return _blocks[key].lease.hand_over(within=HUNG)


def locked(name):
    return distributed_lock(name).locked()


def rows():
    """The locks that are held, as operators see them."""
    names = "name", "state", "id", "fence", "permit", "waiters"
    found = held.list()
    return [{name: getattr(one, name) for name in names} | {"pid": one.owner.pid} for one in found]


def seen(name):
    """Who waits for the lock, and who had it before."""
    detail = held.detail(name)
    return {
        "waiters": [one.owner.pid for one in detail.waiters],
        "past": [[one.owner.pid, one.ended] for one in detail.past],
    }


def force_release(name, id):  # noqa: A002
    """End a lease as an operator does."""
    return held.force_release(name, id)


def keep(name, seconds):
    pause = getattr(held, "pause", None) or held.hold  # As the former version called it.
    return pause(name, seconds, by="ann", reason="maintenance")


def give_back(name):
    return (getattr(held, "resume", None) or held.unhold)(name)


def job(name, *, fails=False, **options):
    """Run a job of which one instance runs at a time."""

    @single_instance(name, **options)
    def body() -> str:
        if fails:
            raise ValueError("as asked")
        return "done"

    return body()


def record(name):
    """Who ran last under the lock with which end, and how often it was skipped since."""
    (found,) = [one for one in held.records() if one.name == name]
    last = {kind: getattr(found, f"last_{kind}") for kind in ("success", "failure", "skip")}
    return {kind: run and run.owner.pid for kind, run in last.items()} | {"skips": found.skips}


def database_job(databases, name):
    """Run a task whose success is committed with its effects."""
    from tests.effects.models import Entry
    from tests.support.celery_app import EAGER, celery_app
    from tests.support.databases import use

    use(**databases)
    (alias,) = databases

    with celery_app(**EAGER):

        @single_instance_task(
            key="{name}", atomic=alias, once="database", acks_late=True, name=f"draw:{name}"
        )
        def draw(name: str) -> str:
            Entry.objects.using(alias).create(fence=0)
            return "done"

        return draw.delay(name).get()


def publish(conf, task, *args, **how):
    """Publish a task of the tests; returns the id of the call that stands for it."""
    from tests.celery.project import tasks
    from tests.celery.project.app import make_app
    from tests.support.celery_app import current

    app = make_app(conf)
    with current(app):
        try:
            sent = app.tasks[f"{tasks.__name__}.{task}"].apply_async(args, how)
            return str(sent.id)
        finally:
            app.close()
