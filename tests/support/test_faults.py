"""What the fault tests measure with measures it."""

import time

import pytest

from tests.support.faults import block_interpreter, slack, takes


def test_what_a_process_stood_still_is_not_counted():
    with takes(at_most=0):
        block_interpreter(slack() + 1)


def test_what_a_process_waited_is_counted():
    with pytest.raises(AssertionError, match="took"), takes(at_most=-2 * slack()):
        time.sleep(0.5)
