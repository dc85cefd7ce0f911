"""The scripts on a keyspace in this process, at a time that stands still until a test moves it."""

from django_redislock.backends.memory.interpreter import Interpreter
from django_redislock.rules import scripts
from django_redislock.rules.keys import lock_keys

KEYS = lock_keys("test", "lottery")
TTL = 10_000  # ms


def token(who):
    """The token of somebody, named by one letter."""
    return who * 32


def lease_id(who):
    return who * 16


def bell(who, process=""):
    """The channel on which somebody is rung: each in a process of its own, unless it is named."""
    return f"bell:{process or who}:1"


class Keyspace:
    """All keys, and what clients named by a letter ask of them. Answers are decoded."""

    _server = Interpreter()  # One for all: to compile the scripts takes longer than to run them.
    _heard = set()

    def __init__(self):
        self._server.clear()
        while self._heard:
            self._server.stop_listening(self._heard.pop().encode())
        self.us = 1_700_000_000_000_001  # Server time; its last digit is not 0, see lua/_grant.lua.
        self.rung = []  # Channel and words of what somebody has heard.

    @property
    def ms(self):
        return self.us // 1000

    def advance(self, ms):
        self.us += 1000 * ms

    def set_back(self, us):
        """Set the clock back; expiries are absolute times, as on a server."""
        keys = self._server.every_key()
        self._server.clear()
        for key in keys:
            for command in writing(key):
                self._server.perform(*command)
        self.us -= us

    def run(self, script, *args, permit=1):
        keys, before = script.given(KEYS.of_permit(permit)), self.endless()
        answer, rings = self._server.run(script, self.us, keys, args)
        assert self.endless() <= before, "A script has left a key that stays for ever."
        texts = map(_text, rings)
        self.rung += zip(texts, texts, strict=True)
        return _text(answer)

    def endless(self):
        """The keys that stay for ever, but for those of all locks together."""
        keys = {key.name.decode() for key in self._server.every_key() if key.ends is None}
        return keys - {KEYS.fence, KEYS.held, KEYS.ran}

    def do(self, *command):
        return _text(self._server.perform(*command, us=self.us))

    def listen(self, *waiters):
        """Let these hear their bells."""
        for who in waiters:
            self._heard.add(bell(who))
            self._server.listen(bell(who).encode())

    def acquire(
        self, who, mode="try", *, ttl=TTL, ticket=0, markers="", process="", limit=1, owner=""
    ):
        """Ask for the lock, or one of its permits; with markers or without, as clients do."""
        script = scripts.ACQUIRE_MARKED if markers else scripts.ACQUIRE
        if limit > 1:
            script = scripts.ACQUIRE_PERMIT_MARKED if markers else scripts.ACQUIRE_PERMIT
        args = token(who), lease_id(who), ttl, mode, ticket, markers, "r", owner or f"by-{who}"
        return self.run(script, *args, *([limit] if limit > 1 else []), bell(who, process))

    def replace(self, who, mode="queue", *, within=1000, ticket=0, called="", at=None, run=""):
        """Ask for the lock as the newest call of a job, or as one that comes back.

        Args:
            within: How long (ms) a replaced run has to end.
            called: When its call was made (ms), if it comes back.
            at: The same, as its owner says it; by default now.
            run: The id of its task run.
        """
        task = f',"task_id":"{run.partition("/")[0]}"' if run else ""
        owner = f'{{"by":"{who}","called":"{self.ms if at is None else at}"{task}}}'
        markers = f"-{'9000/9/9' if run else ''}|{run}"
        args = token(who), lease_id(who), TTL, mode, ticket, markers, "r", owner, within, called
        return self.run(scripts.ACQUIRE_REPLACING, *args, bell(who))

    def pause(self, who, *, lasts=TTL):
        """Ask for the lock as an operator, so that nobody has it."""
        named = "hold" + who * 28, lease_id(who)
        return self.run(scripts.ACQUIRE, *named, lasts, "pause", 0, "", "-", f"by-{who}", "")

    def renew(self, who, count, ttl=TTL):
        return self.run(scripts.RENEW, token(who), ttl, count)

    def release(self, who, permit=1):
        return self.run(scripts.RELEASE, token(who), permit=permit)

    def leave(self, who, *limit, fence=""):
        return self.run(scripts.LEAVE, token(who), fence, *limit)

    def look(self):
        return self.run(scripts.LOOK)

    def start(self, who, mode="try", *, every=1000, burst=1, patience=86_400_000, claimed=""):
        """Ask for a start under the rate of that name, one each so many ms."""
        claimed = claimed and token(claimed)
        args = token(who), lease_id(who), claimed, mode, patience, 1000 * every, burst, f"by-{who}"
        return self.run(scripts.TAKE_START, *args, bell(who))

    def give_back_start(self, who, every=1000):
        return self.run(scripts.GIVE_BACK_START, token(who), 1000 * every)

    @property
    def lock(self):
        """What the lock key holds; "" if there is none."""
        return self.do("GET", KEYS.lock) or ""

    def holders(self, limit):
        """Who has the permits, the first one first; a dot where nobody has."""
        keys = [KEYS.of_permit(number).lock for number in range(1, limit + 1)]
        return "".join((self.do("GET", key) or ".....")[4] for key in keys)

    @property
    def left(self):
        """The ms that are left of the lock key."""
        return int(self.do("PTTL", KEYS.lock))

    @property
    def queue(self):
        """Who waits, the first to be served first."""
        members = iter(self.do("ZRANGE", KEYS.queue, 0, -1))
        waiters = dict(zip(members, members, strict=True))
        assert all(record.startswith(f"{token}|") for token, record in waiters.items())
        return "".join(token[-1] for token in waiters)

    @property
    def past(self):
        """The timeline, the oldest entry first."""
        return list(self.do("LRANGE", KEYS.past, 0, -1))

    def scores(self, key):
        """The members of a sorted set with their scores."""
        found = iter(self.do("ZRANGE", key, 0, -1, "WITHSCORES"))
        return {member: float(score) for member, score in zip(found, found, strict=True)}

    def fields(self, key):
        found = iter(self.do("HGETALL", key))
        return dict(zip(found, found, strict=True))


def writing(key):
    """Those that write a key, while the clock of the server is at 0."""
    name, content = key.name, key.content
    match key.kind:
        case b"string":
            yield "SET", name, content
        case b"list":
            yield "RPUSH", name, *content
        case b"hash":
            for field, value in zip(content[::2], content[1::2], strict=True):
                yield "HSET", name, field, value
        case b"zset":
            for member, score in zip(content[::2], content[1::2], strict=True):
                yield "ZADD", name, score, member
    if key.ends is not None:
        yield "PEXPIRE", name, key.ends


def value(who, state="hr00000", *, fence, since, ttl=TTL, confirm_by=0, channel=""):
    """What the lock key holds while it is somebody's; see lua/_lease.lua."""
    head = token(who) + state + lease_id(who)
    return f"{head}|{fence}|{since}|{ttl}|{confirm_by}|{channel}|by-{who}"


def _text(answer):
    if isinstance(answer, list):
        return [*map(_text, answer)]
    return answer.decode() if isinstance(answer, bytes) else answer
