"""A Celery application for the tests: its tasks, and real workers that run them.

    def test_two_runs(stage, worker):
        first = stage.send("skipping", key := stage.key(), hold=True)
        ...

A :class:`~tests.celery.project.stage.Stage` is a broker, a result backend and a lock server of its
own (a database of a server that tests share). Tasks tell what they do in a journal (journal.py).
"""

from __future__ import annotations

import os

from tests.support.waiting import HUNG

# Seconds until something counts as not coming. With the naive lock (see naive.py) the tests fail,
# and need not be patient about it.
PATIENCE = 2 if "TESTS_NAIVE" in os.environ else HUNG
