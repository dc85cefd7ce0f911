"""How the winners are drawn; knows nothing of locks."""

from __future__ import annotations

import secrets

from django.db import transaction

from lottery.models import Draw, Participant, Winner

PRIZES = 10


def draw_winners(*, server: str, fence: int | None, number: int | None = None) -> Draw:
    """Draw the winners among the eligible participants and record them.

    Args:
        server: Who draws.
        fence: That of the lease it is drawn under, for the record; None without the lock.
        number: Of the lottery, where there are many.
    """
    with transaction.atomic():
        eligible = Participant.objects.filter(eligible=True)
        candidates = list(eligible.values_list("pk", flat=True))
        draw = Draw.objects.create(server=server, fence=fence, number=number)
        winners = secrets.SystemRandom().sample(candidates, min(PRIZES, len(candidates)))
        Winner.objects.bulk_create(Winner(draw=draw, participant_id=pk) for pk in winners)
    return draw
