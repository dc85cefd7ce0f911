"""docs/protocol.md draws what is sent: each of its diagrams is played on a real server.

The arrows to the server, from its left side by client A and from its right side by B, are the
commands that the two send, in that order.
"""

import re
import threading
import time
from itertools import groupby

import pytest

from django_redislock import LockLost, LockUnavailable, distributed_lock
from django_redislock.rules import scripts
from tests import ROOT
from tests.support.others import waiters
from tests.support.waiting import HUNG, wait_until
from tests.support.ways import in_thread

PAGE = (ROOT / "docs" / "protocol.md").read_text()
NAMES = {one.sha: one.name for one in vars(scripts).values() if isinstance(one, scripts.Script)}
SERVER = 26  # The column of the line that stands for it.


def drawn():
    """By heading, who sends what in the diagram below it."""
    found = {}
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if not (diagram := re.search(r"^```text\n(A .+?)```", text, re.MULTILINE | re.DOTALL)):
            continue
        sent = []
        for line in diagram[1].splitlines():
            if by_a := re.match(r"\|-+ (\w+) -+(?:>| x)", line):
                sent.append(("A", by_a[1]))
            if by_b := re.match(r"\|<-+ (\w+) -+\|", line[SERVER:]):
                sent.append(("B", by_b[1]))
        found[heading] = sent
    return found


class Play:
    """Two clients of one server, and what they have sent."""

    def __init__(self, a, b):
        self.a, self.b = a, b
        for alias in ("default", "b"):  # It brings the connections, and the server the scripts.
            with distributed_lock("warm-up", using=alias):
                pass
        self.clear()

    def clear(self):
        """Forget what was sent."""
        self.a.log.clear()
        self.b.log.clear()

    def sent(self):
        logs = [("A", command) for command in self.a.commands("EVALSHA")]
        logs += [("B", command) for command in self.b.commands("EVALSHA")]
        logs.sort(key=lambda entry: entry[1].time)
        return [(who, NAMES[command.args[0].decode()]) for who, command in logs]


@pytest.fixture
def play(server, make_proxy, settings, key_prefix, monkeypatch):
    # However slow this machine is, a short lease stays a short one.
    monkeypatch.setattr("django_redislock.handle.NOTED_FROM", HUNG)
    a, b = make_proxy(server), make_proxy(server)
    settings.REDISLOCK = {
        alias: {"LOCATION": proxy.url, "KEY_PREFIX": key_prefix}
        for alias, proxy in (("default", a), ("b", b))
    }
    return Play(a, b)


def grant(play):
    with distributed_lock("lottery"):
        pass


def wait_and_hand_over(play):
    deadline = time.monotonic() + HUNG
    while _hand_over(play)[-1] != ("B", "renew"):
        # B was too slow to believe the ring, and asked.
        assert time.monotonic() < deadline
        play.clear()


def _hand_over(play):
    lock = distributed_lock("lottery", renew=False)
    is_held, over = threading.Event(), threading.Event()

    def wait():
        with distributed_lock("lottery", using="b", wait=HUNG, renew=False):
            is_held.set()
            over.wait(HUNG)

    assert lock.acquire()
    waiter = in_thread(wait)
    try:
        wait_until(lambda: waiters("lottery"))
        lock.release()
        assert is_held.wait(HUNG)
        wait_until(lambda: play.sent()[-1][0] == "B")
        return play.sent()
    finally:
        over.set()
        waiter.result(HUNG)


def expiry(play):
    lock = distributed_lock("lottery", ttl=1, renew=False)
    assert lock.acquire()
    with distributed_lock("lottery", using="b", wait=HUNG) as lease:
        assert lease.fence
    play.a.refuse()


def renewal(play):
    with distributed_lock("lottery", ttl=3) as lease:
        wait_until(lambda: lease.renewals)


def loss(play):
    play.a.rule_for_script(scripts.RENEW.sha, "cut_before", times=None)
    lock = distributed_lock("lottery", ttl=1)
    assert lock.acquire()
    lease = lock.lease
    wait_until(lambda: ("A", "renew") in play.sent())
    wait_until(lambda: not lease.held)
    wait_until(lambda: not distributed_lock("lottery", using="b").locked())
    with distributed_lock("lottery", using="b"):
        pass
    with pytest.raises(LockLost):
        lock.release()


def lost_replies(play):
    play.a.rule_for_script(scripts.ACQUIRE.sha, "cut_after")
    play.a.rule_for_script(scripts.RELEASE.sha, "cut_after")
    with distributed_lock("lottery"):
        pass


def unknown_outcome(play):
    play.a.rule_for_script(scripts.ACQUIRE.sha, "cut_after", times=2)
    with pytest.raises(LockUnavailable):
        distributed_lock("lottery", wait=0).acquire()
    assert not distributed_lock("lottery", using="b").locked()


PLAYS = {
    "Grant": grant,
    "Wait and hand-over": wait_and_hand_over,
    "Expiry with waiters": expiry,
    "Renewal": renewal,
    "Loss": loss,
    "Lost replies": lost_replies,
    "An outcome that nobody will know": unknown_outcome,
}
# How often a renewal is tried, and whether a waiter looks once or twice, is a matter of time.
EXACT = {"Grant", "Lost replies", "An outcome that nobody will know"}


def test_each_diagram_is_played():
    assert list(drawn()) == list(PLAYS)
    assert all(drawn().values())


@pytest.mark.waits
@pytest.mark.parametrize("heading", PLAYS)
def test_a_diagram_is_what_clients_send(heading, play):
    PLAYS[heading](play)
    sent = [(who, script) for who, script in play.sent() if script != "look"]
    expected = drawn()[heading]
    if heading not in EXACT:
        if heading == "Loss":  # A renewal may be on its way when the lease is lost.
            first = sent.index(("A", "renew"))
            sent = [one for at, one in enumerate(sent) if one != ("A", "renew") or at == first]
        sent, expected = ([one for one, _ in groupby(each)] for each in (sent, expected))
    assert sent[: len(expected)] == expected
