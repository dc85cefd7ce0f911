"""Clusters, and masters that sentinels watch, which a test may break; its locks are patient."""

import pytest

from tests.support.waiting import HUNG

# A lease may be lost with a master, or its release; then its lock is free when its ttl is over.
PATIENT = {"TTL": 3.0, "WAIT": HUNG, "UNAVAILABLE_AFTER": HUNG}


@pytest.fixture
def start(make_cluster, make_watched, settings, key_prefix):
    """Start one, and return it and its locks; names in capitals are settings of these.

    cluster, locks = start("cluster", replicas=1, TTL=15)
    watched, locks = start("sentinels", "redis", tls=True)
    """
    make = {"cluster": make_cluster, "sentinels": make_watched}

    def start(topology, kind="valkey", **given):
        changed = {name: given.pop(name) for name in [*given] if name.isupper()}
        options = changed.pop("OPTIONS", {})
        servers = make[topology](kind, **given)
        locks = servers.locks(settings, key_prefix, **{**PATIENT, **changed})
        return servers, locks.configure(**servers.setting(**options))

    return start
