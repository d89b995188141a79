"""Step 12: indexes that lead to calls that are not settled, and to dead letters by the time they died."""

from alembic import op

from outboxq import migrations

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=12)


def downgrade() -> None:
    migrations.downgrade(op, to=11)
