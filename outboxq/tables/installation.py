"""The tables of living relays, of the installation's id, and of the migration steps that were applied."""

from sqlalchemy import Boolean, CheckConstraint, Column, Integer, Table, Uuid, text

from outboxq.tables.columns import Instant, StoredText, bounded, metadata, set_storage

relay = Table(
    "relay",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("alive_until", Instant(), nullable=False),
    Column("started_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("host", StoredText),
    Column("pid", Integer),
    bounded("relay_ranges", "alive_until", "started_at"),
)
# Updated every few seconds: free space on the page keeps the updates HOT.
set_storage(relay, "fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500")

# The id from which provider keys are derived, so that two installations never give the same key.
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
    Column("applied_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("created_schema", Boolean, nullable=False, server_default=text("false")),
)
