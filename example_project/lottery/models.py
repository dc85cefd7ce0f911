"""Who takes part, what was drawn, who won, and how many tickets were sold."""

from __future__ import annotations

from django.db import models


class Participant(models.Model):
    """A person who takes part in the lottery."""

    name = models.CharField(max_length=200)
    eligible = models.BooleanField(
        default=True,
        db_index=True,
        help_text="Only the eligible can win.",
    )

    class Meta:
        ordering = ["name", "pk"]

    def __str__(self) -> str:
        return self.name


class Draw(models.Model):
    """One drawing of the lottery."""

    drawn_at = models.DateTimeField(auto_now_add=True)
    server = models.CharField(max_length=255, help_text="The Celery worker that drew.")
    number = models.PositiveIntegerField(
        null=True,
        db_index=True,
        editable=False,
        help_text="Of the lottery that was drawn, where there are many.",
    )
    fence = models.BigIntegerField(
        unique=True,
        null=True,
        editable=False,
        help_text="Fence of the lease it was drawn under; none without the lock.",
    )

    class Meta:
        ordering = ["-drawn_at", "-pk"]

    def __str__(self) -> str:
        return f"Draw {self.pk}"


class Winner(models.Model):
    """A participant who won in a draw."""

    draw = models.ForeignKey(Draw, on_delete=models.CASCADE, related_name="winners")
    participant = models.ForeignKey(Participant, on_delete=models.PROTECT, related_name="wins")

    class Meta:
        ordering = ["draw", "pk"]
        constraints = [
            models.UniqueConstraint(fields=["draw", "participant"], name="wins_once_per_draw"),
        ]

    def __str__(self) -> str:
        return f"{self.participant} in {self.draw}"


class Pot(models.Model):
    """What the tickets of a lottery have brought in so far."""

    tickets = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.tickets} tickets"
