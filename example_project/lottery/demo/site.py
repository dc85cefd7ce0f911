"""The site of `demo_admin`, and who may sign in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib.auth.models import Permission, User
from django.urls import reverse

from example_project import embedded_server
from lottery.demo.servers import manage_command

if TYPE_CHECKING:
    from lottery.demo.stage import Stage

HOST = "127.0.0.1"
PASSWORD = "demo"  # Of users that live as long as the demo, on the loopback interface.
# As Django's runserver says it.
LISTENS, PORT_TAKEN = "Starting development server at", "That port is already in use"
OPERATOR, VIEWER = "admin", "viewer"


class Site:
    """Django's development server."""

    def __init__(self, stage: Stage, wanted_port: int) -> None:
        self._stage = stage
        self._start(wanted_port)

    def url(self, page: str) -> str:
        """The address of a page, by its name in the URL configuration."""
        return f"http://{HOST}:{self.port}{reverse(page)}"

    def check(self) -> None:
        """Raise ChildDied if it runs no more."""
        if self._child.status and PORT_TAKEN in self._child.err():
            self._start()  # Another process took the port after we had found it free.
        self._child.check(may_end=False)

    def is_up(self) -> bool:
        """Whether it takes requests."""
        return LISTENS in self._child.out()

    def _start(self, wanted_port: int = 0) -> None:
        self.port = embedded_server.free_port(wanted_port)
        python, *arguments = manage_command("runserver", "--noreload", f"{HOST}:{self.port}")
        self._child = self._stage.machine("web", [python, "-u", *arguments])


def add_users() -> None:
    """Add one who may do everything, and one who may only look."""
    User.objects.create_superuser(OPERATOR, password=PASSWORD)
    viewer = User.objects.create_user(VIEWER, password=PASSWORD, is_staff=True)
    viewer.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label__in=["django_redislock", "lottery"],
            codename__startswith="view_",
        )
    )
