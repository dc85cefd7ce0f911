"""Attempts at a lock as the flows take them, with a token and an id that the test knows."""

import math
from functools import cache

from django_redislock.rules.forms import Attempt
from django_redislock.rules.options import Terms
from django_redislock.rules.stored import NO_MARKERS


def attempt(
    name,
    token,
    id,  # noqa: A002
    owner,
    *,
    ttl,
    operation_timeout=5.0,
    wait=0.0,
    replicas=0,
    markers=NO_MARKERS,
    renews=False,
    unavailable_after=math.inf,
    limit=1,
    replace_within=None,
    kind=Attempt,
    **more,
):
    """An attempt; *more* are further attributes of it."""
    terms = Terms(
        ttl=ttl,
        wait=wait,
        renew=renews,
        max_hold=math.inf,
        operation_timeout=operation_timeout,
        unavailable_after=unavailable_after,
        release_before_commit="warn",
        limit=limit,
        replace_within=replace_within,
    )
    made = kind(name, owner, terms, replicas, markers)
    vars(made).update(token=token, id=id, **more)
    return made


@cache
def the_attempt(*args, **kwargs):
    """The same attempt for the same arguments, so that it can be a part of a key."""
    return attempt(*args, **kwargs)
