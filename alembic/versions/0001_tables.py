"""Step 1: the tables."""

from alembic import op

from outboxq import migrations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=1)


def downgrade() -> None:
    migrations.downgrade(op, to=0)
