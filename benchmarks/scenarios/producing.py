"""Rows 8 and 9: the cost of enqueueing for the producer."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import Engine, Uuid, create_engine, event
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.apps.accounts import Account
from benchmarks.apps.noop import nothing
from benchmarks.bench import ACCOUNTS, CENTS, Bench, Workbench, conninfo
from benchmarks.figures import Better, Comparison, Series, Unsupported
from outboxq import OutboxSession
from outboxq.clock import uuid7s

_A_TRANSACTION = 1_000
_COPY = b"COPY outboxq.job (id, queue, kind, args, headers, priority, state) FROM STDIN"


def _new_id() -> UUID:
    return UUID(uuid7s(1)[0])


class _Base(DeclarativeBase):
    """Beside the accounts, for this scenario alone."""


class Note(_Base):
    """A plain row with the columns that `add_job` writes."""

    __tablename__ = "note"
    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=_new_id)
    topic: Mapped[str]
    kind: Mapped[str]
    body: Mapped[dict[str, Any]] = mapped_column(JSONB)
    headers: Mapped[dict[str, Any]] = mapped_column(JSONB)
    priority: Mapped[int]
    state: Mapped[str]


def bulk(bench: Bench) -> list[Comparison | Unsupported]:
    """Row 8. The limit is COPY of lines that were made before, which pgbench cannot send: psycopg does."""
    limit, ours = "COPY of 1,000 ready-made rows a transaction, 1 connection", "add_jobs, 1,000 a transaction"
    with bench.database() as workbench, _disposed(workbench) as engine:
        measures: dict[str, Callable[[], float]] = {
            limit: partial(_copied, bench, workbench),
            ours: partial(_added, bench, workbench, engine),
        }
        found = bench.alternate(measures, "jobs/s")
    return [Comparison(8, "bulk", ours, found[ours], found[limit], limit, 0.5)]


def unique(bench: Bench) -> list[Comparison | Unsupported]:
    """Row 19. One add_job a transaction: plain, with a new key each, and with one key that is taken."""
    plain, new, taken = "plain", "a key of its own each", "a key that another job has"
    keys: dict[str, Callable[[], str | None]] = {
        plain: lambda: None,
        new: lambda: f"key {_new_id()}",
        taken: lambda: "the key",
    }
    with bench.database() as workbench, _disposed(workbench) as engine:
        measures = {name: partial(_added_one_by_one, bench, workbench, engine, key) for name, key in keys.items()}
        found = bench.alternate(measures, "jobs/s")
    limit = "add_job of a plain job, in a transaction of its own"
    return [
        Comparison(19, "unique", f"add_job of a unique job: {new}", found[new], found[plain], limit, 0.6),
        Comparison(19, "unique", f"add_job of a unique job: {taken}", found[taken], found[plain], limit, 1.0),
    ]


def _added_one_by_one(bench: Bench, workbench: Workbench, engine: Engine, key: Callable[[], str | None]) -> float:
    workbench.fill(0)
    added, seconds = 0, bench.size.seconds
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        with OutboxSession(engine) as session:
            named = key()
            kind = nothing if named is None else nothing.options(unique=named)
            session.add_job(kind, **_arguments(added))
            session.commit()
        added += 1
    return added / (time.perf_counter() - begun)


def beside(bench: Bench) -> list[Comparison | Unsupported]:
    """Row 9."""
    times = 20 if bench.size.name == "quick" else 1_000
    with bench.database() as workbench, _disposed(workbench) as engine:
        _Base.metadata.create_all(engine)
        # Compiled statements and imports are paid once.
        _added_cpu(engine, 20)
        statements = _statements(engine, _write_and_add) - _statements(engine, _write)
        found = []
        for repeat in range(1, bench.repeats + 1):
            found.append(_added_cpu(engine, times))
            job, row = found[-1]
            bench.say(f"  {repeat} of {bench.repeats}  µs of CPU: add_job {job:.0f}, one more ORM row {row:.0f}")
    sent = Series((float(statements),), "statements")
    what, limit_name = "what add_job adds to an ORM write", "one more plain ORM row of the same width"
    cpu, limit = (Series(tuple(each), "µs of CPU") for each in zip(*found, strict=True))
    return [
        Comparison(9, "add-job", f"{what}: statements", sent, None, "", 1.0, Better.lower),
        Comparison(9, "add-job", f"{what}: CPU", cpu, limit, limit_name, 1.2, Better.lower, is_paired=True),
    ]


@contextmanager
def _disposed(workbench: Workbench) -> Iterator[Engine]:
    engine = create_engine(workbench.url)
    try:
        yield engine
    finally:
        engine.dispose()


def _copied(bench: Bench, workbench: Workbench) -> float:
    workbench.fill(0)
    blocks = [_block() for _ in range(5 if bench.size.name == "quick" else 200)]
    with psycopg.connect(conninfo(workbench.url)) as connection, connection.cursor() as cursor:
        begun = time.perf_counter()
        for block in blocks:
            with cursor.copy(_COPY) as copy:
                copy.write(block)
            connection.commit()
        return len(blocks) * _A_TRANSACTION / (time.perf_counter() - begun)


def _block() -> bytes:
    return "".join(
        f"{_new_id()}\tbench\tjob\t{json.dumps(_arguments(number))}\t{{}}\t0\tready\n"
        for number in range(_A_TRANSACTION)
    ).encode()


def _arguments(number: int) -> dict[str, Any]:
    return {"account": 1 + number * 7919 % ACCOUNTS, "cents": CENTS, "reference": f"invoice 2026-{number}"}


def _added(bench: Bench, workbench: Workbench, engine: Engine) -> float:
    workbench.fill(0)
    transactions, seconds = 0, bench.size.seconds
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        with OutboxSession(engine) as session:
            session.add_jobs(nothing.job(**_arguments(number)) for number in range(_A_TRANSACTION))
            session.commit()
        transactions += 1
    return transactions * _A_TRANSACTION / (time.perf_counter() - begun)


def _write(session: OutboxSession, number: int) -> None:
    account = session.get_one(Account, 1 + number % ACCOUNTS)
    account.balance += CENTS


def _write_and_add(session: OutboxSession, number: int) -> None:
    _write(session, number)
    session.add_job(nothing, **_arguments(number))


def _write_and_note(session: OutboxSession, number: int) -> None:
    _write(session, number)
    body = _arguments(number)
    session.add(Note(topic="bench", kind="job", body=body, headers={}, priority=0, state="ready"))


def _added_cpu(engine: Engine, times: int) -> tuple[float, float]:
    """Microseconds of this process's CPU that a job and a row take above `_write`: three transactions by turns."""
    spent = dict.fromkeys((_write, _write_and_add, _write_and_note), 0.0)
    for number in range(times):
        for write in spent:
            begun = time.process_time()
            _transaction(engine, write, number)
            spent[write] += time.process_time() - begun
    job, row = ((spent[write] - spent[_write]) / times * 1e6 for write in (_write_and_add, _write_and_note))
    return job, row


def _transaction(engine: Engine, write: Callable[[OutboxSession, int], None], number: int) -> None:
    with OutboxSession(engine) as session:
        write(session, number)
        session.commit()


def _statements(engine: Engine, write: Callable[[OutboxSession, int], None]) -> int:
    sent: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        with Session(engine) as probe:
            probe.connection()
        _transaction(engine, write, 1)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    return len(sent)
