"""What uWSGI serves in a test: loaded, and a lock used, in its master before that forks in C."""

import json
import os

import django

from django_redislock import distributed_lock
from tests.support.waiting import wait_until

django.setup()
MASTER = os.getpid()
HELD = distributed_lock("held by the master")
assert HELD.acquire()
lease = HELD.lease
wait_until(lambda: lease.renewals)


def application(environ, start_response):
    """Serve a request that takes many short locks, and holds a long one meanwhile."""
    name = environ["PATH_INFO"]
    fences = []
    with distributed_lock(f"long {name}") as long:
        while long.renewals < 2 or len(fences) < 100:
            with distributed_lock(f"short {name}") as short:
                short.ensure_held(verify=True)
                fences.append(short.fence)
        long.ensure_held(verify=True)
    said = {
        "is_worker": os.getpid() != MASTER,
        "pid": os.getpid(),
        "owner": long.owner.pid,
        "in_order": fences == sorted(set(fences)),
        "holds_what_the_master_holds": HELD.lease is not None and HELD.lease.held,
    }
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(said).encode()]
