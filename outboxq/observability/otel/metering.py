"""OpenTelemetry's metrics of handlers: how long they ran, and how many jobs they received."""

from opentelemetry import metrics

from outboxq.events import JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed
from outboxq.observability.otel import conventions

_OUTCOMES: dict[type, str] = {
    JobDone: "done",
    JobRetried: "retried",
    JobDied: "dead",
    JobSnoozed: "snoozed",
    JobDiscarded: "discarded",
}
# The events of jobs whose handlers may have run.
EVENTS: tuple[type[object], ...] = tuple(_OUTCOMES)


class ProcessMeter:
    """A hook that measures the committed attempts of jobs; `instrument_jobs` registers it."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._duration = meter.create_histogram(
            conventions.PROCESS_DURATION,
            "s",
            "How long handlers ran; each job of a batch handler has its share.",
            explicit_bucket_boundaries_advisory=conventions.DURATION_BOUNDS,
        )
        self._consumed = meter.create_counter(
            conventions.CONSUMED_MESSAGES, "{message}", "Jobs that handlers were called with."
        )

    def record(self, event: JobDone | JobRetried | JobDied | JobSnoozed | JobDiscarded) -> None:
        """Count the attempt that an event reports, and record how long its handler ran."""
        job = event.job
        attributes = {**conventions.operation("process", job.queue), conventions.KIND: job.kind}
        error_type = event.error_type if isinstance(event, JobRetried | JobDied) else ""
        if error_type:
            attributes[conventions.ERROR_TYPE] = error_type
        self._consumed.add(1, attributes)
        self._duration.record(event.seconds, {**attributes, conventions.OUTCOME: _OUTCOMES[type(event)]})
