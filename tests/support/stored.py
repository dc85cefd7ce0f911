"""What is on the server of a test, read straight from it."""

from django_redislock.rules import scripts
from django_redislock.rules.keys import fence_key, index_key, lock_keys, ran_index_key
from django_redislock.rules.scripts import Script
from django_redislock.rules.stored import Owner

NAME = "lottery"

NEWER_ID = "fedcba9876543210"
NEWER_HOLDER = "web-9:4711 id-9"


def newer_lease(renewals="00000", task_id="id-9"):
    """What a version after this one may write, in format 2: see lua/_lease.lua."""
    owner = Owner("web-9", 4711, task="shop.draw", task_id=task_id).packed.decode()
    return f"{'0123456789abcdef' * 2}2r{renewals}{NEWER_ID}|its|own|{owner}"


def keys_of(locks, name=NAME):
    return lock_keys(locks.prefix, name)


def value_of(locks, name=NAME):
    return locks.redis.get(keys_of(locks, name).lock)


def is_held_by(locks, lease):
    """Whether the server says that the lock is this lease's."""
    value = value_of(locks, lease.name)
    return value is not None and lease.id.encode() in value.split(b"|")[0]


def is_left_clean(locks, name=NAME, permit=1):
    """Whether nobody holds the lock, or that permit of it, or waits for it."""
    keys = keys_of(locks, name).of_permit(permit)
    return not locks.redis.exists(keys.lock, keys.queue)


def immortal(locks):
    """The keys that would stay for ever; those of all names may, which do not grow with them."""
    common = {key(locks.prefix) for key in (fence_key, index_key, ran_index_key)}
    return [key for key in locks.without_ttl() if key.decode() not in common]


def channels(locks, name=NAME):
    """Where those are rung who wait for the lock."""
    members = locks.redis.zrange(keys_of(locks, name).queue, 0, -1)
    return [record.split(b"|")[2] for record in members[1::2]]  # After each waiter's token.


_SCRIPTS = [script for script in vars(scripts).values() if isinstance(script, Script)]


def load_scripts(locks):
    """Let the server know the scripts, so that the first run of one is no other than the rest."""
    for script in _SCRIPTS:
        locks.redis.script_load(script.source)
