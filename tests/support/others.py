"""Others who hold the lock, or wait for it.

==================  ===============================================================================
held_by_other       another machine holds the lock during a block; in whatever place locks are kept
held_by             the same, by a machine and for a task that a list can name
rival               a lock of another process, to acquire, to hand over, to wait; on a server only.
                    It goes straight there, also while the test's own locks meet a faulty network
release_of          a release of a lease that its own handle does not send
hold                what a child process does that holds the lock; see processes.py
==================  ===============================================================================
"""

import math
from contextlib import contextmanager
from types import SimpleNamespace

from django_redislock import distributed_lock, held
from django_redislock.conf import Conf
from django_redislock.rules.forms import Release
from django_redislock.rules.options import Options, terms_of
from django_redislock.rules.stored import Owner
from django_redislock.testing import LockTestKit
from tests.support.processes import hear, say
from tests.support.stored import NAME, immortal, keys_of, load_scripts
from tests.support.waiting import HUNG

RIVAL = "rival"


def held_by_other(name, **options):
    """Let another machine hold the lock during a block."""
    return LockTestKit().simulate_held_by_other(name, **options)


def held_by(name, host="web-3", task="", ttl=60, limit=None):
    """Let a machine with that name hold the lock, or a permit, during a block, for that task."""
    task_id = "id-1" if task else ""
    owner = Owner(host=host, pid=4711, thread="MainThread", task=task, task_id=task_id)
    return held_by_other(name, ttl=ttl, owner=owner, limit=limit)


def release_of(lease, **noted):
    """A release of *lease*, which leaves behind what is *noted*, for a flow."""
    return release_form(
        *(lease.name, lease._token, lease.id, lease.owner), permit=lease.permit_number, **noted
    )


def release_form(
    name,
    token,
    id,  # noqa: A002
    owner,
    *,
    deadline=0.0,
    ends=0.0,
    min_hold=0.0,
    permit=1,
    lost=None,
    operation_timeout=HUNG,
    insist=False,
    **noted,
):
    lease = SimpleNamespace(name=name, id=id, owner=owner, _token=token, permit_number=permit)
    vars(lease).update(deadline=deadline, ends=ends, min_hold=min_hold, lost=lost)
    terms = terms_of(Options(), Conf(alias="default"), lambda _: operation_timeout)
    return Release(lease, terms, insist=insist, **noted)


def add_rival(settings, locks, **options):
    """Add an alias for the same locks straight on the server, as another process would use it."""
    default = settings.REDISLOCK["default"]
    # It does not give up while a test has the server stand still.
    patient = {"UNAVAILABLE_AFTER": math.inf}
    rival = {**default, **patient, "LOCATION": locks.server.url, **options}
    settings.REDISLOCK = {"default": default, RIVAL: rival}


@contextmanager
def against_rival(locks, settings):
    """Let another process want the same locks during the block; no key may then stay for ever."""
    add_rival(settings, locks)
    load_scripts(locks)
    yield
    assert immortal(locks) == []


def rival(name=NAME, **options):
    """A handle of the rival, who tries once unless told otherwise."""
    return distributed_lock(name, using=RIVAL, **{"wait": 0, **options})


def hold(name=NAME, **options):
    """In a child: wait for the lock, tell the fence, and hold the lock until told otherwise."""
    with distributed_lock(name, **options) as lease:
        say(lease.fence)
        hear()


# Who waits


def waiters(name):
    """How many wait for the lock, as everybody can see."""
    seen = held.get(name)
    return seen.waiters if seen else 0


def queued(locks, name=NAME):
    """How many stand in the queue, by a look past the locks of the test and any proxy."""
    return int(locks.redis.zcard(keys_of(locks, name).queue)) // 2  # A token and a record each.


def bells(locks):
    """How many listen to be told that the lock is theirs."""
    return len(locks.redis.pubsub_channels(f"{locks.prefix}:bell:*"))
