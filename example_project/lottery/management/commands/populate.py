"""`manage.py populate`: participants for the lottery."""

from __future__ import annotations

import itertools
import random
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from lottery.models import Participant

GIVEN_NAMES = [
    *("Ada", "Alan", "Amina", "Anouk", "Barbara", "Bjarne", "Chidi", "Dana", "Edsger", "Elena"),
    *("Fatima", "Frances", "Grace", "Guido", "Hedy", "Ines", "Ivan", "Jamal", "Joan", "Kamala"),
    *("Ken", "Leslie", "Lin", "Mei", "Niklaus", "Noor", "Olga", "Priya", "Radia", "Wanjiru"),
]
FAMILY_NAMES = [
    *("Abara", "Ahmed", "Baker", "Bauer", "Castro", "Chen", "Cruz", "Diallo", "Dubois", "Eze"),
    *("Fofana", "Garcia", "Haddad", "Hansen", "Ito", "Jensen", "Kaya", "Kim", "Lopez", "Mensah"),
    *("Moreau", "Nguyen", "Novak", "Okafor", "Patel", "Rossi", "Sato", "Silva", "Toure", "Zhou"),
    *("Allen", "Costa", "Fischer", "Ivanova", "Nakamura", "Popescu", "Smith", "Tanaka", "Walker"),
]


class Command(BaseCommand):
    """Adds participants with made-up names."""

    help = "Add participants with made-up names."

    def add_arguments(self, parser: CommandParser) -> None:
        """How many."""
        parser.add_argument("--eligible", type=int, default=1000, help="default: %(default)s")
        parser.add_argument("--ineligible", type=int, default=50, help="default: %(default)s")

    def handle(self, *, eligible: int, ineligible: int, verbosity: int, **options: Any) -> None:
        """Add them."""
        pairs = [f"{given} {family}" for given in GIVEN_NAMES for family in FAMILY_NAMES]
        random.shuffle(pairs)
        names = itertools.cycle(pairs)
        chances = [True] * eligible + [False] * ineligible
        Participant.objects.bulk_create(
            Participant(name=next(names), eligible=chance) for chance in chances
        )
        if verbosity:
            self.stdout.write(f"Added {eligible} eligible and {ineligible} other participants.")
