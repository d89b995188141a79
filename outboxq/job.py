"""A claimed job, and what its headers say."""

import re
from datetime import datetime
from operator import attrgetter
from uuid import UUID

import msgspec

# Headers of outboxq's own, whose names begin like this: the rest of a job's chain; and for the callback of a batch its
# id, and how many of its jobs became dead letters.
THEN_HEADER = "outboxq.then"
BATCH_HEADER = "outboxq.batch"
BATCH_FAILED_HEADER = "outboxq.batch_failed"
UNIQUE_HEADER = "outboxq.unique"
# The length of the windows in each of which a coalesced job may run once, in microseconds.
EVERY_HEADER = "outboxq.every"
# The `seq` with which a coalesced job was added, once its row has another one.
ADDED_HEADER = "outboxq.added"
# Longer headers, which no producer of ours writes, leave no room for it.
MAX_STAMPED_BYTES = 1_000_000
_NUMBER = re.compile("[0-9]{1,18}")
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace-id, parent-id, flags.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
# Headers that belong to one job alone: a copy would make another job followed, called back or unique as this one.
OWN_HEADERS = frozenset({THEN_HEADER, BATCH_HEADER, BATCH_FAILED_HEADER, UNIQUE_HEADER, EVERY_HEADER, ADDED_HEADER})


# A struct, as a claim makes one for each of its jobs: in a third of a frozen dataclass's time, and nothing that the
# garbage collector has to walk.
class Job(msgspec.Struct, frozen=True, gc=False):
    """A claimed job, as its handler sees it in `ctx.job`. Its payload and its errors are not in its `repr`.

    `attempt` counts from 1 and includes this run. `args` is the stored JSON text; handlers receive it decoded.
    `max_attempts` is None if the handler's own retry policy decides. `crashes` counts the deaths of its relay while it
    ran alone, before this run. `expires_at` is None for a job that never expires, `lease_token` in transaction mode,
    `claimed_at` before a relay has claimed it. `batch_id` is that of the batch that it was added to (`jobs.batch`).
    Times are the database's, in UTC; `claimed_at` as far as the relay's clock can tell.
    """

    id: UUID
    queue: str
    kind: str
    args: str
    headers: str
    priority: int
    attempt: int
    max_attempts: int | None
    crashes: int
    parked: int
    unique_key: str | None
    group_key: str | None
    errors: str
    run_at: datetime
    created_at: datetime
    seq: int
    expires_at: datetime | None = None
    batch_id: UUID | None = None
    lease_token: int | None = None
    claimed_at: datetime | None = None

    @property
    def waited_seconds(self) -> float:
        """The time for which the job waited: from when it was due until it was claimed, by the database's clock."""
        at, due = self.claimed_at, self.run_at
        return 0.0 if at is None or at < due else (at - due).total_seconds()

    @property
    def added_order(self) -> tuple[int, int]:
        """Its place among the jobs of its coalescing key, by the order in which they were added."""
        return added_order(self.headers, self.seq)

    def __repr__(self) -> str:
        shown = (name for name in self.__struct_fields__ if name not in ("args", "headers", "errors"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


# What few jobs have: the keys that others share with them, their callback batch, and a time when they expire.
EXTRAS = ("unique_key", "group_key", "batch_id", "expires_at")
extras_of = attrgetter(*EXTRAS)
NO_EXTRAS = (None, None, None, None)


def number_in(headers: str, name: str) -> int | None:
    """The number in a header of a job; None if it has none, or one that no producer of ours has set.

    As the statements of `statements/added.py` read it.
    """
    # Most jobs have no headers.
    if name not in headers:
        return None
    try:
        # The others as they are: one may hold a number that no float can.
        found = msgspec.json.decode(msgspec.json.decode(headers, type=dict[str, msgspec.Raw])[name])
    except (KeyError, ValueError, RecursionError):
        return None
    # A boolean is an integer to Python.
    text = found if isinstance(found, str) else str(found) if type(found) is int else ""
    return int(text) if _NUMBER.fullmatch(text) else None


def added_order(headers: str, seq: int) -> tuple[int, int]:
    """The place of a job with these headers, by which the newest of a coalescing key is found."""
    added = number_in(headers, ADDED_HEADER)
    return (seq if added is None else added), seq


def with_added_order(headers: str, seq: int) -> str:
    """The headers of a coalesced job with its place, of which its next row has no other trace."""
    if number_in(headers, ADDED_HEADER) is not None or not headers.startswith("{") or len(headers) > MAX_STAMPED_BYTES:
        return headers
    rest = headers[1:].lstrip()
    return f'{{"{ADDED_HEADER}": "{seq}"{"" if rest.startswith("}") else ", "}{rest}'


class _Traced(msgspec.Struct):
    traceparent: str


def trace_id_of(headers: str) -> str | None:
    """The trace id in a job's headers, which are JSON text; None without a valid `traceparent`."""
    if '"traceparent"' not in headers:
        return None
    try:
        found = msgspec.json.decode(headers.encode(), type=_Traced).traceparent
    except (msgspec.DecodeError, RecursionError):
        return None
    match = _TRACEPARENT.fullmatch(found)
    return match[1] if match else None
