"""Databases with tables of a test module's own beside outboxq's."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, MetaData, create_engine, text

from outboxq.postgres import Database, Server


@contextmanager
def database_with(tables: MetaData, server: Server, template: str) -> Iterator[Database]:
    """A new database with these tables."""
    with server.create_database(template=template) as database:
        engine = create_engine(database.url)
        tables.create_all(engine)
        engine.dispose()
        yield database


@contextmanager
def emptied(database: Database, *tables: str) -> Iterator[Engine]:
    """An engine on the database, whose jobs and rows in these tables are removed first."""
    engine = create_engine(database.url)
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(('outboxq.job', *tables))}"))
    yield engine
    engine.dispose()
