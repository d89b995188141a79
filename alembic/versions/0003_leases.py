"""Step 3: one row per relay process that holds leases."""

from alembic import op

from outboxq import migrations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=3)


def downgrade() -> None:
    migrations.downgrade(op, to=2)
