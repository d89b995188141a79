"""Orders."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "order",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("cents", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("charge_id", sa.String),
    )


def downgrade() -> None:
    op.drop_table("order")
