"""An application of Celery for the tasks of one test."""

from contextlib import contextmanager
from unittest import mock
from weakref import WeakSet

import celery._state
from celery import Celery
from celery.backends import cache
from celery.result import AsyncResult
from kombu.transport import memory
from kombu.transport.virtual import BrokerState
from kombu.utils.functional import LRUCache

EAGER = {"task_always_eager": True, "task_store_eager_result": False}

# In a Django project the first application becomes the default one, unless there is one; and one of
# a test is closed at its end. This one lives as long as the process.
celery._state.get_current_app()

# To unsubscribe, the destructor connects again to a result backend that was closed. The garbage
# collector may call it in another test, where it then finds that new socket open.
AsyncResult.__del__ = lambda self: None


@contextmanager
def celery_app(**conf):
    """The current application, until the block ends; shared tasks that it has made end with it."""
    # Shared tasks are made anew for each application to come, and for no other one that is there:
    # that may have a task of this name from another test.
    finalizers = set(celery._state._on_app_finalizers)
    with (
        mock.patch.object(celery._state, "_on_app_finalizers", finalizers),
        mock.patch.object(celery._state, "_apps", WeakSet()),
        # What the memory of a process keeps, results and messages, no other application finds.
        mock.patch.object(cache, "_DUMMY_CLIENT_CACHE", LRUCache()),
        mock.patch.object(memory.Channel, "queues", {}),
        mock.patch.object(memory.Transport, "global_state", BrokerState()),
    ):
        app = Celery("tests", set_as_current=False)
        app.conf.update(conf)
        with current(app):
            try:
                yield app
            finally:
                app.close()


@contextmanager
def current(app):
    """Make it the current application, until the block ends.

    If it stayed the current one when it is closed, the tests that come after in the same process
    would look there for their shared tasks, of which a closed application hears nothing.
    """
    before = celery._state._tls.current_app
    app.set_current()
    try:
        yield
    finally:
        celery._state._set_current_app(before)
