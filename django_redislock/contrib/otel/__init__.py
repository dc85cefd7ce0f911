"""Metrics and traces of locks by OpenTelemetry: an app that INSTALLED_APPS switches on."""
