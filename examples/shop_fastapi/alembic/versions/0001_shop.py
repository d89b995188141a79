"""Products, orders and invoices."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "product",
        sa.Column("sku", sa.String, primary_key=True),
        sa.Column("price_cents", sa.Integer, nullable=False),
        sa.Column("stock", sa.Integer, nullable=False),
        sa.CheckConstraint("stock >= 0", name="product_never_oversold"),
    )
    op.create_table(
        "order",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("email", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
    )
    op.create_table(
        "order_line",
        sa.Column("order_id", sa.BigInteger, sa.ForeignKey("order.id"), primary_key=True),
        sa.Column("sku", sa.String, sa.ForeignKey("product.sku"), primary_key=True),
        sa.Column("quantity", sa.Integer, nullable=False),
        sa.Column("price_cents", sa.Integer, nullable=False),
    )
    op.create_table(
        "invoice",
        sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
        sa.Column("order_id", sa.BigInteger, sa.ForeignKey("order.id"), nullable=False),
        sa.Column("total_cents", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    for table in ("invoice", "order_line", "order", "product"):
        op.drop_table(table)
