"""Random histories on real servers, checked against a model that fits on a page.

Several actors, each a thread, want one lock. Between their steps the lock is forced open, deleted
or flushed, scripts are forgotten and connections are cut. The model says after every step who
holds the lock, who waits in which order, and who has lost what; the fence must never fall back.
"""

import uuid

import pytest
from django.test import override_settings
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_redislock import LockLost, distributed_lock, held
from django_redislock.rules.keys import lock_keys
from tests.support.actors import Actor
from tests.support.faults import lease_of
from tests.support.losses import Loss
from tests.support.matrix import everywhere
from tests.support.waiting import HUNG, wait_until

NAME = "lottery"
TTL = 100.0  # Long: time plays no part here, see tests/model for that.

actors = st.integers(0, 3)


class Rival(Actor):
    """A thread that uses a lock as it is told."""

    def __init__(self):
        self.lock = distributed_lock(NAME, ttl=TTL, wait=0)
        self.waiting = None
        super().__init__()


class LockMachine(RuleBasedStateMachine):
    """The rules: what actors and misfortune may do, and what must come of it."""

    def __init__(self):
        super().__init__()
        prefix = f"stateful-{uuid.uuid4().hex[:8]}"
        setting = {"default": {"LOCATION": self.url, "KEY_PREFIX": prefix}}
        self.overridden = override_settings(REDISLOCK=setting)
        self.overridden.enable()
        self.keys = lock_keys(prefix, NAME)
        self.actors = [Rival() for _ in range(4)]
        # The model:
        self.holder = None
        self.queue = []
        self.lost = {}  # Who still has a handle on a lease that is over, and why.
        self.fence = 0
        self.cut = False  # Whether connections were, so that some in the pool may be dead.

    # --- what actors do ---------------------------------------------------------------------

    @rule(me=actors)
    def try_once(self, me):
        assume(self._is_free(me))
        actor = self.actors[me]
        actor.lock = distributed_lock(NAME, ttl=TTL, wait=0)
        granted = actor.does(actor.lock.acquire)
        assert granted is (self.holder is None)
        if granted:
            self._is_granted(me)

    @rule(me=actors)
    def wait_in_the_queue(self, me):
        assume(self._is_free(me))
        actor = self.actors[me]
        if self.holder is None:
            return
        actor.lock = distributed_lock(NAME, ttl=TTL, wait=60)
        actor.waiting = actor.begin(actor.lock.acquire)
        self.queue.append(me)
        self._wait_until_queued()

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self):
        actor = self.actors[self._holder()]
        actor.does(actor.lock.release)
        self._next_holds()

    @precondition(lambda self: self.holder is not None)
    @rule(verify=st.booleans())
    def renew(self, verify):
        lease = lease_of(self.actors[self._holder()].lock)
        if verify:
            lease.ensure_held(verify=True)
        else:
            lease.renew()
        assert TTL - 5 < lease.expires_in < TTL
        assert TTL - 5 < self.redis.pttl(self.keys.lock) / 1000 <= TTL

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def find_out(self, data):
        me = data.draw(st.sampled_from(sorted(self.lost)))
        actor = self.actors[me]
        lease = lease_of(actor.lock)
        reason = self.lost.pop(me).told(lease.lost_reason, others=self.holder is not None)
        if data.draw(st.booleans()):
            with pytest.raises(LockLost) as raised:
                lease.renew()
            assert raised.value.reason == reason
            assert not lease.held
        told = None
        try:
            actor.does(actor.lock.release)
        except LockLost as lost:
            told = lost.reason
        # If it was sent on a connection that was cut, the first try may have released it (R6).
        assert told == reason or (self.cut and told is None)

    # --- what befalls them --------------------------------------------------------------------

    @precondition(lambda self: self.holder is not None)
    @rule()
    def force_release(self):
        me = self._holder()
        lease = lease_of(self.actors[me].lock)
        assert not held.force_release(NAME, "0" * 16)
        assert held.force_release(NAME, lease.id)
        self._forget_what_was_forced()  # The server remembers one lease for each lock.
        self._loses("forced")
        self._next_holds()

    @precondition(lambda self: self.holder is not None)
    @rule()
    def delete_the_key(self):
        self.redis.delete(self.keys.lock)
        self._loses("expired")
        if self.queue:  # Whoever looks lets the first waiter in.
            assert not distributed_lock(NAME, wait=0).acquire()
            self._next_holds()

    @precondition(lambda self: not self.queue)
    @rule()
    def lose_all_data(self):
        self.redis.flushdb()
        if self.holder is not None:
            self._loses("expired")
        self._forget_what_was_forced()

    @rule()
    def forget_the_scripts(self):
        self.redis.script_flush()

    @rule()
    def cut_all_connections(self):
        self.cut = True
        self.redis.client_kill_filter(_type="normal", skipme=True)
        self.redis.client_kill_filter(_type="pubsub", skipme=True)
        self._wait_until_queued()

    # --- what must be so ------------------------------------------------------------------------

    @invariant()
    def one_holds_and_everybody_knows(self):
        value = self.redis.get(self.keys.lock)
        assert (value is None) is (self.holder is None)
        for me, actor in enumerate(self.actors):
            lease = lease_of(actor.lock)
            if me == self.holder:
                lease.ensure_held()  # If it was handed over, its confirmation may not be read yet.
                assert lease.held
                assert lease.id.encode() in value
            elif me not in self.lost:
                assert lease is None

    @invariant()
    def nothing_stays_for_ever(self):
        for key in {*self.keys} - {self.keys.fence, self.keys.held, self.keys.ran}:
            assert self.redis.pttl(key) != -1, key

    def teardown(self):
        try:
            while self.holder is not None or self.queue:
                self.release()
            assert not self.redis.exists(self.keys.lock, self.keys.queue)
        finally:
            for actor in self.actors:
                actor.close()
            self.overridden.disable()

    # --- the model ------------------------------------------------------------------------------

    def _is_free(self, me):
        return me != self.holder and me not in self.queue and me not in self.lost

    def _holder(self):
        assert self.holder is not None
        return self.holder

    def _is_granted(self, me):
        lease = lease_of(self.actors[me].lock)
        assert lease.fence > self.fence
        self.fence = lease.fence
        self.holder = me
        for loss in self.lost.values():
            loss.is_taken()

    def _next_holds(self):
        """The first waiter has the lock now."""
        self.holder = None
        if self.queue:
            me = self.queue.pop(0)
            future = self.actors[me].waiting
            assert future.result(HUNG) is True
            self._is_granted(me)

    def _loses(self, reason):
        self.lost[self._holder()] = Loss(reason)
        self.holder = None

    def _forget_what_was_forced(self):
        for loss in self.lost.values():
            loss.is_forgotten()

    def _wait_until_queued(self):
        """Whoever waits is in the queue, and can be rung."""

        def queued():
            records = self.redis.zrange(self.keys.queue, 0, -1)[1::2]  # After each token.
            channels = [record.split(b"|")[2] for record in records]
            rung = sum(count for _, count in self.redis.pubsub_numsub(*channels))
            return len(channels) == len(self.queue) == rung

        wait_until(queued, HUNG)


@pytest.mark.proves("P1", "P3", "R9")
@everywhere
@pytest.mark.slow
@pytest.mark.no_permit("every history has a prefix of its own, and flushes the bystander")
def test_no_history_breaks_the_rules(server, redis_url):
    LockMachine.url = redis_url
    LockMachine.redis = server.client()
    run_state_machine_as_test(
        LockMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
