"""Whatever goes wrong, nothing that is written under the fence is lost; longer by `make jepsen`.

That updates are lost without it, here and by the locks of others, shows that the trial can tell.
"""

import pytest

from tests.jepsen import history
from tests.jepsen.places import CONTENDERS
from tests.jepsen.trial import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

SECONDS = 3.0
SEED = 29  # It begins with a holder cut off, and a server or a master killed.
OURS = [name for name, contender in CONTENDERS.items() if contender.lock == "ours"]
CONTROLS = [name for name in CONTENDERS if name not in OURS]


@pytest.mark.proves("P2", "R9")
@pytest.mark.parametrize("backend", OURS)
def test_no_update_is_lost_under_the_fence_while_servers_and_clients_fail(
    backend, django_db_blocker, tmp_path
):
    kept = tmp_path / "history.edn"
    with django_db_blocker.unblock():
        report = run(backend, seconds=SECONDS, seed=SEED, keep=kept)
    print(report)
    assert report.wrong == []
    assert report.verdict.lost > 0, "nobody was too late, so nothing is proven"
    assert report.verdict.refused > 0, "the holder that was cut off has written"
    assert history.verdict_on(history.read(kept)) == report.verdict


@pytest.mark.parametrize("backend", CONTROLS)
def test_the_locks_of_others_lose_updates_in_the_same_trial(backend, django_db_blocker):
    with django_db_blocker.unblock():
        report = run(backend, seconds=0, seed=SEED)  # No longer than it takes.
    print(report)
    assert report.verdict.lost > 0
