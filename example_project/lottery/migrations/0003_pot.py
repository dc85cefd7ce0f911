from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("lottery", "0002_draw_number")]

    operations = [
        migrations.CreateModel(
            name="Pot",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("tickets", models.PositiveIntegerField(default=0)),
            ],
        ),
    ]
