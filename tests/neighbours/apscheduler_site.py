"""A site each of whose processes has a scheduler of APScheduler. Each second it draws."""

import json
import os
import time

import django
from apscheduler.schedulers.background import BackgroundScheduler
from django.conf import settings

from django_redislock import single_instance
from tests.celery.project.journal import note

settings.configure(
    INSTALLED_APPS=["django_redislock"], REDISLOCK=json.loads(os.environ["TESTS_REDISLOCK"])
)
django.setup()

KEY = os.environ["TESTS_KEY"]


@single_instance("{key}:{tick}", ttl=3, once=600)
def draw(key, tick):
    note(key, "draw", tick=tick)


def on_tick():
    tick = int(time.time())
    note(KEY, "tick", tick=tick)
    draw(KEY, tick)
    note(KEY, "tock", tick=tick)


scheduler = BackgroundScheduler()
scheduler.add_job(on_tick, "cron", second="*", max_instances=3)
scheduler.start()


def application(environ, start_response):
    start_response("200 OK", [])
    return [b"ok"]
