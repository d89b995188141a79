"""Rows as a relay leaves them that leased jobs: alive for so long, or dead since then."""

from uuid import UUID, uuid4

from sqlalchemy import Connection, text


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
