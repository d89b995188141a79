"""Step 9: schedules, groups, unique jobs, limits, batches, cancellations and expiry."""

from alembic import op

from outboxq import migrations

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=9)


def downgrade() -> None:
    migrations.downgrade(op, to=8)
