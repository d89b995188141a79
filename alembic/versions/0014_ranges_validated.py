"""Step 14: the checks of step 13 hold for every row; what was there before is repaired."""

from alembic import op

from outboxq import migrations

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=14)


def downgrade() -> None:
    migrations.downgrade(op, to=13)
