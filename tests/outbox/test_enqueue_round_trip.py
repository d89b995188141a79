"""Arguments come out of real jsonb as what went in: value, encode, PostgreSQL, decode."""

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url

from outboxq.codec.parameters import build_signature
from outboxq.postgres import Server


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal
    tags: list[str] = dataclasses.field(default_factory=list)


class Order(msgspec.Struct):
    id: UUID
    lines: list[Line]
    placed_at: datetime


class Cat(msgspec.Struct, tag="cat"):
    name: str


class Dog(msgspec.Struct, tag="dog"):
    name: str


class Address(pydantic.BaseModel):
    street: str
    since: date
    geo: tuple[float, float] | None = None


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict, total=False):
    deep: dict[str, list[int | None]]


ORDER = Order(UUID(int=9), [Line("a", Decimal("1.10"), ["x"])], datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC))
ZONE = timezone(timedelta(hours=-9, minutes=-30))
RoundTrip = Callable[[object, object], object]


@pytest.fixture(scope="module")
def round_trip(outboxq_server: Server, outboxq_template: str) -> Iterator[RoundTrip]:
    """Encodes a value for an annotation, sends it through a jsonb column, and decodes it."""
    with outboxq_server.create_database(template=outboxq_template) as database:
        url = make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TEMPORARY TABLE stored (id int PRIMARY KEY, args jsonb)")
            connection.execute("INSERT INTO stored VALUES (1, '{}')")

            def through(annotation: object, value: object) -> object:
                def handler(ctx, value): ...

                handler.__annotations__["value"] = annotation
                signature = build_signature("kind", handler)
                encoded = signature.encode("value", value).decode()
                query = "UPDATE stored SET args = jsonb_build_object('value', %s::jsonb) RETURNING args::text"
                row = connection.execute(query, [encoded]).fetchone()
                assert row is not None
                return signature.decode(row[0])["value"]

            yield through


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Line, Line("a", Decimal("12.50"), ["x", "y"])),
        (Order, ORDER),
        (list[Order] | None, [ORDER]),
        (Order | None, None),
        (Cat | Dog, Dog("rex")),
        (Address, Address(street="Main", since=date(2020, 2, 29), geo=(1.5, -2.25))),
        (list[Address], [Address(street="Main", since=date(2020, 2, 29))]),
        (Colour, Colour.BLUE),
        (dict[str, Colour], {"a": Colour.RED}),
        (Level, Level.HIGH),
        (Literal["a", "b"], "b"),
        (Point, Point(1, 2)),
        (Options, {"deep": {"a": [1, None]}}),
        (datetime, datetime(2026, 7, 1, 12, 30, 15, 123_456, tzinfo=UTC)),
        (datetime, datetime(2026, 7, 1, 12, 30, tzinfo=ZONE)),
        (datetime, datetime(2026, 7, 1, 12, 30)),
        (date, date(1, 1, 1)),
        (time, time(23, 59, 59, 999_999)),
        (timedelta, timedelta(days=3, seconds=4, microseconds=5)),
        (UUID, UUID("0190b5a0-0000-7000-8000-000000000001")),
        (Decimal, Decimal("0.1000000000000000000000000000001")),
        (bytes, bytes(range(256))),
        (int, 2**63),
        (int, -(10**4000)),
        (float, 1.7976931348623157e308),
        (float, 5e-324),
        (set[int], {1, 2, 3}),
        (tuple[int, str], (1, "x")),
        (dict[int, str], {1: "a", -5: "b"}),
        (dict[UUID, date], {UUID(int=1): date(2024, 1, 1)}),
        (str, ""),
        (str, "\\u0000 \u2028 \U0010ffff \x7f\x01"),
        (object, {"b": [1, 2.5, "x", None, True], "a": {}}),
        (Any, None),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode(),
)
def test_a_typed_argument_comes_back_as_itself(round_trip: RoundTrip, annotation: object, value: object) -> None:
    """Equal, and of the same type."""
    returned = round_trip(annotation, value)
    assert returned == value
    assert type(returned) is type(value)


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
finite = st.floats(allow_nan=False, allow_infinity=False)
aware = st.datetimes(
    timezones=st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
    min_value=datetime(2, 1, 1),
    max_value=datetime(9998, 1, 1),
)
typed = st.one_of(
    st.tuples(st.just(int), st.integers()),
    st.tuples(st.just(float), finite),
    st.tuples(st.just(float | None), finite | st.none()),
    st.tuples(st.just(str), text),
    st.tuples(st.just(bytes), st.binary()),
    st.tuples(st.just(datetime), aware),
    st.tuples(st.just(Decimal), st.decimals(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just(UUID), st.uuids()),
    st.tuples(st.just(timedelta), st.timedeltas(timedelta(days=-999_999), timedelta(days=999_999))),
    st.tuples(st.just(list[dict[str, int]]), st.lists(st.dictionaries(text, st.integers()))),
    st.tuples(st.just(Line), st.builds(Line, text, st.decimals(allow_nan=False, allow_infinity=False), st.lists(text))),
)
through_jsonb = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.large
@through_jsonb
@given(typed)
def test_any_typed_value_comes_back_equal(round_trip: RoundTrip, case: tuple[object, object]) -> None:
    """Whatever fits the annotation; jsonb reorders keys and rewrites numbers, and changes no value."""
    annotation, value = case
    assert round_trip(annotation, value) == value


# jsonb knows numbers, not floats. The digits of a float over 2**53 spell another whole number than it is, and come
# back as that; only the annotation `float` makes them the float again.
small = st.floats(-(2.0**53), 2.0**53)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | small | text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=20,
)


@pytest.mark.large
@through_jsonb
@given(json_values)
def test_any_plain_json_comes_back_equal(round_trip: RoundTrip, value: object) -> None:
    """For an argument that is not annotated."""
    assert round_trip(object, value) == value


@through_jsonb
@given(st.text(alphabet="\\u0\0n\"'", max_size=12))
def test_text_is_refused_exactly_where_it_holds_nul(round_trip: RoundTrip, value: str) -> None:
    """Among backslashes, 'u's and zeros of any number, jsonb and we agree."""
    if "\0" in value:
        with pytest.raises(TypeError, match="NUL"):
            round_trip(str, value)
    else:
        assert round_trip(str, value) == value


@pytest.mark.large
@through_jsonb
@given(
    st.recursive(
        small | st.sampled_from([math.nan, math.inf, -math.inf]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    )
)
def test_floats_are_refused_exactly_where_one_is_not_finite(round_trip: RoundTrip, value: object) -> None:
    """However deep it sits."""

    def finite_all(item: object) -> bool:
        if isinstance(item, dict):
            return all(map(finite_all, item.values()))
        return all(map(finite_all, item)) if isinstance(item, list) else math.isfinite(item)  # type: ignore[arg-type]

    if finite_all(value):
        assert round_trip(object, value) == value
    else:
        with pytest.raises(TypeError, match="NaN or infinity"):
            round_trip(object, value)
