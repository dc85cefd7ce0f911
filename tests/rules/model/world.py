"""One moment of the world, and all that may happen next.

Time stands still but for the move "a tick passes", which comes when all that goes on by itself has
gone on: commands, replies and bells that are on their way arrive, in any order, and who is woken
acts. What is slow, stopped or lost is a fault. There are few faults in one history, but each may
come at any moment, and last for any number of ticks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_redislock.exceptions import LockLost
from django_redislock.rules import flows, scripts
from django_redislock.rules.flows import Busy, Granted, HandOver
from django_redislock.rules.forms import Attempt, release
from django_redislock.rules.lease_state import LeaseState, Renewal
from django_redislock.rules.replies import AcquireArgs
from django_redislock.rules.scripts import Script
from django_redislock.rules.steps import Answer, Bell, Call, Listen, Pause, Tell
from django_redislock.rules.stored import Owner
from tests.rules.model.book import Book, Interrupt, Lost, Raised, Returned, Sent
from tests.rules.model.promises import Violation, belongs, check_command, check_end
from tests.rules.model.server import Kept, Server
from tests.support.attempts import the_attempt
from tests.support.others import release_form

TICK = 0.5  # Seconds.
TTL = 1.5
OPERATION_TIMEOUT = TTL / 3
EPOCH = 1_000_000  # What the server's clock shows at the beginning.
NAME = "lottery"
OWNER = Owner()
PAUSE = 1000  # ms
PAUSE_TOKEN = "hold".ljust(32, "0")
BATON_TOKEN = "baton".ljust(32, "0")
BATON = "b" * 16  # The id of the lease that is handed over.


def renew(renewal, deadline, ends):
    """What Lease.renew() does: the same rules, without a backend. Returns the new deadline."""
    wanted = the_attempt(NAME, renewal.token, BATON, OWNER, ttl=TTL, renews=True)
    state = LeaseState(wanted, Granted(0, deadline, 0.0, ends, renewal.permit), lambda: None)
    answer = yield from flows.answer_to_renewal(renewal, OPERATION_TIMEOUT)
    state.answered(renewal, answer, answer.now)
    return state.deadline


def hand_over(over):
    """What Lease.hand_over() does: the same rules, without a backend. Returns the baton."""
    try:
        reason = yield from flows.hand_over(over)
    except GeneratorExit:
        raise
    except BaseException:
        yield from flows.take_back(over)
        raise
    return "" if reason else over.next_id


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the model explores.

    Attributes:
        waits: For each client how long it is ready to wait.
        horizon: Ticks after which no more are tried.
        faults: How many there may be in one history.
        kinds: Which: cut (the connection is lost, with a command or its reply), zombie (the
            same, and the command arrives later), slow (a command arrives late), pause (a client
            stands still for a while), bell (one is lost), interrupt (an acquire or a hand-over is
            cancelled), kill, stop (a client, for good), flush (the server loses its data), hold
            (an operator keeps the lock from everybody for a while).
        renewals: How often a lease is renewed at most.
        rounds: How often each client wants the lock.
        writes: Whether holders write to a resource, "fenced" or "unfenced".
        limits: For each client how many permits the lock has, as far as it knows; none for one.
        batons: Whether the first client may hand its lease over, and others take it up.
        instead, acquire, hand_over, sent_at_reply: For naive variants of the protocol; the first
            tells which scripts the server runs instead of others.
    """

    waits: tuple[float, ...] = (math.inf, math.inf)
    horizon: int = 8
    faults: int = 1
    kinds: frozenset[str] = frozenset()
    renewals: int = 0
    rounds: int = 1
    writes: str = ""
    limits: tuple[int, ...] = ()
    batons: bool = False
    instead: Mapping[Script, Script] = field(default_factory=dict)
    acquire: Callable[[Attempt, float], flows.Flow[Any]] = flows.acquire
    hand_over: Callable[[HandOver], flows.Flow[str]] = hand_over
    sent_at_reply: bool = False

    @property
    def permits(self):
        """How many may hold the lock at a time."""
        return max(self.limits, default=1)

    def limit_of(self, who):
        """How many they are, as far as a client knows."""
        return self.limits[who] if self.limits else 1


class Client(NamedTuple):
    """One process that wants the lock."""

    phase: str = "idle"  # idle, acquiring, holding, releasing, done, killed, stopped
    round: int = 0
    flow: int = 0  # Acquire or release: node in the book.
    answered: bool = False  # When it is done: whether the last thing that it sent was.
    renewal: int = 0  # Node of a renewal under way.
    renewals: int = 0
    fence: int = 0
    permit: int = 1
    deadline: float = 0.0
    ends: float = 0.0  # Later than the deadline until a hand-over is known to be confirmed.
    lost: str = ""  # Why, if it is.
    checked: bool = False  # Has looked whether it holds, and is about to write.
    paused: bool = False
    line: int = 0  # Number of its connection.
    bells: tuple[tuple[str, ...], ...] = ()  # On their way, or unread.
    haunted: bool = False  # An acquire whose connection is lost may still arrive.


class Command(NamedTuple):
    """A command on its way to the server."""

    who: int
    node: int  # That asked for it.
    line: int  # The connection it is sent on.
    late: bool = False  # Takes its time.


class State(NamedTuple):
    """One moment."""

    time: int  # Ticks.
    kept: Kept  # By the server.
    clients: tuple[Client, ...]
    commands: frozenset[Command]
    replies: frozenset[tuple[int, int, Any]]  # On their way: client, node, answer.
    faults: int  # That are left.
    fence: int = 0  # The highest that was ever granted.
    written: int = 0  # Fence of the last writer.
    flushed: bool = False
    held_until: int = 0  # ms: of the operator's pause.
    baton: str = ""  # That the first client has passed on.

    @property
    def now(self):
        return self.time * TICK


class World:
    """The rules of what may happen."""

    def __init__(self, setup):
        self.setup = setup
        self.book = Book()
        self.server = Server(NAME, setup.instead, setup.permits)

    def beginning(self):
        return State(
            time=0,
            kept=self.server.empty,
            clients=tuple(Client() for _ in self.setup.waits),
            commands=frozenset(),
            replies=frozenset(),
            faults=self.setup.faults,
        )

    def moves(self, state):
        """All that may happen next."""
        soon = list(self.soon(state))
        yield from soon
        idle = all(client.phase == "idle" for client in state.clients)
        if not soon and not idle and state.time < self.setup.horizon:
            yield "a tick passes", self.tick(state)
        for command in state.commands:
            if command.late:
                yield f"{self._named(command)} arrives late", self._arrive(state, command)
        for who, client in enumerate(state.clients):
            if client.paused:
                yield f"{who} goes on", _with(state, who, client._replace(paused=False))
            else:
                yield from self.choices(state, who, client)
        if state.faults:
            yield from self.faults(state)

    def soon(self, state):
        """What goes on by itself, before time does."""
        for command in sorted(state.commands):
            if not command.late:
                yield f"{self._named(command)} arrives", self._arrive(state, command)
        for who, node, value in sorted(state.replies, key=lambda reply: reply[:2]):
            if not state.clients[who].paused:
                sent = state.now if self.setup.sent_at_reply else self.book[node].since
                after = state._replace(replies=state.replies - {(who, node, value)})
                told = Sent(Answer(value, sent, state.now), state.now)
                yield f"{who} reads {value!r}", self._tell(after, who, node, told)
        for who, client in enumerate(state.clients):
            if client.paused:
                continue
            if client.phase in {"acquiring", "releasing"}:
                yield from self._wakes(state, who, client)
            elif client.checked:
                yield f"{who} writes", self._write(state, who, client)

    def fair_move(self, state):
        """What happens next when all faults have stopped; None when everybody has ended."""
        for move in self.soon(state):
            return move
        for command in state.commands:
            return f"{self._named(command)} arrives late", self._arrive(state, command)
        for who, client in enumerate(state.clients):
            if client.paused:
                return f"{who} goes on", _with(state, who, client._replace(paused=False))
            if client.phase == "holding":
                return self._release(state, who, client)
        if any(client.phase in {"acquiring", "releasing"} for client in state.clients):
            return "a tick passes", self.tick(state)
        return None

    # --- time and network -----------------------------------------------------------------------

    def tick(self, state):
        time = state.time + 1
        return state._replace(time=time, kept=self.server.at(state.kept, _us(time)))

    def _arrive(self, state, command):
        """The server runs a command."""
        who, node, line, _ = command
        step = self.book[node].step
        client = state.clients[who]
        after, answer = self._run(state, step, f"{who}:{line}")
        after = after._replace(commands=state.commands - {command})
        if node in {client.flow, client.renewal} and isinstance(step, Call):
            after = after._replace(replies=after.replies | {(who, node, answer)})
        return after

    def _run(self, state, step, channel):
        """The server runs a script. Returns the state, with its rings, and its answer."""
        # Between two acquires the connection stays subscribed, and nobody reads.
        subscribed = frozenset(
            f"{other}:{one.line}"
            for other, one in enumerate(state.clients)
            if one.phase != "killed"
        )
        ran = self.server.run(
            state.kept,
            step.script,
            step.script.told(step.args, channel),
            _us(state.time),
            subscribed,
            step.permit,
        )
        fence = check_command(
            state.kept, ran.kept, step, _ms(state.time), state.fence, state.held_until
        )
        after = state._replace(kept=ran.kept, fence=fence)
        for rung_at, words in ran.rung:
            listener = int(rung_at.partition(":")[0])
            other = after.clients[listener]
            if other.phase in {"acquiring", "stopped"}:
                after = _with(after, listener, other._replace(bells=(*other.bells, words)))
        return after, ran.answer

    def _hold(self, state):
        """An operator keeps the lock from everybody."""
        args = AcquireArgs(PAUSE_TOKEN, "f" * 16, PAUSE, "pause", b"0", "", "-", OWNER.packed)
        after, _ = self._run(state, Tell(scripts.ACQUIRE, NAME, args), "")
        return after._replace(held_until=_ms(state.time) + PAUSE)

    # --- clients --------------------------------------------------------------------------------

    def choices(self, state, who, client):
        """What a client may do, now or later."""
        if client.phase == "idle" and not self._has_an_untried_twin(state, who):
            wait = self.setup.waits[who]
            token = _token(who, client.round)
            asked = {"ttl": TTL, "operation_timeout": OPERATION_TIMEOUT}
            limit = self.setup.limit_of(who)
            wanted = the_attempt(NAME, token, _id(token), OWNER, wait=wait, limit=limit, **asked)
            node = self.book.start(self.setup.acquire, state.now, wanted, state.now)
            asking = client._replace(phase="acquiring", bells=())
            yield f"{who} asks", self._reached(_with(state, who, asking), who, node)
            if state.baton:
                wanted = the_attempt(
                    *(NAME, token, state.baton, OWNER), script=scripts.TAKE_UP, **asked
                )
                node = self.book.start(self.setup.acquire, state.now, wanted, state.now)
                yield f"{who} takes it up", self._reached(_with(state, who, asking), who, node)
        elif client.phase == "holding" and not client.checked:
            yield self._release(state, who, client)
            if self.setup.batons and who == 0 and _is_held(state, client):
                over = HandOver(
                    *(NAME, _token(who, client.round), BATON_TOKEN, BATON),
                    *(flows.CONFIRM_WITHIN, OWNER, OPERATION_TIMEOUT),
                )
                node = self.book.start(self.setup.hand_over, state.now, over)
                giving = _with(state, who, client._replace(phase="releasing"))
                yield f"{who} hands it over", self._reached(giving, who, node)
            relies = _is_held(state, client) or state.now < client.ends
            if relies and not client.renewal and client.renewals < self.setup.renewals:
                token, count = _token(who, client.round), client.renewals + 1
                renewal = Renewal(NAME, token, TTL, count, permit=client.permit)
                node = self.book.start(renew, state.now, renewal, client.deadline, client.ends)
                renewing = client._replace(renewal=node, renewals=count)
                after = state._replace(commands=_sent(state, who, node))
                yield f"{who} renews", _with(after, who, renewing)
            if self.setup.writes and _is_held(state, client):
                checking = client._replace(checked=True)
                yield f"{who} looks whether it holds, and does", _with(state, who, checking)

    def _has_an_untried_twin(self, state, who):
        """Whether an earlier client could ask in this one's place.

        Clients that have done nothing yet, and want the same, differ by their number alone. They
        ask in its order: each other order would be the same history with other names.
        """
        untried, setup = Client(), self.setup
        first = 1 if setup.batons else 0  # Only the first one hands over.
        return state.clients[who] == untried and any(
            state.clients[twin] == untried
            and setup.waits[twin] == setup.waits[who]
            and setup.limit_of(twin) == setup.limit_of(who)
            for twin in range(first, who)
        )

    def _wakes(self, state, who, client):
        node = self.book[client.flow]
        match node.step:
            case Listen(_, seconds):
                if client.bells:
                    words, *rest = client.bells
                    heard = _with(state, who, client._replace(bells=tuple(rest)))
                    told = Sent(Bell(words, state.now), state.now)
                    yield (
                        f"{who} hears {' '.join(words)}",
                        self._tell(heard, who, client.flow, told),
                    )
                if state.now >= node.since + seconds:
                    told = Sent(Bell((), state.now), state.now)
                    yield f"{who} hears nothing", self._tell(state, who, client.flow, told)
            case Pause(seconds):
                if state.now >= node.since + seconds or seconds < TICK:
                    told = Sent(state.now, state.now)
                    yield f"{who} has paused", self._tell(state, who, client.flow, told)

    def _release(self, state, who, client):
        token = _token(who, client.round)
        if client.lost in {"expired", "unreachable"}:
            undone = NAME, token, OPERATION_TIMEOUT, client.permit
            node = self.book.start(flows.undo, state.now, *undone)
            after = _with(state, who, client._replace(phase="releasing"))
            return f"{who} gives back what may be left", self._reached(after, who, node)
        if client.lost:
            return f"{who} leaves, knowing that it was lost", self._leave(state, who, client)
        ending = token, client.deadline, client.ends, client.permit
        node = self.book.start(_releasing, state.now, *ending)
        releasing = client._replace(phase="releasing")
        return f"{who} releases", self._reached(_with(state, who, releasing), who, node)

    def _write(self, state, who, client):
        after = _with(state, who, client._replace(checked=False))
        if client.fence >= state.written:
            return after._replace(written=client.fence)
        if self.setup.writes == "unfenced":
            raise Violation(f"{who} wrote after a later holder did")
        return after  # Refused.

    def _tell(self, state, who, node, told):
        """A flow is told something, and goes on to its next step."""
        return self._reached(state, who, self.book.tell(node, told), before=node)

    def _reached(self, state, who, node, before=0):
        client = state.clients[who]
        if before and before == client.renewal:
            return self._renewal_reached(state, who, client, node)
        while isinstance(self.book[node].step, Tell):
            state = state._replace(commands=_sent(state, who, node))
            node = self.book.tell(node, Sent(None, state.now))
        step = self.book[node].step
        client = client._replace(flow=node)
        if isinstance(step, Call):
            state = state._replace(commands=_sent(state, who, node))
        elif isinstance(step, Returned | Raised):
            client = client._replace(bells=())
            match step:
                case Returned(Granted(fence, deadline, _, ends, permit)):
                    client = client._replace(
                        phase="holding", flow=0, fence=fence, deadline=deadline, ends=ends
                    )
                    client = client._replace(permit=permit)
                case Returned(str(baton)):
                    return self._leave(state._replace(baton=baton), who, client)
                case Returned(Busy(holding)) if holding.id == _id(_token(who, client.round)):
                    raise Violation(f"P4: {who} is told busy, but its own command holds the lock")
                case _:
                    return self._leave(state, who, client)
        return _with(state, who, client)

    def _leave(self, state, who, client):
        """A client has nothing to do with the lock any more, or wants it again."""
        again = client.round + 1 < self.setup.rounds
        left = Client(
            phase="idle" if again else "done",
            round=client.round + again,
            answered=not isinstance(self.book[client.flow].told, Lost),
            line=client.line,
            haunted=client.haunted,
        )
        return _with(state, who, left)

    def _renewal_reached(self, state, who, client, node):
        match self.book[node].step:
            case Call():
                commands = _sent(state, who, node)
                return _with(state._replace(commands=commands), who, client._replace(renewal=node))
            case Returned(deadline):
                deadline = max(client.deadline, deadline)
                client = client._replace(renewal=0, deadline=deadline, ends=deadline)
            case Raised(LockLost(reason=reason)):
                client = client._replace(renewal=0, deadline=-math.inf, ends=-math.inf, lost=reason)
            case Raised(_):
                client = client._replace(renewal=0)
        return _with(state, who, client)

    # --- faults ---------------------------------------------------------------------------------

    def faults(self, state):
        """All that may go wrong now."""
        kinds = self.setup.kinds
        left = state._replace(faults=state.faults - 1)
        for who, client in enumerate(state.clients):
            if client.phase in {"idle", "done", "killed", "stopped"}:
                continue
            if "cut" in kinds:
                yield from self._cuts(left, who, client)
            hands_over = getattr(self.book[client.flow].step, "script", None) is scripts.HAND_OVER
            if "interrupt" in kinds and (client.phase == "acquiring" or hands_over):
                yield from self._interrupts(left, who, client)
            if "bell" in kinds and client.bells:
                deaf = client._replace(bells=client.bells[1:])
                yield f"{who} misses the bell", _with(left, who, deaf)
            if "pause" in kinds and not client.paused:
                yield f"{who} stands still", _with(left, who, client._replace(paused=True))
            for kind, phase in (("kill", "killed"), ("stop", "stopped")):
                if kind in kinds:
                    gone = Client(phase=phase, round=client.round, line=client.line)
                    after = left._replace(replies=_without(left.replies, who))
                    yield f"{who} is {phase} for good", _with(after, who, gone)
        if "slow" in kinds:
            for command in state.commands:
                if not command.late:
                    commands = state.commands - {command} | {command._replace(late=True)}
                    yield f"{self._named(command)} is slow", left._replace(commands=commands)
        if "maintenance" in kinds and state.held_until <= _ms(state.time):
            yield "an operator holds the lock", self._hold(left)
        if "flush" in kinds:
            lost = left._replace(kept=self.server.empty, flushed=True)
            yield "the server loses its data", self.tick(lost)

    def _cuts(self, state, who, client):
        """A connection is lost: with the command, with its reply, or before the command arrives."""
        for node in {client.flow, client.renewal} - {0}:
            step = self.book[node].step
            if isinstance(step, Listen):
                lost = Lost(state.now, state.now)
                yield f"{who} is cut off", self._tell(_redial(state, who, node), who, node, lost)
            elif isinstance(step, Call):
                lost = Lost(self.book[node].since, state.now)
                for after, what in self._unanswered(state, who, node):
                    yield what, self._tell(after, who, node, lost)
        for command in state.commands:
            if command.who == who and isinstance(self.book[command.node].step, Tell):
                after = state._replace(commands=state.commands - {command})
                yield f"{self._named(command)} is lost", after

    def _interrupts(self, state, who, client):
        step = self.book[client.flow].step
        told = Interrupt(state.now)
        if not isinstance(step, Call):
            yield f"{who} is interrupted", self._tell(state, who, client.flow, told)
        elif not step.shielded:
            for after, what in self._unanswered(state, who, client.flow):
                yield f"{who} is interrupted, {what}", self._tell(after, who, client.flow, told)

    def _unanswered(self, state, who, node):
        """The ways in which a call stays unanswered."""
        redialled = _redial(state, who, node)
        for command in state.commands:
            if command[:2] != (who, node):
                continue
            named, commands = self._named(command), state.commands - {command}
            yield redialled._replace(commands=commands), f"{named} is lost"
            if "zombie" in self.setup.kinds:
                if self.book[node].step.script.name in {*scripts.ACQUIRES, scripts.TAKE_UP.name}:
                    haunted = redialled.clients[who]._replace(haunted=True)
                    redialled = _with(redialled, who, haunted)
                zombie = commands | {command._replace(late=True)}
                yield redialled._replace(commands=zombie), f"{named} is given up and may arrive"
            return
        replies = _without(state.replies, who, node)
        yield redialled._replace(replies=replies), f"the reply to {who} is lost"

    def _named(self, command):
        step = self.book[command.node].step
        asks = step.script.name in scripts.ACQUIRES
        mode = f" ({AcquireArgs(*step.args[:8]).mode})" if asks else ""
        return f"{command.who}'s {step.script.name}{mode}"

    # --- promises -------------------------------------------------------------------------------

    def check(self, state):
        """Raise Violation if this moment must not be."""
        holders = [who for who, one in enumerate(state.clients) if _is_held(state, one)]
        leases = state.kept.leases
        if not state.flushed:
            if len(holders) > self.setup.permits:
                raise Violation(f"P1: {holders} hold the lock at once")
            for who in holders:
                client = state.clients[who]
                if not belongs(leases[client.permit - 1], _token(who, client.round)):
                    raise Violation(f"P1: {who} holds a lock that the server has given up")
                if client.permit > self.setup.limit_of(who):
                    raise Violation(f"P1: {who} has permit {client.permit}, which is none to it")
        for lease in filter(None, leases):
            check_end(lease, _ms(state.time), TTL)
        for who, client in enumerate(state.clients):
            token = _token(who, client.round)
            if client.phase == "done" and client.answered and not client.haunted:
                if any(belongs(lease, token) for lease in leases):
                    raise Violation(f"R4: {who} has gone, and its lease stays")
                if who == 0 and not state.baton and belongs(leases[0], BATON_TOKEN):
                    raise Violation("R4: a lease waits for a baton that nobody has")
                if token in state.kept.queue:
                    raise Violation(f"R4: {who} has gone, and stays in the queue")


def _with(state, who, client):
    clients = list(state.clients)
    clients[who] = client
    return state._replace(clients=tuple(clients))


def _sent(state, who, node):
    return state.commands | {Command(who, node, state.clients[who].line)}


def _without(replies, who, node=0):
    return frozenset(one for one in replies if one[0] != who or (node and one[1] != node))


def _redial(state, who, node):
    """The connection of a flow is lost; its next step makes another one."""
    client = state.clients[who]
    if node == client.flow:
        client = client._replace(line=client.line + 1, bells=())
    return _with(state, who, client)


def _is_held(state, client):
    return client.phase == "holding" and state.now < client.deadline


def _token(who, round):  # noqa: A002
    return f"{who}{round}".ljust(32, "0")


def _releasing(token, deadline, ends, permit):
    left = {"deadline": deadline, "ends": ends, "operation_timeout": OPERATION_TIMEOUT}
    form = release_form(NAME, token, _id(token), OWNER, permit=permit, insist=True, **left)
    return release(form)


def _id(token):
    return token[:16]


def _ms(time):
    return _us(time) // 1000


def _us(time):
    return int((EPOCH + time * TICK) * 1_000_000)
