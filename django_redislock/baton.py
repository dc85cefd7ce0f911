"""The baton: a text by which one process takes up the lease that another has handed over."""

from __future__ import annotations

from typing import NamedTuple, Self

from django.core.signing import BadSignature, Signer

_SALT = "django_redislock.baton"


class Baton(NamedTuple):
    """The content of a baton. None of it is secret: the signature protects it."""

    alias: str
    name: str  # Of the lock.
    id: str  # Of the lease to take up.
    permit: int = 1  # Which one it is,
    limit: int | None = None  # of how many.

    @property
    def signed(self) -> str:
        """The text that is passed on."""
        return Signer(salt=_SALT).sign_object(list(self))

    @classmethod
    def read(cls, baton: object) -> Self:
        """Read what :attr:`signed` wrote.

        Raises:
            ValueError: It was not signed with this SECRET_KEY, or is no text, or is newer.
        """
        if not isinstance(baton, str):
            raise ValueError(f"baton must be what hand_over() returned, not {baton!r}.")
        try:
            said = Signer(salt=_SALT).unsign_object(baton)
        except BadSignature:
            raise ValueError(
                "baton must be what hand_over() returned: it was changed, or signed with another"
                " SECRET_KEY. All programs that pass batons need the same one; an old one can stay"
                " in SECRET_KEY_FALLBACKS."
            ) from None
        if not isinstance(said, list) or len(said) > len(cls._fields):
            raise ValueError(
                "baton says more than this version of django_redislock can read: a newer one has"
                " made it. Update this program too."
            )
        return cls(*said)
