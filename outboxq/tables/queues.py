"""The tables of queues with their limits and rates, of paused kinds, and of schedules."""

from sqlalchemy import Boolean, CheckConstraint, Column, Index, Integer, Table, text

from outboxq.tables.columns import Instant, JsonText, Real, StoredText, bounded, metadata, set_storage

queue = Table(
    "queue",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("paused_at", Instant()),
    # How many jobs of the queue, and of each of its groups, run at a time; NULL for no limit.
    Column("max_running", Integer),
    Column("max_per_group", Integer),
    # At most `rate_burst` + n * `rate_jobs` jobs begin in n times `rate_seconds`; all three or none.
    Column("rate_jobs", Integer),
    Column("rate_seconds", Real()),
    Column("rate_burst", Integer),
    # How long dead letters are kept; 0 for ever, and NULL for as long as the application declares.
    Column("keep_dead_seconds", Real()),
    CheckConstraint(
        "max_running BETWEEN 1 AND 10000 AND max_per_group BETWEEN 1 AND 1000",
        name="queue_running",
    ),
    CheckConstraint(
        "num_nulls(rate_jobs, rate_seconds, rate_burst) IN (0, 3) "
        "AND rate_jobs BETWEEN 1 AND 1000000 AND rate_seconds BETWEEN 0.001 AND 2678400 "
        "AND rate_burst BETWEEN 1 AND 1000000",
        name="queue_rate",
    ),
    CheckConstraint("keep_dead_seconds = 0 OR keep_dead_seconds BETWEEN 60 AND 315619200", name="queue_keep_dead"),
    bounded("queue_ranges", "paused_at"),
)

# The theoretical arrival time of the generic cell rate algorithm, for each queue with a rate.
rate = Table(
    "rate",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("tat", Instant(), nullable=False),
    # At most as far ahead as the burst of its queue allows.
    CheckConstraint("isfinite(tat)", name="rate_ranges"),
)
set_storage(rate, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

paused_kind = Table(
    "paused_kind",
    metadata,
    Column("queue", StoredText, primary_key=True),
    Column("kind", StoredText, primary_key=True),
    Column("paused_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    bounded("paused_kind_ranges", "paused_at"),
)

# Jobs that are added at certain times: a relay that locks a due row adds its jobs and sets `next_at`, in one
# transaction.
schedule = Table(
    "schedule",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("kind", StoredText, nullable=False),
    Column("queue", StoredText, nullable=False),
    Column("args", JsonText, nullable=False, server_default=text("'{}'::jsonb")),
    # Headers, priority, keys and so on: the options of `kind.options(...)`.
    Column("options", JsonText, nullable=False, server_default=text("'{}'::jsonb")),
    Column("cron", StoredText, nullable=False),
    Column("time_zone", StoredText, nullable=False),
    Column("missed", StoredText, nullable=False),
    Column("jitter_seconds", Real(), nullable=False, server_default=text("0")),
    # True if an application's code declares it.
    Column("declared", Boolean, nullable=False, server_default=text("false")),
    Column("next_at", Instant(), nullable=False),
    Column("last_at", Instant()),
    Column("paused_at", Instant()),
    Column("created_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    # The registry that declares it; NULL if operators made it, or code from before this column.
    Column("owner", StoredText),
    # The time when its owner's code was first seen without it. It is disabled while `paused_at` has the same value.
    Column("disabled_at", Instant()),
    CheckConstraint("octet_length(name) BETWEEN 1 AND 255", name="schedule_name_bytes"),
    CheckConstraint("octet_length(owner) BETWEEN 1 AND 255", name="schedule_owner_bytes"),
    CheckConstraint("octet_length(queue) BETWEEN 1 AND 63", name="schedule_queue_bytes"),
    CheckConstraint("octet_length(kind) BETWEEN 1 AND 63", name="schedule_kind_bytes"),
    CheckConstraint("jsonb_typeof(args) = 'object'", name="schedule_args_object"),
    CheckConstraint("jsonb_typeof(options) = 'object'", name="schedule_options_object"),
    CheckConstraint("missed IN ('skip', 'one', 'all')", name="schedule_missed"),
    CheckConstraint("jitter_seconds BETWEEN 0 AND 86400", name="schedule_jitter"),
    CheckConstraint(
        "next_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'",
        name="schedule_times",
    ),
    bounded("schedule_ranges", "last_at", "paused_at", "created_at"),
    bounded("schedule_disabled_ranges", "disabled_at"),
)
Index("schedule_next", schedule.c.next_at, postgresql_where=text("paused_at IS NULL"))
