"""The page of completed runs in a real browser, under a strict Content-Security-Policy."""

import pytest

from django_redislock import single_instance_task

pytestmark = pytest.mark.slow

TASK = "lottery.tasks.draw"


def test_an_empty_page_shows_how_a_run_comes_there_and_then_one_is_seen_and_forgotten(
    stage, visit, picture
):
    here = visit("forgetter", viewport={"width": 1600, "height": 560})
    page = here.page
    page.goto("/admin/django_redislock/completedrun/")
    here.sees("has no completed run")
    sample = page.locator("#content pre")
    names = {"single_instance_task": single_instance_task}
    exec(sample.inner_text(), names)
    assert names["nightly_report"].single_instance_options.once == "database"
    stage.complete(
        {"name": "lottery:2026-11-20", "ago": 2 * 86400 + 7, "task_id": "5e0c71a2", "fence": 1},
        {"name": "lottery:2026-11-21", "ago": 86400 + 7, "task_id": "93d4c1f0", "fence": 2},
        {"name": "a\u202eb", "ago": 3600, "task_id": "0f6b82e7", "fence": 3},
    )
    page.goto("/admin/django_redislock/completedrun/")
    names = page.locator("#result_list .field-lock")
    assert names.all_inner_texts() == [r"a\u202eb", "lottery:2026-11-21", "lottery:2026-11-20"]
    picture(page, "completed-runs-light")
    page.check("#result_list tr:has-text('2026-11-20') input.action-select")
    page.select_option("select[name=action]", "delete_selected")
    page.click("button[name=index]")
    here.sees("Are you sure")
    assert "lottery:2026-11-20" in page.inner_text("#content")
    page.click("input[type=submit]")
    here.sees("Successfully deleted 1 completed run")
    assert names.all_inner_texts() == [r"a\u202eb", "lottery:2026-11-21"]
