"""Which node of a cluster is believed about who keeps a lock, when nodes say different things."""

import threading
from types import SimpleNamespace

import pytest
from redis import exceptions as redis_errors
from redis.crc import REDIS_CLUSTER_HASH_SLOTS

from django_redislock import process
from django_redislock.backends.cluster import slots
from django_redislock.backends.cluster.node import NoCluster, read_slot_map
from django_redislock.backends.redis.calling import trouble_of
from django_redislock.backends.redis.errors import AtServers, ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.steps import Call
from tests.support.waiting import HUNG, wait_until

A, B, C = (f"10.0.0.{number}:6379" for number in (1, 2, 3))
NAME = "lottery"
CALL = Call(scripts.LOOK, NAME, (), HUNG)
CUT_OFF = ReplyError("CLUSTERDOWN The cluster is down")


class StubNode:
    """One that no connection leads to; what is said of it is all there is."""

    def __init__(self, address, _):
        self.address = address

    def redirection(self, outcome):
        return None

    def retire(self):
        pass


class Talk:
    """What each node says about who keeps the slots, and who has been asked."""

    def __init__(self, **said):
        self.said = {{"A": A, "B": B, "C": C}[node]: says for node, says in said.items()}
        self.asked = []
        self.slots = slots.Slots(self.said, self._dialer_to, StubNode, HUNG)

    def owner_node(self):
        return self.slots.find(NAME, HUNG).address

    def lose(self, address, error=CUT_OFF):
        """Let a call that a node was sent have failed, and what follows from that be over."""
        node = self.slots.found(NAME, None)
        assert node.address == address
        self.slots.judge(node, CALL, trouble_of(error, 0))
        self.slots.settle(HUNG)

    def _dialer_to(self, address):
        return StubDialer(self, address)


class StubDialer:
    """Leads to what a node says: an address, which keeps all slots; or what goes wrong."""

    def __init__(self, talk, address):
        self._talk = talk
        self._address = address

    def dial(self, seconds):
        self._talk.asked.append(self._address)
        return self

    def execute(self, command, seconds):
        said = self._talk.said.get(self._address, TimeoutError())
        if isinstance(said, Exception):
            raise said
        if not said:
            return []
        host, _, port = said.partition(":")
        return [[0, REDIS_CLUSTER_HASH_SLOTS - 1, [host.encode(), int(port), b"of one cluster"]]]

    def close(self):
        pass


@pytest.mark.proves("R13")
@pytest.mark.parametrize(
    "error",
    [
        CUT_OFF,
        redis_errors.ConnectionError("the server closed the connection"),
        NoCluster("this is no node of a cluster"),
        redis_errors.AuthenticationError("WRONGPASS invalid username-password pair"),
    ],
    ids=["cut off", "dead", "no node any more", "refuses the password"],
)
def test_r13_a_node_that_was_lost_is_not_believed_that_it_keeps_a_lock(error):
    talk = Talk(A=A, B=C)
    assert talk.owner_node() == A
    talk.lose(A, error)
    wait_until(lambda: talk.owner_node() == C)
    assert talk.owner_node() == C


@pytest.mark.proves("R13")
def test_r13_nor_is_another_that_has_not_heard_of_it_if_a_third_has():
    talk = Talk(A=A, B=A, C=C)
    assert talk.owner_node() == A
    talk.lose(A)
    wait_until(lambda: talk.owner_node() == C)


@pytest.mark.proves("R13")
def test_r13_while_all_say_that_a_lost_node_keeps_a_lock_it_is_asked_again():
    talk = Talk(A=A, B=A, C=A)
    for _ in range(3):
        assert talk.owner_node() == A
        talk.lose(A)
    talk.said[B] = C
    wait_until(lambda: lost_or_at(talk, C))


def lost_or_at(talk, address):
    """Whether a lock is looked for there; if not, it was in vain."""
    if talk.owner_node() == address:
        return True
    talk.lose(A)
    return False


def test_while_nothing_new_is_said_one_node_is_asked_at_a_time(now):
    """A master may be away for long, and a cluster may have many nodes."""
    talk = Talk(A=A, B=A, C=A)
    assert talk.owner_node() == A
    asked = []
    for seconds in (1.0, 0.2, 0.2, 1.0):
        now[0] += seconds
        talk.asked.clear()
        talk.lose(A)
        asked.append([*talk.asked])
    assert asked == [[B, C], [B], [C], [B, C]]


def test_a_node_that_is_silent_is_not_waited_for_each_time(now):
    talk = Talk(A=A, B=A, C=TimeoutError())
    assert talk.owner_node() == A
    asked = []
    for seconds in (9.0, 2.0, 9.0):
        now[0] += seconds
        talk.asked.clear()
        talk.lose(A)
        asked.append([*talk.asked])
    assert asked == [[B], [B, C], [B]]
    talk.said[B] = talk.said[A] = TimeoutError()
    talk.said[C] = C
    now[0] += 1.0
    talk.asked.clear()
    talk.lose(A)
    assert talk.asked == [B, C]
    assert talk.owner_node() == C


@pytest.fixture
def now(monkeypatch):
    """A time that stands still until a test lets it pass."""
    time = [1000.0]
    monkeypatch.setattr(slots, "clock", SimpleNamespace(now=lambda: time[0]))
    return time


def test_a_refusal_that_concerns_a_call_has_nobody_asked_who_keeps_the_lock():
    talk = Talk(A=A, B=C)
    assert talk.owner_node() == A
    before = len(talk.asked)
    talk.slots.judge(
        talk.slots.found(NAME, None), CALL, trouble_of(ReplyError("NOPERM no permissions"), 0)
    )
    assert talk.owner_node() == A
    assert len(talk.asked) == before


@pytest.mark.parametrize(
    "first", ["", ReplyError("NOPERM no permissions")], ids=["no one", "error"]
)
def test_an_answer_that_names_no_node_is_none(first):
    talk = Talk(A=first, B=C)
    assert talk.owner_node() == C


def test_a_node_without_the_name_that_is_preferred_is_reached_by_its_ip_or_not_at_all():
    """Nodes call it "?" if hostnames are preferred and it has none."""
    rest = REDIS_CLUSTER_HASH_SLOTS - 1
    known, self_named = [b"ip", b"10.0.0.2"], {b"ip": b""}
    named = [[b"?", 6379, b"2", known], [b"?", 6380, b"3", []], [b"?", 6381, b"4", self_named]]
    for number, owner in enumerate((f"{B}", None, "10.0.0.1:6381")):
        found = read_slot_map(A, [[0, rest, named[number]]])
        assert set(found.owner_nodes.values()) == ({owner} if owner else set())
        assert found.nodes == ({owner} if owner else set())
        assert found.owned == REDIS_CLUSTER_HASH_SLOTS


def test_if_no_node_knows_who_keeps_a_lock_they_are_asked_again():
    """As while a cluster is being made."""
    talk = Talk(A="", B="")
    with pytest.raises(AtServers, match=f"{A}: .*; {B}: "):
        talk.owner_node()
    talk.said[B] = C
    assert talk.owner_node() == C


def test_without_more_threads_an_inquiry_keeps_nobody_from_the_known_nodes(monkeypatch):
    """The thread that wants to know asks by itself, and others do not wait for that."""
    talk = Talk(A=A, B=C)
    assert talk.owner_node() == A
    asking, go_on = threading.Event(), threading.Event()

    def start(thread):
        raise RuntimeError("can't start new thread")

    def slot_map_of(*args):
        asking.set()
        assert go_on.wait(HUNG)
        raise TimeoutError

    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(slots, "_slot_map_of", slot_map_of)
    inquirer = threading.Thread(target=talk.lose, args=(A,))
    inquirer.start()
    try:
        assert asking.wait(HUNG)
        moved = threading.Thread(target=talk.slots.node, args=(SimpleNamespace(address=B),))
        moved.start()
        moved.join(HUNG / 2)
        assert not moved.is_alive()
    finally:
        go_on.set()
        inquirer.join()
