"""Two servers with a scheduler each: the same job twice, at what both believe to be noon."""

import pytest

from tests.support.waiting import wait_until

pytest_plugins = ["tests.celery.project.stage"]

EVERY = 9.0  # Seconds between two noons; min_hold is 5, so a busy machine may be late by 4.
LATE = 0.3  # Seconds by which the clock of the second server is late.


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.row("two-beats")
def test_of_two_beats_with_clocks_that_differ_one_draws_at_each_noon(own_stage, tmp_path):
    key = own_stage.key()
    for number, late in enumerate((0.0, LATE)):
        own_stage.start(
            *("--beat", "--schedule", str(tmp_path / f"schedule-{number}")),
            ready=False,
            noon={"key": key, "every": EVERY, "late": late},
        )
    for worker in own_stage.workers:
        worker.wait_ready()

    def sent_by_all(times):
        return all(
            worker.log.count("Sending due task noon") >= times for worker in own_stage.workers
        )

    wait_until(lambda: sent_by_all(2), 60, "two noons have passed", every=0.05)
    own_stage.wait_for(key, "draw", 2)
    own_stage.wait_until_idle()
    for worker in own_stage.workers:
        worker.kill()
    noons = [int(draw["time"] // EVERY) for draw in own_stage.events(key, "draw")]
    assert len(noons) >= 2
    assert noons == list(range(noons[0], noons[0] + len(noons)))
