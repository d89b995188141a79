"""Kinds: what a producer names when it enqueues a job, with or without the handler's code at hand."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Generic, ParamSpec

from outboxq.codec.entities import is_pending
from outboxq.codec.parameters import Signature
from outboxq.codec.values import MAX_ARGS_BYTES, encode_headers, encode_value, join_object
from outboxq.errors import ArgumentError
from outboxq.names import check_name
from outboxq.new_job import JobEnvelope, NewJob, check_size
from outboxq.outcomes import MAX_DELAY

P = ParamSpec("P")

MAX_PRIORITY = 32_767
# A character of UTF-8 has up to 4 bytes.
_SURELY_SMALL = MAX_ARGS_BYTES // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How a job is enqueued, apart from its arguments."""

    delay: timedelta | None = None
    run_at: datetime | None = None
    priority: int = 0
    max_attempts: int | None = None
    headers: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.delay is not None and self.run_at is not None:
            raise ArgumentError("options take delay= or run_at=, not both")
        if self.delay is not None and not isinstance(self.delay, timedelta):
            raise ArgumentError(f"delay takes a timedelta, got {type(self.delay).__name__}")
        if self.delay is not None and not timedelta(0) <= self.delay <= MAX_DELAY:
            raise ArgumentError(f"delay takes 0 to {MAX_DELAY.days:,} days, got {self.delay}")
        if self.run_at is not None and (not isinstance(self.run_at, datetime) or self.run_at.utcoffset() is None):
            raise ArgumentError("run_at takes a datetime with a time zone, for example datetime.now(UTC)")
        if self.run_at is not None and not 2 <= self.run_at.year <= 9998:
            raise ArgumentError(f"run_at takes the years 2 to 9998, got {self.run_at}")
        if not _is_int(self.priority) or abs(self.priority) > MAX_PRIORITY:
            raise ArgumentError(f"priority takes an int from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {self.priority!r}")
        if self.max_attempts is not None and not (_is_int(self.max_attempts) and 1 <= self.max_attempts <= 32_767):
            raise ArgumentError(f"max_attempts takes an int from 1 to 32767, got {self.max_attempts!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class JobKind(Generic[P]):
    """A kind of job and the queue it goes to; `P` are the arguments of its handler after the context."""

    def __init__(self, kind: str, queue: str, options: JobOptions | None = None) -> None:
        self.kind = check_name("kind", kind)
        self.queue = check_name("queue", queue)
        self.job_options = options or JobOptions()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind!r} in queue {self.queue!r}>"

    def signature(self) -> Signature | None:
        """The handler's signature; None if the handler lives in another service."""
        return None

    def options(
        self,
        *,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "JobKind[P]":
        """The same kind with other options; what is not given stays as it was.

        Args:
            delay: Run this long after the database's clock at the INSERT.
            run_at: Run at this time (with a time zone). Replaces `delay`, and the other way round.
            priority: -32767 to 32767; 0 by default. Among the jobs that are ready, higher runs first; delayed and
                retried jobs run in the order of their times.
            max_attempts: Overrides the handler's retry policy.
            headers: Strings stored next to the arguments, for tracing and routing; the handler reads them from
                `ctx.headers`.

        Raises:
            ArgumentError: a value out of its range, or both `delay` and `run_at`.
        """
        given = {"priority": priority, "max_attempts": max_attempts, "headers": headers}
        changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        if delay is not None or run_at is not None:
            changes |= {"delay": delay, "run_at": run_at}
        return _KindWithOptions(self, replace(self.job_options, **changes))  # type: ignore[arg-type]  # checked by JobOptions

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """A job for `add_jobs`, its arguments checked and encoded now.

        Raises:
            ArgumentError: the arguments do not fit, or JSON cannot hold them.
            JobTooLarge: over 256 KiB of JSON.
        """
        signature = self.signature()
        args_text = None if signature is None else signature.encode_call(args, kwargs)
        if args_text is not None:
            return self._new(args_text)
        values = self._bind_by_name(args, kwargs) if signature is None else signature.bind(args, kwargs)
        pending = {name: value for name, value in values.items() if is_pending(value)}
        if signature is not None:
            for name, entity in pending.items():
                signature.check_entity(name, entity)
        encode = encode_value if signature is None else signature.encode
        return self._new(join_object({n: encode(n, v) for n, v in values.items() if n not in pending}), pending or None)

    def _new(self, args: str, pending: Mapping[str, object] | None = None) -> NewJob:
        # The caller may change the headers' mapping, so it is read anew for each job.
        envelope = self._new_envelope() if self.job_options.headers else self._envelope
        if len(args) > _SURELY_SMALL:
            check_size(envelope.kind, args)
        return NewJob(envelope, args, pending)

    @functools.cached_property
    def _envelope(self) -> JobEnvelope:
        return self._new_envelope()

    def _new_envelope(self) -> JobEnvelope:
        options = self.job_options
        headers = encode_headers(options.headers) if options.headers else "{}"
        return JobEnvelope(
            self.kind, self.queue, headers, options.priority, options.max_attempts, options.run_at, options.delay
        )

    def _bind_by_name(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        if args:
            raise ArgumentError(f"{self.kind!r} is handled elsewhere: pass its arguments by name")
        for name in kwargs:
            check_name("argument", name)
        return kwargs


class _KindWithOptions(JobKind[P]):
    def __init__(self, base: JobKind[P], options: JobOptions) -> None:
        super().__init__(base.kind, base.queue, options)
        self._base = base

    def signature(self) -> Signature | None:
        return self._base.signature()


def external(kind: str, *, queue: str) -> JobKind[...]:
    """A kind whose handler lives in another service: its arguments go by name, unchecked against a signature."""
    return JobKind(kind, queue)
