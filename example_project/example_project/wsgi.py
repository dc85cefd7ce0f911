"""The WSGI application, for `runserver` and any WSGI server."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

from example_project.telemetry import serve_metrics

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

application = get_wsgi_application()
serve_metrics()
