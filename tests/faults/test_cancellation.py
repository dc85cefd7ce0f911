"""A task that is cancelled is told so once, as by any await: nothing is invented, nothing lost.

What it had asked of the lock is undone first, which takes a moment; and it may be cancelled again
meanwhile, by a second time limit or by whoever waits for it.
"""

import asyncio
from contextlib import nullcontext

import anyio
import pytest
import uvloop

from django_redislock import distributed_lock
from django_redislock.rules import scripts
from tests.support.backends import UNHURRIED
from tests.support.others import against_rival, queued, rival
from tests.support.stored import NAME, is_left_clean
from tests.support.waiting import HUNG, await_until, wait_until

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request):
    """Run a coroutine in an event loop of each kind."""
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield runner.run


@pytest.fixture
def locks(locks, proxy, settings, undo_in_time):
    """The default alias goes through a proxy, the rival straight to the server."""
    locks.on(proxy, TTL=60, WAIT=HUNG, OPTIONS=UNHURRIED)
    with against_rival(locks, settings):
        yield locks


# Blocks that are cancelled when their time is over, as the test has it: at expire().


class AsyncioTimeout:
    is_over = False  # Whether the block has ended so.

    async def __aenter__(self):
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()

    async def __aexit__(self, *exc_info):
        try:
            await self._timeout.__aexit__(*exc_info)
        except TimeoutError:
            self.is_over = True
        return self.is_over

    def expire(self):
        self._timeout.reschedule(0)


class AnyioScope:
    """It goes on cancelling until its block has ended."""

    async def __aenter__(self):
        self._scope = anyio.CancelScope().__enter__()

    async def __aexit__(self, *exc_info):
        swallowed = self._scope.__exit__(*exc_info)
        self.is_over = self._scope.cancelled_caught
        return swallowed

    def expire(self):
        self._scope.cancel()


class TaskGroup:
    """It is over when another task of the group fails."""

    is_over = False

    async def __aenter__(self):
        self._failing = asyncio.get_running_loop().create_future()
        self._group = await asyncio.TaskGroup().__aenter__()
        self._group.create_task(self._fail())

    async def _fail(self):
        raise await self._failing

    async def __aexit__(self, *exc_info):
        try:
            await self._group.__aexit__(*exc_info)
        except ExceptionGroup:
            self.is_over = True
        return self.is_over

    def expire(self):
        self._failing.set_result(ZeroDivisionError())


LIMITS = [
    pytest.param(inner, outer, id=f"{inner.__name__}-in-{outer.__name__}")
    for inner, outer in [
        (AsyncioTimeout, AsyncioTimeout),
        (AnyioScope, AnyioScope),
        (AsyncioTimeout, AnyioScope),
        (AnyioScope, AsyncioTimeout),
        (AsyncioTimeout, TaskGroup),
    ]
]


@pytest.mark.proves("R4")
@pytest.mark.parametrize(("inner_type", "outer_type"), LIMITS)
@pytest.mark.parametrize("stage", ["waiting", "holding", "releasing"])
def test_r4_of_two_limits_that_are_over_the_outer_ends_its_block_and_that_is_all(
    stage, inner_type, outer_type, run, locks, proxy
):
    script = scripts.LEAVE if stage == "waiting" else scripts.RELEASE
    rule = proxy.rule_for_script(script.sha, "hold")
    inner, outer = inner_type(), outer_type()
    entered = asyncio.Event()

    async def work():
        async with outer:
            async with inner, distributed_lock(NAME):
                entered.set()
                if stage == "holding":
                    await asyncio.sleep(HUNG)
            await asyncio.sleep(HUNG)  # The outer one ends this, if it has not ended that.
        assert outer.is_over
        await nothing_more_comes()

    async def test():
        task = asyncio.create_task(work())
        if stage == "waiting":
            await await_until(lambda: queued(locks))
        else:
            await entered.wait()
        if stage == "releasing":
            await await_until(lambda: rule.hits)
        inner.expire()
        await await_until(lambda: rule.hits)
        await some_turns()  # So the undo is under way, or else on hold.
        outer.expire()
        await some_turns()
        await asyncio.to_thread(proxy.forward_held)
        await task

    with rival() if stage == "waiting" else nullcontext():
        run(test())
    assert is_left_clean(locks)


@pytest.mark.proves("R4")
def test_r4_two_time_limits_of_wait_for_are_as_good(run, locks, proxy):
    rule = proxy.rule_for_script(scripts.LEAVE.sha, "delayreply:0.05", times=None)

    async def work():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wait_for(distributed_lock(NAME).aacquire(), 0.05), 0.06)
        await nothing_more_comes()

    async def test():
        while not rule.hits:  # On a busy machine the limits may be over before anything is sent.
            await asyncio.gather(*(work() for _ in range(10)))
        # In Python 3.11 the outer one ends the inner one, and so no longer waits for the undo.
        await await_until(lambda: len(asyncio.all_tasks()) == 1)

    with rival():
        run(test())
    assert is_left_clean(locks)


async def some_turns():
    """Let all run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def nothing_more_comes():
    """Check that no cancellation of this task is still on its way."""
    await some_turns()
    task = asyncio.current_task()
    assert task.cancelling() == 0


@pytest.mark.proves("R4")
@pytest.mark.parametrize("undo", ["succeeds", "fails"])
@pytest.mark.parametrize("run", ["asyncio"], indirect=True)
def test_r4_a_cancellation_while_a_grant_is_given_back_is_told_by_the_acquire(
    undo, run, locks, proxy
):
    locks.configure(REPLICAS_ACK=1, OPTIONS={"socket_timeout": 3})  # There is no replica.
    rule = proxy.rule_for_script(scripts.LEAVE.sha, "hold")

    async def work():
        with pytest.raises(asyncio.CancelledError):
            await distributed_lock(NAME, ttl=4).aacquire()
        task = asyncio.current_task()
        assert task.uncancel() == 0
        await nothing_more_comes()

    async def test():
        task = asyncio.create_task(work())
        await await_until(lambda: rule.hits)
        task.cancel()
        await some_turns()
        if undo == "succeeds":
            await asyncio.to_thread(proxy.forward_held)
        else:
            # Else it would be undone once more, since the task was cancelled.
            proxy.rule_for_script(scripts.LEAVE.sha, "cut_before")
            await asyncio.to_thread(proxy.cut)
        await task

    run(test())
    wait_until(lambda: is_left_clean(locks))  # What was not undone ends by itself.
