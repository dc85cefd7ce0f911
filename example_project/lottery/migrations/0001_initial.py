from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Draw",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("drawn_at", models.DateTimeField(auto_now_add=True)),
                (
                    "server",
                    models.CharField(help_text="The Celery worker that drew.", max_length=255),
                ),
                (
                    "fence",
                    models.BigIntegerField(
                        editable=False,
                        help_text="Fence of the lease it was drawn under; none without the lock.",
                        null=True,
                        unique=True,
                    ),
                ),
            ],
            options={
                "ordering": ["-drawn_at", "-pk"],
            },
        ),
        migrations.CreateModel(
            name="Participant",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=200)),
                (
                    "eligible",
                    models.BooleanField(
                        db_index=True, default=True, help_text="Only the eligible can win."
                    ),
                ),
            ],
            options={
                "ordering": ["name", "pk"],
            },
        ),
        migrations.CreateModel(
            name="Winner",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                (
                    "draw",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="winners",
                        to="lottery.draw",
                    ),
                ),
                (
                    "participant",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="wins",
                        to="lottery.participant",
                    ),
                ),
            ],
            options={
                "ordering": ["draw", "pk"],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("draw", "participant"), name="wins_once_per_draw"
                    )
                ],
            },
        ),
    ]
