"""docs/production.md: each command of the checklist runs and finds what it should."""

import pytest

from django_redislock import held
from tests.support.others import held_by


@pytest.mark.slow
def test_the_checklist(paste, locks):
    page = paste("production.md")
    first, migrate, missed, metrics, killed, force, maintenance, *_ = page.blocks()
    check, doctor = first.splitlines()
    status, said = page.manage(check)
    assert status == 0, said
    status, said = page.manage(doctor)
    assert "eviction" in said
    assert "ACL SETUSER" in said

    status, said = page.manage(migrate)
    assert (status, "django_redislock" in said) == (0, True), said

    assert page.manage(missed)[0] == 1  # It has never run here.
    status, said = page.manage(metrics)
    assert (status, "redislock_" in said) == (0, True)

    look, explain = killed.splitlines()
    with held_by("nightly", host="web-9"):
        assert "web-9" in page.manage(look)[1]
        assert "web-9" in page.manage(explain)[1]
        assert page.manage(force)[0] == 0
        assert held.get("nightly") is None
    pause, resume = maintenance.splitlines()
    assert page.manage(pause)[0] == 0
    assert held.get("nightly") is not None
    assert page.manage(resume)[0] == 0
    assert held.get("nightly") is None
