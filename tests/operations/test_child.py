"""A program run as if this process were it: signals, exit statuses, and whose end ends whom."""

import errno
import os
import select
import signal
import subprocess
import sys

import pytest

from django_redislock.management import guard
from django_redislock.management.guard import PASSED_ON
from django_redislock.management.run import Child, cannot_run
from tests import ROOT
from tests.support.servers import stop_process
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

PARENT = """
import fcntl, os, sys, termios, threading
from django_redislock.management import run as child

if os.isatty(0):
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
grace, order, *program = sys.argv[1:]
one = child.Child(program, os.environ | {"REDISLOCK_NAME": "lottery"}, float(grace))
threading.Thread(target=lambda: os.read(int(order), 1) and one.end(), daemon=True).start()
sys.exit(one.run())
"""
# Tells each signal that it gets, until a line comes.
LISTENER = """
import os, select, signal, sys
numbers = [int(number) for number in sys.argv[1:]]
for number in numbers:
    signal.signal(number, lambda number, frame: os.write(1, b"%d\\n" % number))
os.write(1, b"ready\\n")
# Not for ever: a signal that comes just before a read begins is told after that read.
while not select.select([0], [], [], 0.05)[0]:
    pass
sys.exit(5)
"""


@pytest.fixture
def order():
    """A pipe: what is written to it has the process call Child.end()."""
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)
    os.close(writes)


@pytest.fixture
def start(order):
    """Start a process that runs a program by Child."""
    started = []

    def parent(*program, grace=1.0, stdin=subprocess.PIPE, stdout=subprocess.PIPE):
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(grace), str(order[0]), *program],
            stdin=stdin,
            stdout=stdout,
            cwd=ROOT,
            pass_fds=order[:1],
            start_new_session=True,  # Without a terminal, or with one of its own.
        )
        started.append(process)
        return process

    yield parent
    for process in started:
        process.kill()
        process.wait(HUNG)
        for file in (process.stdin, process.stdout, process.stderr):
            if file:
                file.close()


def line_of(process):
    """The next line of its standard output."""
    assert process.stdout
    return line_from(process.stdout.fileno())


def line_from(file):
    line = b""
    while not line.endswith(b"\n"):
        assert select.select([file], [], [], HUNG)[0], f"no line, only {line!r}"
        if not (byte := os.read(file, 1)):
            break
        line += byte
    return line.strip()


def listener(*numbers):
    return [sys.executable, "-I", "-S", "-c", LISTENER, *map(str, numbers)]


def test_the_program_has_our_files_and_environment_and_none_of_pythons_habits(start):
    script = "echo $REDISLOCK_NAME; grep SigIgn /proc/self/status; ls /proc/self/fd | wc -l; cat"
    process = start("sh", "-c", script)
    everything = bytes(range(256)) * 1000
    out, _ = process.communicate(everything, HUNG)
    name, ignored, files, sent = out.split(b"\n", 3)
    assert name == b"lottery"
    of_python = sum(1 << one - 1 for one in (signal.SIGPIPE, signal.SIGXFSZ))
    assert not int(ignored.split()[1], 16) & of_python
    assert int(files) == 4  # With the one that ls reads.
    assert sent == everything


def test_its_exit_status_is_ours_and_our_own_handlers_are_put_back():
    numbers = (*PASSED_ON, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    statuses = {"exit 0": 0, "exit 7": 7, "kill -KILL $$": 137, "kill -TERM $$": 143}
    for script, status in statuses.items():
        assert Child(["sh", "-c", script], {}, 1.0).run() == status
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    in_another_thread = in_thread(Child(["sh", "-c", "exit 7"], {}, 1.0).run)
    assert in_another_thread.result(HUNG) == 7


def test_its_exit_status_is_known_though_we_were_started_with_sigchld_ignored_and_blocked(start):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start("sh", "-c", "exit 7")
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.wait(HUNG) == 7


def test_what_cannot_be_run_is_told_as_a_shell_does(tmp_path, capfd):
    text, script = tmp_path / "text", tmp_path / "script"
    text.write_text("echo no")
    script.write_text('echo "$1"')  # It does not say by what it is to be run.
    script.chmod(0o755)
    programs = {"no-such-program": 127, str(tmp_path): 126, str(text): 126, str(script): 0}
    for program, status in programs.items():
        assert (cannot_run(program) or (0, ""))[0] == status
        assert Child([program, "yes"], {}, 1.0).run() == status
    said = capfd.readouterr()
    assert said.out == "yes\n"
    assert [line.partition(":")[0] for line in said.err.splitlines()] == [*programs][:3]


def test_signals_are_passed_on(start):
    process = start(*listener(*PASSED_ON))
    assert line_of(process) == b"ready"
    for number in PASSED_ON:
        process.send_signal(number)
        assert line_of(process) == b"%d" % number
    process.communicate(b"\n", HUNG)
    assert process.returncode == 5


def test_one_that_is_ignored_stays_so(start):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.
    try:
        process = start("sh", "-c", "kill -HUP $PPID; kill -HUP $$; echo on; exit 3")
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert line_of(process) == b"on"
    assert process.wait(HUNG) == 3


def test_what_a_terminal_sends_to_both_is_not_passed_on(start):
    terminal, theirs = os.openpty()
    process = start(*listener(signal.SIGINT, signal.SIGUSR1), stdin=theirs, stdout=theirs)
    os.close(theirs)
    try:
        assert line_from(terminal) == b"ready"
        stop_process(process.pid)  # Lest two that come at once look like one.
        os.write(terminal, b"\x03")
        assert line_from(terminal) == b"^C%d" % signal.SIGINT
        process.send_signal(signal.SIGCONT)
        # If it is passed on as well, it comes before this one.
        process.send_signal(signal.SIGUSR1)
        assert line_from(terminal) == b"%d" % signal.SIGUSR1
        os.write(terminal, b"\n")
        assert process.wait(HUNG) == 5
    finally:
        os.close(terminal)


def test_it_is_killed_if_it_does_not_end_within_its_grace(tmp_path):
    ready, asked = tmp_path / "ready", tmp_path / "asked"
    script = f"trap 'touch {asked}' TERM; touch {ready}; while :; do sleep 0.05; done"
    child = Child(["sh", "-c", script], {}, 0.5)

    in_thread(lambda: wait_until(ready.exists) and child.end())
    assert child.run() == 137
    assert asked.exists()


def test_all_are_killed_if_we_fail(tmp_path, monkeypatch):
    pids = tmp_path / "pids"

    def fail(process):
        monkeypatch.undo()
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", fail)
    with pytest.raises(KeyboardInterrupt):
        Child(["sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"], {}, 1.0).run()
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


# What keeps a line of a shell from being one process: one in the background, one that is deaf, an
# orphan, a chain in which each starts the next, one in a session of its own, and a pipeline.
TREE = """
sleep 600 &
sh -c 'trap : TERM HUP; echo deaf; while :; do sleep 1; done' &
(sh -c 'echo orphan; sleep 600; true' &)
f() { sleep 0.01; f & }
f &
setsid sh -c 'echo alone; sleep 600; true' &
sleep 600 | sleep 600
"""


def start_tree(start, **options):
    """Start all these processes, and wait until they are there."""
    process = start("sh", "-c", TREE, **options)
    assert {line_of(process) for _ in range(3)} == {b"deaf", b"orphan", b"alone"}
    return process


def wait_for_the_last_of(process):
    """Wait until nobody is left that could write to its standard output."""
    assert line_of(process) == b""


def test_if_we_are_killed_so_is_all_that_the_program_has_started(start):
    process = start_tree(start)
    process.kill()
    wait_for_the_last_of(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_us_by_a_signal_ends_what_the_program_leaves_behind(start, number):
    process = start_tree(start, grace=0.2)
    process.send_signal(number)
    wait_for_the_last_of(process)
    assert process.wait(HUNG) == 128 + number


def test_a_process_that_ends_while_the_guard_looks_around_does_not_end_the_guard(monkeypatch):
    def end(path, **how):  # As Linux says it when the process ends at that very moment.
        if str(path).startswith("/proc/"):
            raise ProcessLookupError(errno.ESRCH, "No such process", str(path))
        return stat(path, **how)

    stat = os.stat
    monkeypatch.setattr(os, "stat", end)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in guard._descendants()
        finally:
            child.kill()


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_without_the_lock_all_that_the_program_has_started_ends_within_the_grace(
    start, order, grace
):
    process = start_tree(start, grace=grace)
    os.write(order[1], b".")
    wait_for_the_last_of(process)
    assert process.wait(HUNG) in {128 + signal.SIGTERM, 128 + signal.SIGKILL}


def test_all_have_the_grace_though_the_program_ends_first(start, order):
    late = "trap 'sleep 0.2; echo done; exit' TERM; echo ready; while :; do sleep 0.05; done"
    process = start("sh", "-c", f"({late}) & wait", grace=HUNG)
    assert line_of(process) == b"ready"
    os.write(order[1], b".")
    assert line_of(process) == b"done"
    wait_for_the_last_of(process)
    assert process.wait(HUNG) == 128 + signal.SIGTERM


def test_what_a_program_leaves_behind_at_its_own_end_goes_on(start):
    process = start("sh", "-c", "exec 3<&0; (read line <&3; echo $line) & exit 3")
    assert process.wait(HUNG) == 3
    assert process.stdin
    process.stdin.write(b"still here\n")
    process.stdin.flush()
    assert line_of(process) == b"still here"


def test_a_terminals_interrupt_ends_what_the_program_leaves_behind(start):
    terminal, theirs = os.openpty()
    # A shell has its background ignore SIGINT.
    process = start("sh", "-c", "sleep 600 & echo $!; wait", grace=0.2, stdin=theirs, stdout=theirs)
    os.close(theirs)
    try:
        behind = int(line_from(terminal))
        os.write(terminal, b"\x03")
        assert process.wait(HUNG) == 128 + signal.SIGINT
        with pytest.raises(ProcessLookupError):
            os.kill(behind, 0)
    finally:
        os.close(terminal)


WITHOUT_PROC = """
import subprocess
from django_redislock.management import guard

below = subprocess.Popen(["sleep", "600"])
found = [guard._descendants()]
guard.Path.glob = lambda path, pattern: []
found.append(guard._descendants())
below.kill()
found.append(guard._descendants())
assert found == [[below.pid], [below.pid], []], (found, below.pid)
"""


def test_without_proc_the_processes_are_those_of_ps():
    subprocess.run([sys.executable, "-c", WITHOUT_PROC], cwd=ROOT, timeout=HUNG, check=True)
