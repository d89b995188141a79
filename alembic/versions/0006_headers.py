"""Step 6: a bound on the headers of SQL producers."""

from alembic import op

from outboxq import migrations

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=6)


def downgrade() -> None:
    migrations.downgrade(op, to=5)
