"""on_conflict="replace" in each place that can keep its lock, and the words of one that cannot."""

import threading

import pytest

from django_redislock import LockUnavailable, single_instance
from django_redislock.jobs import current_lease
from tests.support.stored import NAME
from tests.support.waiting import wait_until


@pytest.mark.places("memory", "cluster", "sentinel")
def test_a_run_is_told_at_once_that_a_newer_call_replaces_it(place):
    begun, results = [], {}

    @single_instance(NAME, on_conflict="replace", ttl=5, replace_within=60)
    def search(number):
        begun.append(number)
        lease = current_lease()
        if number == 1:
            wait_until(lambda: not lease.held)
            lease.ensure_held()
        return number

    def call(number):
        results[number] = search(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 2)]
    threads[0].start()
    wait_until(lambda: begun)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert results[1]["skipped"] == "replaced"
    assert results[2] == 2


@pytest.mark.places("unscripted")
def test_where_the_server_runs_no_scripts_it_is_refused_in_words(place):
    search = single_instance(NAME, on_conflict="replace", ttl=5)(lambda: None)
    with pytest.raises(LockUnavailable, match="need EVAL, which the server forbids"):
        search()
