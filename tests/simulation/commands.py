"""What the server keeps of a lock, and what no command may do to that, however late."""

from typing import NamedTuple

from django_redislock.rules import scripts
from django_redislock.rules.flows import CONFIRM_WITHIN

CONFIRM_WITHIN_MS = int(CONFIRM_WITHIN * 1000)


class Violation(Exception):
    """A promise was broken."""


class Lease(NamedTuple):
    """The value of the lock key, see lua/_lease.lua, and when the key expires."""

    value: bytes
    ends: int | None  # ms

    @property
    def token(self):
        return self.value[:32].decode()

    @property
    def id(self):
        return self.value[39:55].decode()

    @property
    def is_pause(self):
        return self.value.startswith(b"hold")

    @property
    def is_unconfirmed(self):
        return self.value[32:33] == b"c"

    @property
    def waits_for_baton(self):
        """Whether whoever has the baton may take it up."""
        return self.is_unconfirmed and self.value.split(b"|")[5] == b"baton:"

    @property
    def fence(self):
        return int(self.value.split(b"|")[1])

    @property
    def confirm_by(self):
        """Until when it can be confirmed, in ms; 0 if nobody has to."""
        return int(self.value.split(b"|")[4])


class Kept(NamedTuple):
    """All that the server keeps of a lock at one moment."""

    leases: tuple[Lease | None, ...]  # Of each permit, from the first on.
    queue: tuple[str, ...]  # Tokens of the waiters.


def belongs(lease, token):
    """Whether it is the lease of this token."""
    return lease is not None and lease.token == token


def check_command(before, after, step, ms, fence, held_until, replaced=frozenset()):
    """Check what a command did to a lock. Returns the highest fence that was ever granted.

    Args:
        before: What the server kept before.
        after: And after it.
        step: The command.
        ms: The time of the server.
        fence: The highest fence before.
        held_until: Until when an operator keeps the lock from everybody, in ms; 0 if none does.
        replaced: The ids of leases that a newer call may end, since their time to end is over.

    Raises:
        Violation: It must not do that.
    """
    granted = []
    for was, now in zip(before.leases, after.leases, strict=True):
        _check_touched(was, now, step, ms, replaced)
        if now is not None and (was is None or now.fence != was.fence):
            granted.append(now)
    for lease in sorted(granted, key=lambda one: one.fence):
        if lease.fence <= fence:
            raise Violation("R9: a fence did not grow")
        fence = lease.fence
        if step.script in {scripts.HAND_OVER, scripts.TAKE_UP}:
            continue  # The lease passes nobody: it goes on under another token.
        if not lease.is_pause and held_until > ms:
            raise Violation(f"{lease.token[:2]} was granted the lock during a pause")
        _check_order(before, after, lease.token)
    return fence


def check_end(lease, ms, ttl):
    """Check that a lease ends in time.

    Args:
        lease: It.
        ms: The time of the server.
        ttl: Seconds.

    Raises:
        Violation: It does not.
    """
    longest = ttl * 1000 + (CONFIRM_WITHIN_MS if lease.is_unconfirmed else 0)
    if lease.ends is None or lease.ends - ms > longest:
        raise Violation(f"P2: the lease of {lease.token[:2]} outlives its ttl")
    if lease.is_unconfirmed and lease.confirm_by - ms > CONFIRM_WITHIN_MS:
        raise Violation(
            f"P6: {lease.token[:2]}, who confirms nothing, delays the others for too long"
        )


def _check_touched(was, now, step, ms, replaced):
    """Nobody but its owner touches a lease, unless it is handed over or has lapsed."""
    if was is None or now == was or was.token in step.args:
        return
    lapsed = was.is_unconfirmed and was.confirm_by <= ms
    taken_up = step.script is scripts.TAKE_UP and was.waits_for_baton and was.id in step.args
    # An operator ends the lease that was seen, by its id; or the pause of a lock.
    forced = step.script is scripts.FORCE_RELEASE and was.id.encode() in step.args
    unheld = step.script is scripts.RESUME and was.is_pause
    followed = step.script is scripts.ACQUIRE_REPLACING and was.id in replaced
    if not (lapsed or taken_up or forced or unheld or followed):
        token = next((arg for arg in step.args if isinstance(arg, str)), "")
        raise Violation(f"P3: a command of {token[:2]} touched the lease of {was.token[:2]}")


def _check_order(before, after, token):
    """Whoever is granted the lock has passed nobody who goes on waiting."""
    queue = before.queue
    ahead = queue[: queue.index(token)] if token in queue else queue
    if passed := [one for one in ahead if one in after.queue]:
        raise Violation(f"P6: {token[:2]} was granted the lock before {passed[0][:2]}")
