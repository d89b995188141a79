"""outboxq's step 7: what a row of its table of jobs may hold."""

from alembic import op

from outboxq import migrations

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    migrations.upgrade(op, to=7)


def downgrade() -> None:
    migrations.downgrade(op, to=6)
