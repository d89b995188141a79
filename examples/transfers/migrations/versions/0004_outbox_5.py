"""outboxq's step 5: how vacuum keeps its tables."""

from alembic import op

from outboxq import migrations

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    migrations.upgrade(op, to=5)


def downgrade() -> None:
    migrations.downgrade(op, to=4)
