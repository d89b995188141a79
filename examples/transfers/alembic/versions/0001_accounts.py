"""Accounts, transfers and the ledger."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "account",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("owner", sa.String, nullable=False),
        sa.Column("balance_cents", sa.BigInteger, nullable=False),
        sa.CheckConstraint("balance_cents >= 0", name="account_never_overdrawn"),
    )
    op.create_table(
        "transfer",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("source_id", sa.BigInteger, sa.ForeignKey("account.id"), nullable=False),
        sa.Column("target_id", sa.BigInteger, sa.ForeignKey("account.id"), nullable=False),
        sa.Column("cents", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("ordered_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False),
        sa.CheckConstraint("cents > 0", name="transfer_moves_something"),
    )
    op.create_table(
        "entry",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("transfer_id", sa.BigInteger, sa.ForeignKey("transfer.id"), index=True, nullable=False),
        sa.Column("account_id", sa.BigInteger, sa.ForeignKey("account.id"), nullable=False),
        sa.Column("cents", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("entry")
    op.drop_table("transfer")
    op.drop_table("account")
