"""What may be an argument, what is refused, and that no error text quotes a value."""

import dataclasses
import enum
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pydantic
import pytest
from sqlalchemy import ForeignKey, Uuid, inspect
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, make_transient_to_detached, mapped_column
from sqlmodel import Field as SQLField
from sqlmodel import SQLModel

from outboxq.codec.entities import EntityKey, primary_key_of
from outboxq.codec.parameters import Signature, build_signature
from outboxq.codec.values import MAX_HEADERS_BYTES, encode_headers, encode_value
from outboxq.errors import ArgumentError, EnqueueError, PayloadError, RegistryError
from outboxq.names import check_name

SECRET = "hunter2-the-secret"


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)


class Savings(Account):
    __tablename__ = "savings"
    id: Mapped[int] = mapped_column(ForeignKey("account.id"), primary_key=True)


class Line(Base):
    __tablename__ = "line"
    order_id: Mapped[UUID] = mapped_column(Uuid, primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)


class Note(MappedAsDataclass, Base):
    __tablename__ = "note"
    id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]


class Hero(SQLModel, table=True):
    id: int | None = SQLField(default=None, primary_key=True)
    name: str = ""


class Colour(enum.Enum):
    RED = "red"


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    cents: int


class Checked(msgspec.Struct):
    cents: int

    def __post_init__(self) -> None:
        raise ValueError(f"these cents are wrong: {self.cents}")


class Model(pydantic.BaseModel):
    cents: int
    ratio: float | None = None


class Aliased(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    cents: int = pydantic.Field(alias="amountInCents")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def euros(self) -> float:
        return self.cents / 100


def signature_of(annotation: object) -> Signature:
    """The signature of a handler with one argument, `value`."""

    def handler(ctx, value): ...

    handler.__annotations__["value"] = annotation
    return build_signature("kind", handler)


def detached(entity: Any, **key: object) -> Any:
    for name, value in key.items():
        setattr(entity, name, value)
    make_transient_to_detached(entity)
    return entity


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        [math.nan],
        {"a": [{"b": math.inf}]},
        (1.0, math.nan),
        Model(cents=1, ratio=math.nan),
    ],
    ids=repr,
)
def test_nan_and_infinity_are_refused_wherever_they_hide(value: object) -> None:
    """msgspec would write them as null: another value, without a word."""
    with pytest.raises(ArgumentError, match="argument 'value' holds NaN or infinity"):
        encode_value("value", value)


def test_nan_is_refused_where_the_annotation_would_accept_null() -> None:
    """`float | None` reads null as None, so decoding again would not notice."""
    with pytest.raises(ArgumentError, match="NaN or infinity"):
        signature_of(float | None).encode("value", math.nan)
    assert signature_of(float | None).encode("value", None) == b"null"


@pytest.mark.parametrize("value", ["\0", "a\0b", ["\0"], {"\0": 1}, "\\\0", "\\\\\0"], ids=repr)
def test_nul_is_refused(value: object) -> None:
    """jsonb cannot hold it, behind any number of backslashes."""
    with pytest.raises(ArgumentError, match="argument 'value' holds a NUL character"):
        encode_value("value", value)


@pytest.mark.parametrize("value", ["\\u0000", "\\\\u0000", "null", "nan", {"\\u0000": None}], ids=repr)
def test_text_that_only_looks_like_nul_or_nan_is_accepted(value: object) -> None:
    """A backslash, a 'u' and four zeros are six characters like any other."""
    assert msgspec.json.decode(encode_value("value", value)) == value


@pytest.mark.parametrize("value", ["\ud800", ["a\udfff"], {"\ud800": 1}], ids=ascii)
def test_lone_surrogates_are_refused(value: object) -> None:
    """UTF-8 cannot encode them."""
    with pytest.raises(ArgumentError, match="argument 'value' holds a lone surrogate"):
        encode_value("value", value)


@pytest.mark.parametrize(
    ("value", "named"), [(object(), "object"), ([object()], "object"), ({"a": Ellipsis}, "ellipsis"), (1j, "complex")]
)
def test_a_value_that_json_cannot_hold_is_refused_by_its_type(value: object, named: str) -> None:
    """The message names the type that is in the way, also deep inside."""
    with pytest.raises(
        ArgumentError, match=f"argument 'value' cannot be stored as JSON: it holds a value of type {named}$"
    ):
        encode_value("value", value)


def test_a_structure_that_never_ends_is_refused() -> None:
    """A list that contains itself ends in a clear error, and not in a crash."""
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ArgumentError, match="argument 'value' cannot be stored as JSON"):
        encode_value("value", endless)


@pytest.mark.parametrize("entity", [Account(id=1), Hero(id=1, name=SECRET)], ids=lambda e: type(e).__name__)
def test_an_entity_inside_other_data_is_not_dumped(entity: object) -> None:
    """Although a SQLModel entity could dump itself whole."""
    with pytest.raises(ArgumentError, match=f"it holds a value of type {type(entity).__name__}"):
        encode_value("value", [entity])


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, SECRET),
        (int, 1.5),
        (str, 5),
        (bool, 1),
        (list[int], [SECRET]),
        (dict[str, int], {SECRET: "x"}),
        (Colour, SECRET),
        (Literal["a", "b"], SECRET),
        (datetime, SECRET),
        (UUID, SECRET),
        (Strict, {"cents": 1, SECRET: 2}),
        (Strict, {}),
        (Checked, {"cents": SECRET}),
        (Model, {"cents": SECRET}),
        (Annotated[str, msgspec.Meta(max_length=3)], SECRET),
        (tuple[int, int], [1]),
        (int, None),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_refused_without_being_quoted(annotation: object, value: object) -> None:
    """At the call and, for what another program stored, when the job is read; neither text shows the value."""
    signature = signature_of(annotation)
    with pytest.raises(ArgumentError, match="argument 'value': ") as refused:
        signature.encode("value", value)
    stored = msgspec.json.encode({"value": value}).decode()
    with pytest.raises(PayloadError, match="argument 'value': ") as unreadable:
        signature.decode(stored)
    for error in (refused.value, unreadable.value):
        assert SECRET not in str(error)
        assert error.__cause__ is None, "a traceback would show the cause's text"
        assert error.__suppress_context__


def test_what_a_validator_says_is_not_quoted() -> None:
    """A __post_init__ that puts the value into its error text does not put it into ours."""
    with pytest.raises(ArgumentError, match="refused by ValueError") as refused:
        signature_of(Checked).encode("value", {"cents": 987_654})
    assert "987" not in str(refused.value)


def test_a_pydantic_model_is_read_by_its_aliases() -> None:
    """A model with aliases and computed fields is stored as the model itself reads it."""
    signature = signature_of(Aliased)
    data = signature.encode("value", Aliased(amountInCents=5))
    assert signature.decode(f'{{"value": {data.decode()}}}') == {"value": Aliased(amountInCents=5)}


def test_an_entity_is_stored_as_its_primary_key() -> None:
    """One value, or a list where the key is composite; read again as a key to load."""
    signature = signature_of(Account)
    assert signature.encode("value", detached(Account(), id=7)) == b"7"
    assert signature.decode('{"value": 7}') == {"value": EntityKey(Account, (7,), optional=False)}
    order = UUID(int=5)
    line = signature_of(Line)
    data = line.encode("value", detached(Line(), order_id=order, day=date(2024, 2, 29)))
    assert data == b'["00000000-0000-0000-0000-000000000005","2024-02-29"]'
    assert line.decode(f'{{"value": {data.decode()}}}') == {
        "value": EntityKey(Line, (order, date(2024, 2, 29)), optional=False)
    }


def test_a_subclass_of_the_annotated_entity_fits() -> None:
    """Inheritance: its key is the base's."""
    assert signature_of(Account).encode("value", detached(Savings(), id=7)) == b"7"


@pytest.mark.parametrize("annotation", [Account, Account | None, Annotated[Account, "note"]], ids=str)
def test_an_entity_of_another_class_is_refused(annotation: object) -> None:
    """Its key would load a row of the wrong table."""
    with pytest.raises(ArgumentError, match=r"argument 'value' takes an? (optional )?Account, got Line"):
        signature_of(annotation).encode("value", detached(Line(), order_id=UUID(int=1), day=date(2024, 1, 1)))


@pytest.mark.parametrize("annotation", [int, object, Any], ids=str)
def test_an_entity_for_an_argument_that_takes_none_is_refused(annotation: object) -> None:
    """Never taken silently for its key, which the annotation may happen to accept."""
    with pytest.raises(ArgumentError, match="argument 'value' is not annotated with a mapped class, got an entity"):
        signature_of(annotation).encode("value", detached(Account(), id=7))


def test_none_is_an_entity_only_where_the_annotation_says_so() -> None:
    """`Account | None` takes None, `Account` does not."""
    assert signature_of(Account | None).encode("value", None) == b"null"
    assert signature_of(Account | None).decode('{"value": null}') == {"value": None}
    with pytest.raises(ArgumentError, match="argument 'value' takes an Account, got NoneType"):
        signature_of(Account).encode("value", None)
    with pytest.raises(PayloadError, match="argument 'value': Expected `int`, got `null`"):
        signature_of(Account).decode('{"value": null}')


def test_a_sqlmodel_table_is_an_entity() -> None:
    """Although it is a Pydantic model too."""
    assert signature_of(Hero).encode("value", detached(Hero(name="x"), id=3)) == b"3"


def test_an_entity_without_a_key_is_never_encoded() -> None:
    """A clear error, not a job with null for a key."""
    assert inspect(Account()).key is None
    with pytest.raises(ArgumentError, match="this Account has no primary key yet"):
        primary_key_of(Account())


@pytest.mark.parametrize(
    "annotation",
    [
        list[Account],
        dict[str, Account],
        Account | Line,
        Account | int,
        list[Account | None],
        tuple[Hero, ...],
        list[Note],
    ],
    ids=str,
)
def test_an_annotation_with_an_entity_inside_is_refused(annotation: object) -> None:
    """When the registry is resolved, with the way out."""
    with pytest.raises(RegistryError, match="argument 'value': an entity must be an argument of its own"):
        signature_of(annotation)


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        ("{}", r"unknown none, missing \['value'\]"),
        ('{"value": 1, "other": 2}', r"unknown \['other'\], missing none"),
    ],
)
def test_stored_arguments_that_no_longer_fit_the_signature_say_so(stored: str, says: str) -> None:
    """Mostly a rolling deploy: names only."""
    with pytest.raises(PayloadError, match=says):
        signature_of(int).decode(stored)


def test_a_default_is_left_to_the_handler_that_will_run() -> None:
    """Arguments that the call leaves out are not stored, and may be missing when read."""

    def handler(ctx, a: int, b: int = 5): ...

    signature = build_signature("kind", handler)
    assert signature.bind((1,), {}) == {"a": 1}
    assert signature.decode('{"a": 1}') == {"a": 1}


def _with_args(ctx, *rest: int): ...


def _with_kwargs(ctx, **rest: int): ...


def _positional_only(ctx, value: int, /): ...


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (_with_args, r"takes \*rest: int: its stored arguments need names"),
        (_with_kwargs, r"takes \*\*rest: int: its stored arguments need names"),
        (_positional_only, r"argument 'value': stored arguments go by name, so remove the '/'"),
    ],
)
def test_a_signature_without_names_is_refused(handler: Callable[..., object], says: str) -> None:
    """Stored arguments go by name."""
    with pytest.raises(RegistryError, match=f"handler 'kind'.*{says}"):
        build_signature("kind", handler)


@pytest.mark.parametrize("what", ["kind", "queue", "argument"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "1 to 63 bytes, got 0"),
        ("x" * 64, "1 to 63 bytes, got 64"),
        ("ä" * 32, "1 to 63 bytes, got 64"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("\x7f", "control character"),
        ("\x85", "control character"),
        ("\ud800", "lone surrogate"),
        (5, "is a string, got int"),
    ],
    ids=ascii,
)
def test_a_name_that_cannot_be_carried_is_refused(what: str, name: str, says: str) -> None:
    """By the table, a channel, a terminal or a log line."""
    with pytest.raises(ArgumentError, match=f"{what} name.*{says}"):
        check_name(what, name)


@pytest.mark.parametrize("name", ["a=1", "a,b", "*", " a", "a "])
def test_a_queue_name_that_the_command_line_would_read_differently_is_refused(name: str) -> None:
    """`--queue accounts=4,mail`; kinds are free."""
    with pytest.raises(ArgumentError, match="queue name"):
        check_name("queue", name)
    assert check_name("kind", name) == name


@pytest.mark.parametrize("name", ["x", "x" * 63, "ä" * 31, "a'b\"c;d--e", "a b", "%s", "📨"], ids=ascii)
def test_other_names_are_taken_as_they_are(name: str) -> None:
    """Quotes and semicolons are characters like any other."""
    assert check_name("queue", name) == name


@pytest.mark.parametrize(
    "headers", [{"a": 1}, {1: "a"}, {"a": None}, {"a": "\0"}, {"\0": "a"}, {"a": "\ud800"}], ids=ascii
)
def test_headers_that_cannot_be_stored_are_refused(headers: dict[str, str]) -> None:
    """Strings only, and what jsonb can hold."""
    with pytest.raises(EnqueueError, match="headers"):
        encode_headers(headers)


def test_headers_have_a_cap() -> None:
    """They travel with every claim."""
    assert encode_headers({"a": "x" * (MAX_HEADERS_BYTES - 8)})
    with pytest.raises(ArgumentError, match="headers take up to 65,536 bytes as JSON, got 65,537"):
        encode_headers({"a": "x" * (MAX_HEADERS_BYTES - 7)})


@dataclasses.dataclass
class Point:
    x: int
    when: datetime
    price: Decimal


def test_nested_data_is_read_as_its_annotated_type() -> None:
    """Dataclasses in lists in dicts come back as themselves."""
    signature = signature_of(dict[str, list[Point]])
    value = {"a": [Point(1, datetime(2024, 1, 1, tzinfo=UTC), Decimal("1.10"))]}
    data = signature.encode("value", value).decode()
    assert signature.decode(f'{{"value": {data}}}') == {"value": value}
