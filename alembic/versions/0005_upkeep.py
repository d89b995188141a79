"""Step 5: how vacuum keeps the tables."""

from alembic import op

from outboxq import migrations

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=5)


def downgrade() -> None:
    migrations.downgrade(op, to=4)
