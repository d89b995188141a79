"""Jobs that are kept to be enqueued later, by a schedule or a batch: as JSON, with everything that an INSERT needs."""

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
# With the kind in front of it.
_MAX_KEY_BYTES = 1_024


def dump(new: NewJob) -> dict[str, object]:
    """The fields by name of which `load` makes the job again; `msgspec.json.encode` writes the arguments as they are.

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
    """The job that `dump` was given; a text is the JSON of it.

    Raises:
        PayloadError: it is not such a job, or the table of jobs would refuse it.
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
    """Refuse a job that `add_job` would refuse: SQL of users may have written it."""
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
    # The database takes no lone surrogates, and no NUL, which JSON may spell as an escape.
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
    """The same job, with those that follow it in a header, as they are stored; they must be complete."""
    if not new.followers:
        return new
    followers = msgspec.json.encode([dump(each) for each in new.followers]).decode()
    envelope = add_headers(new.envelope, {THEN_HEADER: followers})
    return msgspec.structs.replace(new, envelope=envelope, followers=())


def unfold_chain(text: str) -> NewJob:
    """The first job of a chain, by the header of the job before it, with the others as its followers.

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
    """The envelope with more headers."""
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
        """The job without its arguments and its keys."""
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
        """The keys, if there are any."""
        unique = None if self.unique is None else UniqueKey(self.unique, _delta(self.unique_kept_seconds))
        keys = JobKeys(self.coalesce, self.group, unique, self.batch)
        return None if keys == JobKeys() else keys


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode()


def _seconds(delta: timedelta | None) -> float | None:
    return None if delta is None else delta.total_seconds()


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
