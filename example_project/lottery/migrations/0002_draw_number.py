from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("lottery", "0001_initial")]

    operations = [
        migrations.AddField(
            model_name="draw",
            name="number",
            field=models.PositiveIntegerField(
                db_index=True,
                editable=False,
                help_text="Of the lottery that was drawn, where there are many.",
                null=True,
            ),
        ),
    ]
