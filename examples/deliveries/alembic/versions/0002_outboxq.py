"""outboxq's tables. The step is named, so that this revision does the same thing for ever."""

from alembic import op

from outboxq import migrations

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    migrations.upgrade(op, to=15)


def downgrade() -> None:
    migrations.downgrade(op, to=0)
