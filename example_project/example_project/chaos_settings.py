"""Settings of the workers of demo_chaos: the broker soon gives up on a silent worker."""

from __future__ import annotations

import os

from example_project.settings import *  # noqa: F403

# Beside the locks, so that these can be lost alone.
CELERY_BROKER_URL = CELERY_RESULT_BACKEND = os.environ["BROKER_URL"]

# A message that a worker has not acknowledged after this long is delivered again. Such a short
# time is for the demo; the lock has its duplicates come back until the first delivery is over.
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 0.5,
    "unacked_restore_throttle": 1,
    # One worker at a time looks for such messages. If it is killed at that, the others wait for it
    # no longer than this; by default they do so for five minutes.
    "unacked_mutex_expire": 2,
}
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
