"""Step 8: the checks of step 7 hold for the rows that were there before."""

from alembic import op

from outboxq import migrations

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=8)


def downgrade() -> None:
    migrations.downgrade(op, to=7)
