"""Why a lease is over, as models of histories know it; lua/_absence.lua is what a server tells."""


class Loss:
    """A lease is over, and its owner has not released it yet.

    Who asks is told what is so at that time. A confirmation or a renewal that comes late on a busy
    machine may ask at any time, and a lease goes by the first answer.
    """

    def __init__(self, reason):
        self.reason = reason
        self._told = {reason}  # Whatever may have been told until now.

    def is_taken(self):
        """Somebody else has the lock, or this permit."""
        if self.reason == "expired":
            self._told.add("taken")

    def is_forgotten(self):
        """The server no longer remembers that the lease was forced open."""
        self.reason = "expired"
        self._told.add("expired")

    def told(self, known, others):
        """What the owner is told now, if it has *known* that reason, and *others* have the lock."""
        if others:
            self.is_taken()
        assert known is None or known in self._told
        return known or ("taken" if self.reason == "expired" and others else self.reason)
