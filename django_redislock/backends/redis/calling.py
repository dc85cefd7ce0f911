"""How scripts are run on one server: what is sent, and what its replies mean."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from copy import copy
from functools import lru_cache
from itertools import compress, count
from typing import TYPE_CHECKING, Any

from django_redislock import clock, logs, process
from django_redislock.backends.drivers import aperform, perform
from django_redislock.backends.redis import without_scripts
from django_redislock.backends.redis.connection import packed, rest
from django_redislock.backends.redis.errors import (
    CLIENT_ERRORS,
    NotAcknowledged,
    NotSent,
    ReplyError,
    described,
    is_transient,
    is_wrong_server,
    reason_of,
    to_allow_scripts,
)
from django_redislock.rules import scripts
from django_redislock.rules.flows import confirmation, milliseconds
from django_redislock.rules.forms import Attempt, Release
from django_redislock.rules.keys import channel, lock_keys, prefix_of
from django_redislock.rules.steps import Answer, NotDone, Refused, Unanswered
from django_redislock.rules.stored import NO_MARKERS, renews_flag

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from django_redislock.backends.redis.async_connection import AsyncConnection
    from django_redislock.backends.redis.connection import Connection
    from django_redislock.backends.redis.pool import ConnectionPool, Loops
    from django_redislock.rules.forms import Form
    from django_redislock.rules.scripts import Script
    from django_redislock.rules.steps import Call, Outcome, Tell, Trouble
    from django_redislock.rules.stored import DoneMarkers

logger = logs.logger("django_redislock")

LOOK_FOR_SCRIPTS_EVERY = 60.0  # Seconds after which missing rights may be there again.

Args = tuple[str | bytes | int, ...]


class Caller:
    """Runs scripts on one server, or plain commands if the server forbids scripts.

    An error of a connection is raised to its lender. So is an error reply of a wrong server: only
    a new connection may help. In a batch, see call(), such a reply is one of the outcomes, and
    turned_away() finds it.
    """

    def __init__(self, alias: str, prefix: str, process: str) -> None:
        self.scripting = True  # Until the server forbids it; then it is asked now and then.
        self.scripts_need = ""  # Then, what to do so that it allows them again.
        self._looks_for_scripts_at = math.inf
        self._alias = alias
        self.prefix = prefix  # Of the locks.
        self._process = process
        self._numbers = count(1)
        self.told: set[Script] = set()  # Since the server was last seen to know no script.

    def channel_on(self, connection: Connection | AsyncConnection, name: str) -> str:
        """The channel on which a connection is rung for the lock *name*; "" if there is none."""
        return connection.channels.get(prefix_of(self.prefix, name), "")

    def new_channel(self, name: str) -> str:
        """A channel for one more connection of this process, to be rung for the lock *name*."""
        return channel(prefix_of(self.prefix, name), self._process, next(self._numbers))

    def call(self, connection: Connection, calls: Sequence[Call], started: float) -> list[Outcome]:
        """Run scripts on a blocking connection, all in one go. They must be safe to repeat.

        Close the connection if one of them was turned_away().

        Args:
            connection: The connection.
            calls: The scripts. All have the longest time of any of them, and ask for the same
                number of replicas.
            started: When that time began.
        """
        if self.scripting:
            text = self._in_batch(calls, started)
            outcomes = perform(text, lambda batch: connection.execute_all(*batch))
            if not self._forbade(outcomes):
                return outcomes
        outcomes = []
        for call in calls:
            try:
                outcomes.append(self._call_without_scripts(connection, call, started))
            except ReplyError as error:
                outcomes.append(trouble_of(error, started))
            started = clock.now()  # Each takes several round trips, and so has a time of its own.
        return outcomes

    async def acall(
        self, connection: AsyncConnection, calls: Sequence[Call], started: float
    ) -> list[Outcome] | None:
        """As call(), on a loop's connection; None if scripts are forbidden."""
        text = self._in_batch(calls, started)
        outcomes = await aperform(text, lambda batch: connection.send_all(*batch))
        return None if self._forbade(outcomes) else outcomes

    def _in_batch(
        self, calls: Sequence[Call], started: float
    ) -> Generator[tuple[list[bytes], float], list[Any], list[Outcome]]:
        """Run scripts in one go. Then send again, in full, the scripts that the server lacked.

        Yields the commands of each try, with the seconds that are left, and is sent the replies.

        A node of a cluster reads the text of a script only from a call for a slot that it keeps. At
        the first try it turns away all other calls. So the text goes with a call that met NOSCRIPT.
        If a slot leaves between two tries, one more try is made.
        """
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(calls)))
        longest = max(call.within for call in calls)
        for in_full in (False, True, True):
            some = [calls[number] for number in left]
            sent, within, acknowledged = clock.now(), rest(longest, started), 0
            commands = self.commands(some, in_full=in_full)
            if some[0].replicas:
                wait = packed(*_wait_for_replicas(some[0], within))
                *replies, acknowledged = yield [*commands, wait], within
            else:
                replies = yield commands, within
            for number, reply in zip(left, replies, strict=True):
                outcomes[number] = outcome_in_batch(reply, sent, acknowledged)
            lacking = [isinstance(one, ReplyError) and lacks_script(one) for one in replies]
            left = list(compress(left, lacking))
            if not left:
                break
        return [outcomes[number] for number in range(len(calls))]

    def call_one(self, connection: Connection, call: Call, started: float, channel: str) -> Outcome:
        """As call(), for one script: with as few steps as the usual answer needs.

        The script may ask for replicas. The server rings us on *channel*, on this connection or on
        a shared one.
        """
        if not self.scripting:
            return self._call_without_scripts(connection, call, started)
        for in_full in (False, True):
            sent, within, acknowledged = clock.now(), rest(call.within, started), 0
            command = self.packed(call, channel, in_full=in_full)
            if call.replicas:
                wait = packed(*_wait_for_replicas(call, within))
                reply, acknowledged = connection.execute_all([command, wait], within)
            else:
                reply = connection.execute(command, within)
            if reply.__class__ is not ReplyError or not lacks_script(reply):
                break
        if reply.__class__ is ReplyError and self._are_forbidden([reply]):
            return self._call_without_scripts(connection, call, started)
        return _outcome(reply, acknowledged, sent)

    def call_asking(self, connection: Connection, call: Call, started: float) -> Outcome:
        """As call_one(), once, on a node of a cluster that is about to get the slot.

        In full: the node may not know the script, and a second call would need ASKING again.
        """
        sent, within = clock.now(), rest(call.within, started)
        commands = [packed("ASKING"), self.packed(call, "", in_full=True)]
        if call.replicas:
            commands.append(packed(*_wait_for_replicas(call, within)))
        _, reply, *acknowledged = connection.execute_all(commands, within)
        return _outcome(reply, acknowledged[0] if acknowledged else 0, sent)

    async def acall_one(
        self, connection: AsyncConnection, call: Call, started: float, channel: str
    ) -> Outcome | None:
        """As call_one(), on a loop's connection; None if scripts are forbidden."""
        for in_full in (False, True):
            sent, within, acknowledged = clock.now(), rest(call.within, started), 0
            command = self.packed(call, channel, in_full=in_full)
            if call.replicas:
                wait = packed(*_wait_for_replicas(call, within))
                sending = connection.send(command, within), connection.send(wait, within)
                reply, acknowledged = await asyncio.gather(*sending)
            else:
                reply = await connection.send(command, within)
            if reply.__class__ is not ReplyError or not lacks_script(reply):
                break
        if reply.__class__ is ReplyError and self._are_forbidden([reply]):
            return None
        return _outcome(reply, acknowledged, sent)

    def telling(self, step: Tell, channel: str) -> bytes:
        """The command that tells a script: in full if the server may not know it.

        A reply would say so, but nobody reads it.
        """
        command = self.packed(step, channel, in_full=step.script not in self.told)
        self.told.add(step.script)
        return command

    def packed(self, step: Call | Tell, channel: str, *, in_full: bool = False) -> bytes:
        """The command that runs a script: by its SHA, or *in_full* with the whole text."""
        args = step.script.told(step.args, channel)
        if in_full:
            if step.script.name in scripts.ACQUIRES:
                self.told.clear()  # A server that lacks the first of all scripts lacks the rest.
            keys = step.script.given(lock_keys(self.prefix, step.name, step.permit))
            return packed("EVAL", step.script.source, len(keys), *keys, *args)
        head = _head(self.prefix, step.name, step.permit, step.script, len(args))
        return head + _bulk(args)

    def commands(self, calls: Sequence[Call], *, in_full: bool = False) -> list[bytes]:
        """The commands of some calls; *in_full*, the first call of each script has its text."""
        if not in_full:
            return [self.packed(call, "") for call in calls]
        first = {call.script: call for call in reversed(calls)}
        return [self.packed(call, "", in_full=first[call.script] is call) for call in calls]

    # --- where scripts are forbidden ----------------------------------------------------------

    def _forbade(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether the server forbids the scripts that had these outcomes."""
        causes = (outcome.__cause__ for outcome in outcomes if isinstance(outcome, Refused))
        return self._are_forbidden([one for one in causes if isinstance(one, ReplyError)])

    def _are_forbidden(self, errors: Sequence[ReplyError]) -> bool:
        """Whether the server leaves us only plain commands; says so once in the log."""
        refusal = next(filter(to_allow_scripts, errors), None)
        if refusal is not None and self.scripting:
            self.scripting, self.scripts_need = False, to_allow_scripts(refusal)
            self._looks_for_scripts_at = clock.now() + LOOK_FOR_SCRIPTS_EVERY
            logger.warning(
                "REDISLOCK[%r]: the server forbids scripts (%s). Locks work with plain commands,"
                " with less: waiters poll instead of being served in turn, operations take more"
                " round trips, and %s are unavailable. To get all back, %s.",
                self._alias,
                refusal,
                without_scripts.UNAVAILABLE,
                self.scripts_need,
                extra=logs.of(alias=self._alias),
            )
        return refusal is not None

    def _call_without_scripts(self, connection: Connection, call: Call, started: float) -> Outcome:
        def ask(*commands: without_scripts.Command) -> list[Any]:
            within = rest(call.within, started)
            return connection.execute_all([packed(*command) for command in commands], within)

        sent, acknowledged = clock.now(), 0
        try:
            self._look_for_scripts(ask)
            keys = lock_keys(self.prefix, call.name, call.permit)
            reply = without_scripts.perform(call, keys, ask)
            if call.replicas:
                within = rest(call.within, started)
                acknowledged = connection.execute(packed(*_wait_for_replicas(call, within)), within)
        except without_scripts.NeedsScripts as error:
            reply = ReplyError(f"{error}; {self.scripts_need}")
        except ReplyError as error:
            reply = error
        return _outcome(reply, acknowledged, sent)

    def _look_for_scripts(self, ask: without_scripts.Ask) -> None:
        """Find out now and then whether scripts are allowed again, for the next calls."""
        now = clock.now()
        if now < self._looks_for_scripts_at:
            return
        self._looks_for_scripts_at = now + LOOK_FOR_SCRIPTS_EVERY
        for reply in ask(("EVAL", "return 1", 0), ("EVALSHA", "0" * 40, 0)):
            if isinstance(reply, ReplyError) and not lacks_script(reply):
                return
        self.scripting, self.scripts_need = True, ""
        logger.warning(
            "REDISLOCK[%r]: the server allows scripts again; waiters are served in turn",
            self._alias,
            extra=logs.of(alias=self._alias),
        )


class FirstSteps:
    """Does first steps that are forms, each on one connection of a server.

    The session of the flow does everything that is not usual: it dials, subscribes, waits for
    replicas, and sends the text of a script.
    """

    def __init__(
        self,
        caller: Caller,
        pool: ConnectionPool,
        loops: Loops,
        waiting: set[str],
        *,
        ring_apart: bool,
    ) -> None:
        """Do none yet.

        Args:
            caller: Runs scripts there.
            pool: The blocking connections.
            loops: The connections of event loops.
            waiting: The ids of the acquires that wait now.
            ring_apart: Whether waiters are rung on other connections than these.
        """
        self._caller = caller
        self._pool = pool
        self._loops = loops
        self._waiting = waiting
        self._ring_apart = ring_apart

    def begin(self, form: Form) -> None:
        """Do a first step on an idle connection, if there is one, and note its result in *form*."""
        if not form.is_plain or not self._caller.scripting or (form.waits and self._ring_apart):
            return
        command = self.command(form)
        connection = self._pool.take_idle(to_wait=form.waits)
        if connection is None:
            return
        if form.script.takes_channel:
            channel = connection.channels.get(prefix_of(self._caller.prefix, form.name), "")
            if form.waits and not channel:
                self._pool.give(connection)
                return
            command += b"$%d\r\n%b\r\n" % (len(channel), channel.encode())
        form.sent = clock.now()
        try:
            reply = connection.execute(command, form.terms.one_try)
            if reply.__class__ is ReplyError:  # Nothing was done.
                form.left = rest(form.terms.one_try, form.sent)
            else:
                form.now = clock.now()
                form.reply = reply
                if reply.__class__ is not bytes and not self._was_rung(form, connection):
                    form.connection = connection
                    return
        except CLIENT_ERRORS as error:
            self._pool.drop(connection)
            was_sent = not isinstance(error, NotSent)
            form.trouble = trouble_of(error, form.now or form.sent, was_sent=was_sent)
            return
        except BaseException:
            self._pool.drop(connection)
            raise
        self._pool.give(connection)

    def _was_rung(self, form: Form, connection: Connection) -> bool:
        """Listen for the bell, if we are queued. Returns whether it has handed us the lock."""
        if not isinstance(form, Attempt) or not (seconds := form.seconds_to_listen()) > 0:
            return False
        try:
            self._waiting.add(form.id)
            ring = connection.next_ring(seconds)
        finally:
            self._waiting.discard(form.id)
        granted = form.heard(ring, clock.now())
        if granted is None or scripts.RENEW not in self._caller.told:
            return False
        connection.tell(self.confirmation(form, granted.permit))
        form.granted = granted
        return True

    async def abegin(self, form: Form) -> None:
        """See begin(), on the connection of the event loop."""
        if not form.is_plain or not self._caller.scripting or (form.waits and self._ring_apart):
            return
        command = self.command(form)
        connection = self._loops.current()
        if connection is None:
            return
        id = form.id if form.waits else ""  # noqa: A001
        if form.script.takes_channel:
            channel = connection.channels.get(prefix_of(self._caller.prefix, form.name), "")
            if id and not channel:
                return
            command += b"$%d\r\n%b\r\n" % (len(channel), channel.encode())
        if id:
            connection.rings.setdefault(id, deque())
        form.sent = clock.now()
        try:
            reply = await connection.send(command, form.terms.one_try)
            if reply.__class__ is ReplyError:  # Nothing was done.
                form.left = rest(form.terms.one_try, form.sent)
                return
            form.now = clock.now()
            form.reply = reply
            if reply.__class__ is not bytes and not await self._awas_rung(form, connection):
                form.connection = connection
        except CLIENT_ERRORS as error:
            form.trouble = trouble_of(error, form.now or form.sent)
        finally:
            if id and form.connection is None:
                connection.rings.pop(id, None)

    async def _awas_rung(self, form: Form, connection: AsyncConnection) -> bool:
        """See _was_rung()."""
        if not isinstance(form, Attempt) or not (seconds := form.seconds_to_listen()) > 0:
            return False
        try:
            self._waiting.add(form.id)
            ring = await connection.next_ring(form.id, seconds)
        finally:
            self._waiting.discard(form.id)
        granted = form.heard(ring, clock.now())
        if granted is None or scripts.RENEW not in self._caller.told:
            return False
        connection.tell(self.confirmation(form, granted.permit))
        form.granted = granted
        return True

    def command(self, form: Form) -> bytes:
        """The command of a form, without the channel. The parts that never change are cached."""
        head = _head(self._caller.prefix, form.name, form.permit, form.script, form.args)
        token = form.token.encode()
        if isinstance(form, Release):
            return b"%b$32\r\n%b\r\n%b" % (head, token, _noted(form) if form.notes else b"")
        assert isinstance(form, Attempt)
        terms, owner = form.terms, form.owner.packed
        first, last = _of_terms(terms.first_ttl, form.waits, terms.renews)
        markers = b"$0\r\n\r\n" if form.markers is NO_MARKERS else _of_markers(form.markers)
        command = b"%b$32\r\n%b\r\n$16\r\n%b\r\n%b%b%b$%d\r\n%b\r\n" % (
            *(head, token, form.id.encode(), first, markers, last, len(owner), owner),
        )
        return command + _of_limit(form.limit) if form.limit > 1 else command

    def confirmation(self, form: Attempt, permit: int = 1) -> bytes:
        """The command that confirms a lease that was handed over to the waiter of a form."""
        head = _head(self._caller.prefix, form.name, permit, scripts.RENEW, 3)
        last = _of_confirmation(form.terms.first_ttl, form.terms.renews)
        return b"%b$32\r\n%b\r\n%b" % (head, form.token.encode(), last)


def trouble_of(error: BaseException, sent: float, *, was_sent: bool = True) -> Trouble:
    """What an error means to a flow.

    Args:
        error: The error.
        sent: When the command was sent, or was to be.
        was_sent: Whether all of it was sent, as far as is known. An error reply means that the
            command was not carried out. Any other error means so only if not all of it was sent.

    Raises:
        BaseException: That of a signal handler, if *error* is one.
    """
    try:
        process.forget_frames(error)
    except BaseException:
        del error  # See process.pass_on_interrupt().
        raise
    outcome: Trouble
    if is_transient(error):
        is_reply = isinstance(error, ReplyError) and not isinstance(error, NotAcknowledged)
        unanswered = NotDone if is_reply or not was_sent else Unanswered
        outcome = unanswered(described(error), sent, clock.now(), reason_of(error))
    else:
        outcome = Refused(described(error), reason_of(error))
    outcome.__cause__ = error
    return outcome


def _outcome(reply: Any, acknowledged: Any, sent: float) -> Outcome:
    """What one reply means, together with the reply to the WAIT behind it."""
    if reply.__class__ is not ReplyError:
        if acknowledged.__class__ is not ReplyError:
            return Answer(reply, sent, clock.now(), acknowledged)
        reply = NotAcknowledged(f"{acknowledged} (which REPLICAS_ACK needs)")
    if is_wrong_server(reply):
        raise copy(reply)
    return trouble_of(reply, sent)


def outcome_in_batch(reply: Any, sent: float, acknowledged: Any = 0) -> Outcome:
    """What one reply to a batch means that was sent at that time."""
    # A wrong server may concern one call alone: no node of a cluster keeps its slot, say.
    return (
        trouble_of(reply, sent) if is_wrong_server(reply) else _outcome(reply, acknowledged, sent)
    )


def turned_away(outcomes: Sequence[Outcome]) -> BaseException | None:
    """The first reply of a wrong server: a new connection may help."""
    causes = (outcome.__cause__ for outcome in outcomes if not isinstance(outcome, Answer))
    return next(filter(is_wrong_server, causes), None)


def _bulk(args: Args) -> bytes:
    """Arguments as they stand in a command."""
    return packed(*args).partition(b"\r\n")[2]


@lru_cache(maxsize=1024)
def _of_terms(ttl: float, waits: bool, renews: bool) -> tuple[bytes, bytes]:
    """The terms in a first try: ttl, mode and ticket; and the flag that follows the markers."""
    mode = "queue" if waits else "try"
    return _bulk((milliseconds(ttl), mode, b"0")), _bulk((renews_flag(renews),))


@lru_cache(maxsize=1024)
def _of_markers(markers: DoneMarkers) -> bytes:
    """The done markers in a first try. Only those of a task's run have an id of their own."""
    return _bulk((markers.packed,))


def _noted(form: Release) -> bytes:
    """What a release has noted, behind the token."""
    owner, run = form.owner.packed, form.run
    id, recognised_for = (run.id.encode(), run.recognised_for) if run else (b"", None)  # noqa: A001
    times, last = _of_notes(form.min_hold, form.once, recognised_for, form.retention)
    return b"$16\r\n%b\r\n%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n%b" % (
        *(form.id.encode(), times, len(owner), owner),
        *(len(form.ended), form.ended.encode(), len(id), id, last),
    )


@lru_cache(maxsize=1024)
def _of_notes(
    min_hold: float, once: float, recognised_for: float | None, retention: str
) -> tuple[bytes, bytes]:
    """The times in front of the owner; and what follows the run. None: no run ends."""
    times = [milliseconds(each) if each else 0 for each in (min_hold, once)]
    known = 0 if recognised_for is None else milliseconds(recognised_for)
    return _bulk(tuple(times)), _bulk((known, retention))


@lru_cache(maxsize=1024)
def _of_limit(limit: int) -> bytes:
    """The one argument more of a try for one of several permits."""
    return _bulk((limit,))


@lru_cache(maxsize=1024)
def _of_confirmation(ttl: float, renews: bool) -> bytes:
    """The terms in a confirmation."""
    return _bulk(confirmation("", "", ttl, renews).args[1:])


@lru_cache(maxsize=4096)
def _head(prefix: str, name: str, permit: int, script: Script, args: int) -> bytes:
    """The beginning of a call of *script* with so many arguments, cached: it has many keys."""
    keys = script.given(lock_keys(prefix, name, permit))
    head = packed("EVALSHA", script.sha, len(keys), *keys)
    return b"*%d\r\n" % (3 + len(keys) + args) + head[head.index(b"$") :]


def _wait_for_replicas(call: Call, within: float) -> tuple[str | int, ...]:
    # The rest is for the way there and back.
    return "WAIT", call.replicas, max(1, int(within * 750))


def lacks_script(error: ReplyError) -> bool:
    """Whether a script has to be sent in full."""
    return error.code == "NOSCRIPT"


def needs_another_way(error: BaseException | None) -> bool:
    """Whether a script was not run because the server lacks its text, or forbids scripts."""
    return isinstance(error, ReplyError) and (lacks_script(error) or bool(to_allow_scripts(error)))
