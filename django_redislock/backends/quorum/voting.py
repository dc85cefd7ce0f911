"""How the answers of several independent servers become one (Redlock), without I/O.

A vote is a generator: it yields a :class:`Round`, which is what some servers are asked at the same
time, is sent what each of them said, and returns the one answer that a flow awaits. So the rules of
the lock know nothing of a quorum, and blocking and asynchronous code differ only in who performs
the rounds.

The rules are those of https://redis.io/docs/latest/develop/use/patterns/distributed-locks/: a lock
is held if a majority has granted it, for the ttl less the time that took and the drift of the
clocks, and what only a minority has granted is given back at once.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock import clock
from django_redislock.backends.quorum.members import majority_of
from django_redislock.backends.redis.calling import lacks_script, trouble
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.flows import as_try
from django_redislock.rules.steps import Call, NotDone, Refused, Trouble, Unanswered

if TYPE_CHECKING:
    from django_redislock.backends.quorum.fences import Fences
    from django_redislock.backends.quorum.members import Member
    from django_redislock.backends.redis.calling import Caller
    from django_redislock.rules.scripts import Script

UNDO_WITHIN = 0.5  # Seconds that giving back what a minority has granted may take.


class Round(NamedTuple):
    """What some of the servers are asked at the same time."""

    commands: Sequence[bytes]  # Packed.
    within: float  # Seconds after which answers are no longer awaited.
    among: Iterable[int]  # Which servers, by their place in LOCATION.
    is_enough: Callable[[Replies], bool] | None = None  # Whether what has come decides; None: all.
    scripts: frozenset[Script] = frozenset()  # Those that the commands run.
    in_full: Callable[[], Sequence[bytes]] = list  # The commands with the text of these.


# What servers said: their replies, in the order of the commands, or why there are none.
Replies = dict[int, "list[Any] | Trouble"]
# What one script came to on each server: what it returned, or why it returned nothing.
Outcomes = dict[int, Any]
Vote = Generator[Round, Replies, Any]


class NoMajority(Exception):
    """Too few servers answered, or too many refused."""

    def __init__(self, problem: str, *, is_transient: bool, is_done_nowhere: bool = False) -> None:
        """Say so.

        Args:
            problem: As a clause.
            is_transient: Whether asking again may help.
            is_done_nowhere: Whether it is certain that no server has carried it out.
        """
        super().__init__(problem)
        self._problem = problem
        self.is_transient = is_transient
        self._is_done_nowhere = is_done_nowhere

    def as_trouble(self, sent: float) -> Trouble:
        """What it means to a flow that asked at that time."""
        trouble: Trouble
        if self.is_transient:
            unanswered = NotDone if self._is_done_nowhere else Unanswered
            trouble = unanswered(self._problem, sent, clock.now())
        else:
            trouble = Refused(self._problem)
        trouble.__cause__ = self.__cause__
        return trouble


class Voting:
    """The votes of one flow."""

    def __init__(self, caller: Caller, members: Sequence[Member], fences: Fences) -> None:
        """Prepare to ask.

        Args:
            caller: Packs scripts.
            members: The servers.
            fences: See there.
        """
        self._caller = caller
        self._members = members
        self._every = range(len(members))
        self._majority = majority_of(len(members))
        self._fences = fences
        # Servers on which an undo of this flow's token may still be on its way. It would end what
        # the token is granted there next, so their grants do not count (R4).
        self._suspect: set[int] = set()

    def answer(self, call: Call) -> Vote:
        """Have a script run on all servers. Returns what one server would.

        Raises:
            NoMajority: There is no such answer.
        """
        if call.script is scripts.ACQUIRE:
            return (yield from self._acquire(call))
        if call.script is scripts.ANNOUNCE:
            return (yield from self._announce(call))
        if call.script is scripts.LEAVE:
            return self._merged(call.script, (yield from self._leave(call, self._every)))
        is_enough = self._is_agreed if call.script in _WORDS else None
        (outcomes,) = yield from self._ask([call], self._every, is_enough)
        return self._merged(call.script, outcomes)

    def answers(self, calls: Sequence[Call]) -> Generator[Round, Replies, list[Any]]:
        """As answer(), for many; in the place of an answer there may be a NoMajority."""
        merged: list[Any] = []
        for call, outcomes in zip(calls, (yield from self._ask(calls, self._every)), strict=True):
            try:
                merged.append(self._merged(call.script, outcomes))
            except NoMajority as error:
                merged.append(error)
        return merged

    # --- what takes more than one round -------------------------------------------------------

    def _acquire(self, call: Call) -> Vote:
        attempt = as_try(call)  # Nobody queues up: each server would have another order.
        if self._fences.are_unknown:
            question = Round([self._fences.question()], call.within, self._every, self._is_heard)
            self._fences.learn((yield question))
        has_markers = call.args[5] != ""
        is_enough = self._is_decided_by_all if has_markers else self._is_decided
        (outcomes,) = yield from self._ask([attempt], self._every, is_enough, self._fences.before())
        granted, refusals = {}, []
        for server, value in outcomes.items():
            if value.__class__ is list:
                refusals.append(value)
            elif value.__class__ is bytes and server not in self._suspect:
                granted[server] = int(value)
        done = [value for value in refusals if value[0] in _POINTLESS]
        if len(granted) >= self._majority and not done:
            return (yield from self._raise_fences(call, granted))
        lack = None
        if not refusals or (not done and len(granted) + len(refusals) < self._majority):
            lack = self._no_majority(outcomes)
            if lack.is_transient:
                # Of those who did not answer, some may have granted it. The flow asks again with
                # the same token, or undoes it everywhere.
                raise lack
        in_question = [
            server
            for server, value in outcomes.items()
            if value.__class__ is bytes or value.__class__ is Unanswered
        ]
        if in_question:
            token, within = call.args[0], min(UNDO_WITHIN, call.within)
            yield from self._leave(Call(scripts.LEAVE, call.name, (token,), within), in_question)
        if lack is not None:
            raise lack
        # What one server knows to be done was done, also if the others have lost it.
        return done[0] if done else self._busy(refusals, len(granted))

    def _raise_fences(self, call: Call, granted: dict[int, int]) -> Vote:
        """Have a majority of the servers know the greatest fence, so that the next one is greater.

        Any two majorities have a server in common. That server gives out no fence twice; but the
        greatest fence of this majority may come from another server, and would be unknown to it.
        """
        fence = max(granted.values())
        behind = [server for server, value in granted.items() if value < fence]
        missing = self._majority - (len(granted) - len(behind))
        if missing > 0:
            replies = yield Round((self._fences.raised(fence),), call.within, behind)
            raised = sum(
                found.__class__ is list and not isinstance(found[0], ReplyError)
                for found in replies.values()
            )
            if raised < missing:
                raise NoMajority(
                    f"{self._majority - missing + raised} of {len(self._members)} servers noted"
                    f" the fence, and {self._majority} are needed",
                    is_transient=True,
                )
        return b"%d" % fence

    def _leave(self, leave: Call, among: Iterable[int]) -> Generator[Round, Replies, Outcomes]:
        """Undo what these servers have granted, or may have."""
        (outcomes,) = yield from self._ask([leave], among)
        self._suspect.update(s for s, found in outcomes.items() if isinstance(found, Trouble))
        return outcomes

    def _busy(self, refusals: list[list[Any]], granted: int) -> list[Any]:
        """What a try is answered that has no majority: who has, and until when that is so."""
        busy = [value for value in refusals if value[0] == b"busy"]
        if not busy or len(refusals) - len(busy) >= self._majority:
            return next(value for value in refusals if value[0] != b"busy")
        ends = sorted(int(left) for _, left, *_ in busy)
        tokens = Counter(value[:32] for _, _, value, _ in busy)
        holder = tokens.most_common(1)[0][0]
        # One server's clock has noted when it was granted, so the same one's says how long ago.
        told = next([value, now] for _, _, value, now in busy if value[:32] == holder)
        # It is free when as many servers are as a majority still needs.
        return [b"busy", ends[min(self._majority - granted, len(ends)) - 1], *told]

    def _announce(self, call: Call) -> Vote:
        """Of several who announce a run at the same time, at least one has to be let through."""
        (outcomes,) = yield from self._ask([call], self._every)
        waiting, votes = Counter(self._values(outcomes)).most_common(1)[0]
        if votes < self._majority or not waiting:
            return b""
        if noted := [server for server, found in outcomes.items() if found == b""]:
            retract = Call(scripts.RETRACT, call.name, call.args[:1], call.within)
            yield from self._ask([retract], noted)
        return waiting

    # --- one round ----------------------------------------------------------------------------

    def _ask(
        self,
        calls: Sequence[Call],
        among: Iterable[int],
        is_enough: Callable[[Replies], bool] | None = None,
        before: Sequence[bytes] = (),
    ) -> Generator[Round, Replies, list[Outcomes]]:
        """Have scripts run, with plain commands *before* them; what each script came to."""

        def in_full() -> list[bytes]:
            return [*before, *self._caller.commands(calls, in_full=True)]

        question = Round(
            [*before, *self._caller.commands(calls)],
            calls[0].within,
            among,
            is_enough,
            frozenset([call.script for call in calls]),
            in_full,
        )
        replies = yield question
        if lacking := [server for server, found in replies.items() if _lacks_script(found)]:
            again = yield question._replace(commands=in_full(), among=lacking, is_enough=None)
            replies = {**replies, **again}
        merged: list[Outcomes] = [{} for _ in calls]
        for server in among:
            found = replies.get(server, _LEFT)
            for number, outcomes in enumerate(merged, start=-len(calls)):
                reply = found[number] if found.__class__ is list else found
                if reply.__class__ is ReplyError:
                    reply = trouble(reply, 0.0)
                outcomes[server] = reply
        return merged

    def _is_heard(self, replies: Replies) -> bool:
        """Whether a majority has answered, whatever it says."""
        return len(replies) >= self._majority

    def _is_decided(self, replies: Replies) -> bool:
        """Whether it is clear that a majority has granted a lock, or that none has."""
        granted = refused = 0
        for server, found in replies.items():
            if found.__class__ is list:
                last = found[-1]
                if last.__class__ is bytes:
                    granted += server not in self._suspect
                elif last.__class__ is list:
                    refused += 1
                else:
                    return False  # All that lack the script are to be told it.
        return granted >= self._majority or refused > len(self._members) - self._majority

    def _is_decided_by_all(self, replies: Replies) -> bool:
        """As _is_decided(), of an acquire that a done marker would make pointless.

        A round ends by itself when all have answered, and a grant is decided no sooner: the last
        server may be the only one that knows the marker.
        """
        last = [found[-1] for found in replies.values() if found.__class__ is list]
        refusals = [value for value in last if value.__class__ is list]
        is_pointless = any(value[0] in _POINTLESS for value in refusals)
        return is_pointless or len(refusals) > len(self._members) - self._majority

    def _is_agreed(self, replies: Replies) -> bool:
        """Whether a majority says the same word."""
        words = [_word(found) for found in replies.values()]
        return len(words) >= self._majority and words.count(words[-1]) >= self._majority

    def _merged(self, script: Script, outcomes: Outcomes) -> Any:
        """The one answer that those of the servers come to."""
        values = self._values(outcomes)
        word = _WORDS.get(script)
        if word is None:
            return _MERGED.get(script, _greatest)(values, len(self._members))
        if values.count(word) >= self._majority:
            return word
        others = [value for value in values if value != word]
        if len(others) <= len(self._members) - self._majority:
            raise self._no_majority(outcomes)  # Those who did not answer might make one.
        return b"forced" if b"forced" in others else Counter(others).most_common(1)[0][0]

    def _values(self, outcomes: Outcomes) -> list[Any]:
        """What the servers answered, in the order of LOCATION."""
        values = [found for found in outcomes.values() if not isinstance(found, Trouble)]
        if len(values) < self._majority:
            raise self._no_majority(outcomes)
        return values

    def _no_majority(self, outcomes: Outcomes) -> NoMajority:
        """Why the answers come to nothing."""
        troubles = {s: found for s, found in outcomes.items() if isinstance(found, Trouble)}
        problems = dict.fromkeys(self._suspect, "may still undo what it grants")
        problems |= {s: found.problem for s, found in troubles.items()}
        says = [f"{self._members[server].name}: {text}" for server, text in problems.items()]
        refused = sum(isinstance(found, Refused) for found in troubles.values())
        error = NoMajority(
            f"{len(outcomes) - len(problems)} of {len(self._members)} servers answered, and"
            f" {self._majority} are needed ({'; '.join(says)})",
            # Those who do not refuse may come to be a majority.
            is_transient=len(self._members) - refused >= self._majority,
            is_done_nowhere=all(isinstance(found, NotDone) for found in outcomes.values()),
        )
        error.__cause__ = next((found.__cause__ for found in troubles.values()), None)
        return error


# Of a server whose answer was not needed any more.
_LEFT = Unanswered("its answer was not awaited", 0.0, 0.0)

# What an acquire is answered if what it is wanted for is done.
_POINTLESS = {b"done", b"finished"}


def _word(found: Any) -> bytes | None:
    """The one word that a server said last, such as a fence; None if it said anything else."""
    return found[-1] if found.__class__ is list and found[-1].__class__ is bytes else None


def _lacks_script(found: Any) -> bool:
    return found.__class__ is list and any(
        reply.__class__ is ReplyError and lacks_script(reply) for reply in found
    )


# --- how answers come to one ----------------------------------------------------------------

# What is said for a lease by those who have it.
_WORDS = {
    scripts.RENEW: b"renewed",
    scripts.RELEASE: b"released",
    scripts.CONCLUDE: b"released",
}


FREE = -2  # Milliseconds that a key is said to last which is not there; see lua/look.lua.
ENDLESS = -1


def _forced(values: list[list[bytes]], of: int) -> list[bytes]:
    """Released, if a look would have shown the lease.

    A minority may still keep a lease that its holder has released.
    """
    released = [value for value in values if value[0] == b"released"]
    others = [value for value in values if value[0] != b"released"]
    if len(others) <= of - majority_of(of):
        return released[0]
    return list(Counter(map(tuple, others)).most_common(1)[0][0])


def _look(values: list[list[Any]], of: int) -> list[Any]:
    """The lease that most know, for as long as a majority has it, and how many know it."""
    held = [value for value in values if int(value[1]) != FREE]
    ids = Counter(value[4] for value in held)
    id, known = ids.most_common(1)[0] if ids else (b"", 0)  # noqa: A001
    silent = of - len(values)
    if known + silent < majority_of(of):
        server_ms = values[0][3]
        return [b"", FREE, 0, server_ms, b"", b"", ""]
    held = sorted((value for value in held if value[4] == id), key=_left, reverse=True)
    newest = max(held, key=lambda value: _number(value[0].split(b"|", 2)[1:2]))
    left = held[min(majority_of(of), known) - 1][1]
    return [newest[0], left, 0, *newest[3:], f"{known} of {of}"]


def _left(value: list[Any]) -> float:
    return math.inf if int(value[1]) == ENDLESS else int(value[1])


def _names(values: list[list[Any]], of: int) -> list[Any]:
    """All that any server knows: one that was away when a lock was granted does not know it."""
    scores: dict[bytes, bytes] = {}
    for _, found in values:
        for key, score in zip(found[::2], found[1::2], strict=True):
            scores.setdefault(key, score)
    total = max(len(scores), *(int(total) for total, _ in values))
    return [total, [item for pair in scores.items() for item in pair]]


def _inspected(values: list[list[Any]], of: int) -> list[Any]:
    """What the server knows that has noted the last lease."""
    return max(values, key=lambda value: _number(value[2][-1:], 2))


def _last_runs(values: list[list[Any]], of: int) -> list[Any]:
    """The last run of each kind that any server has noted; each notes it by its own clock.

    Of a run that has not ended, only if a majority may say so: one that is about to begin is known
    to some servers already, and a server that has missed the end of a run takes it for one that
    never ended.
    """
    now_ms = max(values, key=lambda value: max(map(_when, value[1:5])))[0]
    success, failure, skip = (max((v[place] for v in values), key=_when) for place in (1, 2, 3))
    # They are counted from the last success on.
    skips = max(value[6] for value in values if value[1] == success)
    started = [{_field(note, 3): note for note in value[5]} for value in values]  # By their leases.
    note_of = ChainMap(*started)
    begun = Counter(lease for here in started for lease in here)
    unended = begun + Counter(_field(value[4], 2) for value in values)
    enough = majority_of(of) - (of - len(values))
    never = [value[4] for value in values if unended[_field(value[4], 2)] >= enough]
    under_way = sorted(note_of[lease] for lease in begun if begun[lease] >= enough)
    last_unended = max(never, key=_when, default=b"")
    return [now_ms, success, failure, skip, last_unended, under_way, skips]


def _greatest(values: list[int], of: int) -> int:
    return max(values)


def _last_call(values: list[int], of: int) -> int:
    """Milliseconds since the last call that any server knows of; -1 if none does."""
    return min((ago for ago in values if ago >= 0), default=-1)


def _soonest(values: list[list[Any]], of: int) -> list[Any]:
    """The earliest of the turns: one who comes too early asks again."""
    return min(values, key=lambda value: int(value[2]))


def _when(note: bytes) -> int:
    """When a run was noted; 0 if none was."""
    return _number([note])


def _number(notes: Sequence[bytes], place: int = 0) -> int:
    """The number in that place of the one note, if there is one; 0 if somebody else wrote it."""
    for note in notes:
        if (field := _field(note, place)).isdigit():
            return int(field)
    return 0


def _field(note: bytes, place: int) -> bytes:
    """What is in that place of a note; b"" if there is nothing."""
    return b"".join(note.split(b"|", place + 1)[place : place + 1])


_MERGED: dict[Script, Callable[[list[Any], int], Any]] = {
    scripts.FORCE_RELEASE: _forced,
    scripts.LOOK: _look,
    scripts.NAMES: _names,
    scripts.INSPECT: _inspected,
    scripts.RUNS: _last_runs,
    scripts.REQUEUE: _last_call,
    scripts.STAND_IN_LINE: _soonest,
}
