"""docs/getting-started.md: what a reader pastes first does what the page says."""

import os

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_redislock.models import Fence
from tests import ROOT
from tests.effects.models import Winner
from tests.support.others import held_by_other
from tests.support.processes import python

pytestmark = pytest.mark.usefixtures("locks")


@pytest.mark.django_db(transaction=True)
def test_the_lottery_is_drawn_once_a_day_under_its_fence(paste):
    page = paste(
        "getting-started.md",
        {
            "shop/models.py": "from tests.effects.models import Winner\n",
            "shop/lottery.py": "def draw(number): return range(number)\n",
        },
    )
    tasks = page.module("shop.tasks")
    name = f"shop.tasks.run_lottery:{timezone.localdate()}"
    with held_by_other(name):  # In eager mode there is no broker to wait at.
        assert tasks.run_lottery.delay().get()["skipped"] == "busy"
    assert not Winner.objects.exists()
    assert tasks.run_lottery.delay().get() is None
    assert tasks.run_lottery.delay().get()["skipped"] == "done"
    assert Winner.objects.count() == 10
    assert Fence.objects.get().name == name


# What the page leaves to Celery's own, and to the reader.
OF_THE_READER = {
    "shop/__init__.py": "from shop.celery import app\n",
    "shop/celery.py": """
        from celery import Celery

        app = Celery("shop")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.autodiscover_tasks()
    """,
    "shop/settings.py": """
        CELERY_TASK_ALWAYS_EAGER = True
        CELERY_RESULT_BACKEND = "cache+memory://"
    """,
    "shop/lottery.py": "def draw(number): return range(number)\n",
    "shop/models.py": """
        from django.db import models

        class Winner(models.Model):
            number = models.IntegerField()
    """,
    "draw.py": """
        import django
        from django.core.management import call_command

        django.setup()
        call_command("makemigrations", "shop")
        call_command("migrate")
        call_command("check", fail_level="WARNING")

        from shop.celery import app
        from shop.models import Winner

        app.loader.import_default_modules()  # As a worker does.
        for _ in range(2):
            app.tasks["shop.tasks.run_lottery"].delay().get()
        assert Winner.objects.count() == 10
    """,
}


@pytest.mark.slow
def test_who_follows_the_page_in_a_new_project_gets_a_draw(paste, locks, tmp_path):
    call_command("startproject", "shop", tmp_path)
    where = f'"{locks.server.url}", "KEY_PREFIX": "{locks.prefix}"'
    paste("getting-started.md", OF_THE_READER, {'"redis://127.0.0.1:6379/0"': where})
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {"DJANGO_SETTINGS_MODULE": "shop.settings", "PYTHONPATH": path}
    python("draw.py", cwd=tmp_path, env=os.environ | environment)
