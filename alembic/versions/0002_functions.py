"""Step 2: add_job for SQL producers, and the trigger that wakes relays."""

from alembic import op

from outboxq import migrations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=2)


def downgrade() -> None:
    migrations.downgrade(op, to=1)
