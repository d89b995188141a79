"""Jobs with flow control in the torture test: grouped, limited, coalesced and unique jobs, and jobs in batches.

Each producer thread has groups and coalescing keys of its own, so that the order in which their jobs are committed is
known. The check uses this order: a group's jobs must have their effects in it, and the newest job of each coalescing
key must have run. All threads share the unique keys.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, TextClause, text

from outboxq import OutboxSession, batch
from outboxq.job import Job
from outboxq.outbox.kinds import JobKind
from outboxq.torture.history import SCHEMA

# How many jobs of the limited queue may run at a time.
LIMIT = 3
LIMITED = "torture-limit"
_GROUPS = 5
_KEYS = 3
_UNIQUE_KEYS = 6
_MEMBERS = 2

LIMIT_THE_QUEUE = f"INSERT INTO outboxq.queue (name, max_running) VALUES ('{LIMITED}', {LIMIT})"

_LOCK_KEY = text("SELECT pg_try_advisory_xact_lock(hashtext('torture unique'), hashtext(:key))")
_LOCK_GROUP = text("SELECT pg_try_advisory_xact_lock(hashtext('torture group'), hashtext(:group))")
# A transaction that has a slot keeps it for all of its jobs, which run one after the other.
_TAKE_SLOT = text(
    """\
SELECT CASE WHEN current_setting('torture.slot', true) = 'held' THEN true ELSE EXISTS (
  SELECT FROM generate_series(1, :limit) AS slot
  WHERE pg_try_advisory_xact_lock(hashtext('torture limit'), slot) LIMIT 1
) END AND set_config('torture.slot', 'held', true) = 'held'"""
)
_VIOLATED = text(f"INSERT INTO {SCHEMA}.violation (job_id, what) VALUES (:job_id, :what)")


def watch(connection: Connection, job: Job, unique: str | None) -> None:
    """Record a violation if this job runs at the same time as another of its group or key, or as too many of its queue.

    Handlers call it. It detects a violation by advisory locks of the job's transaction. Leased jobs are not watched: if
    their relay is suspended, its transaction may still have the locks while another relay already runs the job, as it
    should.

    Args:
        unique: The job's unique key; None without one.
    """
    if job.lease_token is not None:
        return
    if job.group_key is not None:
        _expect(connection, job, _LOCK_GROUP, {"group": f"{job.queue} {job.group_key}"}, "beside its group")
    if unique is not None:
        _expect(connection, job, _LOCK_KEY, {"key": f"{job.kind} {unique}"}, "beside its key")
    if job.queue == LIMITED:
        _expect(connection, job, _TAKE_SLOT, {"limit": LIMIT}, "over its limit")


def _expect(connection: Connection, job: Job, taken: TextClause, values: Mapping[str, object], what: str) -> None:
    if not connection.execute(taken, values).scalar():
        with connection.engine.begin() as beside:
            beside.execute(_VIOLATED, {"job_id": job.id, "what": what})


@dataclass(frozen=True, slots=True)
class Added:
    """A job that `Lanes` has added.

    Attributes:
        key: The job's coalescing key, if any.
        place: The position of the job among the jobs of that key.
    """

    id: UUID
    key: str | None = None
    place: int | None = None


class Lanes:
    """Adds jobs with flow control for producer threads; each thread gets groups and coalescing keys of its own.

    Args:
        kinds: The flow control of the jobs of each kind: "group", "limit", "coalesce", "unique", "batch" or "call".
        starts: The directory in which handlers of mode `calls` record their starts.
    """

    def __init__(self, kinds: Mapping[str, str], starts: str) -> None:
        self._uses = kinds
        self._starts = starts
        self._own = threading.local()

    def add(self, session: OutboxSession, kind: JobKind[...], behaviour: str) -> list[Added]:
        """Add a job of this kind, or two jobs and their callback if its flow control is "batch"; return the added jobs.

        The list is empty if the kind's jobs are unique and another job has the key already.
        """
        use = self._uses.get(kind.kind, "")
        number = self._count(use)
        owner = threading.current_thread().name
        match use:
            case "group":
                grouped = kind.options(group=f"{owner}-{number % _GROUPS}")
                return [Added(session.add_job(grouped, behaviour=behaviour).id)]
            case "coalesce":
                key = f"{owner}-{number % _KEYS}"
                handle = session.add_job(kind.options(coalesce=key), behaviour=behaviour, number=number)
                return [Added(handle.id, f"{kind.kind} {key}", number)]
            case "unique":
                key = str(number % _UNIQUE_KEYS)
                handle = session.add_job(kind.options(unique=key), behaviour=behaviour, unique=key)
                session.flush()
                return [Added(handle.id)] if handle.added else []
            case "call":
                return [Added(session.add_job(kind, behaviour=behaviour, starts=self._starts).id)]
            case "batch":
                with batch(session, on_done=kind.job()) as opened:
                    members = [opened.add_job(kind, behaviour=behaviour) for _ in range(_MEMBERS)]
                # The callback has the batch's id.
                return [Added(opened.id), *(Added(member.id) for member in members)]
        return [Added(session.add_job(kind, behaviour=behaviour).id)]

    def _count(self, use: str) -> int:
        counts: Counter[str] = vars(self._own).setdefault("counts", Counter())
        counts[use] += 1
        return counts[use]


def coalesce_key(job: Job) -> str | None:
    """Return the coalescing key of a job as the torture test records it, with the kind before it; None without one."""
    return None if job.unique_key is None else job.unique_key.replace("\x1f", " ")
