"""The lease of a joint lock: a lease of each of its names. joint_holds.py takes and ends them."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from django_redislock import misuse
from django_redislock.decorating import check_callback
from django_redislock.lease import Lease
from django_redislock.rules.joint_state import JointState
from django_redislock.rules.together import together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from django_redislock.lease import GrantingBackend
    from django_redislock.rules.steps import Flow


class JointLease(Lease):
    """The lease of several locks. It is held while each of its parts is held.

    Attributes:
        name: All names, in the order in which they were taken.
        fence: The greatest of *fences*. Comparable only between leases of the same names.
        parts: The lease of each name. Each is renewed by itself, and operators see each as a row.
    """

    __slots__ = ("_parts",)

    state: Any

    def __init__(self, parts: Sequence[Lease], backend: GrantingBackend) -> None:
        state: Any = JointState([part.state for part in parts])
        fence = max(part.fence for part in parts)
        first = parts[0]
        template = ", ".join(part.template for part in parts)
        super().__init__(state.name, first.id, fence, first.owner, backend, state, template)
        self._parts = tuple(parts)

    def __del__(self) -> None:
        """Nothing: each dropped part logs that itself."""

    @property
    def parts(self) -> tuple[Lease, ...]:
        """The lease of each name."""
        return self._parts

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call *callback* with this lease once, when its first part is lost."""
        check_callback(callback, "on_lost()")
        untold = [callback]

        def tell(_: Lease) -> None:
            try:
                told = untold.pop()
            except IndexError:
                return  # Another part was lost before.
            told(self)

        for part in self._parts:
            part.on_lost(tell)

    def on_endangered(self, callback: Callable[[Lease], object], left: float = 0.5) -> None:
        """Call *callback* with this lease when a part of it may soon be lost; see Lease.

        It is not called again until no part is endangered.
        """
        check_callback(callback, "on_endangered()")
        told: list[tuple[Lease, object]] = []  # Of which part, in which of its dangers.
        mutex = threading.Lock()

        def tell(part: Lease) -> None:
            danger = part.state.danger
            with mutex:
                told[:] = [one for one in told if one[0].state.danger is one[1]]
                is_first = not told
                told.append((part, danger))
            if is_first and danger is not None:
                callback(self)

        for part in self._parts:
            part.on_endangered(tell, left)

    def renewing(self, ttl: float | None, until: float = -math.inf) -> Flow[None]:
        yield from together([part.renewing(ttl, until) for part in self._parts])

    def _hand_over(self, within: float | timedelta) -> NoReturn:
        raise misuse.is_joint(self.name)
