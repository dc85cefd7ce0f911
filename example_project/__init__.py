"""Makes the project inside importable from the repository's top level.

`python example_project/manage.py` puts this directory on the path, as in every Django project.
`celery -A example_project worker` puts the current directory there instead; run one level up, it
finds this package, which therefore stands for the one inside.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent

sys.path.insert(0, str(_HERE))
__path__ = [str(_HERE / "example_project")]

from .celery import app as celery_app  # noqa: E402  (it is found on the path set above)

__all__ = ["celery_app"]
