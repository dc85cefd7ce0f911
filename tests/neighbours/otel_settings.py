"""Django settings of a worker that is traced, also by others; its journal gets the spans."""

import json

from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import set_tracer_provider

from tests.celery.project.journal import note
from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_redislock.contrib.otel"]


class ToJournal(SpanExporter):
    """Writes down what would be sent."""

    def export(self, spans):
        for span in spans:
            note("otel", "span", span=json.loads(span.to_json()))
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToJournal()))
set_tracer_provider(provider)
CeleryInstrumentor().instrument()
RedisInstrumentor().instrument()
