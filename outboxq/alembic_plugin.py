"""The Alembic plugin: `op.outboxq_upgrade(to=2)` and `op.outboxq_downgrade(to=0)` in a user's revisions.

Alembic imports this module in every project where outboxq is installed, so it stays tiny: the steps are imported by
the revision that runs them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.operations import Operations
    from alembic.runtime.plugins import Plugin


def setup(_: "Plugin") -> None:
    """Register the operations; Alembic calls this once."""
    from alembic.operations import MigrateOperation, Operations

    class _Step(MigrateOperation):
        def __init__(self, to: int | None, schema: str) -> None:
            self.to = to
            self.schema = schema

    class _Upgrade(_Step):
        @classmethod
        def outboxq_upgrade(cls, operations: "Operations", *, to: int | None = None, schema: str = "outboxq") -> None:
            operations.invoke(cls(to, schema))

    class _Downgrade(_Step):
        @classmethod
        def outboxq_downgrade(cls, operations: "Operations", *, to: int = 0, schema: str = "outboxq") -> None:
            operations.invoke(cls(to, schema))

    def upgrade(operations: "Operations", step: _Upgrade) -> None:
        from outboxq import migrations

        migrations.upgrade(operations, to=step.to, schema=step.schema)

    def downgrade(operations: "Operations", step: _Downgrade) -> None:
        from outboxq import migrations

        migrations.downgrade(operations, to=step.to or 0, schema=step.schema)

    Operations.register_operation("outboxq_upgrade")(_Upgrade)
    Operations.register_operation("outboxq_downgrade")(_Downgrade)
    Operations.implementation_for(_Upgrade)(upgrade)
    Operations.implementation_for(_Downgrade)(downgrade)
