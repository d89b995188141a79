"""The quick way of a call to its stored arguments gives what the way argument by argument gives, or nothing."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from outboxq import Context, Jobs
from outboxq.codec.parameters import Signature
from outboxq.codec.values import encode_value, join_object
from outboxq.errors import ArgumentError


class Base(MappedAsDataclass, DeclarativeBase):
    pass


class Account(Base):
    """A dataclass too, which the JSON encoder would take for a value."""

    __tablename__ = "encode_call_account"
    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Point:
    x: int


jobs = Jobs()


@jobs.handler()
def credit(ctx: Context, cents: int, note: object = None, *, at: datetime | None = None) -> None: ...


@jobs.handler()
def place(ctx: Context, point: Point) -> None: ...


@jobs.handler()
def greet(ctx: Context, account: Account) -> None: ...


def argument_by_argument(signature: Signature, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    values = signature.bind(args, kwargs)
    return join_object({name: signature.encode(name, value) for name, value in values.items()})


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((), {"cents": 1}),
        ((1, "a"), {"at": datetime(2030, 1, 1, tzinfo=UTC)}),
        ((1,), {"note": {"a": [1, 2.5, "ü", "\\", '"']}}),
        ((), {"cents": 2**60, "note": [True, [1, 2], "x"]}),
    ],
)
def test_a_call_is_encoded_as_its_arguments_are(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """In one pass; the same object in the end."""
    quick = credit.signature().encode_call(args, kwargs)
    assert quick is not None
    assert msgspec.json.decode(quick) == msgspec.json.decode(argument_by_argument(credit.signature(), args, kwargs))


@pytest.mark.parametrize(
    ("kind", "args", "kwargs"),
    [
        (credit, (), {}),
        (credit, ("1",), {}),
        (credit, (1, 2, None), {}),
        (credit, (1,), {"cents": 1}),
        (credit, (1,), {"euros": 1}),
        (credit, (1,), {"note": math.nan}),
        (credit, (1,), {"note": [{"a": math.inf}]}),
        (credit, (1,), {"note": "a\0"}),
        (credit, (1,), {"note": "\ud800"}),
        (credit, (1,), {"note": object()}),
        (credit, (1,), {"note": Account(id=1)}),
        (place, ({"x": "no"},), {}),
        (greet, (1,), {}),
        (greet, (Account(id=1),), {}),
        (greet, (Point(1),), {}),
    ],
)
def test_what_may_be_refused_is_left_to_the_slow_way(
    kind: Any, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Which refuses it in words, or finds it pending."""
    assert kind.signature().encode_call(args, kwargs) is None
    if not any(isinstance(value, Account) for value in args):
        with pytest.raises(ArgumentError):
            kind.job(*args, **kwargs)


def test_an_object_of_a_class_of_the_callers_goes_the_slow_way() -> None:
    """It is stored all the same."""
    assert place.signature().encode_call((Point(1),), {}) is None
    assert place.job(Point(1)).args == join_object({"point": encode_value("point", Point(1))})
