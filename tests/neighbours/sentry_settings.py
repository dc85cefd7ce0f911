"""Django settings of a worker that reports to Sentry; its journal gets the reports."""

import json

import sentry_sdk
from sentry_sdk.transport import Transport

from tests.celery.project.journal import note
from tests.settings import *  # noqa: F403


class ToJournal(Transport):
    """Writes down what would be sent."""

    def capture_envelope(self, envelope):
        for item in envelope.items:
            note("sentry", item.type, report=json.loads(item.payload.get_bytes()))


# It finds Celery, Django and redis-py by itself.
sentry_sdk.init(
    dsn="http://public@127.0.0.1:1/1",
    transport=ToJournal,
    traces_sample_rate=1.0,
    send_default_pii=True,
    auto_session_tracking=False,
)
