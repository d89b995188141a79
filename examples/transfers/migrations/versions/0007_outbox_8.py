"""outboxq's step 8: the checks of step 7 hold for the rows that were there before."""

from alembic import op

from outboxq import migrations

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    migrations.upgrade(op, to=8)


def downgrade() -> None:
    migrations.downgrade(op, to=7)
