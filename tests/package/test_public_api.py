"""The public surface: what there is, how it is called, and what importing it needs."""

import inspect
import sys
import textwrap

import pytest

import django_redislock
from django_redislock import Lease, distributed_lock, signals
from django_redislock.lock import Lock
from tests.support.processes import python

# --- names and signatures ------------------------------------------------------------------------


def test_the_package_has_these_names_and_no_others():
    assert sorted(django_redislock.__all__) == [
        "InvalidLockName",
        "Lease",
        "Limit",
        "LockError",
        "LockLost",
        "LockMisuse",
        "LockTimeout",
        "LockUnavailable",
        "Rate",
        "Skipped",
        "StaleFence",
        "distributed_lock",
        "fenced_update",
        "leadership",
        "single_instance",
        "single_instance_task",
        "take_up",
    ]
    assert all(hasattr(django_redislock, name) for name in django_redislock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lock_everything'"):
        django_redislock.lock_everything  # noqa: B018


def test_there_are_these_signals():
    from django.dispatch import Signal

    found = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert found - {"setting_changed"} == {
        "lock_acquired",
        "lock_released",
        "lock_timed_out",
        "lock_unavailable",
        "lease_endangered",
        "lock_lost",
        "lock_force_released",
        "run_started",
        "run_ended",
        "task_skipped",
        "task_abandoned",
    }


def test_distributed_lock_is_called_like_this():
    parameters = inspect.signature(distributed_lock).parameters
    assert [(name, one.default) for name, one in parameters.items()] == [
        ("names", inspect.Parameter.empty),
        ("ttl", None),
        ("renew", None),
        ("max_hold", None),
        ("min_hold", 0),
        ("atomic", False),
        ("wait", None),
        ("limit", None),
        ("limits", None),
        ("using", "default"),
        ("release_on_commit", False),
        ("reentrant", False),
    ]
    kinds = [one.kind for one in parameters.values()]
    assert kinds == [inspect.Parameter.VAR_POSITIONAL] + [inspect.Parameter.KEYWORD_ONLY] * 11


def public(cls):
    """The public attributes of a class or an object."""
    names = {name for name in dir(cls) if not name.startswith("_")}
    return names | {name for name in getattr(cls, "__slots__", ()) if not name.startswith("_")}


def pairs():
    """The methods that there are twice: blocking, and with an "a" before it."""
    return [
        (cls, name)
        for cls in (Lock, Lease)
        for name in sorted(public(cls))
        if f"a{name}" in public(cls)
    ]


def test_there_are_these_pairs():
    assert {name for _, name in pairs()} >= {
        "acquire",
        "release",
        "locked",
        "renew",
        "ensure_held",
        "hand_over",
    }


@pytest.mark.parametrize(
    ("cls", "name"), pairs(), ids=[f"{cls.__name__}.{name}" for cls, name in pairs()]
)
def test_both_of_a_pair_are_called_alike(cls, name):
    blocking, awaited = getattr(cls, name), getattr(cls, f"a{name}")
    assert inspect.signature(awaited) == inspect.signature(blocking)
    assert inspect.iscoroutinefunction(awaited)
    assert not inspect.iscoroutinefunction(blocking)


def test_a_lease_has_these_attributes(redislock):
    with distributed_lock("lottery") as lease:
        assert isinstance(lease, Lease)
        attributes = public(lease)
    assert attributes >= {
        "name",
        "alias",
        "atomic",
        "fence",
        "owner",
        "id",
        "ttl",
        "held",
        "expires_in",
        "lost_reason",
        "ensure_held",
        "aensure_held",
        "renew",
        "arenew",
        "hand_over",
        "ahand_over",
        "on_lost",
    }
    assert not {name for name in attributes if "token" in name}


def test_a_handle_has_these_attributes():
    assert public(Lock) >= {
        "name",
        "lease",
        "acquire",
        "aacquire",
        "release",
        "arelease",
        "locked",
        "alocked",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)  # Without a cache it takes a minute of processor time.
def test_mypy_sees_the_types_that_typing_api_tells_and_each_misuse():
    files = ["tests/package/typing_api.py", "tests/package/typing_misuse.py"]
    python("-m", "mypy", "--strict", *files, timeout=580)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_sees_the_types_that_typing_api_tells_and_each_misuse():
    # Its wheel has all that it needs; pyproject.toml names the same files.
    python("-m", "basedpyright", "--pythonpath", sys.executable, timeout=580)


# --- importing -----------------------------------------------------------------------------------


def run(code):
    """Run code in a fresh interpreter, and return what it printed."""
    return python("-c", textwrap.dedent(code), env={}).stdout.strip()


NO_CELERY = """
import sys

class NoCelery:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"celery", "kombu", "billiard"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoCelery())
"""


@pytest.mark.slow
@pytest.mark.proves("P10")
@pytest.mark.parametrize("before", ["", "import django.db"])
def test_importing_needs_no_settings(before):
    code = """
    from django_redislock import *
    from django_redislock.signals import lock_acquired
    from django_redislock import distributed_lock, held
    lock = distributed_lock("lottery", ttl=5)
    from django.conf import settings
    print(settings.configured)
    """
    assert run(before + textwrap.dedent(code)) == "False"


@pytest.mark.slow
@pytest.mark.proves("P10")
def test_importing_the_lock_imports_no_celery_and_starts_nothing():
    code = """
    import sys
    events = []
    sys.addaudithook(lambda event, args: events.append(event))
    from django_redislock import distributed_lock, held
    started = {"_thread.start_new_thread", "os.fork", "socket.__new__", "socket.connect"}
    print("celery" in sys.modules, started.intersection(events))
    """
    assert run(code) == "False set()"


@pytest.mark.slow
def test_without_celery_the_lock_works_and_the_task_says_what_to_install():
    code = (
        NO_CELERY
        + """
import django_redislock
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_redislock"],
    REDISLOCK={"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}},
)
import django
django.setup()
with django_redislock.distributed_lock("lottery") as lease:
    assert lease.held
try:
    from django_redislock import single_instance_task
except ImportError as error:
    print(error)
"""
    )
    assert "pip install 'django_redislock[celery]'" in run(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "from django_redislock.celery import single_instance_task",
        "from django_redislock.celery.decorator import single_instance_task",
        "import django_redislock.celery.checks",
    ],
)
def test_without_celery_its_submodules_say_what_to_install(line):
    code = f"{NO_CELERY}\ntry:\n    {line}\nexcept ImportError as error:\n    print(error)"
    assert "pip install 'django_redislock[celery]'" in run(code)


@pytest.mark.slow
def test_without_a_database_locks_work_and_atomic_says_what_is_missing():
    code = """
    import sys
    import django
    from django.conf import settings
    settings.configure(
        INSTALLED_APPS=["django_redislock"],
        REDISLOCK={"default": {"BACKEND": "django_redislock.backends.InMemoryBackend"}},
    )
    django.setup()
    from django_redislock import distributed_lock
    with distributed_lock("lottery") as lease:
        lease.ensure_held()
    print("django_redislock.fencing" in sys.modules)
    try:
        distributed_lock("lottery", atomic=True)
    except ValueError as error:
        print(error)
    """
    said = run(code).splitlines()
    assert said[0] == "False"
    assert "DATABASES has none" in said[1]


NO_HIREDIS = NO_CELERY.replace("NoCelery", "NoHiredis").replace(
    '{"celery", "kombu", "billiard"}', '{"hiredis"}'
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        "from django_redislock.backends import RedisBackend",
        """
from django.conf import settings
settings.configure(REDISLOCK={"default": {"LOCATION": "redis://127.0.0.1:1/0"}})
from django_redislock import distributed_lock
distributed_lock("lottery", wait=0).acquire()
""",
        """
from django.conf import settings
settings.configure(INSTALLED_APPS=["django_redislock"])
import django
django.setup()
""",
    ],
    ids=["import", "first use", "setup"],
)
def test_without_hiredis_it_is_said_what_to_install(lines):
    code = f"{NO_HIREDIS}\ntry:\n{textwrap.indent(lines, '    ')}\n"
    code += "except Exception as error:\n    print(error)"
    assert "pip install 'redis[hiredis]'" in run(code)


NO_LUPA = NO_CELERY.replace("NoCelery", "NoLupa").replace(
    '{"celery", "kombu", "billiard"}', '{"lupa"}'
)
SET_UP_WITH = """
import django, sys
from django.conf import settings
settings.configure(DEBUG=True, INSTALLED_APPS=["django_redislock"], REDISLOCK={"default": %s})
django.setup()
"""
IN_MEMORY = '{"BACKEND": "django_redislock.backends.InMemoryBackend"}'


@pytest.mark.slow
def test_without_lupa_all_but_locks_in_memory_works():
    code = (
        NO_LUPA
        + SET_UP_WITH % '{"LOCATION": "redis://127.0.0.1:1/0"}'
        + """
from django.core.checks import run_checks
from django_redislock import distributed_lock, pytest_plugin, testing
from django_redislock.backends import InMemoryBackend, RedisBackend
distributed_lock("lottery")
print([found.id for found in run_checks()])
"""
    )
    assert run(code) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "lines",
    [
        'distributed_lock("lottery", wait=0).acquire()',
        """
with testing.LockTestKit():
    distributed_lock("lottery", wait=0).acquire()
""",
        "print([found.id + found.msg for found in run_checks()])",
    ],
    ids=["first use", "test kit", "check"],
)
def test_without_lupa_locks_in_memory_say_what_to_install(lines):
    code = f"""{NO_LUPA}{SET_UP_WITH % IN_MEMORY}
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django_redislock import distributed_lock, testing
try:
{textwrap.indent(lines, "    ")}
except ImproperlyConfigured as error:
    print(error)
"""
    said = run(code)
    assert "REDISLOCK['default']['BACKEND']" in said
    assert "InMemoryBackend" in said
    assert "pip install 'django_redislock[testing]'" in said


@pytest.mark.slow
def test_a_broken_celery_is_not_called_missing():
    code = """
    import sys, types
    broken = types.ModuleType("celery")
    sys.modules["celery"] = broken
    try:
        from django_redislock import single_instance_task
    except ImportError as error:
        print("pip install" in str(error))
    """
    assert run(code) == "False"
