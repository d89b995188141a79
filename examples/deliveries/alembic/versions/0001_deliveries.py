"""Endpoints, events and deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "endpoint",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("url", sa.String, unique=True, nullable=False),
        sa.Column("is_active", sa.Boolean, nullable=False),
    )
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
    )
    op.create_table(
        "delivery",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("event_id", sa.BigInteger, sa.ForeignKey("event.id"), index=True, nullable=False),
        sa.Column("endpoint_id", sa.BigInteger, sa.ForeignKey("endpoint.id"), index=True, nullable=False),
        sa.Column("status", sa.String, nullable=False),
    )
    op.create_table(
        "attempt",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("delivery_id", sa.BigInteger, sa.ForeignKey("delivery.id"), index=True, nullable=False),
        sa.Column("code", sa.Integer, nullable=False),
        sa.Column("answered_at", sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp(), nullable=False),
    )


def downgrade() -> None:
    for name in ("attempt", "delivery", "event", "endpoint"):
        op.drop_table(name)
