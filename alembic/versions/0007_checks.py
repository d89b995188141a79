"""Step 7: what a row of `job` may hold."""

from alembic import op

from outboxq import migrations

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=7)


def downgrade() -> None:
    migrations.downgrade(op, to=6)
