"""OpenTelemetry: spans and metrics of producers and relays, and the trace context that leads from one to the other.

Needs the extra `outboxq[otel]`; nothing else of outboxq imports it.
"""

from outboxq.observability.otel.processing import instrument_jobs as instrument_jobs
from outboxq.observability.otel.producing import instrument as instrument

__all__ = ["instrument", "instrument_jobs"]
