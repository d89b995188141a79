"""Rows for operators to change, and what the tables say of what they did."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from outboxq.admin.actions import Begin
from tests.support.waiting import wait_until as wait_until

Table = Literal["job", "dead_job"]

_DEAD = ", headers, priority, attempt, crashes, errors, reason, created_at"
_DEAD_VALUES = ", '{}', 0, 9, 2, '[]', 'tired', now()"


def add(engine: Engine, number: int, table: Table = "job", *, queue: str = "many", kind: str = "a") -> list[UUID]:
    """Jobs that wait, or dead letters; their ids, in order."""
    more, values = (_DEAD, _DEAD_VALUES) if table == "dead_job" else ("", "")
    statement = (
        f"INSERT INTO outboxq.{table} (id, queue, kind, args{more}) SELECT gen_random_uuid(), :queue, :kind, '{{}}'"
        f"{values} FROM generate_series(1, :number) RETURNING id"
    )
    with engine.begin() as connection:
        return sorted(connection.execute(text(statement), {"queue": queue, "kind": kind, "number": number}).scalars())


def count(engine: Engine, table: Table) -> int:
    with engine.connect() as connection:
        return connection.execute(text(f"SELECT count(*) FROM outboxq.{table}")).scalar_one()


def marked(engine: Engine) -> int:
    """How many jobs a claim would take for such whose relay died."""
    statement = (
        "SELECT count(*) FROM outboxq.job WHERE xmax <> '0'::xid AND pg_xact_status(xmax::text::xid8) = 'aborted'"
    )
    with engine.connect() as connection:
        return connection.execute(text(statement)).scalar_one()


def audited(engine: Engine) -> list[dict[str, Any]]:
    """The rows of the audit, in the order in which they were written."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT * FROM outboxq.audit ORDER BY at, id"))
        return [dict(row._mapping) for row in rows]  # public, but for its name


def is_free(engine: Engine) -> bool:
    """Whether no transaction holds a row of the audit."""
    held = "SELECT FROM outboxq.audit WHERE id NOT IN (SELECT id FROM outboxq.audit FOR UPDATE SKIP LOCKED)"
    with engine.begin() as connection:
        return connection.execute(text(held)).first() is None


def audit_text(engine: Engine) -> str:
    """Everything in the audit as one text."""
    with engine.connect() as connection:
        return str(connection.execute(text("SELECT string_agg(audit::text, ' ') FROM outboxq.audit")).scalar_one())


def beginning(engine: Engine) -> Begin:
    """Begins transactions on one connection each, as a caller of the library would."""

    def begin() -> AbstractContextManager[Connection]:
        return engine.begin()

    return begin


def on_change(engine: Engine, body: str, table: Table = "job", *, at_commit: bool = False) -> None:
    """Run PL/pgSQL for each row that is deleted, at once or at COMMIT."""
    when = "CONSTRAINT TRIGGER on_change AFTER" if at_commit else "TRIGGER on_change BEFORE"
    how = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE FUNCTION on_change() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {body}; RETURN OLD; END$$; "
            f"CREATE {when} DELETE ON outboxq.{table} {how} FOR EACH ROW EXECUTE FUNCTION on_change()"
        )


# Waits at one row, for as long as a test holds the lock.
GATE = 4_711


def wait_at(row: UUID) -> str:
    return f"IF OLD.id = '{row}' THEN PERFORM pg_advisory_xact_lock_shared({GATE}); END IF"


@contextmanager
def closed_gate(engine: Engine) -> Iterator[Connection]:
    """The gate is closed until the end of the block, or of the connection's transaction."""
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({GATE})")
        yield connection


def waiting_pid(engine: Engine) -> int | None:
    """The backend that waits at the gate, if one does."""
    statement = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = :gate AND NOT granted"
    with engine.connect() as connection:
        return connection.execute(text(statement), {"gate": GATE}).scalar()
