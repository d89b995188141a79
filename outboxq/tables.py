"""The tables as this version of the code sees them; `migrations/` makes them, and a test compares the two."""

import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    ARRAY,
    DDL,
    REAL,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    DateTime,
    Double,
    Engine,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    Uuid,
    cast,
    event,
    func,
    inspect,
    select,
    text,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapper, registry
from sqlalchemy.sql.elements import BindParameter, ColumnElement
from sqlalchemy.types import TypeEngine, UserDefinedType

SCHEMA = "outboxq"

# The migration step that this code needs. It can do without what later steps add, which may come after a deployment.
NEEDED_VERSION = 9

metadata = MetaData(schema=SCHEMA)


def mapped_schema(connection: Connection | Engine) -> str:
    """The schema that the `schema_translate_map` of a connection or an engine leads to."""
    translated: dict[str | None, str | None] = connection.get_execution_options().get("schema_translate_map") or {}
    return translated.get(SCHEMA) or SCHEMA


_JSONB_AS_TEXT: TypeEngine[str] = JSONB()


class StoredText(Text):
    """A text column whose values are sent as text.

    SQLAlchemy would send them as varchar, for which PostgreSQL has no operators: it would look for the nearest one in
    all schemas of the search path, and prefer a user's for text and varchar to its own for two texts.
    """

    render_bind_cast = True

    def adapt(self, cls: type[Any], **kw: Any) -> Any:
        """Keep this type, even if a dialect has a type of its own for texts."""
        return super().adapt(type(self) if issubclass(cls, String) else cls, **kw)


class JsonText(UserDefinedType[str]):
    """A jsonb column that travels as JSON text both ways.

    Neither the engine's own JSON serializer nor a driver's decoder touches the payload: it is decoded job by job, so
    that one broken payload fails one job.
    """

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "JSONB"

    def bind_expression(self, bindvalue: BindParameter[str]) -> ColumnElement[str]:
        return cast(type_coerce(bindvalue, Text()), _JSONB_AS_TEXT)

    def column_expression(self, colexpr: ColumnElement[str]) -> ColumnElement[str]:
        return cast(colexpr, Text)


def _set_storage(table: Table, parameters: str) -> None:
    # By ALTER TABLE, because SQLAlchemy 2.0 knows no WITH (...).
    statement = DDL(f"ALTER TABLE %(fullname)s SET ({parameters})")  # type: ignore[no-untyped-call]  # SQLAlchemy left it untyped
    event.listen(table, "after_create", statement)


# The sizes that a claim can read, measured as the text that it reads. A value of up to 1,024 bytes, uncompressed,
# cannot exceed them, and is not measured. A dead letter must meet them before it becomes a job again.
JOB_SIZES = (
    "(pg_catalog.pg_column_size(args) <= 1024 AND pg_catalog.pg_column_compression(args) IS NULL "
    "OR pg_catalog.octet_length(args::text) <= 16777216) "
    "AND (pg_catalog.pg_column_size(headers) <= 1024 AND pg_catalog.pg_column_compression(headers) IS NULL "
    "OR pg_catalog.octet_length(headers::text) <= 1048576) "
    "AND pg_catalog.octet_length(unique_key) <= 1024 AND pg_catalog.octet_length(group_key) <= 1024"
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
    Column("run_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", SmallInteger),
    Column("crashes", SmallInteger, nullable=False, server_default=text("0")),
    Column("parked", SmallInteger, nullable=False, server_default=text("0")),
    Column("unique_key", StoredText),
    Column("group_key", StoredText),
    Column("lease_owner", Uuid),
    Column("lease_token", BigInteger, nullable=False, server_default=text("0")),
    Column("errors", JsonText, nullable=False, server_default=text("'[]'::jsonb")),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("batch_id", Uuid),
    Column("expires_at", DateTime(timezone=True)),
    CheckConstraint("octet_length(queue) BETWEEN 1 AND 63", name="queue_name_bytes"),
    CheckConstraint("octet_length(kind) BETWEEN 1 AND 63", name="kind_name_bytes"),
    CheckConstraint(
        "state IN ('ready', 'scheduled', 'leased', 'suspect', "
        "'grouped', 'group_waiting', 'group_leased', 'group_suspect')",
        name="job_state",
    ),
    # Jobs of a group have states of their own, which no claim of ungrouped jobs looks for.
    CheckConstraint(
        "(group_key IS NOT NULL OR state IN ('ready', 'scheduled', 'leased', 'suspect')) "
        "AND (state <> 'group_leased' OR lease_owner IS NOT NULL)",
        name="job_groups",
    ),
    CheckConstraint(
        "expires_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'",
        name="job_expiry",
    ),
    CheckConstraint("priority > -32768", name="job_priority"),
    CheckConstraint("jsonb_typeof(args) = 'object'", name="job_args_object"),
    # What Python's datetime can hold, in any time zone: a claim could neither read another time, nor get past its row.
    CheckConstraint(
        "run_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00' "
        "AND created_at BETWEEN timestamptz '0001-01-03 00:00:00+00' AND timestamptz '9999-12-29 00:00:00+00'",
        name="job_times",
    ),
    # Counters end one below their type, so that counting on cannot overflow.
    CheckConstraint(
        "attempt BETWEEN 0 AND 2147483646 AND crashes BETWEEN 0 AND 32766 AND parked BETWEEN 0 AND 32766 "
        "AND lease_token BETWEEN 0 AND 9223372036854775806",
        name="job_numbers",
    ),
    CheckConstraint("state <> 'leased' OR lease_owner IS NOT NULL", name="job_lease"),
    CheckConstraint(JOB_SIZES, name="job_sizes"),
)

# Vacuumed early and at full speed, because every job's row is soon dead.
_set_storage(
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
# All states of a group's jobs, so that its head is found by one probe, whatever state it is in.
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
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("died_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("batch_id", Uuid),
)

Index("dead_job_queue", dead_job.c.queue, dead_job.c.died_at)
Index("dead_job_batch", dead_job.c.batch_id, postgresql_where=text("batch_id IS NOT NULL"))

queue = Table(
    "queue",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("paused_at", DateTime(timezone=True)),
    # How many jobs of the queue, and of each of its groups, run at a time; NULL for no limit.
    Column("max_running", Integer),
    Column("max_per_group", Integer),
    # At most `rate_burst` + n * `rate_jobs` jobs begin in n times `rate_seconds`; all three or none.
    Column("rate_jobs", Integer),
    Column("rate_seconds", Double),
    Column("rate_burst", Integer),
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
)

relay = Table(
    "relay",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("alive_until", DateTime(timezone=True), nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("host", StoredText),
    Column("pid", Integer),
)
# Updated every few seconds: free room on the page keeps the updates HOT.
_set_storage(relay, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

# The messages that were accepted, each written in the transaction of the rows that it leads to.
inbox = Table(
    "inbox",
    metadata,
    Column("consumer", StoredText, primary_key=True),
    Column("message_id", StoredText, primary_key=True),
    Column("fingerprint", LargeBinary),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("octet_length(consumer) BETWEEN 1 AND 63", name="inbox_consumer_bytes"),
    CheckConstraint("octet_length(message_id) BETWEEN 1 AND 512", name="inbox_message_id_bytes"),
)
Index("inbox_expires", inbox.c.expires_at)

# Calls to the outside, written in short transactions of their own. `in_doubt`: an earlier call may have been applied.
effect = Table(
    "effect",
    metadata,
    Column("scope", StoredText, primary_key=True),
    Column("key", StoredText, primary_key=True),
    Column("fingerprint", LargeBinary),
    Column("status", StoredText, nullable=False),
    Column("in_doubt", Boolean, nullable=False, server_default=text("false")),
    Column("provider_key", Uuid, nullable=False),
    Column("lock_token", Uuid, nullable=False),
    Column("locked_until", DateTime(timezone=True), nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("1")),
    Column("result", JsonText),
    Column("error", StoredText),
    Column("first_called_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("changed_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("expires_at", DateTime(timezone=True)),
    CheckConstraint("octet_length(scope) BETWEEN 1 AND 255", name="effect_scope_bytes"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 512", name="effect_key_bytes"),
    CheckConstraint("status IN ('started', 'done', 'failed', 'retryable', 'unknown')", name="effect_status"),
    # Only what has an expiry is pruned: never a call that may be under way, or one whose outcome is unknown.
    CheckConstraint(
        "expires_at IS NULL OR status IN ('done', 'failed') OR status = 'retryable' AND NOT in_doubt",
        name="effect_kept",
    ),
)
Index("effect_expires", effect.c.expires_at, postgresql_where=text("expires_at IS NOT NULL"))
Index("effect_unknown", effect.c.changed_at, postgresql_where=text("status = 'unknown'"))

# Vacuumed early: the pruner starts at the oldest expiry, and walks over the entries that it deleted until a vacuum.
for _memory in (inbox, effect):
    _set_storage(
        _memory,
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on",
    )

# Jobs that are added at times: a relay that locks a due row adds its jobs and moves `next_at`, in one transaction.
schedule = Table(
    "schedule",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("kind", StoredText, nullable=False),
    Column("queue", StoredText, nullable=False),
    Column("args", JsonText, nullable=False, server_default=text("'{}'::jsonb")),
    # Headers, priority, keys and so on: what `kind.options(...)` took.
    Column("options", JsonText, nullable=False, server_default=text("'{}'::jsonb")),
    Column("cron", StoredText, nullable=False),
    Column("time_zone", StoredText, nullable=False),
    Column("missed", StoredText, nullable=False),
    Column("jitter_seconds", Double, nullable=False, server_default=text("0")),
    # Whether an application's code declares it.
    Column("declared", Boolean, nullable=False, server_default=text("false")),
    Column("next_at", DateTime(timezone=True), nullable=False),
    Column("last_at", DateTime(timezone=True)),
    Column("paused_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("octet_length(name) BETWEEN 1 AND 255", name="schedule_name_bytes"),
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
)
Index("schedule_next", schedule.c.next_at, postgresql_where=text("paused_at IS NULL"))

# Who has a key: a job, for as long as its row is in `job`, and until `kept_until`. Relays never write here while a
# handler runs.
unique_key = Table(
    "unique_key",
    metadata,
    Column("key", StoredText, primary_key=True),
    Column("job_id", Uuid, nullable=False),
    Column("kept_until", DateTime(timezone=True)),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 1024", name="unique_key_bytes"),
)

# The theoretical arrival time of the generic cell rate algorithm, for each queue with a rate.
rate = Table(
    "rate",
    metadata,
    Column("name", StoredText, primary_key=True),
    Column("tat", DateTime(timezone=True), nullable=False),
)
_set_storage(rate, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

# Batches that are not over: one is over when no row of it is left in `job`.
batch = Table(
    "batch",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("callback", JsonText, nullable=False),
    # The batch that its callback is a member of.
    Column("parent_id", Uuid),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("jsonb_typeof(callback) = 'object'", name="batch_callback_object"),
)
Index("batch_parent", batch.c.parent_id, postgresql_where=text("parent_id IS NOT NULL"))
for _table in (unique_key, batch):
    _set_storage(
        _table,
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on",
    )

# Jobs that run and should not: the relay that runs one finds its id here.
cancel_request = Table(
    "cancel_request",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("outcome", StoredText, nullable=False, server_default=text("'discard'")),
    Column("requested_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    CheckConstraint("outcome IN ('discard', 'dead')", name="cancel_request_outcome"),
)

paused_kind = Table(
    "paused_kind",
    metadata,
    Column("queue", StoredText, primary_key=True),
    Column("kind", StoredText, primary_key=True),
    Column("paused_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
)

# What each relay says of itself, several times a minute. `running`: the jobs that have run for long.
relay_status = Table(
    "relay_status",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("host", StoredText, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("version", StoredText, nullable=False),
    Column("schema_step", Integer, nullable=False),
    Column("started_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("seen_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("state", StoredText, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("kinds", ARRAY(Text), nullable=False),
    Column("slots", Integer, nullable=False),
    Column("busy", Integer, nullable=False),
    Column("listens", Boolean, nullable=False),
    Column("running", JsonText, nullable=False),
    # How often the relay has added to `stat`: the same numbers are never added twice.
    Column("flush", BigInteger, nullable=False),
    CheckConstraint("jsonb_typeof(running) = 'array'", name="relay_status_running"),
)
_set_storage(relay_status, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

# What became of jobs, by minutes (grain 60) and by hours (3600). All relays add to the same rows.
stat = Table(
    "stat",
    metadata,
    Column("grain", SmallInteger, primary_key=True, autoincrement=False),
    Column("at", DateTime(timezone=True), primary_key=True),
    Column("queue", StoredText, primary_key=True),
    Column("kind", StoredText, primary_key=True),
    *(
        Column(name, BigInteger, nullable=False, server_default=text("0"))
        for name in ("done", "retried", "died", "snoozed", "discarded", "crashed", "lost")
    ),
    Column("wait_seconds", Double, nullable=False, server_default=text("0")),
    Column("run_seconds", Double, nullable=False, server_default=text("0")),
    Column("wait", ARRAY(BigInteger), nullable=False),
    Column("run", ARRAY(BigInteger), nullable=False),
    CheckConstraint("grain IN (60, 3600)", name="stat_grain"),
    CheckConstraint("cardinality(wait) = 20 AND cardinality(run) = 20", name="stat_buckets"),
)
_set_storage(stat, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000")

# How each queue stood, once a minute. `exact`: false if a number above 10,000 is an estimate.
gauge = Table(
    "gauge",
    metadata,
    Column("at", DateTime(timezone=True), primary_key=True),
    Column("queue", StoredText, primary_key=True),
    *(Column(name, Integer, nullable=False) for name in ("ready", "scheduled", "due", "leased", "suspect", "dead")),
    Column("exact", Boolean, nullable=False),
    Column("oldest_seconds", REAL),
)

# Jobs that are over, of kinds that keep them.
done_job = Table(
    "done_job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("queue", StoredText, nullable=False),
    Column("kind", StoredText, nullable=False),
    Column("outcome", StoredText, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("claimed_at", DateTime(timezone=True)),
    Column("finished_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("seconds", Double, nullable=False),
    Column("relay", Uuid),
    Column("args", JsonText),
    Column("headers", JsonText),
    Column("result", JsonText),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("outcome IN ('done', 'discarded', 'cancelled')", name="done_job_outcome"),
)
Index("done_job_expires", done_job.c.expires_at)
_set_storage(
    done_job, "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on"
)

# What operators did.
audit = Table(
    "audit",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("finished_at", DateTime(timezone=True)),
    Column("actor", StoredText, nullable=False),
    Column("role", StoredText),
    Column("via", StoredText, nullable=False),
    Column("db_user", StoredText, nullable=False, server_default=text("session_user")),
    Column("action", StoredText, nullable=False),
    Column("target", StoredText),
    Column("filter", JsonText),
    Column("reason", StoredText),
    # How many rows the preview showed, were changed, and were passed over because others held them.
    Column("expected", BigInteger),
    Column("changed", BigInteger, nullable=False, server_default=text("0")),
    Column("held", BigInteger, nullable=False, server_default=text("0")),
    Column("error", StoredText),
    CheckConstraint("via IN ('cli', 'web', 'api')", name="audit_via"),
)
Index("audit_at", audit.c.at)

# The id that provider keys are made of, so that two installations never give the same key.
deployment = Table(
    "deployment",
    metadata,
    Column("singleton", Boolean, primary_key=True, server_default=text("true")),
    Column("id", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
    CheckConstraint("singleton", name="deployment_one_row"),
)

migration = Table(
    "migration",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("applied_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("created_schema", Boolean, nullable=False, server_default=text("false")),
)


class JobRow:
    """Jobs that are not inserted yet: one object in the caller's unit of work stands for all jobs of a flush.

    Mapped to no table, so that its flush writes nothing by itself: `enqueue` inserts the jobs when the flush comes to
    it. Until then it is pending, so that SQLAlchemy itself minds savepoints, rollbacks and autoflush. Never returned to
    callers.

    Args:
        number: Tells it apart from others in its session's identity map.
        write: Called with the connection and this object when a flush comes to it.
    """

    # For hooks of users that ask every object of a session for its table.
    __tablename__ = job.name

    def __init__(self, number: int, write: "Callable[[Connection, JobRow], None]") -> None:
        self.number = number
        self.write = write
        # By their ids in hex; None once they are written.
        self.jobs: dict[str, Any] | None = {}


# Selected from the table, so that `binds` by table lead here too; without its primary key, so that nothing is written.
_numbered = select(func.pg_catalog.max(job.c.seq, type_=job.c.seq.type).label("number")).subquery("jobs")
_mapping = threading.Lock()


def job_mapper() -> Mapper[JobRow]:
    """The mapping of `JobRow`, made anew after `clear_mappers()`, which removes all mappings."""
    found: Mapper[JobRow] | None = inspect(JobRow, raiseerr=False)
    if found is None:
        with _mapping:
            found = inspect(JobRow, raiseerr=False) or _map()
    assert found is not None
    return found


def _map() -> Mapper[JobRow]:
    mapper = registry(metadata=metadata).map_imperatively(
        JobRow, _numbered, primary_key=[_numbered.c.number], eager_defaults=False
    )
    JobRow.__table__ = job  # type: ignore[attr-defined]  # where declared classes have their table
    event.listen(mapper, "before_insert", lambda _mapper, connection, row: row.write(connection, row))
    return mapper


job_mapper()
