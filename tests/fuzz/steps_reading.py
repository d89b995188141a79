"""Steps that get rows, and look at them."""

from typing import Any

from sqlalchemy import func, inspect, select, text
from sqlalchemy.orm import undefer

from tests.fuzz.frame import Frame, key_of, number_of, on_held, seen, shown, step_function, value_table
from tests.fuzz.models import CLASSES, Account, Child, Parent, Ticket


@step_function
def get(frame: Frame, name: str, key: int) -> object:
    return frame.hold(frame.session.get(CLASSES[name], key_of(name, key)))


@step_function
def get_one(frame: Frame, name: str, key: int) -> object:
    return frame.hold(frame.session.get_one(CLASSES[name], key_of(name, key)))


@step_function
def get_anew(frame: Frame, name: str, key: int) -> object:
    return frame.hold(frame.session.get(CLASSES[name], key_of(name, key), populate_existing=True))


@step_function
def get_locked(frame: Frame, name: str, key: int) -> object:
    return frame.hold(frame.session.get(CLASSES[name], key_of(name, key), with_for_update={"of": CLASSES[name]}))


@step_function
def select_one(frame: Frame, name: str, key: int) -> object:
    entity = CLASSES[name]
    return frame.hold(frame.session.scalars(select(entity).where(entity.id == number_of(name, key))).first())


@step_function
def select_all(frame: Frame, name: str) -> object:
    entity = CLASSES[name]
    return frame.hold(*frame.session.scalars(select(entity).order_by(entity.id)).all())


@step_function
def select_anew(frame: Frame, name: str) -> object:
    entity = CLASSES[name]
    anew = select(entity).order_by(entity.id).execution_options(populate_existing=True)
    return frame.hold(*frame.session.scalars(anew).all())


@step_function
def select_locked(frame: Frame, name: str, key: int) -> object:
    entity = CLASSES[name]
    locked = select(entity).where(entity.id == number_of(name, key)).with_for_update(of=entity, key_share=True)
    return frame.hold(frame.session.scalars(locked).first())


@step_function
def select_rich(frame: Frame) -> object:
    return frame.hold(*frame.session.scalars(select(Account).where(Account.is_rich).order_by(Account.id)).all())


@step_function
def query_above(frame: Frame, name: str, least: int) -> object:
    entity = CLASSES[name]
    return frame.hold(*frame.session.query(entity).filter(entity.value > least).order_by(entity.id).all())


@step_function
def select_undeferred(frame: Frame, key: int) -> object:
    figured = CLASSES["Figured"]
    statement = select(figured).where(figured.id == key).options(undefer(figured.memo))
    return frame.hold(frame.session.scalars(statement).first())


@step_function
def value_of(frame: Frame, name: str, key: int) -> object:
    table = value_table(name)
    return frame.session.scalar(select(table.c.value).where(table.c.id == number_of(name, key)))


@step_function
def sum_of(frame: Frame, name: str) -> object:
    return frame.session.scalar(select(func.sum(CLASSES[name].value)))


@step_function
def count_of(frame: Frame, name: str) -> object:
    return frame.session.scalar(select(func.count()).select_from(CLASSES[name]))


@step_function
def anything(frame: Frame) -> object:
    """A statement that has nothing to do with any row."""
    return frame.session.scalar(select(func.count()))


@step_function
def rows_by_text(frame: Frame, name: str) -> object:
    rows = frame.session.execute(text(f"SELECT id, value FROM {value_table(name).name} ORDER BY id"))
    return [tuple(row) for row in rows]


@step_function
def rows_by_connection(frame: Frame, name: str) -> object:
    table = value_table(name)
    return [tuple(row) for row in frame.session.connection().execute(select(table).order_by(table.c.id))]


@step_function
def notes(frame: Frame) -> object:
    return [row[0] for row in frame.session.execute(text("SELECT text FROM note ORDER BY number"))]


@step_function
def jobs_waiting(frame: Frame) -> object:
    """Jobs that were added, by this handler and those before it."""
    waiting = text("SELECT args->>'name' FROM outboxq.job WHERE queue = 'elsewhere' ORDER BY seq")
    return [row[0] for row in frame.session.execute(waiting)]


@on_held
def see(frame: Frame, entity: Any) -> object:
    return seen(entity)


@on_held
def read(frame: Frame, entity: Any) -> object:
    """The value, loaded if need be."""
    return shown(entity.value)


@on_held
def read_all(frame: Frame, entity: Any) -> object:
    """Every attribute, loaded if need be: deferred ones too."""
    return {name: shown(getattr(entity, name)) for name in sorted(inspect(entity).mapper.column_attrs.keys())}


@on_held
def read_related(frame: Frame, entity: Any) -> object:
    """A collection or a reference, loaded if need be."""
    if isinstance(entity, Parent):
        return frame.hold(*entity.children)
    if isinstance(entity, Child):
        return frame.hold(entity.parent)
    return frame.hold(entity.account) if isinstance(entity, Ticket) else "nothing related"


@on_held
def refresh(frame: Frame, entity: Any) -> object:
    frame.session.refresh(entity)
    return seen(entity)


@on_held
def refresh_value(frame: Frame, entity: Any) -> object:
    frame.session.refresh(entity, ["value"])
    return seen(entity)


@on_held
def refresh_locked(frame: Frame, entity: Any) -> object:
    frame.session.refresh(entity, with_for_update={"of": type(entity)})
    return seen(entity)


@step_function
def look_at_session(frame: Frame) -> object:
    session = frame.session
    ours = {*CLASSES, "Note"}
    names = [sorted(type(each).__name__ for each in some) for some in (session.new, session.dirty, session.deleted)]
    return [*([name for name in some if name in ours] for some in names), session.autoflush, session.info.get("fuzz")]
