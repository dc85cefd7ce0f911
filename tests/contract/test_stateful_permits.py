"""Random histories of a lock with permits, checked against a model that fits on a page.

Several actors, each a thread, want permits of one lock, and do not agree how many it has. Between
their steps a lease expires on the server or is forced open, and an operator holds the lock. The
model says after every step who has which permit and who waits in which order. It serves the first
waiter as soon as a permit is free that this waiter may have, and nobody before.
"""

from __future__ import annotations

import uuid
from concurrent.futures import Future
from typing import NamedTuple

import pytest
from django.test import override_settings
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_redislock import Lease, LockLost, LockMisuse, distributed_lock, held
from django_redislock.lock import Lock
from django_redislock.rules import flows
from django_redislock.rules.keys import lock_keys
from tests.support.actors import Actor
from tests.support.losses import Loss
from tests.support.waiting import HUNG, wait_until

NAME = "gpu"
TTL = 100.0  # Long: a lease ends by itself only where a rule says so.
MOST = 4

ACTORS = 8

actors = st.integers(0, ACTORS - 1)
# Old and new processes, as during a deploy that changes it.
limits = st.sampled_from([1, 2, 2, 3, 3, 4])


class Waiter(NamedTuple):
    """An actor in the queue."""

    who: Actor
    lock: Lock
    limit: int
    acquiring: Future[bool]


class Grant(NamedTuple):
    """A permit that an actor has, or has had and not released yet."""

    who: Actor
    lock: Lock
    lease: Lease


class PermitMachine(RuleBasedStateMachine):
    """The rules: what actors, operators and misfortune may do, and what must come of it."""

    def __init__(self):
        super().__init__()
        prefix = f"stateful-{uuid.uuid4().hex[:8]}"
        setting = {"default": {"LOCATION": self.url, "KEY_PREFIX": prefix, "TTL": TTL, "WAIT": 0}}
        self.overridden = override_settings(REDISLOCK=setting)
        self.overridden.enable()
        self.keys = {number: lock_keys(prefix, NAME, number) for number in range(1, MOST + 1)}
        self.actors = [Actor() for _ in range(ACTORS)]
        # The model:
        self.holders = {}  # By permit.
        self.queue = []
        self.entry = ""  # That of an operator: "first in line", or "begun".
        self.lost = []  # What is not released yet, and why it is over.
        self.fence = 0

    # --- what actors do ---------------------------------------------------------------------

    @initialize(limits=st.lists(limits, min_size=3, max_size=6))
    def begin(self, limits):
        self.arrive(limits)

    @rule(limits=st.lists(limits, min_size=1, max_size=3))
    def arrive(self, limits):
        """Some who have nothing wait for a permit, or get one at once."""
        for limit in limits:
            # Two that pause one and wait for another are another matter: a circle.
            idle = [actor for actor in self.actors if not self._has(actor)]
            if idle:
                lock = distributed_lock(NAME, limit=limit, wait=HUNG)
                self.queue.append(Waiter(idle[0], lock, limit, idle[0].begin(lock.acquire)))
                self._serve()

    @rule(number=actors, limit=limits)
    def try_once(self, number, limit):
        me, lock = self._awake(number), distributed_lock(NAME, limit=limit)
        if len(self._of(me)) >= limit:
            with pytest.raises(LockMisuse, match="already"):
                me.does(distributed_lock(NAME, limit=limit, wait=HUNG).acquire)
            return
        free = self._free_for(limit)
        granted = me.does(lock.acquire)
        assert granted is (free is not None and not self.queue)
        if granted:
            self._is_granted(me, lock, limit)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        self._release(self._permit(data))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def renew(self, data):
        number = self._permit(data)
        self.holders[number].lease.renew()
        assert TTL - 5 < self.redis.pttl(self.keys[number].lock) / 1000 <= TTL

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def nest(self, data):
        grant = self.holders[self._permit(data)]
        assume(not any(lost.who is grant.who for lost, _ in self.lost))
        mine = [one.lease for one in self._of(grant.who)]

        def enter_again():
            with distributed_lock(NAME, limit=MOST, reentrant=True) as lease:
                assert lease in mine

        grant.who.does(enter_again)

    @precondition(lambda self: self.lost)
    @rule()
    def find_out(self):
        grant, loss = self.lost.pop(0)
        number = grant.lease.permit
        others = number in self.holders or (number == 1 and self.entry == "begun")
        reason = loss.told(grant.lease.lost_reason, others)
        with pytest.raises(LockLost) as raised:
            grant.who.does(grant.lock.release)
        assert raised.value.reason == reason
        assert not grant.lease.held

    # --- what befalls them --------------------------------------------------------------------

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def expire(self, data):
        number = self._permit(data)
        # At once: a renewal that is on its way must not come before the end.
        self.redis.pexpireat(self.keys[number].lock, 1)
        self._loses(number, "expired")

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def force_release(self, data):
        number = self._permit(data)
        others = [grant.lease.id for other, grant in self.holders.items() if other != number]
        for wrong in ("0" * 16, *others):
            assert not held.force_release(NAME, wrong, permit=number)
        assert held.force_release(NAME, self.holders[number].lease.id, permit=number)
        for loss in self._losses_of(number):  # The server remembers one lease of each permit.
            loss.is_forgotten()
        self._loses(number, "forced")

    @precondition(lambda self: not self.entry)
    @rule(begins=st.booleans())
    def hold_back(self, begins):
        begun = held.pause(NAME, 600, by="ann")
        assert begun is (1 not in self.holders)
        self.entry = "begun" if begun else "first in line"
        if begun:
            self._is_taken(1)
        if begins and not begun:
            self._release(1)

    @precondition(lambda self: self.entry)
    @rule()
    def resume(self):
        assert held.resume(NAME)
        self.entry = ""
        self._serve()

    @rule()
    def forget_the_scripts(self):
        self.redis.script_flush()

    # --- what must be so ------------------------------------------------------------------------

    @invariant()
    def each_permit_has_one_holder_and_all_know(self):
        for number, keys in self.keys.items():
            value, grant = self.redis.get(keys.lock), self.holders.get(number)
            if grant is None:
                assert (value or b"hold").startswith(b"hold"), number
                assert (value is None) is (number > 1 or self.entry != "begun")
                continue
            grant.lease.ensure_held()  # If it was handed over, this waits for the confirmation.
            assert grant.lease.held
            assert grant.lease.id.encode() in value
        assert not any(waiter.acquiring.done() for waiter in self.queue)

    @invariant()
    def nothing_stays_for_ever(self):
        for number, keys in self.keys.items():
            for key in (keys.lock, keys.queue, keys.forced, keys.past):
                assert self.redis.pttl(key) != -1, (number, key)

    def teardown(self):
        try:
            if self.entry:
                self.resume()
            while self.holders:
                self._release(min(self.holders))
            assert self.queue == []
            self._all_can_be_taken()
        finally:
            for actor in self.actors:
                actor.close()
            self.overridden.disable()

    def _all_can_be_taken(self):
        for lost, _ in self.lost:
            with pytest.raises(LockLost):
                lost.who.does(lost.lock.release)
        locks = [distributed_lock(NAME, limit=MOST) for _ in self.actors]
        pairs = list(zip(self.actors, locks, strict=True))
        granted = [me.does(lock.acquire) for me, lock in pairs]
        assert granted == [True] * MOST + [False] * (ACTORS - MOST)
        for me, lock in pairs[:MOST]:
            me.does(lock.release)

    # --- the model ------------------------------------------------------------------------------

    def _awake(self, number):
        """That actor, which must not wait, and must know of what it has lost."""
        me = self.actors[number]
        assume(not any(waiter.who is me for waiter in self.queue))
        assume(not any(lost.who is me for lost, _ in self.lost))
        return me

    def _has(self, actor):
        """Whether it has, waits for, or has had and not released anything."""
        lost = [grant for grant, _ in self.lost]
        return any(one.who is actor for one in (*self.queue, *self.holders.values(), *lost))

    def _of(self, actor):
        return [grant for grant in self.holders.values() if grant.who is actor]

    def _permit(self, data):
        """Any that is held."""
        return int(data.draw(st.sampled_from(sorted(self.holders))))

    def _free_for(self, limit):
        """The lowest permit that is free, if one is that an acquire with this limit may have."""
        if self.entry:
            return None
        return next((one for one in range(1, limit + 1) if one not in self.holders), None)

    def _release(self, number):
        grant = self.holders.pop(number)
        grant.who.does(grant.lock.release)
        self._serve()

    def _loses(self, number, reason):
        self.lost.append((self.holders.pop(number), Loss(reason)))
        self._serve()

    def _serve(self):
        """What is free goes to the first waiters, one after the other, and to nobody else."""
        if self.entry and 1 not in self.holders:
            self._wait_for_the_hold()
        while self.queue and self._free_for(self.queue[0].limit) is not None:
            me, lock, limit, acquiring = self.queue.pop(0)
            assert acquiring.result(HUNG) is True
            self._is_granted(me, lock, limit)
        wait_until(lambda: self._queued() == [waiter.limit for waiter in self.queue])

    def _wait_for_the_hold(self):
        def begun():
            # If the lease has expired, whoever asks next lets it begin.
            assert not distributed_lock(NAME, limit=MOST).acquire()
            return (self.redis.get(self.keys[1].lock) or b"").startswith(b"hold")

        self.entry = "begun"
        wait_until(begun)
        self._is_taken(1)

    def _queued(self):
        """The limits of those who wait, in the order of the queue on the server."""
        records = self.redis.zrange(self.keys[1].queue, 0, -1)[1::2]  # After each token.
        flags = [record.split(b"|")[4] for record in records if not record.startswith(b"hold")]
        return [int(flag[1:] or b"1") for flag in flags]

    def _is_granted(self, me, lock, limit):
        (entry,) = lock._entries
        lease = entry.lease
        assert 1 <= lease.permit <= limit
        assert lease.permit not in self.holders
        assert lease.fence > self.fence  # So those of a permit grow, and all were served in turn.
        self.fence = lease.fence
        self.holders[lease.permit] = Grant(me, lock, lease)
        self._is_taken(lease.permit)

    def _is_taken(self, number):
        for loss in self._losses_of(number):
            loss.is_taken()

    def _losses_of(self, number):
        return [loss for grant, loss in self.lost if grant.lease.permit == number]


@pytest.mark.proves("P1", "P3", "R9", "R14")
@pytest.mark.slow
@pytest.mark.no_permit("its locks have permits")
def test_no_history_breaks_the_rules_of_permits(server, redis_url, monkeypatch):
    # Nobody is told that a lease has expired, or that the first waiter with a lower limit is gone.
    monkeypatch.setattr(flows, "LOOK_EVERY", 0.1)
    PermitMachine.url = redis_url
    PermitMachine.redis = server.client()
    run_state_machine_as_test(
        PermitMachine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            derandomize=True,
            phases=[Phase.generate],  # To shrink a history that hangs would take for ever.
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
