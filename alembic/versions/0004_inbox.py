"""Step 4: the inbox, effects and the deployment's id."""

from alembic import op

from outboxq import migrations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=4)


def downgrade() -> None:
    migrations.downgrade(op, to=3)
