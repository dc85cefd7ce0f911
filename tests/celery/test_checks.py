"""System checks of tasks: each of their messages, and none without a reason."""

import inspect
import os

import pytest
from django.core.checks import ERROR
from django.core.management import call_command

from django_redislock import Rate
from django_redislock.celery import single_instance_task
from django_redislock.celery.checks import check_tables, check_tasks
from tests import ROOT
from tests.support.celery_app import celery_app
from tests.support.processes import python


def draw(draw_id):
    """A task with an argument."""


def tidy():
    """A task without."""


@pytest.fixture
def check():
    """Make one task in an application of its own, and return the ids of what is said of it."""

    def check(function, conf, **options):
        app.conf.update(conf)
        name = f"checked.{function.__name__}"
        single_instance_task(**options, name=name)(function)
        messages = [
            one for one in check_tasks(None) if name in one.msg or one.msg.startswith("worker_pool")
        ]
        assert all(one.hint for one in messages)
        assert all((one.level == ERROR) == (".E" in one.id) for one in messages)
        return [str(one.id).removeprefix("django_redislock.") for one in messages]

    with celery_app(broker_url="redis://", result_backend="cache+memory://") as app:
        yield check


LATE = {"acks_late": True}
LONG = {"visibility_timeout": 9000}


@pytest.mark.parametrize(
    ("function", "conf", "options", "found"),
    [
        (tidy, {}, {}, []),
        (draw, {}, {"key": "lottery:{draw_id}"}, []),
        (draw, {}, {"key": "lottery"}, []),
        (draw, {}, {}, ["W050"]),
        (draw, {}, {"limits": [Rate("api", "10/s")]}, []),  # It has the name of its lock.
        (tidy, {}, {"autoretry_for": (ValueError,)}, []),
        (draw, {}, {"acks_late": True, "time_limit": 1800, "key": "lottery"}, []),
        (tidy, {}, {"acks_late": True, "max_hold": 7200}, ["W051"]),
        (tidy, {"task_acks_late": True, "task_time_limit": 7200}, {}, ["W051"]),
        (tidy, {}, {"acks_late": True, "time_limit": 3600}, []),  # The default of Redis.
        (tidy, {}, {"acks_late": True, "time_limit": 3601}, ["W051"]),
        (tidy, {"broker_url": ["rediss://one", "rediss://two"]}, {**LATE, "time_limit": 3600}, []),
        (tidy, {"broker_url": "pyamqp://"}, {"acks_late": True, "time_limit": 1801}, ["W051"]),
        (tidy, {}, {"acks_late": True, "max_hold": 7200, "time_limit": 60}, []),
        (tidy, {"broker_transport_options": LONG}, {**LATE, "max_hold": 7200}, []),
        (tidy, {}, {"time_limit": 600, "max_hold": 300}, ["W052"]),
        (tidy, {}, {"time_limit": 300, "max_hold": 600}, []),
        (tidy, {}, {"on_conflict": "wait", "wait": 60}, []),
        (tidy, {}, {"on_conflict": "wait", "wait": 90}, ["W053"]),
        (tidy, {"result_backend": None}, {"acks_late": True}, ["W054"]),
        (tidy, {"result_backend": "rpc://"}, {"acks_late": True}, ["W054"]),
        (tidy, {"result_backend": None}, {"acks_late": True, "ignore_result": True}, []),
        (tidy, {}, {"min_hold": 30}, ["W055"]),
        (tidy, {}, {"once": 30}, ["W055"]),
        (tidy, {}, {"once": 30, "acks_late": True}, []),
        (tidy, {}, {"once": 30, "on_conflict": "retry"}, []),
        (tidy, {"task_acks_late": True}, {"once": 30}, []),
        (tidy, {"task_acks_late": True}, {"once": 30, "acks_late": False}, ["W055"]),
        (tidy, {}, {"min_hold": 30, "on_conflict": "retry"}, ["W060"]),
        (tidy, {"task_acks_late": True}, {"min_hold": 30, "on_conflict": "wait"}, ["W060"]),
        (tidy, {}, {"min_hold": 30, "on_conflict": "retry", "limit": 1}, []),
        (tidy, {}, {"min_hold": 30, "on_conflict": "retry", "once": 60}, []),
        (tidy, {}, {"min_hold": 30, "on_conflict": "retry", "unique_queued": True}, []),
        (tidy, {"task_acks_late": True}, {"min_hold": 30}, []),
        (tidy, {}, {"give_up_after": 3}, ["E052"]),
        (tidy, {"task_acks_late": True}, {"give_up_after": 3}, ["W059"]),
        (tidy, {"task_reject_on_worker_lost": True}, {**LATE, "give_up_after": 3}, []),
        (tidy, {"worker_pool": "gevent"}, {}, ["W058"]),
        (tidy, {"worker_pool": "eventlet"}, {}, ["W058"]),
        (tidy, {"worker_pool": "threads"}, {}, []),
        (tidy, {}, {"unique_queued": True}, ["W056"]),
        (tidy, {}, {"unique_queued": True, "on_conflict": "retry"}, []),
        (tidy, {}, {"unique_queued": True, "on_conflict": "wait"}, ["W056"]),
        (tidy, {}, {"unique_queued": "newest", "on_conflict": "retry"}, []),
        (tidy, {}, {"using": "default"}, []),
        (tidy, {}, {"using": "defautl"}, ["E050"]),
    ],
)
def test_each_task_is_judged_by_its_options_and_the_settings(check, function, conf, options, found):
    assert check(function, conf, **options) == found


def test_a_hint_says_so_if_there_is_no_alias_at_all_and_which_setting_counts_on_rabbitmq(
    check, settings
):
    assert check(tidy, {"broker_url": "pyamqp://"}, **LATE, time_limit=7200) == ["W051"]
    (found,) = (one for one in check_tasks(None) if "checked.tidy" in one.msg)
    assert "with RabbitMQ also consumer_timeout, on the server" in str(found.hint)
    settings.REDISLOCK = {}
    assert check(draw, {}) == ["E050"]
    (found,) = (one for one in check_tasks(None) if "checked.draw" in one.msg)
    assert found.hint == "Its aliases are: none."


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, []),
        ({"once": 60}, ["E051"]),
        ({"unique_queued": True, "on_conflict": "retry"}, ["E051"]),
        ({"debounce": 60}, ["E051"]),
        ({"give_up_after": 3, "acks_late": True, "reject_on_worker_lost": True}, ["E051", "W061"]),
        ({"acks_late": True}, ["W061"]),
    ],
)
def test_what_needs_records_of_runs_is_not_for_a_quorum(options, says, check, settings):
    location = [f"redis://127.0.0.1:{port}/0" for port in (1, 2, 3)]
    quorum = {"BACKEND": "django_redislock.backends.QuorumBackend", "LOCATION": location}
    settings.REDISLOCK = {"default": quorum}
    found = check(tidy, {"result_backend": "redis://"}, **options)
    assert [one for one in found if one in {"E051", "W061"}] == says
    for one in check_tasks(None):
        if one.id == "django_redislock.E051":
            assert 'Write using="runs" there' in one.msg


@pytest.mark.parametrize(
    ("options", "migrated_to", "missing"),
    [
        ({}, None, []),
        ({"atomic": "effects"}, None, ["fences"]),
        ({"atomic": "effects"}, "0002", []),
        ({"atomic": "effects", "once": "database"}, None, ["fences", "completed runs"]),
        ({"atomic": "effects", "once": "database"}, "0002", ["completed runs"]),
        ({"atomic": "effects", "once": "database"}, "0003", []),
    ],
)
def test_a_table_that_a_task_with_atomic_lacks_is_an_error_of_a_deployment(
    options, migrated_to, missing, check, make_database
):
    database = make_database("effects", migrate=False)
    if migrated_to:
        call_command("migrate", "django_redislock", migrated_to, database=database, verbosity=0)
    check(tidy, {}, **options)
    assert check_tables(None) == []  # A database is asked if it is named.
    found = [one for one in check_tables(None, [database]) if "checked.tidy" in one.msg]
    assert [one.id for one in found] == ["django_redislock.E053"] * len(missing)
    for one, table in zip(found, missing, strict=True):
        assert one.level == ERROR
        assert f"has no table of {table}. Run `manage.py migrate" in one.msg


PROJECT = {
    "shop_settings.py": """
        SECRET_KEY = "of no use"
        INSTALLED_APPS = ["django_redislock"]
        REDISLOCK = {"default": {"LOCATION": "redis://127.0.0.1:6379/0"}}
        import shop_celery
    """,
    "shop_celery.py": """
        from celery import Celery
        app = Celery("shop", broker="redis://127.0.0.1:1/0", backend="rpc://")
        app.autodiscover_tasks(["parcels"])
        app.autodiscover_tasks(lambda: ["letters"], related_name="jobs")
        app.autodiscover_tasks(["broken", "unreached"])
        app.conf.include = ["missing"]
    """,
    "parcels/__init__.py": "",
    "parcels/tasks.py": """
        from django_redislock import single_instance_task

        @single_instance_task
        def weigh(parcel_id): ...
    """,
    "letters/__init__.py": "",
    "letters/jobs.py": """
        from django_redislock import single_instance_task

        @single_instance_task
        def stamp(letter_id): ...
    """,
    "broken/__init__.py": "",
    "broken/tasks.py": "raise ZeroDivisionError('as asked.')",
    "unreached/__init__.py": "",
}


def test_tasks_are_found_wherever_celery_finds_them_and_a_broken_module_is_named(tmp_path):
    for name, text in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(inspect.cleandoc(text))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {"DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": path}
    command = ("-m", "django", "check", "--tag", "django_redislock")
    said = python(*command, env=os.environ | environment, cwd=tmp_path).stderr
    assert "Traceback" not in said
    for task in ("parcels.tasks.weigh", "letters.jobs.stamp"):
        assert f"(django_redislock.W050) Task {task} takes arguments" in said
    assert said.count("(django_redislock.W057)") == 2
    broken = tmp_path / "broken" / "tasks.py"
    assert f"ZeroDivisionError: as asked ({broken}, line 1)" in said
    assert "ModuleNotFoundError: No module named 'missing'.\n" in said
