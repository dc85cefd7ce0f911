from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """The table of completed runs; only tasks with once="database" use it."""

    dependencies = [("django_redislock", "0002_fence")]

    operations = [
        migrations.CreateModel(
            name="CompletedRun",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("key", models.CharField(max_length=64, unique=True)),
                ("name", models.CharField(max_length=200)),
                ("alias", models.CharField(max_length=200)),
                ("task", models.TextField()),
                ("task_id", models.TextField()),
                ("place", models.TextField()),
                ("fence", models.BigIntegerField()),
                ("lease_id", models.CharField(max_length=16)),
                ("completed_at", models.DateTimeField(db_index=True)),
            ],
            options={"default_permissions": ("view", "delete")},
        ),
    ]
