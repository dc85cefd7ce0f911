from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """The table in which leases claim their fences; only lease.atomic() uses it."""

    dependencies = [("django_redislock", "0001_initial")]

    operations = [
        migrations.CreateModel(
            name="Fence",
            fields=[
                ("key", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("name", models.CharField(max_length=200)),
                ("alias", models.CharField(max_length=200)),
                ("fence", models.BigIntegerField()),
                ("lease_id", models.CharField(max_length=16)),
                ("claimed_at", models.DateTimeField()),
            ],
            options={"default_permissions": ()},
        ),
    ]
