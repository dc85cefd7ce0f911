"""The public surface: what there is, how it is called, and what importing it needs."""

import inspect
import json
import sys
import textwrap

import pytest
from django.dispatch import Signal

import django_redislock
from django_redislock import Lease, distributed_lock, signals
from django_redislock.lock import Lock
from tests.support.processes import python

# --- names and signatures ------------------------------------------------------------------------

NAMES = """
    InvalidLockName Lease Limit LockError LockLost LockMisuse LockTimeout LockUnavailable Rate
    Skipped StaleFence distributed_lock fenced_update leadership single_instance
    single_instance_task take_up
"""
SIGNALS = """
    lock_acquired lock_released lock_timed_out lock_unavailable lease_endangered lock_lost
    lock_force_released run_started run_ended task_skipped task_abandoned
"""
OF_A_LEASE = """
    name alias atomic fence owner id ttl held expires_in lost_reason ensure_held aensure_held renew
    arenew hand_over ahand_over on_lost
"""
OF_A_HANDLE = "name lease acquire aacquire release arelease locked alocked"


def test_the_package_has_these_names_and_signals_and_no_others():
    assert sorted(django_redislock.__all__) == NAMES.split()
    assert all(hasattr(django_redislock, name) for name in django_redislock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lock_everything'"):
        django_redislock.lock_everything  # noqa: B018
    found = {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    assert found - {"setting_changed"} == {*SIGNALS.split()}


def test_distributed_lock_is_called_like_this():
    names, *options = inspect.signature(distributed_lock).parameters.values()
    assert (names.name, names.kind) == ("names", names.VAR_POSITIONAL)
    assert {one.kind for one in options} == {names.KEYWORD_ONLY}
    assert {one.name: one.default for one in options} == {
        **dict.fromkeys(("ttl", "renew", "max_hold", "wait", "limit", "limits")),
        **dict.fromkeys(("atomic", "release_on_commit", "reentrant"), False),
        "min_hold": 0,
        "using": "default",
    }


def public(cls):
    """The public attributes of a class or an object."""
    names = {name for name in dir(cls) if not name.startswith("_")}
    return names | {name for name in getattr(cls, "__slots__", ()) if not name.startswith("_")}


def test_methods_that_there_are_twice_are_called_alike():
    """Blocking, and with an "a" before it."""
    pairs = [
        (cls, name) for cls in (Lock, Lease) for name in public(cls) if f"a{name}" in public(cls)
    ]
    assert {name for _, name in pairs} >= {
        *("acquire", "release", "locked", "renew", "ensure_held", "hand_over")
    }
    for cls, name in pairs:
        blocking, awaited = getattr(cls, name), getattr(cls, f"a{name}")
        assert inspect.signature(awaited) == inspect.signature(blocking), name
        assert inspect.iscoroutinefunction(awaited), name
        assert not inspect.iscoroutinefunction(blocking), name


def test_a_lease_and_a_handle_have_these_attributes(redislock):
    with distributed_lock("lottery") as lease:
        assert isinstance(lease, Lease)
        attributes = public(lease)
    assert attributes >= {*OF_A_LEASE.split()}
    assert not {name for name in attributes if "token" in name}
    assert public(Lock) >= {*OF_A_HANDLE.split()}


@pytest.mark.slow
@pytest.mark.timeout(600)  # Without a cache it takes a minute of processor time.
def test_mypy_sees_the_types_that_typing_api_tells_and_each_misuse():
    python("-m", "mypy", "--strict", "tests/package/typing_api.py", timeout=580)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pyright_sees_the_types_that_typing_api_tells_and_each_misuse():
    # Its wheel has all that it needs; pyproject.toml names the same file.
    python("-m", "basedpyright", "--pythonpath", sys.executable, timeout=580)


# --- importing -----------------------------------------------------------------------------------


def run(code, *arguments):
    """Run code in a fresh interpreter, and return what it printed."""
    return python("-c", textwrap.dedent(code), *arguments, env={}).stdout.strip()


@pytest.mark.slow
@pytest.mark.proves("P10")
@pytest.mark.parametrize("before", ["sys", "django.db"])
def test_importing_needs_no_settings_imports_no_celery_and_starts_nothing(before):
    code = """
    import sys
    __import__(sys.argv[1])
    events = []
    sys.addaudithook(lambda event, args: events.append(event))
    from django_redislock import distributed_lock, held
    started = {"_thread.start_new_thread", "os.fork", "socket.__new__", "socket.connect"}
    print("celery" in sys.modules, started.intersection(events))
    from django_redislock import *
    from django_redislock.signals import lock_acquired
    lock = distributed_lock("lottery", ttl=5)
    from django.conf import settings
    print(settings.configured)
    """
    assert run(code, before).split("\n") == ["False set()", "False"]


WITHOUT = """
import json, sys
without, alias, works, fails = json.loads(sys.argv[1])

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in without:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from django.conf import settings
settings.configure(DEBUG=True, INSTALLED_APPS=["django_redislock"], REDISLOCK={"default": alias})
import django
if works:
    django.setup()
    from django_redislock import distributed_lock
for line in works:
    exec(line)
said = []
for line in fails:
    try:
        if without != ["hiredis"]:
            django.setup()
            from django_redislock import distributed_lock, testing
        exec(line)
    except Exception as error:
        said.append(str(error))
print(json.dumps(said))
"""
IN_MEMORY = {"BACKEND": "django_redislock.backends.InMemoryBackend"}
ON_A_SERVER = {"LOCATION": "redis://127.0.0.1:1/0"}
HOLD = "with distributed_lock('lottery') as lease: lease.ensure_held()"
ACQUIRE = "from django_redislock import distributed_lock; distributed_lock('lottery').acquire()"
CHECK = "from django.core.checks import run_checks; found = run_checks()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "alias", "works", "fails", "says"),
    [
        (
            ["celery", "kombu", "billiard"],
            IN_MEMORY,
            [HOLD],
            [
                "from django_redislock import single_instance_task",
                "from django_redislock.celery import single_instance_task",
                "from django_redislock.celery.decorator import single_instance_task",
                "import django_redislock.celery.checks",
            ],
            ["pip install 'django_redislock[celery]'"],
        ),
        (
            ["hiredis"],
            ON_A_SERVER,
            [],
            ["from django_redislock.backends import RedisBackend", ACQUIRE, "django.setup()"],
            ["pip install 'redis[hiredis]'"],
        ),
        (
            ["lupa"],
            IN_MEMORY,
            [],
            [
                ACQUIRE,
                f"with testing.LockTestKit(): {ACQUIRE.rpartition('; ')[2]}",
                f"{CHECK}; raise Exception([one.id + one.msg for one in found])",
            ],
            [
                *("REDISLOCK['default']['BACKEND']", "InMemoryBackend"),
                "pip install 'django_redislock[testing]'",
            ],
        ),
        (
            ["lupa"],
            ON_A_SERVER,
            [
                "from django_redislock import distributed_lock, pytest_plugin, testing",
                "from django_redislock.backends import InMemoryBackend, RedisBackend",
                "distributed_lock('lottery')",
                f"{CHECK}; assert found == [], found",
            ],
            [],
            [],
        ),
        (
            ["django_redislock.fencing"],  # It is not even looked for.
            IN_MEMORY,
            [HOLD, "assert 'django_redislock.fencing' not in sys.modules"],
            ["distributed_lock('lottery', atomic=True)"],
            ["DATABASES has none"],
        ),
    ],
    ids=["celery", "hiredis", "lupa in memory", "lupa on a server", "a database"],
)
def test_without_what_is_optional_the_rest_works_and_what_needs_it_says_what_is_missing(
    without, alias, works, fails, says
):
    said = json.loads(run(WITHOUT, json.dumps([without, alias, works, fails])))
    assert len(said) == len(fails)
    assert [(text, part) for text in said for part in says if part not in text] == []


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
