"""Settings of the process that runs the demo; manage.py chooses them for that command.

They only name a home for this one run. The command makes it, starts a server and a database in
it, tells its workers (which use the ordinary settings) where they are, and removes it all.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

DEMO_HOME = Path(tempfile.gettempdir()) / f"lottery-demo-{secrets.token_hex(8)}"

os.environ["DATABASE_PATH"] = str(DEMO_HOME / "lottery.sqlite3")
# Whatever is set, the demo keeps its hands off it; this process itself never speaks to Redis.
os.environ["REDIS_URL"] = "redis://127.0.0.1:1/0"

from example_project.settings import *  # noqa: E402, F403

# The tables of other apps are made as they are today, without the steps that led there.
MIGRATION_MODULES = dict.fromkeys(
    ["admin", "auth", "contenttypes", "sessions", "django_tasks_database"]
)
