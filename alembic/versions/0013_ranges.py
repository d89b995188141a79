"""Step 13: what a row beside `job` may hold: times, numbers, and callbacks that can become a job."""

from alembic import op

from outboxq import migrations

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=13)


def downgrade() -> None:
    migrations.downgrade(op, to=12)
