"""No secret ever shows: neither the token that proves ownership, nor the server's password."""

import logging
import traceback

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_redislock import (
    LockLost,
    LockMisuse,
    LockTimeout,
    LockUnavailable,
    conf,
    distributed_lock,
    held,
)
from django_redislock.backends.registry import backends
from tests.support.matrix import everywhere, needs_scripts, on_servers
from tests.support.ways import both_ways

PASSWORD = "hunter2-correct-horse"


def shown(*values):
    """All that printing, formatting and raising these values shows."""
    texts = []
    for value in values:
        texts += [repr(value), str(value), f"{value}"]
        if isinstance(value, BaseException):
            texts += traceback.format_exception(value)
            texts += [repr(value.args)]
    return "\n".join(texts)


@pytest.mark.proves("P10")
@pytest.mark.waits
@needs_scripts
@both_ways
async def test_the_token_is_never_shown(way, place, caplog):
    caplog.set_level(logging.DEBUG)
    lock, errors = distributed_lock("lottery", ttl=6, wait=0), []

    async def expect(error, action):
        with pytest.raises(error) as raised:
            await action
        errors.append(raised.value)

    async def block(other):
        async with way.entered(other):
            pytest.fail("the block ran")

    assert await way.acquire(lock)
    lease = lock.lease
    token = lease._token
    assert len(token) >= 32  # 128 bits.
    text = shown(lock, lease, lease.owner, held.get("lottery"), held.list())
    await expect(LockMisuse, way.acquire(distributed_lock("lottery", wait=1)))
    await expect(
        LockTimeout, way.start(lambda: block(distributed_lock("lottery", wait=0))).result()
    )
    await way.until(lambda: lease.renewals)
    held.force_release("lottery", lease.id, by="ann")
    await expect(LockLost, way.renew(lease))
    await expect(LockLost, way.release(lock))
    text += shown(lock, lease, *errors, backends["default"]) + caplog.text
    assert "lottery" in text
    assert lease.id in text
    assert token not in text
    assert token[:12] not in text


@pytest.mark.proves("P10", "R1")
def test_every_lease_has_a_token_of_its_own_that_its_id_does_not_tell(place):
    tokens, ids = set(), set()
    for _ in range(20):
        with distributed_lock("lottery") as lease:
            tokens.add(lease._token)
            ids.add(lease.id)
            assert lease.id not in lease._token
    assert len(tokens) == len(ids) == 20


@pytest.mark.proves("P10")
@everywhere
@on_servers
@pytest.mark.parametrize("where", ["OPTIONS", "LOCATION"])
@both_ways
async def test_a_password_that_is_refused_or_in_the_location_is_not_shown(
    way, place, caplog, where
):
    caplog.set_level(logging.DEBUG)
    if where == "OPTIONS":
        place.configure(OPTIONS={"username": "ann", "password": PASSWORD})
    else:
        place.configure(LOCATION=f"redis://ann:{PASSWORD}@127.0.0.1:1/0")
    with pytest.raises(LockUnavailable) as raised:
        await way.acquire(distributed_lock("lottery", wait=0))
    text = shown(raised.value, backends["default"], conf.conf("default")) + caplog.text
    assert PASSWORD not in text


@pytest.mark.proves("P10")
@pytest.mark.parametrize(
    "default",
    [
        {"LOCATION": f"redis//ann:{PASSWORD}@127.0.0.1"},
        {"LOCATION": f"http://ann:{PASSWORD}@127.0.0.1"},
        {"LOCATION": f"redis://ann:{PASSWORD}@127.0.0.1:port/0"},
        {"LOCATION": f"redis://127.0.0.1/0?socket_timeout={PASSWORD}"},
        {"LOCATION": {"url": f"redis://ann:{PASSWORD}@127.0.0.1"}},
        {"LOCATION": [f"redis://ann:{PASSWORD}@127.0.0.1"]},
        {"LOCATION": [f"redis://ann:{PASSWORD}@127.0.0.1", 7]},
        {"OPTIONS": {"password": PASSWORD, "sokket": PASSWORD}},
        {"OPTIONS": PASSWORD},
        {"OPTIONS": [("password", PASSWORD)]},
        {"OPTIONS": {"password": PASSWORD}, "TTL": "x"},
    ],
    ids=repr,
)
def test_a_password_in_a_wrong_setting_is_not_shown(settings, default):
    settings.REDISLOCK = {"default": default}
    with pytest.raises(ImproperlyConfigured) as raised:
        distributed_lock("lottery", wait=0).acquire()
    # Nor by the exceptions that are printed with it.
    assert PASSWORD not in shown(raised.value)


@pytest.mark.proves("P10")
@pytest.mark.parametrize(
    ("program", "command"),
    [
        (["/srv/manage.py", "import_users"], "manage.py import_users"),
        (["/srv/bin/celery", "worker"], "celery"),
        (["/usr/lib/python3/celery/__main__.py", "worker"], "celery"),  # python -m celery
    ],
)
def test_the_owner_carries_no_arguments(program, command, locks, monkeypatch):
    from django_redislock import holder

    monkeypatch.setattr("sys.argv", [*program, f"--password={PASSWORD}"])
    holder._command.cache_clear()
    monkeypatch.setattr(holder, "_last", holder._LastOwner())
    try:
        with distributed_lock("lottery") as lease:
            assert lease.owner.command == command
            keys = locks.keys()
            values = [locks.redis.dump(key) or b"" for key in keys]
            assert not any(PASSWORD.encode() in value for value in values)
    finally:
        holder._command.cache_clear()
