"""Rows as a relay leaves them that leased jobs: alive for so long, or dead since then."""

from uuid import UUID, uuid4

from sqlalchemy import Connection, text

from outboxq.job import Job


def lease(connection: Connection, job_id: UUID, alive_for: str) -> None:
    """Have a relay of its own hold the job, alive until so long (an interval, negative: dead) from now."""
    values = {"owner": uuid4(), "id": job_id, "alive_for": alive_for}
    connection.execute(
        text(
            "INSERT INTO outboxq.relay (id, alive_until) "
            "VALUES (:owner, clock_timestamp() + CAST(:alive_for AS interval))"
        ),
        values,
    )
    connection.execute(
        text("UPDATE outboxq.job SET state = 'leased', lease_owner = :owner, lease_token = 1 WHERE id = :id"), values
    )


# The columns of a claimed job, in the order of `Job`, as a claim reads them.
_COLUMNS = """id, queue, kind, args::text, headers::text, priority, attempt, max_attempts, crashes, parked, unique_key,
  group_key, errors::text, run_at, created_at, seq, expires_at, batch_id, lease_token"""


def add_leased(connection: Connection, number: int, **columns: str) -> None:
    """Add jobs that a relay has under a lease, with these values as SQL; `n` counts them, and is their token."""
    values = {
        "id": "gen_random_uuid()", "queue": "'q'", "kind": "'k'", "args": "'{}'", "state": "'leased'",
        "lease_owner": "gen_random_uuid()", "lease_token": "n", "attempt": "1",
    } | columns  # fmt: skip
    connection.exec_driver_sql(
        f"INSERT INTO outboxq.job ({', '.join(values)}) SELECT {', '.join(values.values())} "
        f"FROM generate_series(1, {number}) AS n"
    )


def leased_jobs(connection: Connection, number: int = 1_000) -> list[Job]:
    """Some of the leased jobs in the table, in the order in which they were added."""
    return [
        Job(*row)
        for row in connection.exec_driver_sql(
            f"SELECT {_COLUMNS} FROM outboxq.job WHERE lease_owner IS NOT NULL ORDER BY seq LIMIT {number}"
        )
    ]
