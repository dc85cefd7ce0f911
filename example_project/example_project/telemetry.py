"""Metrics of each process for Prometheus, if METRICS_PORT is set.

A process counts only what it does itself: a web server, a beat, each child of a Celery worker. So
each has a port of its own, the first of METRICS_PORT and the ports after it that is free, and
Prometheus is told all of them:

    scrape_configs:
      - job_name: lottery
        static_configs:
          - targets: ["localhost:9464", "localhost:9465", "localhost:9466"]

The provider is set after the last fork, since a child would go on counting from what it inherits.
The instruments of django_redislock were made before, and find it then.
"""

from __future__ import annotations

import os

MOST_PROCESSES = 20  # And so many ports.
_serving: dict[str, int] = {}  # Celery's solo pool asks twice.


def serve_metrics(**_: object) -> None:
    """Begin to count, and show it at http://localhost:PORT/metrics."""
    first = os.environ.get("METRICS_PORT")
    if not first or "port" in _serving:
        return
    from opentelemetry import metrics
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import start_http_server

    for port in range(int(first), int(first) + MOST_PROCESSES):
        try:
            start_http_server(port, addr="127.0.0.1")
        except OSError:  # Another process has it.
            continue
        metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
        _serving["port"] = port
        return
