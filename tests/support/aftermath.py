"""Afterwards: what a fault may not leave behind, however the jobs themselves ended."""

from collections.abc import Mapping

from sqlalchemy import Engine, text

from outboxq.torture.history import OPEN_TRANSACTIONS as OPEN
from tests.support.waiting import wait_until

_ROWS: Mapping[str, str] = {
    "jobs": "SELECT count(*) FROM outboxq.job",
    "dead letters": "SELECT count(*) FROM outboxq.dead_job",
    "jobs under a lease": "SELECT count(*) FROM outboxq.job WHERE state = 'leased' OR lease_owner IS NOT NULL",
    "relays": "SELECT count(*) FROM outboxq.relay",
}


def assert_nothing_left(engine: Engine, *, dead_letters: int = 0, dead_relays: int = 0) -> None:
    """Assert that nothing waits, and nothing is leased, dead, locked, prepared or open; every relay has ended by now.

    Args:
        dead_letters: As many jobs were to give up.
        dead_relays: As many relays were killed while they held a lease, whose row stays for a day.
    """
    # The server learns a little later than we do that a process is gone.
    wait_until(lambda: not left_open(engine), "the server to let go of everything, and not " + str(left_open(engine)))
    found = _count(engine, _ROWS)
    relays = found.pop("relays", 0)
    assert relays <= dead_relays, f"{relays} relays have a lease"
    assert found == ({"dead letters": dead_letters} if dead_letters else {})


def left_open(engine: Engine) -> dict[str, int]:
    """What of prepared transactions, open transactions and locks there is, other than ours."""
    return _count(engine, OPEN)


def expire_leases(engine: Engine) -> None:
    """Let the time of every lease pass."""
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.relay SET alive_until = clock_timestamp()"))


def _count(engine: Engine, queries: Mapping[str, str]) -> dict[str, int]:
    with engine.connect() as connection:
        counts = {name: connection.execute(text(query)).scalar_one() for name, query in queries.items()}
    return {name: number for name, number in counts.items() if number}
