"""What the locks of these tests protect."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models

from django_redislock.models import FencedModel


class Counter(models.Model):
    """A number that is read, and written one higher: two who do so at once lose an update."""

    name = models.CharField(max_length=50, unique=True)
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


class Entry(models.Model):
    """One line of a ledger; ``position`` is the order in which they were written."""

    position = models.BigAutoField(primary_key=True)
    fence = models.BigIntegerField()
    value = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.position}: {self.value} under {self.fence}"


def written(database: str) -> list[int]:
    """The fences of all entries, in the order in which they were written."""
    return list(Entry.objects.using(database).order_by("position").values_list("fence", flat=True))


class Report(FencedModel):
    """A row that knows the fence that it was last written under."""

    body = models.CharField(max_length=50, default="")
    is_new = models.BooleanField(default=True)

    def __str__(self) -> str:
        return f"{self.body} under {self.fence}"


class Annual(Report):
    """A row in two tables, whose fence stands in that of its parent."""

    year = models.IntegerField(default=0)


class Note(FencedModel):
    """A row that may be selected by what stands in another table."""

    report = models.ForeignKey(Report, models.CASCADE)
    text = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return f"{self.text} under {self.fence}"


class Kept(models.Manager["Letter"]):
    """Hides the letters that are thrown away, as soft deletion does."""

    def get_queryset(self) -> models.QuerySet[Letter]:
        return super().get_queryset().exclude(text="thrown away")


class Letters(models.QuerySet["Letter"]):
    """Marks what it writes."""

    def update(self, **values: Any) -> int:
        """Mark it, too."""
        return super().update(text="written", **values)


class Letter(Note):
    """A note with a way to write of its own, and a manager that hides some."""

    objects: ClassVar[models.Manager[Letter]] = Kept()
    everything = Letters.as_manager()

    class Meta:
        proxy = True
        base_manager_name = "objects"


class Till(Counter, FencedModel):
    """A row in two tables, whose fence stands in its own."""

    is_open = models.BooleanField(default=True)


class Stock(models.Model):
    """That of docs/databases.md, which is written if its version is the one that was read."""

    left = models.IntegerField()
    version = models.IntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.left} left"


class Order(models.Model):
    """That of docs/recipes.md. No test of this folder needs its table."""

    total = models.IntegerField()
    receipt = models.CharField(max_length=50, default="")

    def __str__(self) -> str:
        return f"{self.total}: {self.receipt}"


class Account(models.Model):
    """That of docs/recipes.md."""

    balance = models.IntegerField()

    def __str__(self) -> str:
        return str(self.balance)


class Winner(models.Model):
    """A number that a lottery has drawn."""

    day = models.CharField(max_length=10)
    number = models.IntegerField()

    def __str__(self) -> str:
        return f"{self.day}: {self.number}"


class Unfenced(models.Model):
    """A row whose field has the name and not the meaning: null compares with nothing."""

    fence = models.BigIntegerField(null=True)

    def __str__(self) -> str:
        return str(self.fence)


# In an order in which they can be made.
TABLES = (Counter, Entry, Report, Annual, Note, Till, Stock, Unfenced)
