"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class LotteryConfig(AppConfig):
    """The lottery."""

    name = "lottery"
