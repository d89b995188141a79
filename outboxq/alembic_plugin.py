"""The Alembic plugin: `op.outboxq_upgrade(to=2)` and `op.outboxq_downgrade(to=0)` in a user's revisions.

Alembic imports this module in every project where outboxq is installed, so it stays tiny: the steps are imported by
the revision that runs them.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from alembic.operations import Operations
    from alembic.runtime.plugins import Plugin


def setup(_: "Plugin") -> None:
    """Register `op.outboxq_upgrade` and `op.outboxq_downgrade`; Alembic calls this once."""
    from alembic.operations import Operations

    class _Steps:
        @classmethod
        def outboxq_upgrade(cls, operations: "Operations", *, to: int | None = None, schema: str = "outboxq") -> None:
            from outboxq import migrations

            migrations.upgrade(operations, to=to, schema=schema)

        @classmethod
        def outboxq_downgrade(
            cls, operations: "Operations", *, to: int = 0, schema: str = "outboxq", discard: "Collection[str]" = ()
        ) -> None:
            from outboxq import migrations

            migrations.downgrade(operations, to=to, schema=schema, discard=discard)

    Operations.register_operation("outboxq_upgrade")(_Steps)
    Operations.register_operation("outboxq_downgrade")(_Steps)


class _PluginModule(ModuleType):
    """The class of this module, which makes it iterable: Alembic before 1.20.1 iterates over a plugin module."""

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


sys.modules[__name__].__class__ = _PluginModule
