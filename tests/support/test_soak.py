"""What the soak reads from its logs."""

import math

from tests.support.soak import find


def found(folder, *lines):
    """What is found if the logs of all processes have these lines."""
    (folder / "1.log").write_text("".join(f"{line}\n" for line in lines))
    (folder / "counter").write_text("0")
    return find(folder, {}, {}, [])


def test_two_that_hold_at_a_time_overlap(tmp_path):
    findings = found(
        tmp_path,
        *("1.0 1:a ask", "1.1 1:a granted one 1", "1.2 1:a held one", "1.9 1:a held one"),
        *("1.0 2:b ask", "1.4 2:b granted two 2", "1.5 2:b held two", "1.6 2:b held two"),
    )
    assert (findings.grants, findings.overlaps) == (2, 1)


def test_a_lease_that_ended_before_its_holder_went_on_overlaps_with_none(tmp_path):
    # The first process stood still between its acquire and its first look at the lease.
    findings = found(
        tmp_path,
        *("1.0 1:a ask", "2.0 2:b ask", "4.0 2:b granted two 2", "4.1 2:b held two"),
        *("4.5 1:a granted one 1", "4.6 1:a lost one", "4.7 1:a end one", "4.9 2:b held two"),
    )
    assert (findings.grants, findings.outcomes["lost"]) == (2, 1)
    assert (findings.overlaps, findings.fences_out_of_order) == (0, 0)
    assert findings.longest_gap < math.inf
