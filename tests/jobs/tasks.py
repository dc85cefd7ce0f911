"""Jobs as tasks of Django: of Django 6, or of its backport, django-tasks."""

from django_redislock import distributed_lock, single_instance
from django_redislock.jobs import current_lease

try:
    from django.tasks import task
except ImportError:  # Before Django 6.
    from django_tasks import task


def lock():
    """The name of the lock that the body holds."""
    lease = current_lease()
    return lease.name if lease else "none"


@task
@single_instance("import:{source}")
def load(source):
    """A job that blocks."""
    return lock()


@task
@single_instance("import:{source}")
async def aload(source):
    """One that awaits."""
    return lock()


@task(takes_context=True)
@single_instance("import:{source}")
def load_as(context, source):
    """One that is told which try it is."""
    return [lock(), context.attempt]


@task
def whose():
    """Whose a lock is that a task takes by itself, and that of a job within it."""

    @single_instance("job")
    def job():
        lease = current_lease()
        return f"{lease.owner.task.rpartition('.')[2]} {lease.owner.task_id}"

    with distributed_lock("itself") as lease:
        return [lease.owner.task, lease.owner.task_id, job()]
