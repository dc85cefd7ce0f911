from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """The permissions that go with held locks; no table."""

    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="HeldLock",
            fields=[
                (
                    "key",
                    models.CharField(
                        editable=False, max_length=1000, primary_key=True, serialize=False
                    ),
                ),
            ],
            options={
                "verbose_name": "held lock",
                "verbose_name_plural": "held locks",
                "permissions": [("force_release_heldlock", "Can force release held locks")],
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view",),
            },
        ),
    ]
