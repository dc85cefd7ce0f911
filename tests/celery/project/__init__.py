"""A Celery application for the tests: its tasks, and real workers that run them.

    def test_two_runs(stage, worker):
        first = stage.send("skipping", key := stage.key(), hold=True)
        ...

A :class:`~tests.celery.project.stage.Stage` is a broker, a result backend and a lock server of its
own (a database of a server that tests share). Tasks tell what they do in a journal (journal.py).
"""

from __future__ import annotations
