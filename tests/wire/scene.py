"""Each operation of the package once, in an order that is the same in each run.

`perform()` is the blocking half, `aperform()` the other. An operation that a place refuses is told
by its error. Times are round, so that the recorder knows them from what is left of a time.
"""

import asyncio
import threading
from contextlib import contextmanager, suppress

from django.core.exceptions import ImproperlyConfigured

from django_redislock import LockError, distributed_lock, held, leadership, single_instance, take_up
from django_redislock.celery import single_instance_task
from tests.support.celery_app import celery_app
from tests.support.waiting import HUNG, await_until, wait_until
from tests.wire.recorder import unheard

LONG = {"ttl": 60, "wait": 60}


class Scene:
    """The steps of it, told to a recorder."""

    def __init__(self, recorder, *, in_turn):
        """Tell *recorder*; waiters are served *in_turn*, or at random times."""
        self._recorder = recorder
        self.in_turn = in_turn

    @contextmanager
    def step(self, title):
        """One operation; an error that a user would meet ends it."""
        self._recorder.title(title)
        try:
            yield self._recorder.says
        except (LockError, ValueError, RuntimeError, ImproperlyConfigured) as error:
            self._recorder.says(f"{type(error).__name__}: {error}")

    def beside(self, name, work):
        """Do something in a thread, which is one of the scene."""

        def run():
            self._recorder.follow(name)
            with suppress(LockError):
                work()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def perform(scene):
    """Do everything that blocks."""
    with scene.step("a first cycle: it dials"), distributed_lock("first", **LONG):
        pass
    with scene.step("a warm cycle"), distributed_lock("warm", **LONG):
        pass
    with scene.step("busy, without a wait") as says, distributed_lock("busy", **LONG):
        scene.beside(
            "rival", lambda: distributed_lock("busy", **{**LONG, "wait": 0}).acquire()
        ).join(HUNG)
    if scene.in_turn:
        wait(scene)
    with (
        scene.step("reentrant"),
        distributed_lock("nested", reentrant=True, **LONG),
        distributed_lock("nested", reentrant=True, **LONG),
    ):
        pass
    with scene.step("renew, verify, locked") as says:
        lock = distributed_lock("renewed", **LONG)
        with lock as lease:
            lease.renew()
            lease.renew(ttl=120)
            lease.ensure_held(verify=True)
            says(lock.locked())
        says(lock.locked())
    with scene.step("min_hold, and a try while it cools down") as says:
        with distributed_lock("cooling", min_hold=120, **LONG):
            pass
        says(distributed_lock("cooling", ttl=60, wait=0).acquire())
    with (
        scene.step("a failure leaves no min_hold"),
        suppress(KeyError),
        distributed_lock("failed", min_hold=120, **LONG),
    ):
        raise KeyError
    with (
        scene.step("permits") as says,
        distributed_lock("permits", limit=2, **LONG),
        distributed_lock("other", **LONG) as lease,
    ):
        says(lease.permit)
        rival = distributed_lock("permits", limit=2, ttl=60, wait=0)
        scene.beside("rival", lambda: (rival.acquire(), rival.release())).join(HUNG)
        says(distributed_lock("permits", limit=2, ttl=60).locked())
    with scene.step("several names") as says, distributed_lock("b", "a", **LONG) as lease:
        says(sorted(lease.fences))
        lease.renew()
    with scene.step("several names, one of them busy") as says, distributed_lock("b", **LONG):
        rival = distributed_lock("a", "b", ttl=60, wait=0)
        scene.beside("rival", rival.acquire).join(HUNG)
    with (
        scene.step("a baton"),
        distributed_lock("baton", **LONG) as lease,
        take_up(lease.hand_over(within=60), ttl=60),
    ):
        pass
    with scene.step("leadership"), leadership("leader", ttl=60, max_silence=120) as term:
        term.beat()
    operate(scene)
    jobs(scene)
    with celery_app(broker_url="memory://") as app:
        tasks(scene, app)


def wait(scene):
    """Wait in vain, and not in vain."""
    with scene.step("a wait that runs out"), distributed_lock("timed-out", **LONG):
        rival = distributed_lock("timed-out", ttl=60, wait=0.2)
        scene.beside("rival", rival.acquire).join(HUNG)
    with scene.step("a hand-over"):
        with distributed_lock("handed", **LONG):
            waiter = scene.beside("waiter", lambda: cycle("handed", **LONG))
            wait_until(lambda: queued("handed"))
        waiter.join(HUNG)


def cycle(name, **options):
    """Hold a lock for no time."""
    with distributed_lock(name, **options):
        pass


def queued(name):
    """Whether somebody stands in the queue of a lock."""
    with unheard():
        found = held.get(name)
    return bool(found and found.waiters)


def operate(scene):
    """What an operator does."""
    with scene.step("list, get, detail") as says, distributed_lock("seen", **LONG):
        says([one.name for one in held.list()])
        says(held.get("seen").state)
        says(len(held.detail("seen").past))
        says(held.similar("see"))
    with scene.step("force release") as says:
        lock = distributed_lock("forced", ttl=60)
        lock.acquire()
        found = held.get("forced")
        says(held.force_release("forced", found.id, by="test", reason="scene"))
        with suppress(LockError):
            lock.release()
    with scene.step("pause and resume") as says:
        held.pause("paused", lasts=120, by="test", reason="scene")
        says(distributed_lock("paused", ttl=60, wait=0).acquire())
        says(held.resume("paused", by="test"))


def jobs(scene):
    """Jobs, and what becomes of them."""
    with scene.step("a job succeeds"):
        single_instance("job", ttl=60)(lambda: 1)()
    with scene.step("a job fails"), suppress(KeyError):
        single_instance("job", ttl=60)(lambda: {}[1])()
    with scene.step("a job is skipped") as says, distributed_lock("job", **LONG):
        job = single_instance("job", ttl=60)(lambda: 1)
        scene.beside("rival", job).join(HUNG)
    with scene.step("once: the second run is skipped") as says:
        once = single_instance("daily", ttl=60, once=3600)(lambda: 1)
        once()
        says(once())
    with scene.step("min_hold of a job") as says:
        short = single_instance("short", ttl=60, min_hold=120)(lambda: 1)
        short()
        says(short())
    with scene.step("a job with a limit"):
        single_instance("limited", ttl=60, limit=2)(lambda: 1)()
    with scene.step("records") as says:
        says([one.name for one in held.records(prefix="dail")])


def tasks(scene, app):
    """Tasks, without a worker."""

    @single_instance_task(key="task:{number}", ttl=60)
    def plain(number):
        return number

    @single_instance_task(key="once:{number}", ttl=60, once=3600)
    def once(number):
        return number

    @single_instance_task(key="queued:{number}", ttl=60, unique_queued=True, queued_ttl=3600)
    def queued(number):
        return number

    @single_instance_task(key="counted:{number}", ttl=60, give_up_after=3)
    def counted(number):
        return number

    with scene.step("a task"):
        plain.apply((1,))
    with scene.step("a task is skipped"), distributed_lock("task:1", **LONG):
        of_this_app = app.tasks[plain.name]  # A thread may have another current application.
        scene.beside("rival", lambda: of_this_app.apply((1,))).join(HUNG)
    with scene.step("once, and a duplicate"):
        once.apply((1,))
        once.apply((1,))
    with scene.step("unique_queued: the second call is the first one") as says:
        first = queued.delay(1)
        says(queued.delay(1).id == first.id)
        queued.apply((1,), task_id=first.id)
    with scene.step("give_up_after"):
        counted.apply((1,))


async def aperform(scene):
    """The same where there is an event loop."""
    with scene.step("asyncio: a first cycle"):
        async with distributed_lock("first", **LONG):
            pass
    with scene.step("asyncio: a warm cycle"):
        async with distributed_lock("warm", **LONG):
            pass
    if scene.in_turn:
        with scene.step("asyncio: a hand-over"):
            async with distributed_lock("handed", **LONG):
                waiter = asyncio.create_task(acycle("handed"))
                await await_until(lambda: asyncio.to_thread(queued, "handed"))
            await waiter
    with scene.step("asyncio: renew, verify, locked") as says:
        lock = distributed_lock("renewed", **LONG)
        async with lock as lease:
            await lease.arenew()
            await lease.aensure_held(verify=True)
            says(await lock.alocked())
    with scene.step("asyncio: several names"):
        async with distributed_lock("b", "a", **LONG):
            pass
    with scene.step("asyncio: permits"):
        async with distributed_lock("permits", limit=2, **LONG):
            pass
    with scene.step("asyncio: a job"):

        async def body():
            return 1

        await single_instance("ajob", ttl=60)(body)()


async def acycle(name):
    """Hold a lock for no time."""
    async with distributed_lock(name, **LONG):
        pass
