from __future__ import annotations

from django.db import migrations


class Migration(migrations.Migration):
    """The permission to pause locks, for operators; no table."""

    dependencies = [("django_redislock", "0003_completedrun")]

    operations = [
        migrations.AlterModelOptions(
            name="heldlock",
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "permissions": [
                    ("force_release_heldlock", "Can force release held locks"),
                    ("pause_heldlock", "Can pause locks, so that nobody gets them"),
                ],
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view",),
            },
        ),
    ]
