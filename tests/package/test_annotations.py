"""Users' modules whose annotations name what is imported for type checkers only.

They are written without ``from __future__ import annotations``. Before Python 3.14 such a name has
to be quoted; from then on only for an old Celery, which evaluates the annotations of a task itself.
"""

from __future__ import annotations

import sys
from textwrap import dedent

import celery
import pytest
from django.test import RequestFactory

from django_redislock import distributed_lock, take_up
from django_redislock.celery.checks import check_tasks
from tests.support.celery_app import EAGER, celery_app

IS_PLAIN = sys.version_info >= (3, 14) and celery.VERSION >= (5, 6, 3)
ORDER = "Order" if IS_PLAIN else '"Order"'

BEGINNING = """
from typing import TYPE_CHECKING

from celery import Task, current_app
from django.http import HttpResponse
from django.utils.decorators import method_decorator
from django.views import View

from django_redislock import Limit, distributed_lock, single_instance, single_instance_task
from django_redislock.celery import SingleInstanceTask
from django_redislock.jobs import current_lease

if TYPE_CHECKING:
    from shop.models import Order


def name():
    return current_lease().name

"""


@pytest.fixture(autouse=True)
def app():
    """An application in eager mode. The tasks of a test end with it."""
    with celery_app(**EAGER):
        yield


def written(code):
    """A module of a user with this code, in which ORDER stands for the class."""
    module = {"__name__": "shop.orders"}
    text = BEGINNING + dedent(code).replace("ORDER", ORDER)
    exec(compile(text, "shop/orders.py", "exec", dont_inherit=True), module)
    return module


OF_LOCKS = {
    "lock": """
        @distributed_lock("order:{order}")
        def pay(order: ORDER) -> ORDER:
            return "order:7"
        """,
    "several": """
        @distributed_lock("order:{order}", "paid:{order}")
        def pay(order: ORDER) -> ORDER:
            return "order:7"
        """,
    "method": """
        class Till:
            @distributed_lock("order:{order}")
            def pay(self, order: ORDER) -> ORDER:
                return "order:7"

        pay = Till().pay
        """,
    "view": """
        def lock(function):
            return distributed_lock("order:{order}")(function)

        class Till(View):
            @method_decorator(lock)
            def get(self, request, order: ORDER) -> ORDER:
                return HttpResponse("order:7")

        def pay(order):
            return Till.as_view()(REQUEST, order=order).content.decode()
        """,
    "key function": """
        def key(order: ORDER, **rest: ORDER) -> ORDER:
            return f"order:{order}"

        @single_instance_task(key=key, bind=True, unique_queued=True)
        def pay(self: Task, order: ORDER, **rest: ORDER) -> ORDER:
            return name()
        """,
}
JOB = """
    def most(order: ORDER) -> ORDER:
        return 2

    @{}
    def pay(order: ORDER) -> ORDER:
        return name()
    """
OF_JOBS = [
    'single_instance("order:{order}")',
    'single_instance(limits=[Limit("order:{order}", most)])',
    'single_instance_task(key="order:{order}")',
    'single_instance_task(limits=[Limit("order:{order}", most)])',
]
CLASS = """
    class Pay(SingleInstanceTask):
        name = "shop.orders.pay"
        single_instance = {{"key": "order:{{order}}"}}

        {}

    pay = current_app.register_task(Pay())
    """
OF_CLASSES = [
    "def run(self, order: ORDER) -> ORDER: return name()",
    "@staticmethod\n        def run(order: ORDER) -> ORDER: return name()",
]


@pytest.mark.parametrize(
    "code",
    [
        *OF_LOCKS.values(),
        *(JOB.format(decorator) for decorator in OF_JOBS),
        *(CLASS.format(run) for run in OF_CLASSES),
    ],
    ids=[*OF_LOCKS, *OF_JOBS, *OF_CLASSES],
)
def test_a_name_that_only_type_checkers_know_may_be_in_an_annotation(redislock, code):
    module = written(code)
    module["REQUEST"] = RequestFactory().get("/")
    pay = module["pay"]
    assert pay(7) == "order:7"
    if hasattr(pay, "delay"):
        assert pay.delay(7).get() == pay.delay(order=7).get() == "order:7"


def test_a_call_of_such_a_task_carries_a_baton(redislock):
    module = written(
        """
        @single_instance_task(key="order:{order}")
        def pay(order: ORDER, *, baton: ORDER = None) -> ORDER:
            return baton

        @single_instance_task(key="order:{order}", on_conflict="raise")
        def ship(order: ORDER) -> ORDER:
            return name()
        """
    )
    with distributed_lock("order:7") as lease:
        baton = lease.hand_over()
    assert module["ship"].delay(7, baton=baton).get() == "order:7"
    with distributed_lock("order:8") as lease:
        baton = lease.hand_over()
    assert module["pay"].delay(7, baton=baton).get() == baton
    with take_up(baton):
        pass


def test_the_system_check_names_the_arguments_of_such_a_task(redislock):
    written(
        """
        @single_instance_task(name="shop.orders.pay")
        def pay(order: ORDER) -> ORDER: ...
        """
    )
    found = [one for one in check_tasks(None) if "shop.orders.pay" in one.msg]
    assert [(one.id, "(order)" in one.msg) for one in found] == [("django_redislock.W050", True)]
