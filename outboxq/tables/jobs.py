"""The tables of jobs and dead letters, and of what belongs to jobs: unique keys, batches, requests to cancel."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    SmallInteger,
    Table,
    Uuid,
    literal_column,
    text,
)

from outboxq.tables.columns import FIRST_TIME, LAST_TIME, Instant, JsonText, StoredText, bounded, metadata, set_storage

# The sizes that a claim can read, measured in the text that it reads. A stored value of up to 1,024 bytes,
# uncompressed, cannot exceed them, and is not measured.
_SIZES = (
    "(pg_catalog.pg_column_size(args) <= 1024 AND pg_catalog.pg_column_compression(args) IS NULL "
    "OR pg_catalog.octet_length(args::text) <= 16777216) "
    "AND (pg_catalog.pg_column_size(headers) <= 1024 AND pg_catalog.pg_column_compression(headers) IS NULL "
    "OR pg_catalog.octet_length(headers::text) <= 1048576) "
    "AND pg_catalog.octet_length(unique_key) <= 1024 AND pg_catalog.octet_length(group_key) <= 1024"
)
_QUEUE_NAME = "pg_catalog.octet_length(queue) BETWEEN 1 AND 63"
_KIND_NAME = "pg_catalog.octet_length(kind) BETWEEN 1 AND 63"
_PRIORITY = "priority > -32768"
_ARGS = "pg_catalog.jsonb_typeof(args) = 'object'"
_CREATED = f"created_at BETWEEN {FIRST_TIME} AND {LAST_TIME}"
# The checks that a dead letter must meet to become a job again.
JOB_CHECKS = " AND ".join(f"({check})" for check in (_QUEUE_NAME, _KIND_NAME, _PRIORITY, _ARGS, _CREATED, _SIZES))

# The checks that the callback of a batch must meet to become a job, with the casts that are used then.
_CALLBACK = (
    "(jsonb_typeof(callback -> 'kind') = 'string') IS TRUE "
    "AND (jsonb_typeof(callback -> 'queue') = 'string') IS TRUE "
    "AND octet_length(callback ->> 'kind') BETWEEN 1 AND 63 "
    "AND octet_length(callback ->> 'queue') BETWEEN 1 AND 63 "
    "AND coalesce(jsonb_typeof(callback -> 'args'), 'null') IN ('object', 'null') "
    "AND coalesce(jsonb_typeof(callback -> 'headers'), 'null') IN ('object', 'null') "
    "AND coalesce(octet_length((callback -> 'args')::text), 0) <= 16777216 "
    "AND coalesce(octet_length((callback -> 'headers')::text), 0) <= 1048000 "
    "AND coalesce((callback ->> 'priority')::smallint, 0) > -32768 "
    "AND coalesce((callback ->> 'max_attempts')::smallint, 1) >= 1 "
    f"AND coalesce((callback ->> 'run_at')::timestamptz, {FIRST_TIME}) BETWEEN {FIRST_TIME} AND {LAST_TIME} "
    "AND coalesce((callback ->> 'delay_seconds')::float8, 0) BETWEEN 0 AND 3153600000 "
    "AND coalesce((callback ->> 'expires_seconds')::float8, 0) BETWEEN 0 AND 3153600000 "
    "AND coalesce(octet_length(callback ->> 'coalesce'), 0) <= 1024 "
    "AND coalesce(octet_length(callback ->> 'group'), 0) <= 1024"
)

job = Table(
    "job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("seq", BigInteger, Identity(always=True), nullable=False),
    Column("queue", StoredText, nullable=False),
    Column("kind", StoredText, nullable=False),
    Column("args", JsonText, nullable=False),
    Column("headers", JsonText, nullable=False, server_default=text("'{}'::jsonb")),
    Column("priority", SmallInteger, nullable=False, server_default=text("0")),
    Column("state", StoredText, nullable=False, server_default=text("'ready'")),
    Column("run_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", SmallInteger),
    Column("crashes", SmallInteger, nullable=False, server_default=text("0")),
    Column("parked", SmallInteger, nullable=False, server_default=text("0")),
    # The coalescing key, under a name from before unique jobs existed: relays of other versions read it by that name.
    # The keys of unique jobs, and the windows of coalesced ones, are in the table `unique_key`.
    Column("unique_key", StoredText),
    Column("group_key", StoredText),
    Column("lease_owner", Uuid),
    Column("lease_token", BigInteger, nullable=False, server_default=text("0")),
    Column("errors", JsonText, nullable=False, server_default=text("'[]'::jsonb")),
    Column("created_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("batch_id", Uuid),
    Column("expires_at", Instant()),
    CheckConstraint(_QUEUE_NAME, name="queue_name_bytes"),
    CheckConstraint(_KIND_NAME, name="kind_name_bytes"),
    CheckConstraint(
        "state IN ('ready', 'scheduled', 'leased', 'suspect', "
        "'grouped', 'group_waiting', 'group_leased', 'group_suspect')",
        name="job_state",
    ),
    # Jobs of a group have states of their own, which no claim of ungrouped jobs reads.
    CheckConstraint(
        "(group_key IS NOT NULL OR state IN ('ready', 'scheduled', 'leased', 'suspect')) "
        "AND (state <> 'group_leased' OR lease_owner IS NOT NULL)",
        name="job_groups",
    ),
    CheckConstraint(
        "expires_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'",
        name="job_expiry",
    ),
    CheckConstraint(_PRIORITY, name="job_priority"),
    CheckConstraint(_ARGS, name="job_args_object"),
    # The times that Python's datetime can represent in any time zone: a claim could neither read another one nor skip
    # it.
    CheckConstraint(f"run_at BETWEEN {FIRST_TIME} AND {LAST_TIME} AND {_CREATED}", name="job_times"),
    # Counters end one below their type's maximum, so that incrementing cannot overflow.
    CheckConstraint(
        "attempt BETWEEN 0 AND 2147483646 AND crashes BETWEEN 0 AND 32766 AND parked BETWEEN 0 AND 32766 "
        "AND lease_token BETWEEN 0 AND 9223372036854775806",
        name="job_numbers",
    ),
    CheckConstraint("state <> 'leased' OR lease_owner IS NOT NULL", name="job_lease"),
    CheckConstraint(_SIZES, name="job_sizes"),
)

# Vacuumed early and at full speed, because every job's row is soon dead.
set_storage(
    job,
    "fillfactor = 90, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, "
    "autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000, "
    "autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 100000, "
    "autovacuum_vacuum_cost_delay = 0, vacuum_index_cleanup = on, vacuum_truncate = off",
)

# The negated priority makes one ascending order out of "higher first, then older first": a row comparison can walk it.
Index("job_ready", job.c.queue, text("(-priority)"), job.c.seq, postgresql_where=text("state = 'ready'"))
Index("job_scheduled", job.c.queue, job.c.run_at, postgresql_where=text("state = 'scheduled'"))
Index("job_leased", job.c.lease_owner, postgresql_where=text("state = 'leased'"))
Index("job_suspect", job.c.queue, job.c.seq, postgresql_where=text("state = 'suspect'"))
Index("job_unique", job.c.unique_key, postgresql_where=text("unique_key IS NOT NULL"))
# Includes all states of a group's jobs, so that one probe finds its head in any state.
Index(
    "job_group",
    job.c.queue,
    job.c.group_key,
    job.c.seq,
    postgresql_ops={"group_key": 'COLLATE "C"'},
    postgresql_where=text("group_key IS NOT NULL AND state <> 'group_waiting'"),
)
Index(
    "job_group_state",
    job.c.state,
    job.c.queue,
    job.c.run_at,
    postgresql_where=text("state = 'group_waiting' OR state = 'group_leased' OR state = 'group_suspect'"),
)
Index("job_batch", job.c.batch_id, job.c.seq, postgresql_where=text("batch_id IS NOT NULL"))

dead_job = Table(
    "dead_job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("queue", StoredText, nullable=False),
    Column("kind", StoredText, nullable=False),
    Column("args", JsonText, nullable=False),
    Column("headers", JsonText, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", SmallInteger),
    Column("crashes", SmallInteger, nullable=False),
    Column("unique_key", StoredText),
    Column("group_key", StoredText),
    Column("errors", JsonText, nullable=False),
    Column("reason", StoredText, nullable=False),
    Column("created_at", Instant(), nullable=False),
    Column("died_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("batch_id", Uuid),
    bounded("dead_job_ranges", "created_at", "died_at"),
)

Index("dead_job_queue", dead_job.c.queue, dead_job.c.died_at)
Index("dead_job_died", dead_job.c.died_at.op("AT TIME ZONE")(literal_column("'UTC'")))
Index("dead_job_batch", dead_job.c.batch_id, postgresql_where=text("batch_id IS NOT NULL"))

# The owner of a key: a job, as long as its row is in `job`, and at least until `kept_until`. Relays never write here
# while a handler runs.
unique_key = Table(
    "unique_key",
    metadata,
    Column("key", StoredText, primary_key=True),
    Column("job_id", Uuid, nullable=False),
    Column("kept_until", Instant()),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 1024", name="unique_key_bytes"),
    bounded("unique_key_ranges", "kept_until"),
)

# Open batches: a batch has ended when no row of it is left in `job`.
batch = Table(
    "batch",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("callback", JsonText, nullable=False),
    # The batch of which its callback is a member.
    Column("parent_id", Uuid),
    Column("created_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("jsonb_typeof(callback) = 'object'", name="batch_callback_object"),
    bounded("batch_ranges", "created_at"),
    CheckConstraint(_CALLBACK, name="batch_callback_job"),
)
Index("batch_parent", batch.c.parent_id, postgresql_where=text("parent_id IS NOT NULL"))

for _table in (unique_key, batch):
    set_storage(
        _table,
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on",
    )

# Running jobs that should not run: the relay that runs one finds its id here.
cancel_request = Table(
    "cancel_request",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("outcome", StoredText, nullable=False, server_default=text("'discard'")),
    Column("requested_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("outcome IN ('discard', 'dead')", name="cancel_request_outcome"),
    bounded("cancel_request_ranges", "requested_at"),
)
