"""A claimed job, and the meaning of its headers."""

import re
from datetime import datetime
from operator import attrgetter
from uuid import UUID

import msgspec

# Outboxq's own headers, whose names begin like this: the later jobs of a chain; for the callback of a batch, its id,
# and the number of its jobs that became dead letters.
THEN_HEADER = "outboxq.then"
BATCH_HEADER = "outboxq.batch"
BATCH_FAILED_HEADER = "outboxq.batch_failed"
UNIQUE_HEADER = "outboxq.unique"
# The length, in microseconds, of the windows in each of which a coalesced job may run once.
EVERY_HEADER = "outboxq.every"
# The `seq` with which a coalesced job was added, if its row has another one by now.
ADDED_HEADER = "outboxq.added"
# Longer headers, which outboxq's producers never write, leave no room for it.
MAX_STAMPED_BYTES = 1_000_000
_NUMBER = re.compile("[0-9]{1,18}")
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace-id, parent-id, flags.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
# Headers that belong to one job only: a copy would be followed, called back or unique like the original.
OWN_HEADERS = frozenset({THEN_HEADER, BATCH_HEADER, BATCH_FAILED_HEADER, UNIQUE_HEADER, EVERY_HEADER, ADDED_HEADER})


# A struct, because a claim makes one for each of its jobs: it takes a third of a frozen dataclass's time, and the
# garbage collector need not walk it.
class Job(msgspec.Struct, frozen=True, gc=False):
    """A claimed job, as a handler sees it in `ctx.job`. Its `repr` shows neither arguments nor errors.

    `attempt` counts from 1 and includes this run. `args` is the stored JSON text; handlers receive it decoded.
    `max_attempts` is None if the handler's own retry policy decides. `crashes` is the number of earlier runs of the
    job, in a transaction of its own, that ended with the death of its relay. `parked` counts how often a relay put the
    job back, because the relay did not know its kind or the kind was paused. `expires_at` is None if the job never
    expires, `lease_token` is None in transaction mode, and `claimed_at` is None before a relay has claimed the job.
    `batch_id` is the id of the batch that the job was added to (`jobs.batch`). Times are the database's, in UTC;
    `claimed_at` is estimated by the relay.
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
        """The time between the moment at which the job was due and its claim, by the database's clock."""
        at, due = self.claimed_at, self.run_at
        return 0.0 if at is None or at < due else (at - due).total_seconds()

    @property
    def added_order(self) -> tuple[int, int]:
        """A pair of numbers by which jobs of one coalescing key are sorted in the order in which they were added."""
        return added_order(self.headers, self.seq)

    def __repr__(self) -> str:
        shown = (name for name in self.__struct_fields__ if name not in ("args", "headers", "errors"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


# Fields that few jobs use: keys that they share with other jobs, their callback batch, and their expiry.
EXTRAS = ("unique_key", "group_key", "batch_id", "expires_at")
extras_of = attrgetter(*EXTRAS)
NO_EXTRAS = (None, None, None, None)


def number_in(headers: str, name: str) -> int | None:
    """Return the number in a header of a job; None if the header is missing, or has a value that outboxq never writes.

    The statements of `statements/added.py` read it in the same way.
    """
    # Most jobs have no headers.
    if name not in headers:
        return None
    try:
        # Other headers are left unread: one may hold a number that no float can.
        found = msgspec.json.decode(msgspec.json.decode(headers, type=dict[str, msgspec.Raw])[name])
    except (KeyError, ValueError, RecursionError):
        return None
    # A boolean is an integer to Python.
    text = found if isinstance(found, str) else str(found) if type(found) is int else ""
    return int(text) if _NUMBER.fullmatch(text) else None


def added_order(headers: str, seq: int) -> tuple[int, int]:
    """Return a pair that sorts the jobs of one coalescing key by the order in which they were added.

    `seq` numbers the rows of jobs in the order of their INSERTs. The first item is the `seq` of the job's first row,
    which a header keeps; the second is that of the present row.
    """
    added = number_in(headers, ADDED_HEADER)
    return (seq if added is None else added), seq


def with_added_order(headers: str, seq: int) -> str:
    """Return a coalesced job's headers, with the job's `seq` (the number of its row) added unless they have one.

    So the job keeps its place among the jobs of its key if it is stored again, as a row with another `seq`.
    """
    if number_in(headers, ADDED_HEADER) is not None or not headers.startswith("{") or len(headers) > MAX_STAMPED_BYTES:
        return headers
    rest = headers[1:].lstrip()
    return f'{{"{ADDED_HEADER}": "{seq}"{"" if rest.startswith("}") else ", "}{rest}'


class _Traced(msgspec.Struct):
    traceparent: str


def trace_id_of(headers: str) -> str | None:
    """Return the trace id in a job's headers, which are JSON text; None without a valid `traceparent`."""
    if '"traceparent"' not in headers:
        return None
    try:
        found = msgspec.json.decode(headers.encode(), type=_Traced).traceparent
    except (msgspec.DecodeError, RecursionError):
        return None
    match = _TRACEPARENT.fullmatch(found)
    return match[1] if match else None
