"""`outboxq batches`: list open callback batches, and show one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outboxq.cli.help import Commands
from outboxq.cli.options import OneId
from outboxq.cli.reading import lists, shows
from outboxq.cli.tables import Column

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = Commands(help="List and show open batches.")


@app.command("list")
@lists(
    "batches",
    (
        Column("id", "id"),
        Column("kind", "name"),
        Column("queue", "name", rank=1),
        Column("members", if_empty=True),
        Column("failed", if_empty=True),
        Column("created_at"),
        Column("parent_id", "id", rank=2),
    ),
    "`batches show`",
)
def list_batches(connection: "Connection", *, limit: int) -> Sequence[object]:
    """List open batches, the oldest first: the callback's kind and queue, and how many members are left and failed.

    A batch that has ended is not listed: its callback is a job with the batch's id. One that is listed without members
    has ended, too; a relay adds its callback within a minute.

    \b
    Example:
      outboxq batches list
    """
    from outboxq.admin import callback_batches

    return callback_batches.list_batches(connection, limit=limit)


@app.command("show")
@shows
def show_batch(connection: "Connection", batch_id: OneId) -> object:
    """Show an open batch: the members that are left by state, and the callback with its arguments.

    \b
    Example:
      outboxq batches show 01980f3e-71c4-7000-8000-000000000001
    """
    from outboxq.admin import callback_batches

    return callback_batches.show_batch(connection, batch_id)
