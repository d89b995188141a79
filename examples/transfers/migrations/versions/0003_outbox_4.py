"""outboxq's step 4: the inbox, and effects that are called once."""

from alembic import op

from outboxq import migrations

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    migrations.upgrade(op, to=4)


def downgrade() -> None:
    migrations.downgrade(op, to=3)
