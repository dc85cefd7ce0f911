"""A kept history says all, in the format of Jepsen's."""

import edn_format
import pytest

from tests.jepsen import history
from tests.jepsen.history import NEMESIS, READER, Event
from tests.jepsen.workload import Desk
from tests.support.processes import python


@pytest.fixture
def desk(tmp_path):
    """Of a trial in which client 1 loses its lease, and client 2 is killed amid a write."""
    desk = Desk(tmp_path)
    with desk.operation(1, "acquire") as value:
        value["fence"] = 7
    with desk.operation(1, "increment-plain") as value:
        desk.note(Event(NEMESIS, "info", "holder-cut-off"))
        with desk.operation(2, "acquire") as other:
            other["fence"] = 8
        with desk.operation(2, "increment-plain") as other:
            other.update(fence=8, value=1)
        desk.note(Event(2, "invoke", "increment-fenced"))
        value.update(fence=7, value=1)
    with pytest.raises(ValueError, match="late"), desk.operation(1, "increment-fenced"):
        raise ValueError("late")
    with desk.operation(READER, "read-plain") as value:
        value.update(value=1, fences=[8, 7])
    with desk.operation(READER, "read-fenced") as value:
        value.update(value=1, fences=[8])
    return desk


@pytest.fixture
def kept(desk, tmp_path):
    path = tmp_path / "history.edn"
    history.write(desk.events(), path)
    return path


def test_what_is_read_back_is_what_was_written_down(desk, kept):
    assert history.read(kept) == list(desk.events())


def test_the_checker_reads_losses_and_refusals_from_it(kept):
    verdict = history.verdict_on(history.read(kept))
    assert (verdict.granted, verdict.lost, verdict.refused) == (2, 1, 1)
    assert verdict.wrong == []


def test_each_line_is_an_operation_of_jepsen(kept):
    lines = [edn_format.loads(line) for line in kept.read_text().splitlines()]
    names = {"process", "type", "f", "value", "time", "index"}
    for index, line in enumerate(lines):
        assert {key.name for key in line} - {"error"} == names
        assert line[edn_format.Keyword("index")] == index
        assert line[edn_format.Keyword("type")].name in {"invoke", "ok", "fail", "info"}
    times = [line[edn_format.Keyword("time")] for line in lines]
    assert times == sorted(times)
    assert times[0] == 0


def test_each_process_ends_an_operation_before_the_next(kept):
    open_ = {}
    for event in history.read(kept):
        if event.type == "invoke":
            assert event.process not in open_
            open_[event.process] = event.f
        elif event.process != NEMESIS:
            assert open_.pop(event.process) == event.f
    assert open_ == {2: "increment-fenced"}  # It was killed.


def test_the_command_judges_a_kept_history(kept):
    done = python("-m", "tests.jepsen", "--check", str(kept))
    assert "granted=2, lost=1, lost_with_fence=0, refused=1" in done.stdout
