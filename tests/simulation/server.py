"""The server: the shipped scripts over the keyspace of the in-memory backend; its accidents."""

import hashlib

from django_redislock.backends.memory.interpreter import Interpreter, ReplyError
from django_redislock.rules.keys import fence_key, index_key, lock_keys, ran_index_key
from django_redislock.rules.scripts import Script
from tests.simulation.commands import Kept, Lease, Violation
from tests.support.keyspace import writing

PREFIX = "simulated"
EPOCH = 1_700_000_000  # What its clock shows at the beginning, in seconds.
# Keys that stay: one each for all names.
LASTING = {fence_key(PREFIX), index_key(PREFIX), ran_index_key(PREFIX)}

_LOOK = b"""
local found = {}
for i = 1, #KEYS - 1 do
  table.insert(found, redis.call('GET', KEYS[i]) or '')
  table.insert(found, redis.call('PTTL', KEYS[i]))
end
return { found, redis.call('ZRANGE', KEYS[#KEYS], 0, -1) }
"""
LOOK = Script("look at all", _LOOK, hashlib.sha1(_LOOK, usedforsecurity=False).hexdigest(), ())
_STARTS = b"return redis.call('ZRANGE', KEYS[1], 1, '+inf', 'BYSCORE', 'WITHSCORES')"
STARTS = Script(
    "look at starts", _STARTS, hashlib.sha1(_STARTS, usedforsecurity=False).hexdigest(), ()
)
_REPLACED = b"return redis.call('HGET', KEYS[1], ARGV[1]) or ''"
REPLACED = Script(
    "look at replaced", _REPLACED, hashlib.sha1(_REPLACED, usedforsecurity=False).hexdigest(), ()
)


class Server:
    """One server, and a replica that may be behind."""

    def __init__(self, timeline, watch, limits, instead):
        self.timeline = timeline
        self.watch = watch
        self.is_up = True
        self.lines = {}  # By channel.
        self._limits = limits
        self._instead = instead
        self._interpreter = Interpreter()
        self._ahead = 0.0  # Seconds by which its clock was set.
        self._replica = None  # What it has, if it hears no more.
        self._keys = {name: lock_keys(PREFIX, name) for name in limits}
        self._looked_at = {
            name: [*(keys.of_permit(one + 1).lock for one in range(limits[name])), keys.queue]
            for name, keys in self._keys.items()
        }

    @property
    def us(self):
        """What its clock shows, in microseconds."""
        return int((EPOCH + self._ahead + self.timeline.now) * 1_000_000)

    @property
    def ms(self):
        return self.us // 1000

    def true(self, ms):
        """When its clock shows that time."""
        return ms / 1000 - EPOCH - self._ahead

    def look(self, name):
        """What it keeps of a lock."""
        ms = self.ms
        (found, queue), _ = self._interpreter.run(LOOK, self.us, self._looked_at[name], ())
        leases = tuple(
            Lease(value, ms + left if left >= 0 else None) if value else None
            for value, left in zip(found[::2], found[1::2], strict=True)
        )
        return Kept(leases, tuple(token.decode() for token in queue[::2]))

    def starts(self, name):
        """The starts under a rate, by token: when each is over (us), and if it is waited for."""
        found, _ = self._interpreter.run(STARTS, self.us, [self._keys[name].rate], ())
        starts = {}
        for member, over in zip(found[::2], found[1::2], strict=True):
            token, record = member[:32].decode(), len(member) > 32
            _, is_waited_for = starts.get(token, (0, False))
            starts[token] = int(float(over)), is_waited_for or record
        return starts

    def is_replaced(self, name, lease_id):
        """Whether a newer call has replaced a waiter or a run."""
        found, _ = self._interpreter.run(
            REPLACED, self.us, [self._keys[name].replaced], (lease_id,)
        )
        return bool(found)

    def every_key(self):
        """All that it keeps."""
        self._interpreter.perform("TIME", us=self.us)
        ms = self.ms
        return [key for key in self._interpreter.every_key() if key.ends is None or key.ends >= ms]

    # --- connections ----------------------------------------------------------------------------

    def receive(self, line, message, trouble):
        """A message arrives."""
        self.watch.arrived(message)
        if not self.is_up or not line.is_known:
            line.was_cut()
            return
        if message.is_rung and not line.is_rung:
            line.is_rung = True
            self._interpreter.listen(line.channel.encode())
        channel = line.channel if line.is_rung else ""
        message.answers = [self._run(step, channel) for step in message.steps]
        self.network.answer(line, message, trouble)

    def forget(self, line):
        """A connection is gone."""
        line.is_known = False
        if self.lines.pop(line.channel, None) is not None:
            self._interpreter.stop_listening(line.channel.encode())

    def _run(self, step, channel):
        script = self._instead.get(step.script, step.script)
        keys = script.given(self._keys[step.name].of_permit(step.permit))
        self.watch.before(step)
        try:
            answer, rings = self._interpreter.run(
                script, self.us, keys, script.told(step.args, channel)
            )
        except ReplyError as error:
            raise Violation(f"R12: {script.name} fails: {error}") from error
        self.watch.after(step, answer)
        for rung, words in zip(rings[::2], rings[1::2], strict=True):
            self.network.ring(self.lines[rung.decode()], words)
        return answer

    # --- accidents ------------------------------------------------------------------------------

    def crash(self):
        """Answer nobody, until recover()."""
        self.is_up = False
        for line in list(self.lines.values()):
            self.forget(line)
            if not line.process.is_cut_off:
                self.timeline.at(self.timeline.now + line.process.latency(), line.was_cut)

    def recover(self):
        """Answer again."""
        self.is_up = True

    def cut_off_replica(self):
        """From now on the replica hears of nothing."""
        if self._replica is None:
            self._replica = self.every_key()

    def promote_replica(self):
        """The replica takes over, with what it has."""
        if self._replica is not None:
            kept, self._replica = self._replica, None
            self._write(kept)

    def flush(self):
        """Lose all data."""
        self._write([])

    def set_clock(self, seconds):
        """Set the clock, forward or back."""
        kept = self.every_key()
        self._ahead += seconds
        self._write(kept)

    def _write(self, kept):
        ms = self.ms
        self._interpreter.clear()  # Its time too, which else never goes back.
        for key in kept:
            if key.ends is None or key.ends >= ms:
                for command in writing(key):
                    self._interpreter.perform(*command)
        self._interpreter.perform("TIME", us=self.us)
