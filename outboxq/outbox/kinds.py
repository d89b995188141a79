"""Kinds: the names with which a producer enqueues jobs, with or without the handler's code at hand."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Generic, ParamSpec, Unpack

from outboxq.codec.entities import EntityArgument, entities_of
from outboxq.codec.parameters import Signature
from outboxq.codec.sameness import encode_unread
from outboxq.codec.values import MAX_ARGS_BYTES, encode_headers, join_object
from outboxq.errors import ArgumentError
from outboxq.job import EVERY_HEADER, OWN_HEADERS
from outboxq.names import check_keywords, check_name
from outboxq.new_job import JobEnvelope, JobKeys, NewJob, check_size
from outboxq.outbox.keys import KeyRules
from outboxq.outbox.options import PLAIN_OPTIONS, FlowOptions, JobOptions

P = ParamSpec("P")

_OPTIONS = frozenset(field.name for field in fields(JobOptions))
_OF_THE_HANDLER: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        ("queue", "kind", "retry", "claim", "timeout_seconds", "batchable", "keep", "on_failure", "messages"),
        "it is the handler's, for all of its jobs: give it to @jobs.handler, or external",
    )
)
# A character of UTF-8 has up to 4 bytes.
_SURELY_SMALL = MAX_ARGS_BYTES // 4


class JobKind(Generic[P]):
    """A kind of job and its queue, to be passed to `add_job`; `P` are its handler's arguments after the context."""

    # True if results of the kind are kept; None if its handler lives in another service.
    keeps_result: bool | None = None

    def __init__(self, kind: str, queue: str, options: JobOptions | None = None) -> None:
        self.kind = check_name("kind", kind)
        self.queue = check_name("queue", queue)
        self.job_options = options or PLAIN_OPTIONS

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind!r} in queue {self.queue!r}>"

    @functools.cached_property
    def _signature(self) -> Signature | None:
        return None

    def signature(self) -> Signature | None:
        """The handler's signature; None if the handler lives in another service."""
        return self._signature

    def options(
        self,
        *,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        headers: Mapping[str, str] | None = None,
        **flow: Unpack[FlowOptions],
    ) -> "JobKind[P]":
        """Return the same kind with other options; options that are not given stay as they were.

        Args:
            delay: Run this long after the INSERT, by the database's clock.
            run_at: Run at this time (with a time zone). Replaces `delay`, and the other way round.
            priority: -32767 to 32767; 0 by default. Among the jobs that are ready, higher runs first; delayed and
                retried jobs run in the order of their times.
            max_attempts: The number of attempts, 1 to 32767, in place of that of the handler's retry policy.
            headers: Strings stored next to the arguments, for tracing and routing; the handler reads them from
                `ctx.headers`.
            flow: Options that a handler can also set for all its jobs: `coalesce`, `every`, `group`, `unique`,
                `expires`.

        Raises:
            ArgumentError: a value is out of its range, or two options exclude each other, such as `delay` and `run_at`.
            InvalidKey: a key cannot be stored.
        """
        check_keywords("options", flow, _OPTIONS, _OF_THE_HANDLER)
        given = {"priority": priority, "max_attempts": max_attempts, "headers": headers, **flow}
        changes: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        if delay is not None or run_at is not None:
            changes |= {"delay": delay, "run_at": run_at}
        return _KindWithOptions(self, replace(self.job_options, **changes))  # type: ignore[arg-type]  # checked by JobOptions

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Make a job for `add_jobs`; its arguments are checked and encoded now.

        Raises:
            ArgumentError: the arguments do not fit, or JSON cannot hold them.
            JobTooLarge: over 256 KiB of JSON.
        """
        signature = self._signature
        args_text = None if signature is None else signature.encode_call(args, kwargs)
        if args_text is not None:
            if signature is not None and signature.takes_entities:
                return self._with_entities(args_text, args, kwargs, signature.entities(args, kwargs))
            return self._new(args_text, None if self._key_rules is None else self._keys(args, kwargs))
        values = self._bind_by_name(args, kwargs) if signature is None else signature.bind(args, kwargs)
        entities = entities_of(values, {} if signature is None else signature.optional)
        pending = {name: argument.entity for name, argument in entities.items() if argument.key is None}
        if signature is not None:
            for name, entity in pending.items():
                signature.check_entity(name, entity)
        encode = encode_unread if signature is None else signature.encode
        ready = join_object({n: encode(n, v) for n, v in values.items() if n not in pending})
        return self._with_entities(ready, args, kwargs, entities)

    def _with_entities(
        self,
        args_text: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        entities: Mapping[str, EntityArgument],
    ) -> NewJob:
        rules = self._key_rules
        if not entities or rules is None or rules.constant is not None:
            return self._new(args_text, self._keys(args, kwargs), entities or None)
        at_flush = functools.partial(rules.of, self._all_values(args, kwargs))
        is_pending = any(argument.key is None for argument in entities.values())
        return self._new(args_text, at_flush if is_pending else at_flush(), entities, at_flush)

    def _new(
        self,
        args: str,
        keys: JobKeys | Callable[[], JobKeys] | None,
        entities: Mapping[str, EntityArgument] | None = None,
        keys_at_flush: Callable[[], JobKeys] | None = None,
    ) -> NewJob:
        # The caller may change the mapping of headers, so it is read again for each job.
        envelope = self._new_envelope() if self.job_options.headers else self._envelope
        if len(args) > _SURELY_SMALL:
            check_size(envelope.kind, args)
        return NewJob(envelope, args, entities, keys, keys_at_flush=keys_at_flush)

    def _keys(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> JobKeys | None:
        rules = self._key_rules
        if rules is None or rules.constant is not None:
            return None if rules is None else rules.constant
        return rules.of(self._all_values(args, kwargs))

    def _all_values(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        signature = self._signature
        return self._bind_by_name(args, kwargs) if signature is None else signature.all_values(args, kwargs)

    @functools.cached_property
    def _key_rules(self) -> KeyRules | None:
        options = self.job_options
        return KeyRules(self.kind, options.coalesce, options.group, options.unique) if options.has_keys else None

    @functools.cached_property
    def _envelope(self) -> JobEnvelope:
        return self._new_envelope()

    def _new_envelope(self) -> JobEnvelope:
        options = self.job_options
        if options.headers and not OWN_HEADERS.isdisjoint(options.headers):
            own = ", ".join(sorted(OWN_HEADERS.intersection(options.headers)))
            raise ArgumentError(f"headers take no {own}, which outboxq writes itself: pass ctx.headers on without it")
        given = dict(options.headers or {})
        if options.every is not None:
            given[EVERY_HEADER] = str(options.every // timedelta(microseconds=1))
        headers = encode_headers(given) if given else "{}"
        return JobEnvelope(
            self.kind,
            self.queue,
            headers,
            options.priority,
            options.max_attempts,
            options.run_at,
            options.delay,
            options.every,
            options.expires,
            self.keeps_result,
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
        self.keeps_result = base.keeps_result

    @functools.cached_property
    def _signature(self) -> Signature | None:
        return self._base.signature()


def external(kind: str, *, queue: str) -> JobKind[...]:
    """Return a kind whose handler lives in another service: arguments are passed by name, without a signature check."""
    return JobKind(kind, queue)
