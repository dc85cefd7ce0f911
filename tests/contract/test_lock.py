"""The lock as programs use it: a block, a handle, a lease, by every way and in every place."""

import asyncio
import os
import socket
import sys
import threading
from contextlib import contextmanager
from wsgiref.util import setup_testing_defaults

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from django.http import HttpResponse
from django.urls import re_path

from django_redislock import Lease, LockMisuse, LockTimeout, distributed_lock, held
from django_redislock.rules.keys import fence_key
from tests.support.matrix import MEMORY, everywhere, on_servers, places
from tests.support.others import held_by_other
from tests.support.servers import KIND
from tests.support.waiting import HUNG
from tests.support.ways import both_ways, in_thread

# --- the block -----------------------------------------------------------------------------------


@everywhere
@both_ways
async def test_the_block_holds_the_lock_and_then_it_is_free(way, place):
    lock = distributed_lock("lottery")
    async with way.entered(lock) as lease:
        assert isinstance(lease, Lease)
        assert lease.held
        assert lock.lease is lease
        assert await way.locked(distributed_lock("lottery"))
    assert not lease.held
    assert lock.lease is None
    assert not await way.locked(lock)


@both_ways
async def test_a_block_that_cannot_have_the_lock_raises_lock_timeout(way, place):
    with held_by_other("lottery", ttl=60), pytest.raises(LockTimeout) as raised:
        async with way.entered(distributed_lock("lottery", wait=0)):
            pytest.fail("the block ran")
    assert raised.value.name == "lottery"
    assert raised.value.holder == "another-host:1 simulated"
    assert 50 < raised.value.expires_in <= 60
    assert "'lottery'" in str(raised.value)


@both_ways
async def test_an_exception_leaves_the_block_unchanged_and_frees_the_lock(way, place):
    error = ZeroDivisionError("of the body")
    with pytest.raises(ZeroDivisionError) as raised:
        async with way.entered(distributed_lock("lottery")):
            raise error
    assert raised.value is error
    assert not await way.locked(distributed_lock("lottery"))


@both_ways
async def test_a_lock_released_within_its_block_is_not_released_twice(way, place):
    lock = distributed_lock("lottery")
    async with way.entered(lock):
        await way.release(lock)
        with held_by_other("lottery"):
            pass
    assert not await way.locked(lock)


# --- the handle ----------------------------------------------------------------------------------


@both_ways
async def test_a_handle_can_be_used_again_and_again(way, place):
    lock = distributed_lock("lottery", wait=0)
    assert await way.acquire(lock) is True
    assert lock.lease.held
    await way.release(lock)
    assert lock.lease is None
    ids = []
    for _ in range(3):
        async with way.entered(lock) as lease:
            ids.append(lease.id)
    assert len(set(ids)) == 3


@both_ways
async def test_release_without_a_lease_is_misuse(way, place):
    lock = distributed_lock("lottery")
    with pytest.raises(LockMisuse, match="'lottery': this thread or asyncio task holds no lease"):
        await way.release(lock)
    await way.acquire(lock)
    await way.release(lock)
    with pytest.raises(LockMisuse, match="holds no lease"):
        await way.release(lock)


@both_ways
async def test_a_handle_cannot_release_what_another_handle_holds(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        with pytest.raises(LockMisuse):
            await way.release(distributed_lock("lottery"))
        await way.ensure_held(lease, verify=True)


def test_a_lease_taken_in_a_loop_may_be_released_without_one(place):
    lock = distributed_lock("lottery")
    assert asyncio.run(lock.aacquire())
    lock.release()
    assert not lock.locked()
    assert lock.acquire()
    asyncio.run(lock.arelease())
    assert not asyncio.run(lock.alocked())


@pytest.mark.proves("P10")
def test_making_a_handle_needs_no_server(settings):
    settings.REDISLOCK = {"default": {"BACKEND": "not.there.Backend"}}
    lock = distributed_lock("lottery")
    assert lock.name == "lottery"
    assert lock.lease is None
    assert repr(lock) == "<Lock 'lottery': not held by this handle>"


# --- what a lock excludes ------------------------------------------------------------------------


@pytest.mark.proves("P1")
@everywhere
@both_ways
async def test_one_lock_excludes_all_others_of_its_name(way, place):
    inside = 0
    seen = []

    async def work():
        nonlocal inside
        for _ in range(5):
            async with way.entered(distributed_lock("lottery")):
                inside += 1
                await way.sleep(0)
                seen.append(inside)
                inside -= 1

    others = [way.start(work) for _ in range(4)]
    for other in others:
        await other.result()
    assert seen == [1] * 20


@both_ways
async def test_using_names_the_place(way, place, settings):
    settings.REDISLOCK = {
        "default": place.setting(),
        "other": {**place.setting(), "KEY_PREFIX": "test-another-prefix", "TTL": 7},
    }
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.ttl == place.setting()["TTL"]
        async with way.entered(distributed_lock("lottery", using="other", wait=0)) as other:
            assert other.ttl == 7
        async with way.entered(distributed_lock("tombola", wait=0)) as other:
            assert other.held


@both_ways
async def test_locked_is_about_anyone(way, place):
    lock = distributed_lock("lottery")
    assert await way.locked(lock) is False
    with held_by_other("lottery"):
        assert await way.locked(lock) is True
    async with way.entered(lock):
        assert await way.locked(lock) is True
    assert await way.locked(lock) is False


# --- the lease -----------------------------------------------------------------------------------


@both_ways
async def test_a_lease_says_what_it_is(way, place):
    async with way.entered(distributed_lock("lottery", ttl=60)) as lease:
        assert lease.name == "lottery"
        assert lease.ttl == 60
        assert isinstance(lease.fence, int)
        assert 50 < lease.expires_in < 60
        assert lease.lost_reason is None
        assert len(lease.id) == 16
        assert repr(lease) == f"<Lease {lease.id} of 'lottery': held, fence {lease.fence}>"
    assert lease.expires_in == 0.0
    assert lease.lost_reason is None
    assert repr(lease) == f"<Lease {lease.id} of 'lottery': ended, fence {lease.fence}>"


@everywhere
@both_ways
async def test_the_owner_is_told_for_humans(way, place):
    async with way.entered(distributed_lock("lottery")) as lease:
        owner = lease.owner
    assert (owner.host, owner.pid) == (socket.gethostname(), os.getpid())
    assert owner.thread == threading.current_thread().name
    assert owner.command == sys.argv[0].removesuffix("/__main__.py").rpartition("/")[2]
    assert str(owner) == f"{owner.host}:{owner.pid} {owner.command}"


@contextmanager
def being_served(path):
    """A request, to all that Django tells of it except its databases."""
    with undisturbed():
        request_started.send(None, environ={"PATH_INFO": path})
        try:
            yield
        finally:
            request_finished.send(None)


@contextmanager
def undisturbed():
    """Databases are told of no request, as in Django's test client."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    try:
        yield
    finally:
        for signal in (request_started, request_finished):
            signal.connect(close_old_connections)


@both_ways
async def test_the_owner_has_the_path_of_the_request_being_served(way, place):
    with being_served("/draw/"):
        async with way.entered(distributed_lock("lottery")) as lease:
            assert lease.owner.path == "/draw/"
    async with way.entered(distributed_lock("lottery")) as lease:
        assert lease.owner.path == ""


@places(KIND, MEMORY)
@pytest.mark.parametrize("sent", ["/gr\u00f6\u00dfe/\u20ac/", "/a\nCRITICAL forged/"])
def test_the_path_of_a_request_is_that_of_django_and_forges_no_line(place, settings, sent):
    paths, told = [], []

    def view(request):
        paths.append(request.path)
        with distributed_lock("lottery") as lease:
            paths.append(lease.owner.path)
            told.append(in_thread(busy).result(HUNG))
        return HttpResponse()

    def busy():
        with pytest.raises(LockTimeout) as raised:
            distributed_lock("lottery", wait=0).__enter__()
        return f"{raised.value} {held.list()[0].holder}"

    settings.ROOT_URLCONF = (re_path(r"(?s).*", view),)
    settings.MIDDLEWARE, settings.ALLOWED_HOSTS = [], ["*"]
    environ = {}
    setup_testing_defaults(environ)
    environ["PATH_INFO"] = sent.encode().decode("latin-1")  # As servers give it, see PEP 3333.
    with undisturbed():
        response = WSGIHandler()(environ, lambda *_: None)
        response.close()
    assert paths == [sent, sent]
    assert told[0].count(sent.replace("\n", r"\n")) == 2
    assert told[0].isprintable()


@pytest.mark.proves("R9")
@everywhere
@both_ways
async def test_the_fence_grows_with_every_lease(way, place):
    fences = []
    for _ in range(5):
        async with way.entered(distributed_lock("lottery")) as lease:
            fences.append(lease.fence)
    assert fences == sorted(set(fences))


@pytest.mark.proves("R9")
@both_ways
async def test_the_fence_grows_even_after_the_server_lost_its_data(way, place):
    async with way.entered(distributed_lock("lottery")) as before:
        pass
    place.lose_data()
    async with way.entered(distributed_lock("lottery")) as after:
        assert after.fence > before.fence


@pytest.mark.no_permit("the keys of the bystander are there too")
@everywhere
@on_servers
@both_ways
async def test_nothing_of_a_name_stays_on_the_server_after_its_release(way, place, monkeypatch):
    # Who held it is noted only if that was for some time.
    monkeypatch.setattr("django_redislock.handle.NOTED_FROM", HUNG)
    for name in ("lottery", "report"):
        async with way.entered(distributed_lock(name)):
            assert len(place.keys()) == 3
    assert place.keys() == [fence_key(place.locks.prefix).encode()]


# --- blocking code in an event loop --------------------------------------------------------------


async def test_a_blocking_acquire_in_a_running_event_loop_is_refused(place):
    lock = distributed_lock("lottery", wait=60)
    with pytest.raises(LockMisuse, match=r"'lottery'.*`async with`"), lock:
        pytest.fail("the block ran")
    with pytest.raises(LockMisuse, match=r"`await lock\.aacquire"):
        lock.acquire()
    with pytest.raises(LockMisuse, match=r"`await lock\.alocked"):
        lock.locked()
    with pytest.raises(LockMisuse, match="event loop"):
        distributed_lock("lottery")(len)("a")
    assert not await lock.alocked()
    assert await asyncio.to_thread(lock.acquire)
    await lock.arelease()


async def test_as_with_the_orm_blocking_code_can_be_allowed_in_a_loop(place, monkeypatch):
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    with distributed_lock("lottery") as lease:
        assert lease.held
