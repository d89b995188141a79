"""OpenTelemetry: spans and metrics of producers and relays, and the trace context that connects their spans.

Needs the extra `outboxq[otel]`; no other module of outboxq imports it.
"""

try:
    import opentelemetry.trace  # noqa: F401  # to report what is missing
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "outboxq.observability.otel needs the package opentelemetry-api: pip install 'outboxq[otel]'", name=missing.name
    ) from missing

from outboxq.observability.otel.processing import instrument_jobs as instrument_jobs
from outboxq.observability.otel.producing import instrument as instrument

__all__ = ["instrument", "instrument_jobs"]
