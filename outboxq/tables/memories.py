"""The tables of remembered events: messages that were accepted, and calls to other services."""

from sqlalchemy import Boolean, CheckConstraint, Column, Index, Integer, LargeBinary, Table, Uuid, text

from outboxq.tables.columns import Instant, JsonText, StoredText, bounded, metadata, set_storage

# The messages that were accepted, each written in the transaction of the rows that it leads to.
inbox = Table(
    "inbox",
    metadata,
    Column("consumer", StoredText, primary_key=True),
    Column("message_id", StoredText, primary_key=True),
    Column("fingerprint", LargeBinary),
    Column("seen_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("expires_at", Instant(), nullable=False),
    CheckConstraint("octet_length(consumer) BETWEEN 1 AND 63", name="inbox_consumer_bytes"),
    CheckConstraint("octet_length(message_id) BETWEEN 1 AND 512", name="inbox_message_id_bytes"),
    bounded("inbox_ranges", "seen_at", "expires_at"),
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
    Column("locked_until", Instant(), nullable=False),
    Column("attempts", Integer, nullable=False, server_default=text("1")),
    Column("result", JsonText),
    Column("error", StoredText),
    Column("first_called_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("changed_at", Instant(), nullable=False, server_default=text("clock_timestamp()")),
    Column("expires_at", Instant()),
    CheckConstraint("octet_length(scope) BETWEEN 1 AND 255", name="effect_scope_bytes"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 512", name="effect_key_bytes"),
    CheckConstraint("status IN ('started', 'done', 'failed', 'retryable', 'unknown')", name="effect_status"),
    # Only rows with an expiry are pruned: never a call that may be in progress, or one whose outcome is unknown.
    CheckConstraint(
        "expires_at IS NULL OR status IN ('done', 'failed') OR status = 'retryable' AND NOT in_doubt",
        name="effect_kept",
    ),
    bounded("effect_ranges", "locked_until", "first_called_at", "changed_at", "expires_at"),
)
Index("effect_expires", effect.c.expires_at, postgresql_where=text("expires_at IS NOT NULL"))
Index("effect_open", effect.c.locked_until, postgresql_where=text("expires_at IS NULL AND status <> 'unknown'"))
Index("effect_unknown", effect.c.changed_at, postgresql_where=text("status = 'unknown'"))

# Vacuumed early, because the pruner starts at the oldest expiry, and walks over entries that it deleted until a vacuum.
for _table in (inbox, effect):
    set_storage(
        _table,
        "autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000, vacuum_index_cleanup = on",
    )
