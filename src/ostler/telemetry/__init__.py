"""Metrics and log events. Nothing here decides, and nothing here may stop the work."""

import logging

from ostler.telemetry.log import LOG_EVENTS, LOGGER_NAME, JsonLines, LifecycleLog, LogEvent, one_line
from ostler.telemetry.metrics import METRICS, LifecycleMetrics, MetricKind, MetricSpec, prometheus_name

# A library leaves it to its user whether and where a log is written.
logging.getLogger("ostler").addHandler(logging.NullHandler())

__all__ = [
    "LOGGER_NAME",
    "LOG_EVENTS",
    "METRICS",
    "JsonLines",
    "LifecycleLog",
    "LifecycleMetrics",
    "LogEvent",
    "MetricKind",
    "MetricSpec",
    "one_line",
    "prometheus_name",
]
