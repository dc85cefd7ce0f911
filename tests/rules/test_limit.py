"""How many may hold a lock at a time: a number, or a function of the arguments of a call."""

import math
from dataclasses import FrozenInstanceError
from datetime import timedelta

import pytest

from django_redislock import InvalidLockName
from django_redislock.rules.limit import Limit, Rate, all_makers, check_limits
from django_redislock.rules.names import formatter


def export(tenant, size=1): ...


def made(limit, function, *args, **kwargs):
    """The limit of one call."""
    return limit.maker(function)(args, kwargs)


def test_a_limit_is_a_value_of_a_name_and_a_number_up_to_a_thousand():
    assert Limit("export", 1000) == Limit("export", 1000) != Limit("export", 1)
    assert Limit("cafe\u0301", 1).name == "caf\u00e9"
    with pytest.raises(FrozenInstanceError):
        Limit("export", 1).number = 2


@pytest.mark.parametrize("number", [0, -1, 1001, 1.5, "2", True, None])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(
        ValueError, match=r"The number of Limit\('export'\) must be an integer, 1 to 1000"
    ):
        Limit("export", number)


def test_only_a_template_may_be_longer_than_a_name():
    assert Limit("{tenant}" + "x" * 200, 1)
    with pytest.raises(InvalidLockName, match="201 bytes"):
        Limit("x" * 201, 1)


def test_a_number_stays_and_the_name_is_made_of_the_arguments():
    assert made(Limit("export:{tenant}", 2), export, "acme") == Limit("export:acme", 2)


def test_the_name_may_be_made_in_another_way():
    for number in (2, lambda size: size):
        maker = Limit("export:{tenant}", number).maker(export, lambda args, kwargs: "as it likes")
        assert maker(("acme", 2), {}) == Limit("as it likes", 2)


def test_the_number_is_a_function_of_the_arguments_that_it_names():
    def counts(tenant, *, size):
        return {"acme": 10}[tenant] * size

    assert made(Limit("export", counts), export, "acme").number == 10
    assert made(Limit("export", counts), export, "acme", size=3).number == 30


def test_it_may_take_all_arguments_or_have_some_of_its_own():
    every = Limit("export", lambda **passed: len(passed))
    assert made(every, export, "acme").number == 2
    own = Limit("export", lambda tenant, at_least=7: at_least)
    assert made(own, export, "acme").number == 7


def test_of_a_function_that_takes_any_argument_it_may_name_any():
    def takes_any(**others): ...

    limit = Limit("export", lambda tenant: {"acme": 3}[tenant])
    assert made(limit, takes_any, tenant="acme").number == 3


def plans(plan="free"):
    return {"free": 1, "pro": 10}[plan]


def test_of_a_function_that_takes_any_argument_a_default_is_only_for_what_is_not_passed():
    def takes_any(tenant="", **others): ...

    limit = Limit("export", plans)
    assert made(limit, takes_any).number == 1
    assert made(limit, takes_any, plan="pro").number == 10
    assert made(limit, takes_any, "acme", plan="pro", size=2).number == 10


def test_an_argument_that_a_call_does_not_have_is_named():
    def takes_any(size=1, **others): ...

    limit = Limit("export", lambda size, tenant, others: size)
    with pytest.raises(InvalidLockName, match="names 'tenant'; the arguments are plan, size"):
        made(limit, takes_any, plan="pro")
    with pytest.raises(InvalidLockName, match="names 'others'; the arguments are"):
        made(limit, takes_any, tenant="acme")


@pytest.mark.parametrize("counts", [int, lambda tenant, /: 2])
def test_a_number_that_takes_no_arguments_by_name_is_refused(counts):
    with pytest.raises(ValueError, match="takes no arguments by name"):
        Limit("export", counts).maker(export)


def test_a_number_that_names_an_unknown_argument_says_which_there_are():
    limit = Limit("export", lambda nobody: 2)
    with pytest.raises(InvalidLockName, match="'nobody'; the arguments are tenant, size"):
        limit.maker(export)
    with pytest.raises(InvalidLockName, match="'nobody'; the arguments are none"):
        limit.maker(lambda: None)


def test_a_number_that_takes_all_says_so_too_if_it_names_one_that_there_is_not():
    def takes_any(**others): ...

    limit = Limit("export", lambda nobody, *places, **rest: len(rest))
    with pytest.raises(InvalidLockName, match="'nobody'; the arguments are tenant, size"):
        limit.maker(export)
    with pytest.raises(InvalidLockName, match="'nobody'; the arguments are tenant"):
        made(limit, takes_any, tenant="acme")
    assert made(limit, takes_any, tenant="acme", nobody=1).number == 1


def test_nobody_would_await_a_coroutine_function():
    async def counts():
        return 2

    with pytest.raises(ValueError, match=r"Limit\('export'\) must not be a coroutine function"):
        Limit("export", counts)


def test_limits_are_a_list_of_which_no_two_have_one_name():
    both = Limit("export:{tenant}", 2), Limit("export", 3)
    assert check_limits([*both]) == both
    for limits in ([], "export", None, ["export"]):
        with pytest.raises(ValueError, match="limits must be a list of"):
            check_limits(limits)
    with pytest.raises(ValueError, match="'export' twice"):
        check_limits([both[1], Limit("export", 2)])


def test_all_limits_of_a_call_are_made_and_are_not_one_lock():
    limits = Limit("export:{tenant}", 2), Limit("export:acme", 3)
    make = all_makers(limits, export, lambda name: formatter(name, export))
    assert make(("other",), {}) == (Limit("export:other", 2), Limit("export:acme", 3))
    with pytest.raises(ValueError, match="'export:acme' twice"):
        make(("acme",), {})


# --- rates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "between"),
    [
        ("10/s", 0.1),
        (" 4.5/m ", 60 / 4.5),
        ("1000/h", 3.6),
        ("2", 0.5),
        ((1, 300), 300),
        ((3, timedelta(minutes=1)), 20),
        ((1, 1e-5), 1e-5),
        ((1, timedelta(days=366)), 366 * 86_400),
    ],
    ids=repr,
)
def test_a_rate_says_how_far_apart_starts_are(rate, between):
    assert Rate("geo", rate).between == pytest.approx(between, rel=1e-12)


@pytest.mark.parametrize(
    "rate",
    [
        "",
        "fast",
        "10/d",
        "0/s",
        (0, 1),
        (1, 0),
        (1, -1),
        (math.inf, 1),
        (1, math.inf),
        10,
        None,
        "1e9/s",
        (1, 9e-06),
        (1, timedelta(days=366, seconds=1)),
    ],
    ids=repr,
)
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match=r"The rate of Rate\('geo'\) must be"):
        Rate("geo", rate)


@pytest.mark.parametrize("burst", [0, -1, 1.5, True, 10_001])
def test_what_is_no_burst_is_refused(burst):
    with pytest.raises(ValueError, match=r"The burst of Rate\('geo'\) must be an integer"):
        Rate("geo", "1/s", burst=burst)


def test_a_rate_is_a_value_with_a_lock_name_and_a_burst_that_is_named():
    assert Rate("cafe\u0301", "1/s", burst=10_000) == Rate("caf\u00e9", "1/s", burst=10_000)
    with pytest.raises(FrozenInstanceError):
        Rate("geo", "1/s").rate = "2/s"
    with pytest.raises(TypeError):
        Rate("geo", "1/s", 2)
    with pytest.raises(InvalidLockName):
        Rate("", "1/s")
