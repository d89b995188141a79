"""Step 11: what relays did and how the queues stood, finished jobs, what operators did."""

from alembic import op

from outboxq import migrations

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrations.upgrade(op, to=11)


def downgrade() -> None:
    migrations.downgrade(op, to=10)
