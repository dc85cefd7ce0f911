"""System checks of tasks: each of their messages, and none without a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import celery._state
import pytest
from celery import Celery

from django_redislock.celery import single_instance_task
from django_redislock.celery.checks import check_tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def draw(draw_id: int) -> None:
    """A task with an argument."""


def tidy() -> None:
    """A task without."""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """Make one task in an application of its own, and return the ids of what is said of it."""
    monkeypatch.setattr(celery._state, "_on_app_finalizers", set(celery._state._on_app_finalizers))
    app = Celery("tests", set_as_current=False, broker="redis://", backend="cache+memory://")
    app.set_current()

    def check(function: Callable[..., Any], conf: dict[str, Any], **options: Any) -> list[str]:
        app.conf.update(conf)
        name = f"checked.{function.__name__}"
        single_instance_task(**options, name=name)(function)
        messages = [one for one in check_tasks(None) if name in one.msg]
        assert all(one.hint for one in messages)
        return [str(one.id).removeprefix("django_redislock.") for one in messages]

    yield check
    app.close()


@pytest.mark.parametrize(
    ("function", "conf", "options", "found"),
    [
        (tidy, {}, {}, []),
        (draw, {}, {"key": "lottery:{draw_id}"}, []),
        (draw, {}, {"key": "lottery"}, []),
        (draw, {}, {}, ["W050"]),
        (draw, {}, {"acks_late": True, "time_limit": 1800, "key": "lottery"}, []),
        (tidy, {}, {"acks_late": True, "max_hold": 7200}, ["W051"]),
        (tidy, {"task_acks_late": True, "task_time_limit": 7200}, {}, ["W051"]),
        (
            tidy,
            {"broker_transport_options": {"visibility_timeout": 9000}},
            {"acks_late": True, "max_hold": 7200},
            [],
        ),
        (tidy, {}, {"time_limit": 600, "max_hold": 300}, ["W052"]),
        (tidy, {}, {"time_limit": 300, "max_hold": 600}, []),
        (tidy, {}, {"on_conflict": "wait", "wait": 30}, []),
        (tidy, {}, {"on_conflict": "wait", "wait": 90}, ["W053"]),
        (tidy, {"result_backend": None}, {"acks_late": True}, ["W054"]),
        (tidy, {"result_backend": None}, {"acks_late": True, "ignore_result": True}, []),
        (tidy, {}, {"using": "default"}, []),
        (tidy, {}, {"using": "defautl"}, ["E050"]),
    ],
)
def test_each_task_is_judged_by_its_options_and_the_settings(
    check: Callable[..., list[str]],
    function: Callable[..., Any],
    conf: dict[str, Any],
    options: dict[str, Any],
    found: list[str],
) -> None:
    assert check(function, conf, **options) == found
