"""`outboxq relays`: list the relays that live."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outboxq.cli.help import Commands
from outboxq.cli.reading import lists
from outboxq.cli.tables import Column

if TYPE_CHECKING:
    from sqlalchemy import Connection

app = Commands(help="List relays.")


@app.command("list")
@lists(
    "relays",
    (
        Column("state"),
        Column("host", "name"),
        Column("pid", "id"),
        Column("queues", "name"),
        Column("busy", if_empty=True),
        Column("slots"),
        Column("free", rank=3),
        Column("waiting", rank=1),
        Column("longest", rank=3),
        Column("seen_at", rank=2),
        Column("started_at", rank=4),
        Column("version", rank=5),
        Column("schema_step", rank=6),
        Column("listens", rank=7),
        Column("id", "id", rank=8),
    ),
    "--limit",
)
def list_relays(connection: "Connection", *, limit: int) -> Sequence[object]:
    """List the relays that live: where, which queues they serve, how many slots work, and what runs longest.

    `waiting` jobs in lease mode have begun, and wait for one of the connections that they share.

    A relay that has said nothing for a minute is dead, and is listed for a day; one that ended in order is not. --json
    has the jobs that have run for longer than a second, and the kinds that each relay knows.

    \b
    Examples:
      outboxq relays list
      outboxq relays list --json | jq '.relays[].running[]'
    """
    from outboxq.admin import relays

    return relays.list_relays(connection, limit=limit)
