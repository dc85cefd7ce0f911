"""The site of the tests: Django's admin alone, under the strictest Content-Security-Policy.

As a child process it is served to a browser: spawn(serve, folder) says its address.
"""

import threading
from wsgiref.simple_server import WSGIRequestHandler

from django.contrib import admin
from django.urls import path

from tests.support.processes import hear, say

urlpatterns = [path("admin/", admin.site.urls)]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PASSWORD = "correct horse battery staple"
# Who may what: a superuser; staff who may look at locks, or also release them; staff who may look
# at completed runs, or also forget them; staff who may nothing.
USERS = {
    "root": None,
    "looker": ["view_heldlock"],
    "operator": ["view_heldlock", "force_release_heldlock"],
    "keeper": ["view_heldlock", "pause_heldlock"],
    "auditor": ["view_completedrun"],
    "forgetter": ["view_completedrun", "delete_completedrun"],
    "clerk": [],
}


def strict_policy(get_response):
    """Middleware: nothing inline, nothing from elsewhere."""

    def with_policy(request):
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return with_policy


def add_user(name):
    """Add one of the users above to the database."""
    from django.contrib.auth.models import Permission, User

    rights = USERS[name]
    user = User.objects.create_user(
        name, password=PASSWORD, is_staff=True, is_superuser=rights is None
    )
    user.user_permissions.add(*Permission.objects.filter(codename__in=rights or ()))
    return user


def serve(folder):
    """In a child: serve the site until the test ends."""
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.core.servers.basehttp import ThreadedWSGIServer
    from django.core.wsgi import get_wsgi_application
    from django.db import connections

    from django_redislock.admin import page, panels

    page.REFRESH_SECONDS = 1
    panels.SAME_OCCASION = -1.0  # A run and a skip within one millisecond are of the same time.
    # A file: each thread has a connection of its own.
    connections["default"].settings_dict["NAME"] = f"{folder}/site.sqlite3"
    call_command("migrate", verbosity=0)
    for name in USERS:
        add_user(name)
    server = ThreadedWSGIServer(("127.0.0.1", 0), _Quiet)
    server.set_app(StaticFilesHandler(get_wsgi_application()))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"http://127.0.0.1:{server.server_port}")
    hear()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *args):
        pass
