"""Stored jobs, which a schedule or a batch enqueues later: JSON with everything that an INSERT needs."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import msgspec

from outboxq.errors import ArgumentError, InvalidKey, JobTooLarge, PayloadError
from outboxq.job import THEN_HEADER
from outboxq.names import check_name
from outboxq.new_job import JobEnvelope, JobKeys, NewJob, UniqueKey, check_size
from outboxq.outbox.keys import check_positive
from outboxq.outbox.options import JobOptions

_EMPTY = "{}"
# The key begins with the kind.
_MAX_KEY_BYTES = 1_024


def dump(new: NewJob) -> dict[str, object]:
    """Return a job as a mapping, to be written as JSON by `msgspec.json.encode`; `load` restores the job from it.

    Raises:
        ArgumentError: an argument has no primary key yet.
    """
    entities = new.pending_entities()
    if entities:
        raise ArgumentError(
            f"{new.kind!r} was given a new {type(entities[0]).__name__}, which has no primary key yet: flush the "
            "session before"
        )
    job = fold_chain(new.complete())
    envelope = job.envelope
    stored: dict[str, object] = {"kind": job.kind, "queue": job.queue, "args": msgspec.Raw(job.args.encode())}
    if envelope.headers != _EMPTY:
        stored["headers"] = msgspec.Raw(envelope.headers.encode())
    keys = job.keys if isinstance(job.keys, JobKeys) else JobKeys()
    others = {
        "priority": envelope.priority or None,
        "max_attempts": envelope.max_attempts,
        "run_at": envelope.run_at,
        "delay_seconds": _seconds(envelope.delay),
        "every_seconds": _seconds(envelope.every),
        "expires_seconds": _seconds(envelope.expires),
        "coalesce": keys.coalesce,
        "group": keys.group,
        "unique": keys.unique.key if keys.unique else None,
        "unique_kept_seconds": _seconds(keys.unique.kept) if keys.unique else None,
        "batch": keys.batch,
    }
    return stored | {name: value for name, value in others.items() if value is not None}


def load(stored: Mapping[str, Any] | str) -> NewJob:
    """Return the job that `dump` has stored; a text is parsed as JSON.

    Raises:
        PayloadError: it is no such job, or the table of jobs would refuse it.
    """
    try:
        job = msgspec.json.decode(stored if isinstance(stored, str) else msgspec.json.encode(stored), type=_StoredJob)
        envelope = job.envelope()
        _check(envelope, job)
        return NewJob(envelope, check_size(job.kind, _text(job.args)), None, job.keys())
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PayloadError("the stored job cannot be read: is it of a newer version of outboxq?") from error
    except (ArgumentError, InvalidKey, JobTooLarge, ValueError, OverflowError) as error:
        raise PayloadError(f"the stored job cannot be added: {error}") from error


def _check(envelope: JobEnvelope, stored: "_StoredJob") -> None:
    """Refuse a stored job that `add_job` would refuse: users may have stored it by their own SQL."""
    check_name("kind", envelope.kind)
    check_name("queue", envelope.queue)
    JobOptions(
        delay=envelope.delay,
        run_at=envelope.run_at,
        priority=envelope.priority,
        max_attempts=envelope.max_attempts,
    )
    for key in filter(None, (stored.coalesce, stored.group, stored.unique)):
        if len(key.encode()) > _MAX_KEY_BYTES or "\0" in key:
            raise ArgumentError(f"a key takes up to {_MAX_KEY_BYTES:,} bytes, without NUL")
    for seconds in (stored.every_seconds, stored.expires_seconds, stored.unique_kept_seconds):
        if seconds is not None:
            check_positive("a time", timedelta(seconds=seconds))
    if stored.batch is not None:
        UUID(stored.batch)
    check_size(envelope.kind, envelope.headers)
    # The database accepts no lone surrogates and no NUL, which JSON may contain as escapes.
    headers = msgspec.json.decode(envelope.headers, type=dict[str, str])
    arguments = msgspec.json.decode(bytes(stored.args), type=dict[str, Any])
    if _has_nul(headers) or _has_nul(arguments):
        raise ArgumentError("no text takes NUL")


def _has_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any("\0" in name or _has_nul(each) for name, each in value.items())
    if isinstance(value, list):
        return any(map(_has_nul, value))
    return isinstance(value, str) and "\0" in value


def fold_chain(new: NewJob) -> NewJob:
    """Return the same job with its followers, the later jobs of its chain, stored in one of its headers.

    The followers' entities must have primary keys.
    """
    if not new.followers:
        return new
    followers = msgspec.json.encode([dump(each) for each in new.followers]).decode()
    envelope = add_headers(new.envelope, {THEN_HEADER: followers})
    return msgspec.structs.replace(new, envelope=envelope, followers=())


def unfold_chain(text: str) -> NewJob:
    """Return the next job of a chain, from the header `outboxq.then` of the job before it.

    The later jobs of the chain become its followers.

    Raises:
        PayloadError: it is no chain.
    """
    try:
        stored = msgspec.json.decode(text, type=Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PayloadError("the chain of a job cannot be read: is it of a newer version of outboxq?") from error
    first, *others = [load(bytes(each).decode()) for each in stored]
    return msgspec.structs.replace(first, followers=tuple(others))


def add_headers(envelope: JobEnvelope, added: Mapping[str, str]) -> JobEnvelope:
    """Return a copy of the envelope whose headers also include `added`."""
    headers = msgspec.json.decode(envelope.headers, type=dict[str, str]) | dict(added)
    return msgspec.structs.replace(envelope, headers=msgspec.json.encode(headers).decode())


class _StoredJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kind: str
    queue: str
    args: msgspec.Raw = msgspec.Raw(b"{}")
    headers: msgspec.Raw = msgspec.Raw(b"{}")
    priority: int = 0
    max_attempts: int | None = None
    run_at: datetime | None = None
    delay_seconds: float | None = None
    every_seconds: float | None = None
    expires_seconds: float | None = None
    coalesce: str | None = None
    group: str | None = None
    unique: str | None = None
    unique_kept_seconds: float | None = None
    batch: str | None = None

    def envelope(self) -> JobEnvelope:
        """Return the job's envelope: everything but its arguments and its keys."""
        return JobEnvelope(
            self.kind,
            self.queue,
            _text(self.headers),
            self.priority,
            self.max_attempts,
            self.run_at,
            _delta(self.delay_seconds),
            _delta(self.every_seconds),
            _delta(self.expires_seconds),
        )

    def keys(self) -> JobKeys | None:
        """Return the job's keys (`coalesce`, `group`, `unique` and the batch), or None if it has none of them."""
        unique = None if self.unique is None else UniqueKey(self.unique, _delta(self.unique_kept_seconds))
        keys = JobKeys(self.coalesce, self.group, unique, self.batch)
        return None if keys == JobKeys() else keys


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode()


def _seconds(delta: timedelta | None) -> float | None:
    return None if delta is None else delta.total_seconds()


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
