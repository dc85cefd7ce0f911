"""Settings of the processes of demo_jobs: machines, and beats that stand by for each other."""

from __future__ import annotations

from celery.beat import BeatLazyFunc

from example_project.machine_settings import *  # noqa: F403
from lottery.demo.due_times import EachSecond

EACH_SECOND = EachSecond()
CELERY_BEAT_SCHEDULE = {
    "bank": {
        "task": "shop.tasks.poll_bank",
        "schedule": EACH_SECOND,
        "args": [BeatLazyFunc(EACH_SECOND.due)],
    },
}
CELERY_BEAT_LEADER_SCHEDULER = "celery.beat:Scheduler"  # It keeps no file.
CELERY_BEAT_LEADER_TTL = 3
