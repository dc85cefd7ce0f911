"""How the winners are drawn; knows nothing of locks but the fence."""

from __future__ import annotations

import secrets

from django.db import transaction

from lottery.models import Draw, Participant, Winner

PRIZES = 10


class StaleFence(Exception):
    """Somebody drew under the same or a later lease: ours ended without our noticing."""


def draw_winners(*, server: str, fence: int | None, number: int | None = None) -> Draw:
    """Draw the winners among the eligible participants and record them.

    Args:
        server: Who draws.
        number: Of the lottery, where there are many. Each is drawn once: a worker that was killed
            after its draw, and before it could say so, has its task run again.
        fence: The fence of the lease held for it. A server that was paused until its lease had
            ended cannot know that another has drawn since; its fence tells. Without one, nothing
            keeps a second draw out.

    Raises:
        StaleFence: A draw with this fence or a later one exists. Nothing is recorded.
    """
    with transaction.atomic():
        # Reading for update lets one draw at a time past this line, so that the fences seen below
        # are final. (On SQLite the transaction itself does so, see DATABASES.)
        eligible = Participant.objects.select_for_update().filter(eligible=True)
        candidates = list(eligible.values_list("pk", flat=True))

        draws = Draw.objects.filter(number=number)
        if number is not None and (drawn := draws.first()):
            return drawn
        if fence is not None and draws.filter(fence__gte=fence).exists():
            raise StaleFence(f"Fence {fence} comes too late: a later draw exists.")

        draw = Draw.objects.create(server=server, fence=fence, number=number)
        winners = secrets.SystemRandom().sample(candidates, min(PRIZES, len(candidates)))
        Winner.objects.bulk_create(Winner(draw=draw, participant_id=pk) for pk in winners)
    return draw
