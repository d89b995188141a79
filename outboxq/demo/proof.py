"""The demo's proof: every figure is counted in the database, with the statement that counts it."""

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from outboxq.demo.shop import STOCK


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: its name, the statement that counts it, its meaning in words, and its required value."""

    name: str
    sql: str
    counted_from: str
    must_be_zero: bool = False


# A rollback does not give back the numbers that an identity drew: the gaps count rows that were inserted and undone.
FIGURES = (
    Figure("orders committed", 'SELECT count(*) FROM shop."order"', "rows of shop.order"),
    Figure(
        "orders rolled back",
        'SELECT last_value - (SELECT count(*) FROM shop."order") FROM shop.order_id_seq',
        "gaps in the ids of shop.order",
    ),
    Figure(
        "savepoints rolled back",
        # Only orders that are committed try one.
        "SELECT last_value - (SELECT count(*) FROM shop.gift_wrap) FROM shop.gift_wrap_id_seq",
        "gaps in the ids of shop.gift_wrap",
    ),
    Figure("jobs enqueued", "SELECT count(*) FROM shop.enqueued_job", "rows of shop.enqueued_job, one a job"),
    Figure("effects applied", "SELECT count(*) FROM shop.effect", "rows of shop.effect, the handlers' ledger"),
    Figure(
        "lost",
        "SELECT count(*) FROM shop.enqueued_job WHERE job_id NOT IN (SELECT job_id FROM shop.effect)",
        "enqueued jobs without an effect",
        must_be_zero=True,
    ),
    Figure(
        "doubled",
        "SELECT count(*) - count(DISTINCT job_id) FROM shop.effect",
        "effects beyond the first of a job (no unique constraint)",
        must_be_zero=True,
    ),
    Figure(
        "ran though rolled back",
        "SELECT count(*) FROM shop.effect WHERE job_id NOT IN (SELECT job_id FROM shop.enqueued_job)",
        "effects of jobs that were never committed",
        must_be_zero=True,
    ),
    Figure(
        "stock off by",
        f'SELECT abs(sum({STOCK} - stock) - (SELECT sum(quantity) FROM shop."order")) FROM shop.product',  # noqa: S608  # STOCK is a constant
        "stock taken, less the quantities ordered",
        must_be_zero=True,
    ),
    Figure("jobs left", "SELECT count(*) FROM outboxq.job", "rows of outboxq.job", must_be_zero=True),
    Figure("dead letters", "SELECT count(*) FROM outboxq.dead_job", "rows of outboxq.dead_job", must_be_zero=True),
)

_TAKEN_OVER = text("SELECT count(DISTINCT job_id) FROM shop.effect WHERE job_id = ANY (:running) AND relay <> :killed")
_BY_RELAY = text("SELECT relay, count(*) AS effects FROM shop.effect GROUP BY relay ORDER BY relay")


@dataclass(frozen=True, slots=True)
class Kill:
    """A relay that was killed, the jobs that it ran at that moment, and how many had written their effect."""

    relay: str
    pid: int
    running: tuple[UUID, ...]
    written: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of the orders.

    Attributes:
        values: The figures, by name.
        by_relay: The effects of each relay, by its name.
        kill: The relay that was killed at work, if one was.
        taken_over: How many of the jobs that it ran have the effect of another relay.
    """

    values: Mapping[str, int]
    by_relay: Mapping[str, int]
    kill: Kill | None
    taken_over: int

    @property
    def holds(self) -> bool:
        """Return True if nothing was lost, doubled or left although a relay was killed at work."""
        return not self.differences()

    def differences(self) -> list[str]:
        """The differences from what is promised, in words."""
        found = [
            f"{figure.name}: expected 0, counted {self.values[figure.name]} ({figure.counted_from})"
            for figure in FIGURES
            if figure.must_be_zero and self.values[figure.name] != 0
        ]
        found += [
            f"{name}: expected some, counted none, so this run proves nothing"
            for name in ("orders committed", "orders rolled back", "savepoints rolled back", "jobs enqueued")
            if self.values[name] == 0
        ]
        if self.kill is None or not self.kill.running:
            found.append("no relay was killed while it ran jobs, so this run proves nothing")
        elif self.taken_over != len(self.kill.running):
            found.append(
                f"{self.kill.relay} ran {len(self.kill.running)} jobs when it was killed: expected all of them to be "
                f"done by others, counted {self.taken_over}"
            )
        return found


def prove(connection: Connection, kill: Kill | None) -> Proof:
    """Count everything in the shop's database."""
    values = {figure.name: int(connection.execute(text(figure.sql)).scalar_one() or 0) for figure in FIGURES}
    by_relay = {str(row.relay): int(row.effects) for row in connection.execute(_BY_RELAY)}
    taken_over = 0
    if kill is not None:
        named = {"running": list(kill.running), "killed": kill.relay}
        taken_over = connection.execute(_TAKEN_OVER, named).scalar_one()
    return Proof(values, by_relay, kill, taken_over)
