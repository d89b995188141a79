"""Parts that the tables share: their schema, and the types of their columns."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    DDL,
    CheckConstraint,
    Connection,
    DateTime,
    Dialect,
    Double,
    Engine,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    cast,
    event,
    extract,
    type_coerce,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import BindParameter, ColumnElement
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

SCHEMA = "outboxq"

metadata = MetaData(schema=SCHEMA)


def mapped_schema(connection: Connection | Engine) -> str:
    """Return the schema of outboxq's tables on this connection or engine.

    It is `SCHEMA`, unless the `schema_translate_map` of the connection or engine names another.
    """
    translated: dict[str | None, str | None] = connection.get_execution_options().get("schema_translate_map") or {}
    return translated.get(SCHEMA) or SCHEMA


_JSONB_AS_TEXT: TypeEngine[str] = JSONB()


class StoredText(Text):
    """A text column whose values are sent as text.

    SQLAlchemy would send them as varchar, for which PostgreSQL has no operators: it would search for the nearest one in
    all schemas of the search path, and prefer a user's operator for text and varchar to its own for two texts.
    """

    render_bind_cast = True

    def adapt(self, cls: type[Any], **kw: Any) -> Any:
        """Called by SQLAlchemy: return this type unchanged, even if a dialect has its own type for texts."""
        return super().adapt(type(self) if issubclass(cls, String) else cls, **kw)


class JsonText(UserDefinedType[str]):
    """A jsonb column that is sent and read as JSON text.

    Neither the engine's own JSON serializer nor a driver's decoder touches the payload: it is decoded job by job, so
    that one broken payload fails one job.
    """

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "JSONB"

    def bind_expression(self, bindvalue: BindParameter[str]) -> ColumnElement[str]:
        return cast(type_coerce(bindvalue, Text()), _JSONB_AS_TEXT)

    def column_expression(self, colexpr: ColumnElement[str]) -> ColumnElement[str]:
        return cast(colexpr, Text)


_EPOCH, _MICROSECONDS = datetime(1970, 1, 1, tzinfo=UTC), 1_000_000
# The times that a datetime can represent in any time zone, in seconds since 1970. Before step 13 a row may have others.
_FIRST = (datetime(1, 1, 3, tzinfo=UTC) - _EPOCH).total_seconds()
_LAST = (datetime(9999, 12, 29, tzinfo=UTC) - _EPOCH).total_seconds()


class Instant(TypeDecorator[datetime]):
    """A timestamptz that is read as its seconds since 1970, and whose Python value is a datetime in UTC.

    The text of a timestamptz depends on the session's DateStyle and TimeZone, and psycopg reads only one form of it.
    The session belongs to the user, so outboxq does not change these settings.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def coerce_compared_value(self, op: Any, value: object) -> TypeEngine[Any]:
        """Called by SQLAlchemy for the other value in an expression: return the type interval for a timedelta."""
        return self.impl_instance.coerce_compared_value(op, value)

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression to select instead of the column: its seconds since 1970."""
        return type_coerce(extract("epoch", column), self)

    def process_result_value(self, value: Decimal | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002  # theirs
        """Return a datetime for the seconds that were read; for infinity and other such times, the nearest one."""
        if value is None:
            return None
        # A numeric, which holds microseconds exactly.
        held = min(max(value, Decimal(_FIRST)), Decimal(_LAST))
        return _EPOCH + timedelta(microseconds=int(held * _MICROSECONDS))


class Real(TypeDecorator[float]):
    """A float8 that is read as a numeric, because the digits of its text depend on a setting of the session."""

    impl = Double()
    cache_ok = True

    def coerce_compared_value(self, op: Any, value: object) -> TypeEngine[Any]:
        """Called by SQLAlchemy for the other value in an expression: return its type as for a plain float8 column."""
        return self.impl_instance.coerce_compared_value(op, value)

    def column_expression(self, column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Return the expression to select instead of the column: its value as a numeric."""
        return type_coerce(cast(column, Numeric), self)

    def process_result_value(self, value: Decimal | None, dialect: Dialect) -> float | None:  # noqa: ARG002  # theirs
        """Return the numeric value that was read, as a float."""
        return None if value is None else float(value)


def set_storage(table: Table, parameters: str) -> None:
    """Make SQLAlchemy set storage parameters of this table, such as a fill factor, after it has created the table."""
    # By ALTER TABLE, because SQLAlchemy 2.0 has no WITH (...).
    statement = DDL(f"ALTER TABLE %(fullname)s SET ({parameters})")  # type: ignore[no-untyped-call]  # SQLAlchemy left it untyped
    event.listen(table, "after_create", statement)


# The times that Python's datetime can represent in any time zone: a row with another one could neither be read nor
# skipped.
FIRST_TIME = "timestamptz '0001-01-03 00:00:00+00'"
LAST_TIME = "timestamptz '9999-12-29 00:00:00+00'"
# Sums of such numbers cannot overflow; infinity and NaN are not below it.
MOST_NUMBER = "1000000000000000"


def bounded(name: str, *columns: str, first: str = FIRST_TIME, last: str = LAST_TIME) -> CheckConstraint:
    """Return a check constraint: each of these columns is NULL or from `first` to `last`."""
    return CheckConstraint(" AND ".join(f"{column} BETWEEN {first} AND {last}" for column in columns), name=name)
