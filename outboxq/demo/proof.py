"""The demo's proof: figures about lost and doubled jobs, each counted in the database by one SQL statement."""

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from outboxq.demo.shop import STOCK


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the demo's proof, which the statement `sql` counts in the database.

    `counted_from`: words for the rows that are counted. `must_be_zero`: True if any other number shows a fault.
    """

    name: str
    sql: str
    counted_from: str
    must_be_zero: bool = False


# A rollback does not return the numbers drawn from an identity: the gaps count rows that were inserted and undone.
FIGURES = (
    Figure("orders committed", 'SELECT count(*) FROM shop."order"', "rows of shop.order"),
    Figure(
        "orders rolled back",
        'SELECT last_value - (SELECT count(*) FROM shop."order") FROM shop.order_id_seq',
        "gaps in the ids of shop.order",
    ),
    Figure(
        "savepoints rolled back",
        # Only committed orders charge a card.
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
    """A relay that the demo has killed: its name and process.

    `running`: the jobs that it was running. `written`: how many of them had written their effect, but not committed it.
    """

    relay: str
    pid: int
    running: tuple[UUID, ...]
    written: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome of a run of the demo, to be printed, and checked by `differences`.

    Attributes:
        values: The counted numbers, by the names of `FIGURES`.
        by_relay: The effects of each relay, by its name.
        kill: The relay that was killed while it ran jobs; None without one.
        taken_over: How many of the jobs that the killed relay was running were done by another relay.
    """

    values: Mapping[str, int]
    by_relay: Mapping[str, int]
    kill: Kill | None
    taken_over: int

    @property
    def holds(self) -> bool:
        """True if `differences` finds none: no job was lost, done twice or left over, although a relay was killed."""
        return not self.differences()

    def differences(self) -> list[str]:
        """Return, in words, each number that differs from the expected one; empty if the proof holds."""
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
    """Count all figures in the shop's database; return the proof.

    `kill`: the relay that was killed while it ran jobs; None without one.
    """
    values = {figure.name: int(connection.execute(text(figure.sql)).scalar_one() or 0) for figure in FIGURES}
    by_relay = {str(row.relay): int(row.effects) for row in connection.execute(_BY_RELAY)}
    taken_over = 0
    if kill is not None:
        named = {"running": list(kill.running), "killed": kill.relay}
        taken_over = connection.execute(_TAKEN_OVER, named).scalar_one()
    return Proof(values, by_relay, kill, taken_over)
