"""Tasks of Django, or of its backport; in a module of their own, where a worker finds them."""

from django_redislock import single_instance
from tests.celery.project.journal import note, wait_at_gate

try:
    from django.tasks import task
except ImportError:  # Before Django 6.
    from django_tasks import task


@task
@single_instance("{key}", ttl=2)
def load(key):
    note(key, "start")
    wait_at_gate(key)
    note(key, "end")
    return f"did {key}"


@task
@single_instance("{key}", ttl=2, on_conflict="wait", wait=60)
def load_after(key):
    return load.func.__wrapped__(key)
