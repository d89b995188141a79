"""Steps that write by statements: Core, text, SQL functions, the driver's cursor, in bulk, and deferred."""

from functools import cache
from typing import Any

from sqlalchemy import (
    Delete,
    Insert,
    String,
    TextClause,
    Update,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql

from tests.fuzz.frame import Frame, mixed, new_row, number_of, step_function, value_table
from tests.fuzz.models import CLASSES, VALUE_CLASS, Account, Note, Placed, Point
from tests.fuzz.schema import MODULUS

_PUT_DOCUMENT = update(Account).where(Account.id == bindparam("which")).values(document=bindparam("new"))
_SYNCHRONIZED = ("auto", "fetch", "evaluate", False)


def _new_update_by_key(name: str) -> Update:
    table = value_table(name)
    return (
        update(table).where(table.c.id == bindparam("which")).values(value=mixed(table.c.value, bindparam("n")))  # type: ignore[arg-type]
    )


_update_by_key = cache(_new_update_by_key)


@cache
def _update_of_class(name: str) -> Update:
    entity = VALUE_CLASS[name]
    return update(entity).where(entity.id == bindparam("which")).values(value=bindparam("n"))


@cache
def _update_by_text(name: str) -> TextClause:
    table = value_table(name).name  # type: ignore[attr-defined]
    return text(f"UPDATE {table} SET value = (value * 2 + :n) % {MODULUS} WHERE id = :which")


@cache
def _delete_by_key(name: str) -> Delete:
    table = value_table(name)
    return delete(table).where(table.c.id == bindparam("which"))  # type: ignore[arg-type]


def _parameters(name: str, key: int, n: int) -> dict[str, int]:
    return {"which": number_of(name, key), "n": n}


def _to_value(name: str, key: int, n: int) -> Update:
    entity = VALUE_CLASS[name]
    return update(entity).where(entity.id == number_of(name, key)).values(value=mixed(entity.value, n))


def _keys_of(table: Any) -> list[Any]:
    return list(table.primary_key)


def new_values(name: str, key: int, n: int) -> dict[str, object]:
    """The values of a row, by its columns."""
    return {"id": number_of(name, key), "value": n, **({"side": "l"} if name == "Pair" else {})}


@cache
def _upsert(name: str) -> Insert:
    table: Any = value_table(name)
    side = {"side": "l"} if name == "Pair" else {}
    statement = postgresql.insert(table).values(id=bindparam("which"), value=bindparam("n"), **side)
    values = {"value": mixed(table.c.value, statement.excluded.value)}
    return statement.on_conflict_do_update(index_elements=_keys_of(table), set_=values)


@cache
def _insert_from_select(name: str) -> Insert:
    table: Any = value_table(name)
    written = cast(table.c.value + bindparam("n"), String)
    return insert(Note.__table__).from_select(["text"], select(written).where(table.c.id == bindparam("which")))  # type: ignore[arg-type]


def _to_doubled(key: int, n: int) -> Update:
    return update(Placed).where(Placed.id == key).values({Placed.doubled: n * 2})


@step_function
def update_core(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.session.execute(_update_by_key(name), _parameters(name, key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def update_orm(frame: Frame, name: str, key: int, n: int, how: int) -> object:
    """SQLAlchemy brings the session's own rows up to date, in one way or another, or not at all."""
    synchronized = _SYNCHRONIZED[how % len(_SYNCHRONIZED)]
    options = {"synchronize_session": synchronized}
    return frame.session.execute(_to_value(name, key, n), execution_options=options).rowcount  # type: ignore[attr-defined]


@step_function
def update_returning(frame: Frame, name: str, key: int, n: int) -> object:
    entity = VALUE_CLASS[name]
    return [tuple(row) for row in frame.session.execute(_to_value(name, key, n).returning(entity.id, entity.value))]


@step_function
def update_all(frame: Frame, name: str, n: int) -> object:
    table = value_table(name)
    return frame.session.execute(update(table).values(value=mixed(table.c.value, n))).rowcount  # type: ignore[arg-type, attr-defined]


@step_function
def update_by_text(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.session.execute(_update_by_text(name), _parameters(name, key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def update_by_connection(frame: Frame, name: str, key: int, n: int) -> object:
    """Past the session: nothing is flushed before it."""
    return frame.session.connection().execute(_update_by_text(name), _parameters(name, key, n)).rowcount


@step_function
def update_by_bind(frame: Frame, name: str, key: int, n: int) -> object:
    bind: Any = frame.session.get_bind()
    return bind.execute(_update_by_key(name), _parameters(name, key, n)).rowcount


@step_function
def update_by_driver(frame: Frame, name: str, key: int, n: int) -> object:
    """Through the driver's SQL, by way of SQLAlchemy."""
    statement = f"UPDATE {value_table(name).name} SET value = value + %s WHERE id = %s"  # type: ignore[attr-defined]
    return frame.session.connection().exec_driver_sql(statement, (n, number_of(name, key))).rowcount


@step_function
def update_by_bytes(frame: Frame, name: str, key: int, n: int) -> object:
    """What only the driver can read."""
    statement: Any = f"UPDATE {value_table(name).name} SET value = value + {n} WHERE id = {number_of(name, key)}"  # type: ignore[attr-defined]
    return frame.session.connection().exec_driver_sql(statement.encode()).rowcount


@step_function
def update_by_cursor(frame: Frame, name: str, key: int, n: int) -> object:
    """On the driver's own cursor."""
    cursor = frame.session.connection().connection.cursor()
    statement = f"UPDATE {value_table(name).name} SET value = value + %s WHERE id = %s"  # type: ignore[attr-defined]
    cursor.execute(statement, (n, number_of(name, key)))
    changed = cursor.rowcount
    cursor.close()
    return changed


@step_function
def call_function(frame: Frame, name: str, key: int, n: int) -> object:
    """A SELECT that writes."""
    function = func.mix_branch if name == "Branch" else func.mix_account
    return frame.session.scalar(select(function(key, n)))


@step_function
def call_by_text(frame: Frame, name: str, key: int, n: int) -> object:
    function = "mix_branch" if name == "Branch" else "mix_account"
    return frame.session.execute(text(f"SELECT {function}(:which, :n)"), {"which": key, "n": n}).scalar()


@step_function
def write_in_cte(frame: Frame, name: str, key: int, n: int) -> object:
    """A SELECT whose WITH writes."""
    # Not from the one that the lanes' threads share: a copy of a statement that another thread compiles at that moment
    # may keep what SQLAlchemy remembers of the original, such as that it returns no columns.
    changed = _new_update_by_key(name).returning(value_table(name).c.value).cte("changed")
    return frame.session.scalars(select(changed.c.value), _parameters(name, key, n)).all()


@step_function
def insert_with_cte(frame: Frame, name: str, key: int, n: int) -> object:
    """An INSERT beside an UPDATE of another table."""
    changed = _new_update_by_key(name).returning(value_table(name).c.value).cte("changed")
    statement = insert(Note.__table__).values(text="beside").add_cte(changed)  # type: ignore[arg-type]
    return frame.session.execute(statement, _parameters(name, key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def insert_from_select(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.session.execute(_insert_from_select(name), _parameters(name, key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def upsert(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.session.execute(_upsert(name), _parameters(name, key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def upsert_nothing(frame: Frame, name: str, key: int, n: int) -> object:
    row = new_values(name, key, n)
    return frame.session.execute(postgresql.insert(value_table(name)).values(row).on_conflict_do_nothing()).rowcount  # type: ignore[arg-type, attr-defined]


@step_function
def upsert_returning(frame: Frame, name: str, key: int, n: int) -> object:
    """By the class, and into the session."""
    entity = CLASSES[name]
    statement = postgresql.insert(entity).values(new_values(name, key, n))
    changed = statement.on_conflict_do_update(
        index_elements=_keys_of(value_table(name)), set_={"value": mixed(entity.value, statement.excluded.value)}
    )
    rows = frame.session.scalars(changed.returning(entity), execution_options={"populate_existing": True})
    return frame.hold(*rows)


@step_function
def delete_returning(frame: Frame, name: str, key: int) -> object:
    table = value_table(name)
    statement = delete(table).where(table.c.id == number_of(name, key)).returning(table.c.value)  # type: ignore[arg-type]
    return frame.session.scalars(statement).all()


@step_function
def update_hybrid(frame: Frame, key: int, n: int) -> object:
    """An attribute that SQLAlchemy makes others of."""
    return frame.session.execute(_to_doubled(key, n)).rowcount  # type: ignore[attr-defined]


@step_function
def update_composite(frame: Frame, key: int, n: int) -> object:
    statement = update(Placed).where(Placed.id == key).values({Placed.point: Point(n, n)})
    return frame.session.execute(statement).rowcount  # type: ignore[attr-defined]


@step_function
def delete_core(frame: Frame, name: str, key: int) -> object:
    return frame.session.execute(_delete_by_key(name), {"which": number_of(name, key)}).rowcount  # type: ignore[attr-defined]


@step_function
def delete_orm(frame: Frame, name: str, key: int) -> object:
    entity = VALUE_CLASS[name]
    return frame.session.execute(delete(entity).where(entity.id == number_of(name, key))).rowcount  # type: ignore[attr-defined]


@step_function
def insert_core(frame: Frame, text: str) -> object:
    frame.session.execute(insert(Note.__table__), [{"text": text}, {"text": text + " too"}])  # type: ignore[arg-type]
    return None


@step_function
def insert_returning(frame: Frame, name: str, key: int, n: int) -> object:
    """An ORM INSERT that gives its rows."""
    row = {"id": key + 40, "value": n, **({"side": "l"} if name == "Pair" else {})}
    return frame.hold(*frame.session.scalars(insert(CLASSES[name]).returning(CLASSES[name]), [row]).all())


@step_function
def bulk_save(frame: Frame, name: str, key: int, n: int) -> object:
    frame.session.bulk_save_objects([new_row(name, key + 50, value=n)])
    return None


@step_function
def bulk_update(frame: Frame, name: str, key: int, n: int) -> object:
    side = {"side": "l"} if name == "Pair" else {}
    frame.session.bulk_update_mappings(CLASSES[name], [{"id": number_of(name, key), "value": n, **side}])  # type: ignore[arg-type]
    return None


@step_function
def fail_in_database(frame: Frame) -> object:
    return frame.session.execute(text("SELECT 1 / 0")).scalar()


@step_function
def defer_update(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.defer(_update_by_key(name), _parameters(name, key, n))


@step_function
def defer_value(frame: Frame, name: str, key: int, n: int) -> object:
    """By its class, and without regard to what is there."""
    return frame.defer(_update_of_class(name), _parameters(name, key, n))


@step_function
def defer_expression(frame: Frame, name: str, key: int, n: int) -> object:
    """A statement that is built anew for each job."""
    table = value_table(name)
    statement = update(table).where(table.c.id == number_of(name, key)).values(value=mixed(table.c.value, n))
    return frame.defer(statement)


@step_function
def defer_text(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.defer(_update_by_text(name), _parameters(name, key, n))


@step_function
def defer_kept_document(frame: Frame, key: int, n: int) -> object:
    """A parameter that the next handler changes."""
    frame.kept["n"] = n
    return frame.defer(_PUT_DOCUMENT, {"which": key, "new": frame.kept})


@step_function
def defer_with_kept_document(frame: Frame, key: int, n: int) -> object:
    """A value inside of a statement that the next handler changes."""
    frame.kept["n"] = n
    return frame.defer(update(Account).where(Account.id == key).values(document=frame.kept))


@step_function
def defer_sum(frame: Frame, name: str, key: int) -> object:
    """A statement that reads what others wrote."""
    table = value_table(name)
    total = select(func.sum(value_table("Branch").c.value)).scalar_subquery()
    return frame.defer(update(table).where(table.c.id == number_of(name, key)).values(value=total))


@step_function
def defer_insert(frame: Frame, text: str) -> object:
    return frame.defer(insert(Note.__table__), {"text": text})  # type: ignore[arg-type]


@step_function
def defer_upsert(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.defer(_upsert(name), _parameters(name, key, n))


@step_function
def defer_from_select(frame: Frame, name: str, key: int, n: int) -> object:
    return frame.defer(_insert_from_select(name), _parameters(name, key, n))


@step_function
def defer_hybrid(frame: Frame, key: int, n: int) -> object:
    return frame.defer(_to_doubled(key, n))


@step_function
def defer_delete(frame: Frame, name: str, key: int) -> object:
    return frame.defer(_delete_by_key(name), {"which": number_of(name, key)})
