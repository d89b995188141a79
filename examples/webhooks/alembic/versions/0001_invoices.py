"""Invoices and their history."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "invoice",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("cents", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "change",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("invoice_id", sa.String, index=True, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("is_newest", sa.Boolean, nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), server_default=sa.func.clock_timestamp(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("change")
    op.drop_table("invoice")
