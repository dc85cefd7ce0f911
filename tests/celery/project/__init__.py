"""A Celery application for the tests: its tasks, and real workers that run them.

    def test_two_runs(stage, worker):
        first = stage.send("skipping", key := stage.key(), hold=True)
        ...

A :class:`~tests.celery.project.stage.Stage` is a broker, a result backend and a lock server of its
own (a database of a server that tests share). Tasks tell what they do in a journal (journal.py).
"""

import os

from tests.support.waiting import HUNG

# Seconds until something counts as not coming. With the naive lock (see naive.py) the tests fail,
# and need not be patient about it.
PATIENCE = 1 if "TESTS_NAIVE" in os.environ else HUNG

# Of a worker that says at once that a child was killed, and not after ten seconds.
LOST_SOON = {"worker_lost_wait": 0.1}

# Of a broker that gives up on a silent worker after a second: broker_transport_options.
SOON = {
    "visibility_timeout": 1,
    # How often kombu 5.7 looks for messages to deliver again; before it was fixed.
    "unacked_restore_interval": 0.2,
    "unacked_restore_throttle": 1,
    # A worker that is killed while it looks keeps all others from it for five minutes otherwise.
    "unacked_mutex_expire": 2,
}

# Queues of RabbitMQ that are kept on several servers.
QUORUM = {
    "task_default_queue_type": "quorum",
    "task_default_exchange_type": "topic",
    "task_create_missing_queue_type": "quorum",
    "task_create_missing_queue_exchange_type": "topic",
}
