"""Step 10: the checks of step 9 hold for the rows that were there before."""

from alembic import op

from outboxq import migrations

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=10)


def downgrade() -> None:
    migrations.downgrade(op, to=9)
