"""The recipe of docs/monitoring.md that writes down who held what."""

import json
import logging.config
import sys

import pytest

from django_redislock import LockLost, distributed_lock, held, signals
from tests import ROOT
from tests.package.test_docs import code_of
from tests.support.waiting import wait_until

SIGNALS = (signals.lock_acquired, signals.lock_released, signals.lock_lost)


@pytest.fixture
def audit(tmp_path, monkeypatch):
    """The recipe is in use; returns the directory with its files."""
    text = (ROOT / "docs" / "monitoring.md").read_text()
    section = text.partition("\n## Who held what")[2].partition("\n## ")[0]
    module, settings = code_of(section, "python")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "audit.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {}
    exec(settings.replace("/var/log/shop", str(tmp_path)), namespace)
    before = [list(signal.receivers) for signal in SIGNALS]

    logging.config.dictConfig(namespace["LOGGING"])
    yield tmp_path
    for signal, receivers in zip(SIGNALS, before, strict=True):
        signal.receivers = receivers
        signal.sender_receivers_cache.clear()
    for name in namespace["LOGGING"]["loggers"]:
        for handler in list(logging.getLogger(name).handlers):
            logging.getLogger(name).removeHandler(handler)
            handler.close()
    for name in ("shop.audit", "shop"):
        sys.modules.pop(name, None)


def test_the_recipe_writes_down_who_held_what(audit, locks):
    with distributed_lock("lottery") as lease:
        pass
    with pytest.raises(LockLost), distributed_lock("tombola") as forced:
        assert held.force_release("tombola", forced.id, by="ann", reason="stuck")
    file = audit / "locks.jsonl"
    wait_until(lambda: len(file.read_text().splitlines()) == 4)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["event"], line["lock"], line["fence"]) for line in lines] == [
        ("acquired", "lottery", lease.fence),
        ("released", "lottery", lease.fence),
        ("acquired", "tombola", forced.fence),
        ("lost", "tombola", forced.fence),
    ]
    assert {line["owner"] for line in lines} == {str(lease.owner)}
    assert lines[1]["success"] is True
    assert lines[3]["reason"] == "forced"
    (by_operator,) = (audit / "operators.log").read_text().splitlines()
    assert "'ann'" in by_operator
    assert forced.id in by_operator
