"""Documents and activities, each tenant's rows for itself."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

TABLES = ("document", "activity")


def upgrade() -> None:
    op.create_table(
        "document",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("tenant", sa.String, server_default=sa.text("current_setting('app.tenant')"), nullable=False),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("words", sa.Integer),
        sa.CheckConstraint("tenant <> ''", name="document_has_a_tenant"),
    )
    op.create_table(
        "activity",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("tenant", sa.String, server_default=sa.text("current_setting('app.tenant')"), nullable=False),
        sa.Column("document_id", sa.BigInteger, sa.ForeignKey("document.id"), nullable=False),
        sa.Column("what", sa.String, nullable=False),
        sa.CheckConstraint("tenant <> ''", name="activity_has_a_tenant"),
    )
    for table in TABLES:
        op.create_index(f"ix_{table}_tenant", table, ["tenant"])
        # FORCE: for the owner of the table too, which the application's role is here.
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        # For what is read and for what is written. Without a tenant there are no rows, and none can be written.
        op.execute(f"CREATE POLICY own_rows ON {table} USING (tenant = current_setting('app.tenant', true))")


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)
