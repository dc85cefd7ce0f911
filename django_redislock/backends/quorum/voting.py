"""How the answers of several independent servers become one (Redlock), without I/O.

A vote is a generator. It yields a :class:`Question` for several servers at once, is sent their
replies, and returns the one answer that a flow awaits. So the rules of the lock know nothing of a
quorum but that its vote may be split. Blocking and asynchronous code differ only in how they ask.

The rules are those of https://redis.io/docs/latest/develop/use/patterns/distributed-locks/: a lock
is held if a majority has granted it. It lasts for the ttl, less the time of the vote and the drift
of the clocks. A grant of a mere minority is given back at once. After a split vote, in which no
owner is known to have a majority, the flow asks again.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django_redislock import clock
from django_redislock.backends.quorum.servers import majority_of
from django_redislock.backends.redis.calling import lacks_script, trouble_of
from django_redislock.backends.redis.errors import ReplyError
from django_redislock.rules import scripts
from django_redislock.rules.flows import as_try
from django_redislock.rules.replies import (
    ENDLESS,
    FORCED,
    FREE,
    RELEASED,
    RENEWED,
    AcquireArgs,
    BusyReply,
    EndlessReply,
    ForceReleaseReply,
    InspectReply,
    LookReply,
    NamesReply,
    SplitReply,
    read_try,
)
from django_redislock.rules.steps import Answer, Call, NotDone, Refused, Trouble, Unanswered
from django_redislock.rules.stored import PAUSE, token_in

if TYPE_CHECKING:
    from django_redislock.backends.quorum.servers import Fences, QuorumServer
    from django_redislock.backends.redis.calling import Caller
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Outcome

UNDO_WITHIN = 0.5  # Seconds that giving a minority's grants back may take.


class Question(NamedTuple):
    """Commands for some of the servers, sent at the same time."""

    commands: Sequence[bytes]  # Packed. If they run scripts, these come last.
    within: float  # Seconds after which replies are no longer awaited.
    among: Iterable[QuorumServer]
    is_enough: Callable[[Replies], bool] | None = None  # Whether replies decide; None: all do.
    scripts: frozenset[Script] = frozenset()  # The scripts that the commands run.
    in_full: Callable[[], Sequence[bytes]] = list  # The commands with the text of the scripts.


# By server: its replies, in the order of the commands, or why there are none.
Replies = dict["QuorumServer", "list[Any] | Trouble"]
# The same for one script alone: its reply, or why there is none.
Outcomes = dict["QuorumServer", Any]
Vote = Generator[Question, Replies, Any]


class NoMajority(Exception):
    """Too few servers answered, or too many refused."""

    def __init__(self, problem: str, *, is_transient: bool, is_done_nowhere: bool = False) -> None:
        """Say why.

        Args:
            problem: As a clause.
            is_transient: Whether asking again may help.
            is_done_nowhere: Whether certainly no server has carried it out.
        """
        super().__init__(problem)
        self._problem = problem
        self.is_transient = is_transient
        self._is_done_nowhere = is_done_nowhere

    def after_a_grant(self) -> NoMajority:
        """The same, but a lease may be left behind: ask again with the same token, or undo it."""
        return NoMajority(self._problem, is_transient=True)

    def as_trouble(self, sent: float) -> Trouble:
        """The trouble for a flow that asked at that time."""
        trouble: Trouble
        if self.is_transient:
            unanswered = NotDone if self._is_done_nowhere else Unanswered
            trouble = unanswered(self._problem, sent, clock.now(), "majority")
        else:
            trouble = Refused(self._problem)
        trouble.__cause__ = self.__cause__
        return trouble


def outcomes_of(values: Iterable[Any], sent: float) -> list[Outcome]:
    """The outcomes of calls that were asked at that time, from the results of their votes."""
    now = clock.now()
    return [
        value.as_trouble(sent) if isinstance(value, NoMajority) else Answer(value, sent, now)
        for value in values
    ]


class Voting:
    """The votes of one flow; see of()."""

    def __init__(self, caller: Caller, servers: Sequence[QuorumServer], fences: Fences) -> None:
        """Prepare to ask.

        Args:
            caller: Packs scripts.
            servers: All of them, in the order of LOCATION.
            fences: Has the servers give out the same fence.
        """
        self._caller = caller
        self._servers = servers
        self._majority = majority_of(len(servers))
        self._fences = fences
        # Servers to which an undo of this flow's token may still be on its way. It would end the
        # next grant to the token there, so their grants do not count (R4).
        self._suspect: set[QuorumServer] = set()
        self._by_token: dict[tuple[Any, ...], Voting] = {}
        # The permit, of several, that this flow asked for last. Its token may have it.
        self._asked: int | None = None

    def of(self, call: Call) -> Voting:
        """The votes about the token of *call*. Facts about one token say nothing of another.

        A flow of several locks has a token for each.
        """
        if call.args[:1] not in self._by_token:
            own = Voting(self._caller, self._servers, self._fences)
            self._by_token[call.args[:1]] = own
        return self._by_token[call.args[:1]]

    def answer(self, call: Call) -> Vote:
        """Run a script on all servers. Returns what one server would, or that the vote is split.

        Raises:
            NoMajority: There is no such answer.
        """
        if call.script.name == scripts.ACQUIRE.name:
            return (yield from self._acquire(call))
        if call.script.name == scripts.ACQUIRE_PERMIT.name:
            return (yield from self._acquire_permit(call))
        if call.script is scripts.LEAVE:
            # Each server has a fence of its own for a grant, so none is named.
            leave = call._replace(args=(call.args[0], "", *call.args[2:]))
            return self._merged(call.script, (yield from self._leave(leave, self._servers)))
        is_enough = self._is_agreed if call.script in _WORDS else None
        (outcomes,) = yield from self._poll([call], self._servers, is_enough)
        return self._merged(call.script, outcomes)

    def answers(self, calls: Sequence[Call]) -> Generator[Question, Replies, list[Any]]:
        """As answer(), for many; a NoMajority may stand in place of an answer."""
        merged: list[Any] = []
        for call, outcomes in zip(
            calls, (yield from self._poll(calls, self._servers)), strict=True
        ):
            try:
                merged.append(self._merged(call.script, outcomes))
            except NoMajority as error:
                merged.append(error.with_traceback(None))  # See process.forget_frames().
        return merged

    def answer_all(self, calls: Sequence[Call]) -> Generator[Question, Replies, list[Any]]:
        """As answer(), for many at once; a NoMajority may stand in place of an answer."""
        votes = {number: self.of(call).answer(call) for number, call in enumerate(calls)}
        answers: dict[int, Any] = {}
        replies: dict[int, Any] = dict.fromkeys(votes)
        while replies:
            questions: dict[int, Question] = {}
            for number, said in replies.items():
                try:
                    questions[number] = votes[number].send(said)
                except StopIteration as end:
                    answers[number] = end.value
                except NoMajority as error:
                    answers[number] = error.with_traceback(None)
            replies = yield from _asked_together(questions)
        return [answers[number] for number in range(len(calls))]

    # --- scripts that take more than one question ---------------------------------------------

    def _acquire(self, call: Call) -> Vote:
        attempt = as_try(call)  # Without a queue: each server would have another order.
        args = AcquireArgs(*call.args)  # type: ignore[arg-type]
        if self._fences.are_unknown:
            time = self._fences.question()
            replies = yield Question([time], call.within, self._servers, self._is_heard)
            self._fences.learn(map(_last, replies.values()))
        raised = self._fences.before()
        (outcomes,) = yield from self._poll([attempt], self._servers, self._is_decided, raised)
        granted = {
            server: int(reply)
            for server, reply in outcomes.items()
            if reply.__class__ is bytes and server not in self._suspect
        }
        refusals = [read_try(one) for one in outcomes.values() if one.__class__ is list]
        if len(granted) >= self._majority:
            return (yield from self._raise_fences(call, granted))
        lacks = not refusals or len(granted) + len(refusals) < self._majority
        if lacks and self._no_majority(outcomes).is_transient:
            # A server that did not answer may have granted it. The flow asks again with the same
            # token, or undoes it everywhere.
            raise self._no_majority(outcomes)
        in_question = [
            server
            for server, reply in outcomes.items()
            if reply.__class__ is bytes or reply.__class__ is Unanswered
        ]
        if in_question:
            within = min(UNDO_WITHIN, call.within)
            leave = Call(scripts.LEAVE, call.name, (args.token,), within, permit=call.permit)
            yield from self._leave(leave, in_question)
        if lacks:
            raise self._no_majority(outcomes)
        return [*self._busy(refusals, len(granted))]

    def _acquire_permit(self, call: Call) -> Vote:
        """Acquire one of several permits: each server alone would choose another one."""
        *asked, limit = call.args
        numbers = range(1, int(limit) + 1)
        plain = call._replace(script=scripts.ACQUIRE, args=tuple(asked))
        number, answer = yield from self._ask_for_permits(plain, numbers)
        if not number:
            return answer
        try:
            kept = _pause_in((yield from self._permits(call, [1] if number > 1 else [])))
        except NoMajority as error:
            raise error.after_a_grant() from error.__cause__
        if kept is None:
            return b"%b %d" % (answer, number)
        # An operator's pause has come before the grant, and keeps all permits from everybody.
        yield from self._give_back(call, number)
        return [*_as_busy(kept)]

    def _ask_for_permits(
        self, call: Call, numbers: Iterable[int]
    ) -> Generator[Question, Replies, tuple[int, Any]]:
        """Ask for each permit that looks free, one after the other.

        The order is random: if all clients began with the first, most would find it taken.

        Returns:
            The permit and its fence; or 0 and the answer of one server to a try that is refused.
        """
        found = yield from self._permits(call, numbers)
        free = [number for number in numbers if number not in found]
        random.shuffle(free)
        if kept := _pause_in(found):
            if self._asked is not None:
                # What it asked for before may be granted, and would stay behind.
                yield from self._give_back(call, self._asked)
            return 0, [*_as_busy(kept)]
        if self._asked is not None:  # Its outcome is unknown, so ask for it first.
            free = [self._asked, *(number for number in free if number != self._asked)]
        busy = [_as_busy(look) for look in found.values() if int(look.left_ms) != ENDLESS]
        for number in free:
            self._asked = number
            answer = yield from self._acquire(call._replace(permit=number))
            if answer.__class__ is bytes:
                return number, answer
            self._asked = None
            refusal = read_try(answer)
            if not isinstance(refusal, BusyReply):
                return 0, answer
            busy.append(refusal)
        if not busy:
            return 0, [*EndlessReply(b"endless")]
        return 0, [*min(busy, key=lambda one: (not isinstance(one, SplitReply), int(one.left_ms)))]

    def _permits(
        self, call: Call, numbers: Iterable[int]
    ) -> Generator[Question, Replies, dict[int, LookReply]]:
        """Look at these permits of a lock. Returns how those look that are held."""
        looks = [Call(scripts.LOOK, call.name, (), call.within, permit=one) for one in numbers]
        if not looks:
            return {}
        outcomes = yield from self._poll(looks, self._servers)
        seen = [LookReply(*self._merged(scripts.LOOK, one)) for one in outcomes]
        return {
            look.permit: reply for look, reply in zip(looks, seen, strict=True) if not reply.is_free
        }

    def _give_back(self, call: Call, number: int) -> Generator[Question, Replies, None]:
        """Undo the acquire of a permit, on all servers."""
        leave = Call(scripts.LEAVE, call.name, call.args[:1], call.within, permit=number)
        yield from self._leave(leave, self._servers)
        self._asked = None

    def _raise_fences(self, call: Call, granted: dict[QuorumServer, int]) -> Vote:
        """Tell the greatest fence to a majority of the servers, so that the next one is greater.

        Any two majorities have a server in common, which gives out no fence twice. But the greatest
        fence of this majority may come from another server. Then the common one must be told.
        """
        fence = max(granted.values())
        behind = [server for server, value in granted.items() if value < fence]
        missing = self._majority - (len(granted) - len(behind))
        if missing > 0:
            replies = yield Question((self._fences.raised(fence),), call.within, behind)
            raised = sum(
                found.__class__ is list and found[0].__class__ is not ReplyError
                for found in replies.values()
            )
            if raised < missing:
                raise NoMajority(
                    f"{self._majority - missing + raised} of {len(self._servers)} servers noted"
                    f" the fence, and {self._majority} are needed",
                    is_transient=True,
                )
        return b"%d" % fence

    def _leave(
        self, leave: Call, among: Iterable[QuorumServer]
    ) -> Generator[Question, Replies, Outcomes]:
        """Undo what these servers have granted, or may have."""
        (outcomes,) = yield from self._poll([leave], among)
        silent = [one for one, reply in outcomes.items() if isinstance(reply, Trouble)]
        self._suspect.update(silent)
        return outcomes

    def _busy(self, refusals: list[Any], granted: int) -> Any:
        """The answer to a try without a majority: which lease the lock has, and until when."""
        busy = [one for one in refusals if isinstance(one, BusyReply)]
        if not busy or len(refusals) - len(busy) >= self._majority:
            return next(one for one in refusals if not isinstance(one, BusyReply))
        holder, known = Counter(one.token for one in busy).most_common(1)[0]
        # The reply of one server: its own clock noted the grant, and tells how long ago that was.
        told = next(one for one in busy if one.token == holder)
        # The lock is free once as many servers are free as a majority still needs.
        ends = sorted(int(one.left_ms) for one in busy)
        left_ms = ends[min(self._majority - granted, len(ends)) - 1]
        return told._replace(
            word=told.word if known >= self._majority else b"split", left_ms=left_ms
        )

    # --- one question -------------------------------------------------------------------------

    def _poll(
        self,
        calls: Sequence[Call],
        among: Iterable[QuorumServer],
        is_enough: Callable[[Replies], bool] | None = None,
        before: Sequence[bytes] = (),
    ) -> Generator[Question, Replies, list[Outcomes]]:
        """Run scripts, after plain commands *before* them. Returns the outcomes of each script."""

        def in_full() -> list[bytes]:
            return [*before, *self._caller.commands(calls, in_full=True)]

        question = Question(
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
                    reply = trouble_of(reply, 0.0)
                outcomes[server] = reply
        return merged

    def _is_heard(self, replies: Replies) -> bool:
        """Whether a majority has answered."""
        return len(replies) >= self._majority

    def _is_decided(self, replies: Replies) -> bool:
        """Whether it is clear that a majority has granted a lock, or that none has."""
        granted = refused = 0
        for server, found in replies.items():
            if found.__class__ is list:
                reply = _last(found)
                if reply.__class__ is bytes:
                    granted += server not in self._suspect
                elif reply.__class__ is list:
                    refused += 1
                else:
                    return False  # Wait: each server that lacks the script is to be told it.
        return granted >= self._majority or refused > len(self._servers) - self._majority

    def _is_agreed(self, replies: Replies) -> bool:
        """Whether a majority says the same word as the server that answered last."""
        words = [_word(found) for found in replies.values()]
        return len(words) >= self._majority and words.count(words[-1]) >= self._majority

    def _merged(self, script: Script, outcomes: Outcomes) -> Any:
        """The one answer that the answers of the servers make."""
        replies = self._replies(outcomes)
        word = _WORDS.get(script)
        if word is None:
            merge = _MERGED.get(script)
            return merge(replies, len(self._servers)) if merge else max(replies)
        if replies.count(word) >= self._majority:
            return word
        others = [reply for reply in replies if reply != word]
        if len(others) <= len(self._servers) - self._majority:
            raise self._no_majority(outcomes)  # With the silent servers there might be one.
        return FORCED if FORCED in others else Counter(others).most_common(1)[0][0]

    def _replies(self, outcomes: Outcomes) -> list[Any]:
        """The replies of the servers, in the order of LOCATION."""
        replies = [found for found in outcomes.values() if not isinstance(found, Trouble)]
        if len(replies) < self._majority:
            raise self._no_majority(outcomes)
        return replies

    def _no_majority(self, outcomes: Outcomes) -> NoMajority:
        """The error that says why there is no answer."""
        troubles = {one: found for one, found in outcomes.items() if isinstance(found, Trouble)}
        problems = dict.fromkeys(self._suspect, "may still undo what it grants")
        problems |= {server: found.problem for server, found in troubles.items()}
        says = [f"{server.name}: {text}" for server, text in problems.items()]
        refused = sum(isinstance(found, Refused) for found in troubles.values())
        error = NoMajority(
            f"{len(outcomes) - len(problems)} of {len(self._servers)} servers answered, and"
            f" {self._majority} are needed ({'; '.join(says)})",
            # The servers that do not refuse may still become a majority.
            is_transient=len(self._servers) - refused >= self._majority,
            is_done_nowhere=all(isinstance(found, NotDone) for found in outcomes.values()),
        )
        error.__cause__ = next((found.__cause__ for found in troubles.values()), None)
        return error


def _asked_together(
    questions: dict[int, Question],
) -> Generator[Question, Replies, dict[int, Replies]]:
    """The replies to each of several questions. Questions to the same servers become one."""
    replies: dict[int, Replies] = {}
    while len(replies) < len(questions):
        left = [number for number in questions if number not in replies]
        among = list(questions[left[0]].among)
        some = [number for number in left if list(questions[number].among) == among]
        said = yield _joined([questions[number] for number in some], among)
        parts = _parts([questions[number] for number in some], said)
        replies.update(zip(some, parts, strict=True))
    return replies


def _joined(questions: Sequence[Question], among: Sequence[QuorumServer]) -> Question:
    """One question that asks all of these."""

    def is_enough(said: Replies) -> bool:
        return all(
            one.is_enough is not None and one.is_enough(own)
            for one, own in zip(questions, _parts(questions, said), strict=True)
        )

    return Question(
        [command for one in questions for command in one.commands],
        max(one.within for one in questions),
        among,
        is_enough,
        frozenset().union(*(one.scripts for one in questions)),
        lambda: [command for one in questions for command in one.in_full() or one.commands],
    )


def _parts(questions: Sequence[Question], said: Replies) -> Iterator[Replies]:
    """The replies to each of some questions that were asked as one."""
    start = 0
    for question in questions:
        end = start + len(question.commands)
        yield {
            server: found[start:end] if isinstance(found, list) else found
            for server, found in said.items()
        }
        start = end


def _as_busy(look: LookReply) -> BusyReply:
    """The reply to an acquire of a lock that looks like this."""
    return BusyReply(b"busy", int(look.left_ms), look.value, int(look.server_ms))


def _pause_in(permits: Mapping[int, LookReply]) -> LookReply | None:
    """An operator's pause among these permits, if there is one. It keeps all of them."""
    first = permits.get(1)
    return first if first and token_in(first.value).startswith(PAUSE.encode()) else None


# The outcome of a server if its reply was no longer needed.
_LEFT = Unanswered("its answer was not awaited", 0.0, 0.0)


def _last(found: Any) -> Any:
    """The last reply of a server, such as a fence; None if it has none."""
    return found[-1] if found.__class__ is list else None


def _word(found: Any) -> bytes | None:
    """The last reply of a server, if it is one word."""
    last = _last(found)
    return last if last.__class__ is bytes else None


def _lacks_script(found: Any) -> bool:
    return found.__class__ is list and any(
        reply.__class__ is ReplyError and lacks_script(reply) for reply in found
    )


# --- how answers come to one ----------------------------------------------------------------

# The word of a server that keeps the lease.
_WORDS = {
    scripts.RENEW: RENEWED,
    scripts.RELEASE: RELEASED,
    scripts.CONCLUDE: RELEASED,
}


def _forced(replies: list[Any], of: int) -> list[Any]:
    """Released, if a look would have shown the lease.

    After its holder has released a lease, a minority may still keep it.
    """
    answers = [ForceReleaseReply(*reply) for reply in replies]
    others = [one for one in answers if one.word != RELEASED]
    if len(others) <= of - majority_of(of):
        return [*next(one for one in answers if one.word == RELEASED)]
    return [*Counter(others).most_common(1)[0][0]]


def _look(replies: list[Any], of: int) -> list[Any]:
    """The lease that most servers know, for as long as a majority has it, and how many know it."""
    looks = [LookReply(*reply) for reply in replies]
    held = [one for one in looks if not one.is_free]
    ids = Counter(one.id for one in held)
    id, known = ids.most_common(1)[0] if ids else (b"", 0)  # noqa: A001
    silent = of - len(looks)
    if known + silent < majority_of(of):
        return [*LookReply(b"", FREE, 0, looks[0].server_ms, b"", b"")]
    held = sorted((one for one in held if one.id == id), key=_left, reverse=True)
    newest = max(held, key=lambda one: one.fence)
    left_ms = held[min(majority_of(of), known) - 1].left_ms
    return [*newest._replace(left_ms=left_ms, waiters=0, where=f"{known} of {of}")]


def _left(look: LookReply) -> float:
    return math.inf if int(look.left_ms) == ENDLESS else int(look.left_ms)


def _names(replies: list[Any], of: int) -> list[Any]:
    """All names that any server knows, with the greatest score of each.

    A server that was away at a grant does not know its name, and one that was away at a renewal has
    an older score. The servers' pages follow each other, so the names are in no order.
    """
    pages = [NamesReply(*reply) for reply in replies]
    scores: dict[bytes, bytes] = {}
    for page in pages:
        for key, score in page.scores:
            scores[key] = max(score, scores.get(key, score), key=float)
    total = max(len(scores), *(int(page.total) for page in pages))
    return [*NamesReply(total, [item for pair in scores.items() for item in pair])]


def _inspected(replies: list[Any], of: int) -> list[Any]:
    """The reply of the server that has noted the last lease."""
    return max(replies, key=lambda reply: InspectReply(*reply).last_since)


_MERGED: dict[Script, Callable[[list[Any], int], Any]] = {
    scripts.FORCE_RELEASE: _forced,
    scripts.LOOK: _look,
    scripts.NAMES: _names,
    scripts.INSPECT: _inspected,
}
