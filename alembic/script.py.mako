"""${message}."""

from alembic import op
from outboxq import migrations

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    migrations.upgrade(op, to=${int(up_revision)})


def downgrade() -> None:
    migrations.downgrade(op, to=${int(up_revision) - 1})
