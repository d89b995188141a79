"""Steps that change rows as objects."""

from typing import Any

from sqlalchemy import inspect
from sqlalchemy.orm import make_transient, make_transient_to_detached
from sqlalchemy.orm.attributes import flag_modified, set_committed_value

from tests.fuzz.frame import Frame, mix, mixed, new_row, on_held, seen, shown, step_function
from tests.fuzz.models import EXTRAS, VALUE_CLASS, Account, Child, Leaf, Note, Parent, Placed, Point, Ticket


@on_held
def change(frame: Frame, entity: Any, n: int) -> object:
    """Read, work out, write back."""
    entity.value = mix(entity.value, n)
    return shown(entity.value)


@on_held
def put(frame: Frame, entity: Any, n: int) -> object:
    """Write without reading."""
    entity.value = n
    return None


@on_held
def express(frame: Frame, entity: Any, n: int) -> object:
    """Let the server work it out."""
    entity.value = mixed(VALUE_CLASS[type(entity).__name__].value, n)
    return None


@on_held
def put_extra(frame: Frame, entity: Any, which: int, n: int) -> object:
    """Write another column."""
    extras = EXTRAS.get(type(entity).__name__)
    if extras is None:
        return "no other column"
    name = sorted(extras)[which % len(extras)]
    setattr(entity, name, extras[name][n % len(extras[name])])
    return shown(getattr(entity, name))


@on_held
def put_point(frame: Frame, entity: Any, n: int) -> object:
    """Two columns as one value."""
    if not isinstance(entity, Placed):
        return "no point"
    before, entity.point = entity.point, Point(n, mix(n, 1))
    return shown(str(before))


@on_held
def put_doubled(frame: Frame, entity: Any, n: int) -> object:
    """By an attribute that is worked out."""
    if not isinstance(entity, Placed):
        return "nothing worked out"
    entity.doubled = n * 2
    return shown(entity.doubled)


@on_held
def put_back(frame: Frame, entity: Any) -> object:
    """Write what is there already: no change, as SQLAlchemy sees it."""
    entity.value = entity.value
    return shown(entity.value)


@on_held
def put_key(frame: Frame, entity: Any, key: int) -> object:
    """Change the primary key."""
    entity.id = key + 30
    return None


@on_held
def flag(frame: Frame, entity: Any) -> object:
    flag_modified(entity, "value")
    return None


@on_held
def change_unseen(frame: Frame, entity: Any, n: int) -> object:
    """Change an attribute behind SQLAlchemy's back."""
    entity.__dict__["value"] = n
    return entity.value


@on_held
def set_committed(frame: Frame, entity: Any, n: int) -> object:
    set_committed_value(entity, "value", n)
    return entity.value


@on_held
def change_in_place(frame: Frame, entity: Any, n: int) -> object:
    """Inside of a document that SQLAlchemy does not watch."""
    if not isinstance(entity, Account) or entity.document is None:
        return "no document"
    entity.document["list"].append(n)
    entity.document["n"] = n
    return shown(entity.document)


@on_held
def change_document(frame: Frame, entity: Any, n: int) -> object:
    """A new document, made of the old one."""
    if not isinstance(entity, Account):
        return "no document"
    entity.document = {**(entity.document or {}), "n": n}
    return shown(entity.document)


@on_held
def put_kept_document(frame: Frame, entity: Any, n: int) -> object:
    """A document that the next handler changes."""
    if not isinstance(entity, Account):
        return "no document"
    frame.kept["n"] = n
    entity.document = frame.kept
    return None


@on_held
def change_settings(frame: Frame, entity: Any, n: int) -> object:
    """Inside of a document that SQLAlchemy watches."""
    if not isinstance(entity, Leaf) or entity.settings is None:
        return "no settings"
    entity.settings["n"] = mix(entity.settings.get("n", 0), n)
    return shown(entity.settings)


@step_function
def add(frame: Frame, name: str, key: int, value: int) -> object:
    """A new row; with a key that is there already, an error at the flush."""
    entity = new_row(name, key, value=value)
    frame.session.add(entity)
    frame.held.append(entity)
    return None


@step_function
def note(frame: Frame, text: str) -> object:
    """A new row whose key the server draws."""
    frame.session.add(Note(text=text))
    return None


@step_function
def notes_of_all(frame: Frame, n: int) -> object:
    """Several new rows."""
    frame.session.add_all([Note(text=f"note {number}") for number in range(n)])
    return None


@step_function
def attach(frame: Frame, name: str, key: int) -> object:
    """A row by its key that nothing was loaded of, and that may not be there."""
    entity = new_row(name, key)
    make_transient_to_detached(entity)
    identity = inspect(entity).key
    if identity in frame.session.identity_map:
        return frame.hold(frame.session.identity_map[identity])
    frame.session.add(entity)
    return frame.hold(entity)


@step_function
def put_unloaded(frame: Frame, name: str, key: int, n: int) -> object:
    """Write to a row that nothing was loaded of: nothing is sent before the flush."""
    shown_first = attach(frame, name, key)
    frame.held[-1].value = n
    return shown_first


@step_function
def put_two_unloaded(frame: Frame, name: str, key: int, n: int) -> object:
    """The same, and another of its columns besides: a statement of another form."""
    shown_first = put_unloaded(frame, name, key, n)
    put_extra(frame, -1, n, n)
    return shown_first


@on_held
def delete(frame: Frame, entity: Any) -> object:
    frame.session.delete(entity)
    return None


@step_function
def merge(frame: Frame, name: str, key: int, value: int) -> object:
    return frame.hold(frame.session.merge(new_row(name, key, value=value)))


@on_held
def expunge(frame: Frame, entity: Any) -> object:
    frame.session.expunge(entity)
    return None


@on_held
def forget(frame: Frame, entity: Any) -> object:
    """Take a row out of every session, and put it back as a new one."""
    make_transient(entity)
    return seen(entity)


@on_held
def expire(frame: Frame, entity: Any) -> object:
    frame.session.expire(entity)
    return seen(entity)


@on_held
def expire_value(frame: Frame, entity: Any) -> object:
    frame.session.expire(entity, ["value"])
    return seen(entity)


@on_held
def add_child(frame: Frame, entity: Any, key: int, value: int) -> object:
    """Into a collection that is loaded for it."""
    if not isinstance(entity, Parent):
        return "no collection"
    entity.children.append(Child(id=key + 20, value=value))
    return [child.id for child in entity.children]


@on_held
def remove_child(frame: Frame, entity: Any) -> object:
    """Out of its collection: an orphan, which the flush deletes."""
    if not isinstance(entity, Parent) or not entity.children:
        return "no child"
    return frame.hold(entity.children.pop(0))


@on_held
def change_children(frame: Frame, entity: Any, n: int) -> object:
    """Every member of a collection."""
    if not isinstance(entity, Parent):
        return "no collection"
    for child in entity.children:
        child.value = mix(child.value, n)
    return [shown(child.value) for child in entity.children]


@on_held
def change_related(frame: Frame, entity: Any, n: int) -> object:
    """The row that a reference leads to."""
    other = getattr(entity, "account" if isinstance(entity, Ticket) else "parent", None)
    if other is None or inspect(other, raiseerr=False) is None:
        return "nothing related"
    other.value = mix(other.value, n)
    return shown(other.value)


@on_held
def move(frame: Frame, entity: Any, other: int) -> object:
    """A reference to another row that is held."""
    target = frame.at(other)
    if isinstance(entity, Child) and isinstance(target, Parent):
        entity.parent = target
    elif isinstance(entity, Ticket) and isinstance(target, Account):
        entity.account = target
    else:
        return "nothing to refer to"
    return seen(target)
