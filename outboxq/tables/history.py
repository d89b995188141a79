"""The tables of the history: relays' state, counts of jobs' outcomes, finished jobs, progress, and operators' actions.

Finished jobs are kept only for kinds with `keep=`.
"""

from sqlalchemy import (
    ARRAY,
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Index,
    Integer,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)

from outboxq.tables.columns import MOST_NUMBER, Instant, JsonText, Real, StoredText, bounded, metadata, set_storage

# The row of each relay about itself, written several times a minute. `running`: its long-running jobs. `limits`: the
# limits of queues that its application declares.
relay_status = Table(
    "relay_status",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("host", StoredText, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("version", StoredText, nullable=False),
    Column("schema_step", Integer, nullable=False),
    Column("started_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("seen_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("state", StoredText, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("kinds", ARRAY(Text), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("busy", Integer, nullable=False),
    # The queues from which one of its slots could have claimed when it was last seen.
    Column("free", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("listens", Boolean, nullable=False),
    Column("running", JsonText, nullable=False),
    Column("limits", JsonText, nullable=False, server_default=text("'[]'")),
    # The number of times that the relay has added to `stat`, so that the same counts are never added twice.
    Column("flush", BigInteger, nullable=False),
    CheckConstraint("jsonb_typeof(running) = 'array' AND jsonb_typeof(limits) = 'array'", name="relay_status_running"),
    bounded("relay_status_ranges", "started_at", "seen_at"),
    CheckConstraint(
        "coalesce(array_ndims(queues), 1) = 1 AND array_position(queues, NULL) IS NULL "
        "AND coalesce(array_ndims(kinds), 1) = 1 AND array_position(kinds, NULL) IS NULL "
        "AND coalesce(array_ndims(free), 1) = 1 AND array_position(free, NULL) IS NULL",
        name="relay_status_names",
    ),
)
set_storage(relay_status, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

_OUTCOMES = ("done", "retried", "died", "snoozed", "discarded", "crashed", "lost")
_SUMS = ("wait_seconds", "run_seconds")


def _bucket(column: str) -> str:
    return (
        f"array_ndims({column}) = 1 AND array_lower({column}, 1) = 1 AND array_position({column}, NULL) IS NULL "
        f"AND 0 <= ALL ({column}) AND {MOST_NUMBER} >= ALL ({column})"
    )


# The outcomes of jobs, by minutes (grain 60) and by hours (3600). All relays add to the same rows.
stat = Table(
    "stat",
    metadata,
    Column("grain", SmallInteger, primary_key=True, autoincrement=False),
    Column("at", Instant(), primary_key=True),
    Column("queue", StoredText, primary_key=True),
    Column("kind", StoredText, primary_key=True),
    *(Column(name, BigInteger, nullable=False, server_default=text("0")) for name in _OUTCOMES),
    *(Column(name, Real(), nullable=False, server_default=text("0")) for name in _SUMS),
    Column("wait", ARRAY(BigInteger), nullable=False),
    Column("run", ARRAY(BigInteger), nullable=False),
    CheckConstraint("grain IN (60, 3600)", name="stat_grain"),
    CheckConstraint("cardinality(wait) = 20 AND cardinality(run) = 20", name="stat_buckets"),
    bounded("stat_ranges", "at"),
    bounded("stat_counts", *_OUTCOMES, first="0", last=MOST_NUMBER),
    bounded("stat_seconds", *_SUMS, first=f"-{MOST_NUMBER}", last=MOST_NUMBER),
    CheckConstraint(f"{_bucket('wait')} AND {_bucket('run')}", name="stat_bucket_counts"),
)
set_storage(stat, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000")

# The state of each queue, once a minute. `exact`: false if a number above 10,000 is an estimate.
gauge = Table(
    "gauge",
    metadata,
    Column("at", Instant(), primary_key=True),
    Column("queue", StoredText, primary_key=True),
    *(Column(name, Integer, nullable=False) for name in ("ready", "scheduled", "due", "leased", "suspect", "dead")),
    Column("exact", Boolean, nullable=False),
    Column("oldest_seconds", REAL),
    bounded("gauge_ranges", "at"),
    bounded("gauge_seconds", "oldest_seconds", first=f"-{MOST_NUMBER}", last=MOST_NUMBER),
)

# Finished jobs, of kinds that keep them.
done_job = Table(
    "done_job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("queue", StoredText, nullable=False),
    Column("kind", StoredText, nullable=False),
    Column("outcome", StoredText, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("created_at", Instant(), nullable=False),
    Column("claimed_at", Instant()),
    Column("finished_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("seconds", Real(), nullable=False),
    Column("relay", Uuid),
    Column("args", JsonText),
    Column("headers", JsonText),
    Column("result", JsonText),
    # The jobs that were merged into its run, because it was coalesced with them.
    Column("stands_for", ARRAY(Uuid)),
    Column("expires_at", Instant(), nullable=False),
    CheckConstraint("outcome IN ('done', 'discarded', 'cancelled', 'expired')", name="done_job_outcome"),
    bounded("done_job_ranges", "created_at", "claimed_at", "finished_at", "expires_at"),
    bounded("done_job_seconds", "seconds", first=f"-{MOST_NUMBER}", last=MOST_NUMBER),
)
Index("done_job_expires", done_job.c.expires_at)
set_storage(
    done_job, "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on"
)

# The progress of running handlers, as they report it.
progress = Table(
    "progress",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("fraction", Real(), nullable=False),
    Column("note", StoredText, nullable=False),
    Column("relay", Uuid, nullable=False),
    Column("noted_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("fraction BETWEEN 0 AND 1", name="progress_fraction"),
    bounded("progress_ranges", "noted_at"),
)
set_storage(progress, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

# The acts of operators.
audit = Table(
    "audit",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("finished_at", Instant()),
    Column("actor", StoredText, nullable=False),
    Column("role", StoredText),
    Column("via", StoredText, nullable=False),
    Column("db_user", StoredText, nullable=False, server_default=text("session_user")),
    Column("action", StoredText, nullable=False),
    Column("target", StoredText),
    # The rows that were meant, and the change of them: never arguments, results or other payloads.
    Column("filter", JsonText),
    Column("change", JsonText),
    Column("reason", StoredText),
    # The number of rows that the preview showed, that were changed, and that were skipped because others held them.
    Column("expected", BigInteger),
    Column("changed", BigInteger, nullable=False, server_default=text("0")),
    Column("held", BigInteger, nullable=False, server_default=text("0")),
    # The last row that a change of many rows has visited: it continues after it.
    Column("position", Uuid),
    # The number of times that it was resumed: a process that finds another number than its own ends.
    Column("resumed", Integer, nullable=False, server_default=text("0")),
    Column("stopped_at", Instant()),
    Column("error", StoredText),
    CheckConstraint("via IN ('cli', 'web', 'api')", name="audit_via"),
    bounded("audit_ranges", "at", "finished_at", "stopped_at"),
)
Index("audit_at", audit.c.at)
