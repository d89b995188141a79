"""Primary keys of any type: the relay finds the row of an entity argument, or `add_job` refuses it."""

import enum
import ipaddress
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import CHAR, Date, Engine, Enum, LargeBinary, Numeric, String, TypeDecorator
from sqlalchemy.dialects.postgresql import CIDR, INET, MACADDR, OID
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.types import UserDefinedType

from outboxq import Backoff, Context, Jobs, Locked, OutboxSession
from outboxq.errors import ArgumentError
from outboxq.events import Event, JobDone
from tests.support.app import Effect
from tests.support.ledger import ledger

Drain = Callable[..., list[Event]]


class Base(DeclarativeBase):
    pass


class Prefixed(TypeDecorator[str]):
    """`acc_17` in Python, `17` in the table."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return value.removeprefix("acc_")

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return f"acc_{value}"


class Guid(TypeDecorator[UUID]):
    """As SQLAlchemy's documentation has it: takes texts too."""

    impl = CHAR(32)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return (value if isinstance(value, UUID) else UUID(value)).hex

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return UUID(value)


class StrictGuid(Guid):
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return value.hex


class Native(UserDefinedType[UUID]):
    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "uuid"


@dataclass(frozen=True)
class Reference:
    """Nothing that JSON knows."""

    number: int


class Referred(TypeDecorator[Reference]):
    impl = String
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> Any:
        return str(value.number)

    def process_result_value(self, value: Any, dialect: object) -> Any:
        return Reference(int(value))


class Color(enum.Enum):
    red = "r"


def mapped(name: str, annotation: Any, *types: Any) -> type[Any]:
    """A class with a key of these types."""
    columns = {
        f"key_{place}": mapped_column(type_, primary_key=True, autoincrement=False) for place, type_ in enumerate(types)
    }
    hints = {} if annotation is None else {f"key_{place}": Mapped[annotation] for place in range(len(types))}
    namespace = {"__tablename__": f"keyed_{name}", "__annotations__": hints, **columns}
    return type(f"Keyed{name.title()}", (Base,), namespace)


A_UUID = uuid4()
READ: dict[str, tuple[type[Any], tuple[object, ...]]] = {
    "a prefix": (mapped("prefixed", str, Prefixed()), ("acc_17",)),
    "a prefix without annotation": (mapped("prefixed_bare", None, Prefixed()), ("acc_17",)),
    "a GUID": (mapped("guid", UUID, Guid()), (A_UUID,)),
    "a GUID without annotation": (mapped("guid_bare", None, Guid()), (A_UUID,)),
    "a strict GUID": (mapped("guid_strict", UUID, StrictGuid()), (A_UUID,)),
    "a type of the user's": (mapped("native", UUID, Native()), (A_UUID,)),
    "two columns": (mapped("two", UUID, Guid(), Guid()), (A_UUID, uuid4())),
    "MACADDR": (mapped("macaddr", str, MACADDR()), ("08:00:2b:01:02:03",)),
    "OID": (mapped("oid", int, OID()), (4711,)),
    "a number": (mapped("numeric", Decimal, Numeric(10, 2)), (Decimal("1.50"),)),
    "an enum": (mapped("enum", Color, Enum(Color)), (Color.red,)),
    "a date": (mapped("date", date, Date()), (date(2026, 1, 31),)),
    "bytes": (mapped("bytes", bytes, LargeBinary()), (b"\x00\xff",)),
}
REFUSED: dict[str, tuple[type[Any], tuple[object, ...]]] = {
    "a strict GUID without annotation": (mapped("guid_strict_bare", None, StrictGuid()), (A_UUID,)),
    "a class of the user's": (mapped("referred", None, Referred()), (Reference(5),)),
    "INET": (mapped("inet", None, INET()), (ipaddress.ip_address("10.0.0.1"),)),
    "CIDR": (mapped("cidr", None, CIDR()), (ipaddress.ip_network("10.0.0.0/8"),)),
}


def register(jobs: Jobs, which: str, class_: type[Any], form: str = "alone") -> None:
    """A handler that notes the key of the entity that it is given."""
    annotation = Locked[class_] if form == "locked" else class_  # type: ignore[valid-type]  # built at run time

    def note(ctx: Context, entity: Any) -> None:
        keys = [name for name in vars(type(entity)) if name.startswith("key_")]
        ctx.session.add(Effect(name=f"{which}: {tuple(getattr(entity, name) for name in keys)}"))

    note.__annotations__["entity"] = annotation
    jobs.handler(queue="q", kind=which, batchable=form != "alone", retry=Backoff(max_attempts=1))(note)


def add_entity(engine: Engine, class_: type[Any], key: tuple[object, ...]) -> None:
    Base.metadata.tables[class_.__tablename__].create(engine)
    with Session(engine) as session:
        session.add(class_(**{f"key_{place}": value for place, value in enumerate(key)}))
        session.commit()


@pytest.mark.first_and_last
@pytest.mark.parametrize("form", ["alone", "shared", "locked"])
def test_the_row_of_an_entity_is_found_by_its_key(
    form: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Whether its own session loads it, or the batch."""
    jobs = Jobs()
    for which, (class_, key) in READ.items():
        add_entity(engine, class_, key)
        register(jobs, which, class_, form)
    with sessions.begin() as session:
        for which, (class_, key) in READ.items():
            handler, entity = jobs.resolve().handlers[which], session.get_one(class_, key)
            session.add_jobs([handler.job(entity), handler.job(entity=entity)])
    events = drain(jobs, batch_size=10)
    assert len([event for event in events if isinstance(event, JobDone)]) == 2 * len(READ)
    expected = Counter({f"{which}: {key}": 2 for which, (_, key) in READ.items()})
    assert ledger(engine) == expected


@pytest.mark.parametrize("which", REFUSED)
def test_an_entity_whose_key_is_not_given_back_by_json_is_refused(
    which: str, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """By `add_job`, with what to do about it, and not by the relay."""
    (class_, key), jobs = REFUSED[which], Jobs()
    add_entity(engine, class_, key)
    register(jobs, which, class_)
    handler = jobs.resolve().handlers[which]
    with sessions.begin() as session:
        entity = session.get_one(class_, key)
        with pytest.raises(ArgumentError, match=r"'entity'.*(pass what the row|cannot be stored as JSON)"):
            session.add_job(handler, entity)
