"""docs/getting-started.md: what a reader pastes first does what the page says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from django_redislock.models import Fence
from tests.effects.models import Winner
from tests.support.others import held_by_other

if TYPE_CHECKING:
    from tests.samples.conftest import Paste

pytestmark = pytest.mark.usefixtures("locks")


@pytest.mark.django_db(transaction=True)
def test_the_lottery_is_drawn_once_a_day_under_its_fence(paste: Paste) -> None:
    page = paste(
        "getting-started.md",
        {
            "shop/models.py": "from tests.effects.models import Winner\n",
            "shop/lottery.py": "def draw(number): return range(number)\n",
        },
    )
    tasks = page.module("shop.tasks")
    with held_by_other("lottery:2026-11-24"):  # In eager mode there is no broker to wait at.
        assert tasks.run_lottery.delay("2026-11-24").get()["skipped"] == "busy"
    assert not Winner.objects.exists()
    assert tasks.run_lottery.delay("2026-11-24").get() is None
    assert tasks.run_lottery.delay("2026-11-24").get()["skipped"] == "done"
    assert Winner.objects.filter(day="2026-11-24").count() == 10
    assert Fence.objects.get().name == "lottery:2026-11-24"
    for _ in range(2):
        tasks.start_lottery.delay().get()
    assert Winner.objects.exclude(day="2026-11-24").count() == 10
