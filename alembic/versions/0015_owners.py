"""Step 15: whose code declares a schedule, and since when that code does not any more."""

from alembic import op

from outboxq import migrations

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=15)


def downgrade() -> None:
    migrations.downgrade(op, to=14)
