"""What is stored comes back as it was, or is refused with the place of what would change."""

import collections
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outboxq import Context, Jobs, external
from outboxq.codec.parameters import Signature, build_signature
from outboxq.codec.sameness import as_jsonb_has_it, change_of
from outboxq.codec.values import encode_headers
from outboxq.errors import ArgumentError, PayloadError, RegistryError, ResultNotKept
from outboxq.handlers.returned import Returned

T = TypeVar("T")
BERLIN = ZoneInfo("Europe/Berlin")
SECRET = "hunter2"


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "yes"


class Shape(msgspec.Struct, omit_defaults=True, rename="camel", tag=True):
    side_length: int
    note: str = ""


class Square(Shape):
    filled: bool = False


class Circle(msgspec.Struct, tag=True):
    radius: float


@dataclass
class Point:
    x: int
    at: datetime | None = None


@dataclass
class Point3(Point):
    z: int = 0


@dataclass(eq=False)
class Plain:
    x: int
    seen: list[int] = field(default_factory=list)
    twice: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.twice = 2 * self.x


@dataclass
class Holder:
    shape: Shape
    any: Any = None


@dataclass
class Box(Generic[T]):
    value: T


@attrs.define
class Cell:
    x: int


class Movie(TypedDict):
    title: str


class Pair(NamedTuple):
    a: int
    b: str


class Base(pydantic.BaseModel):
    name: str


class Child(Base):
    age: int


class Family(pydantic.BaseModel):
    head: Base
    when: datetime | str | None = None
    any: Any = None


class Secretive(pydantic.BaseModel):
    token: pydantic.SecretStr


class Excluding(pydantic.BaseModel):
    kept: int
    left: int = pydantic.Field(default=0, exclude=True)


class Rounding(pydantic.BaseModel):
    ratio: float

    @pydantic.field_serializer("ratio")
    def rounded(self, ratio: float) -> float:
        return round(ratio, 1)


class Private(pydantic.BaseModel):
    x: int
    _note: str = ""

    def noted(self, note: str) -> "Private":
        self._note = note
        return self


class Serialized(pydantic.BaseModel):
    head: pydantic.SerializeAsAny[Base]


class Cat(pydantic.BaseModel):
    sort: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    sort: Literal["dog"] = "dog"
    lives: int


class Pet(pydantic.BaseModel):
    it: Cat | Dog = pydantic.Field(discriminator="sort")


class Extra(pydantic.BaseModel):
    model_config = {"extra": "allow"}
    x: int


class Strict(pydantic.BaseModel):
    model_config = {"strict": True}
    at: datetime
    key: UUID
    price: Decimal
    pair: tuple[int, ...]


class Either(pydantic.BaseModel):
    it: UUID | date | datetime | str


class Raising(pydantic.BaseModel):
    x: int

    @pydantic.field_validator("x")
    @classmethod
    def checked(cls, x: int) -> int:
        return x if x > 0 else [][x]

    def model_dump(self, **_: Any) -> dict[str, int]:
        return {"x": self.x} if self.x < 9 else {}[SECRET]


@dataclass
class Asserting:
    x: int

    def __post_init__(self) -> None:
        assert self.x > 0, f"Expected {SECRET}"


@dataclass
class Initial:
    x: int
    given: InitVar[int] = 0


class Tree(pydantic.BaseModel):
    name: str = pydantic.Field(alias="theName")
    below: list["Tree"] = []


UserId = NewType("UserId", int)


class DriversUUID(UUID):
    """As asyncpg has one."""


def signature_of(annotation: object) -> Signature:
    """The signature of a handler with one argument, `value`."""

    def handler(ctx, value): ...

    handler.__annotations__["value"] = annotation
    return build_signature("kind", handler)


def stored_and_read(annotation: object, value: object) -> object:
    """What the handler receives, by way of what jsonb makes of the stored arguments."""

    def handler(ctx: Context, value: Any) -> None: ...

    handler.__annotations__["value"] = annotation
    new = Jobs().handler()(handler).job(value=value)
    return signature_of(annotation).decode(as_jsonb_has_it(new.args.encode()).decode())["value"]


REFUSED = {
    "a secret": (Secretive, Secretive(token=SECRET), r"\.token, a SecretStr, would be another one"),
    "an excluded field": (Excluding, Excluding(kept=1, left=2), r"\.left, an int, would be another one"),
    "a child in a field": (Family, Family(head=Child(name="a", age=1)), r"\.head, a Child, would be a Base"),
    "a child": (Base, Child(name="a", age=1), "a Child would be a Base"),
    "children": (list[Base], [Base(name="a"), Child(name="a", age=1)], r"\[1\], a Child, would be a Base"),
    "a child, whole": (Serialized, Serialized(head=Child(name="a", age=1)), r"\.head, a Child, would be a Base"),
    "a rounding serializer": (Rounding, Rounding(ratio=0.123), r"\.ratio, a float, would be another one"),
    "infinity in a model": (Family, Family(head=Base(name="a"), any=math.inf), r"\.any, a float, would be a NoneType"),
    "a tuple in a model": (Family, Family(head=Base(name="a"), any=(1,)), r"\.any, a tuple, would be a list"),
    "an enum in a model": (Family, Family(head=Base(name="a"), any=Level.HIGH), r"\.any, a Level, would be an int"),
    "a text like a time in a union": (
        Family,
        Family(head=Base(name="a"), when="2024-01-01T00:00:00"),
        r"\.when, a str",
    ),
    "a private attribute": (Private, Private(x=1).noted("a"), r"\._note, a str, would be another one"),
    "a Struct's child": (Shape, Square(side_length=1, filled=True), "refused by ValidationError"),
    "a dataclass's child": (Point, Point3(1, z=5), "a Point3 would be a Point"),
    "such in a list": (list[Point], [Point3(1, z=5)], r"\[0\], a Point3, would be a Point"),
    "such in a dict": (dict[str, Point], {"a": Point3(1)}, r"\[key 1\], a Point3, would be a Point"),
    "such in a field": (Holder, Holder(Shape(1), {"a": date(2024, 1, 1)}), r"\.any\[key 1\], a date, would be a str"),
    "more keys than the type": (Movie, {"title": "a", "year": 1}, "a dict would have 1 of its 2 keys"),
    "such of one of several": (list[Movie], [{"title": "a"}, {"title": "a", "b": 1}], r"\[1\], a dict, would have 1"),
    "a list for a tuple": (tuple[int, int], [1, 2], "a list would be a tuple"),
    "a tuple for a list": (list[int], (1, 2), "a tuple would be a list"),
    "a tuple for a sequence": (Sequence[int], (1, 2), "a tuple would be a list"),
    "a frozenset for a set": (set[int], frozenset({1}), "a frozenset would be a set"),
    "a dict for a dataclass": (Point, {"x": 1}, "a dict would be a Point"),
    "a text for an enum": (Colour, "red", "a str would be a Colour"),
    "a text for bytes": (bytes, "aGFs", "a str would be a bytes"),
    "a time for a text": (str, datetime(2024, 1, 1), "a datetime would be a str"),
    "a UUID for a text": (str, UUID(int=1), "a UUID would be a str"),
    "an enum for a number": (int, Level.HIGH, "a Level would be an int"),
    "an enum for a text": (str, Word.YES, "a Word would be a str"),
    "a bytearray": (bytes, bytearray(b"x"), "a bytearray would be a bytes"),
    "a whole number too large for a float": (float, 2**53 + 1, "an int would be another one"),
    "no decimal number": (Decimal, Decimal("NaN"), "a Decimal would be another one"),
    "a zone without an offset": (time, time(1, tzinfo=BERLIN), "a time would be another one"),
    "texts for UUIDs": (list[UUID], [str(UUID(int=1))], r"\[0\], a str, would be a UUID"),
}
# Un-annotated, `Any` and `object`, and what is in a bare list or dict: that of which JSON has no type.
FOREIGN_TO_JSON: list[object] = [
    datetime(2024, 1, 1, tzinfo=UTC),
    date(2024, 1, 1),
    time(1),
    timedelta(1),
    Decimal("1.1"),
    UUID(int=1),
    b"x",
    Colour.RED,
    Level.HIGH,
    Word.YES,
    {1},
    frozenset({1}),
    (1, 2),
    {1: "a"},
    {Word.YES: 1},
    {Level.HIGH: 1},
    Point(1),
    Shape(1),
    Base(name="a"),
    Pair(1, "a"),
    Cell(1),
    1e23,
    math.nan,
    2 * [(1,)],
]


@pytest.mark.parametrize(("annotation", "value", "says"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_would_change_is_refused(annotation: object, value: object, says: str) -> None:
    """At `add_job`, with the place of what would change, and what it would be."""
    with pytest.raises(ArgumentError, match=f"argument 'value'.*({says})") as refused:
        stored_and_read(annotation, value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("annotation", "wrap"),
    [
        (Any, lambda value: value),
        (object, lambda value: value),
        (dict, lambda value: {"a": value}),
        (dict[str, object], lambda value: {"a": value}),
        (list, lambda value: [0, value]),
    ],
    ids=["Any", "object", "dict", "dict[str, object]", "list"],
)
@pytest.mark.parametrize("value", FOREIGN_TO_JSON, ids=lambda value: type(value).__name__)
def test_what_json_has_no_type_of_is_refused_without_an_annotation(
    annotation: object, wrap: Callable[[object], object], value: object
) -> None:
    """It would arrive as a text, a list or a dict."""
    with pytest.raises(ArgumentError, match=r"argument 'value' (would not come back the same|holds NaN)"):
        stored_and_read(annotation, wrap(value))


def changed(value: Any, x: int) -> Any:
    """The value with another `x` than its class would take now."""
    value.x = x
    return value


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (changed(Raising(x=1), -1), "IndexError"),
        (changed(Raising(x=1), 9), "KeyError"),
        (changed(Asserting(1), -1), "AssertionError"),
    ],
    ids=["a validator", "a serializer", "an assertion"],
)
def test_what_users_code_raises_of_a_value_is_a_refusal(value: Any, error: str) -> None:
    """Users' errors of any type become ours, without their text: in arguments, stored jobs and results."""
    for annotation, argument in ((type(value), value), (list[type(value)], [value])):
        with pytest.raises(ArgumentError, match=f"'value'.*refused by {error}") as refused:
            stored_and_read(annotation, argument)
        assert SECRET not in str(refused.value)
    with pytest.raises(PayloadError, match="refused by"):
        signature_of(type(value)).decode('{"value": {"x": -1}}')
    with pytest.raises(ResultNotKept) as refused:
        Returned("kind", lambda: value).outcome(value)
    assert SECRET not in str(refused.value)


def test_a_result_that_its_own_class_cannot_be_read_as_is_not_kept() -> None:
    """A dataclass with an `InitVar` is one."""
    with pytest.raises(ResultNotKept, match="an Initial would be a dict"):
        Returned("kind", lambda: None).outcome(Initial(1))


def test_a_key_is_not_quoted() -> None:
    """A token may be a key; the place says which one it is."""
    with pytest.raises(ArgumentError, match=r"\[key 2\]\[0\], a date, would be a str") as refused:
        stored_and_read(dict, {"a": 1, SECRET: [date(2024, 1, 1)]})
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Any, {"a": [1, 2.5, "ü", None, True, {"b": []}]}),
        (dict[str, object], {"a": [1, {"b": None}]}),
        (Any, 2**70),
        (Any, 1e-7),
        (float, 1e23),
        (float, 5),
        (list[float], [1, 2.5]),
        (int | float, 1e16),
        (int | str, "5"),
        (Literal["a", 1], 1),
        (Annotated[int, msgspec.Meta(ge=0)], 1),
        (UserId, UserId(5)),
        (UUID, DriversUUID(int=5)),
        (dict[str, int], collections.defaultdict(int, a=1)),
        (tuple[int, str], Pair(1, "a")),
        (Pair, Pair(1, "a")),
        (dict[int, str], {1: "a"}),
        (dict[Colour, date], {Colour.RED: date(2024, 1, 1)}),
        (set[int], {1, 2}),
        (frozenset[Level], frozenset({Level.HIGH})),
        (AbstractSet[int], {1}),
        (Mapping[str, Sequence[int]], {"a": [1]}),
        (Shape | Circle, Circle(1)),
        (Shape, Shape(1)),
        (Holder, Holder(Shape(1, "a"), {"a": [1]})),
        (Box[Decimal], Box(Decimal("1.10"))),
        (Cell, Cell(1)),
        (Plain, Plain(2, [1])),
        (Point | None, Point(1, datetime(2024, 1, 1, tzinfo=BERLIN))),
        (Extra, Extra(x=1, y="a")),
        (Pet, Pet(it=Dog(lives=1))),
        (Strict, Strict(at=datetime(2024, 1, 1), key=UUID(int=1), price=Decimal("1.10"), pair=(1, 2))),
        (list[Either], [Either(it=each) for each in (UUID(int=1), date(2024, 1, 1), datetime(2024, 1, 1), "a")]),
        (Tree, Tree(theName="a", below=[Tree(theName="b")])),
        (Private, Private(x=1)),
        (Excluding, Excluding(kept=1)),
        (Movie, {"title": "a"}),
        (timedelta, timedelta(days=-3, microseconds=1)),
    ],
    ids=repr,
)
def test_what_comes_back_as_it_was_is_taken(annotation: object, value: object) -> None:
    """Also an equal object of a class derived from a builtin, and a whole number where a float is read."""
    assert change_of(value, stored_and_read(annotation, value)) is None


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (UUID, str(UUID(int=5)), UUID(int=5)),
        (UUID | None, str(UUID(int=5)), UUID(int=5)),
        (datetime, "2024-01-01T00:00:00Z", datetime(2024, 1, 1, tzinfo=UTC)),
    ],
    ids=str,
)
def test_a_text_is_taken_for_a_uuid_or_a_time(annotation: object, text: str, value: object) -> None:
    """As an HTTP request has it."""
    assert stored_and_read(annotation, text) == value


@pytest.mark.parametrize("annotation", [datetime | str, UUID | str], ids=str)
def test_a_union_of_a_text_and_what_is_written_as_one_is_refused(annotation: object) -> None:
    """A text that looks like a date would come back as one."""
    with pytest.raises(RegistryError, match="more than one str-like type"):
        signature_of(annotation)


@pytest.mark.parametrize("zone", [BERLIN, timezone(timedelta(hours=1))], ids=str)
@pytest.mark.parametrize("fold", [0, 1])
def test_a_time_zone_comes_back_as_its_offset(zone: Any, fold: int) -> None:
    """Also in the hour that comes twice, of which `==` says that it is equal to no time of another zone."""
    moment = datetime(2024, 10, 27, 2, 30, fold=fold, tzinfo=zone)
    read = stored_and_read(datetime, moment)
    assert isinstance(read, datetime)
    assert (read.replace(tzinfo=None), read.utcoffset()) == (moment.replace(tzinfo=None, fold=0), moment.utcoffset())
    assert change_of(Point(1, moment), stored_and_read(Point, Point(1, moment))) is None


def test_an_offset_with_seconds_comes_back_in_minutes() -> None:
    """Berlin's, before 1893, was 53 minutes and 28 seconds."""
    read = stored_and_read(datetime, datetime(1880, 1, 1, tzinfo=BERLIN))
    assert read == datetime(1880, 1, 1, tzinfo=timezone(timedelta(minutes=53)))


def test_a_call_that_went_well_lets_no_other_one_pass() -> None:
    """Calls are known by the types of their arguments, one by one."""

    def handler(ctx: Context, name: str, key: UUID, note: Any) -> None: ...

    kind = Jobs().handler()(handler)
    for _ in range(2):
        assert kind.job(name="a", key=UUID(int=1), note=1).args
        for changed in ({"name": UUID(int=1)}, {"note": UUID(int=1)}, {"note": (1,)}, {"name": b"x"}):
            with pytest.raises(ArgumentError, match="would not come back the same"):
                kind.job(**({"name": "a", "key": UUID(int=1), "note": 1} | changed))


def test_a_handler_elsewhere_gets_what_an_objects_own_class_reads() -> None:
    """Its annotations are unknown: datetimes and the like go as texts, a model that hides something does not."""
    ship = external("ship", queue="depot")
    assert ship.job(at=datetime(2024, 1, 1, tzinfo=UTC), point=Point(1), data={"a": {1}}).args
    with pytest.raises(ArgumentError, match=r"argument 'model' would not come back the same: \.token, a SecretStr"):
        ship.job(model=Secretive(token=SECRET))


def test_a_header_is_no_enum() -> None:
    """It would come back as its text."""
    with pytest.raises(ArgumentError, match="headers take strings"):
        encode_headers({"a": Word.YES})


_MOMENTS = st.datetimes(timezones=st.sampled_from([None, UTC, BERLIN, ZoneInfo("Australia/Lord_Howe")]))
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([*Colour, *Level, *Word, "red", "yes", "2024-01-01", "2024-01-01T00:00:00Z", str(UUID(int=1))]),
    st.dates(),
    _MOMENTS,
    st.times(),
    st.timedeltas(),
    st.decimals(),
    st.uuids(),
    st.builds(Point, st.integers(0, 9), st.none() | _MOMENTS),
    st.builds(Point3, st.integers(0, 9)),
    st.builds(Shape, st.integers(0, 9), st.text(max_size=3)),
    st.builds(Circle, st.floats() | st.integers(0, 9)),
    st.builds(Child, name=st.text(max_size=3), age=st.integers()),
    st.builds(Base, name=st.text(max_size=3)),
    st.builds(Rounding, ratio=st.floats(-9, 9)),
    st.builds(Pair, st.integers(0, 9), st.text(max_size=3)),
)
_HASHABLE = st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.dates(), st.sampled_from([*Level, *Word]))
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(_HASHABLE, max_size=3),
        st.frozensets(_HASHABLE, max_size=3),
        st.dictionaries(_HASHABLE | st.uuids(), inner, max_size=3),
        st.builds(Holder, st.builds(Shape, st.integers(0, 9)), inner),
        st.builds(Family, head=st.builds(Base, name=st.just("a")), any=inner),
    ),
    max_leaves=4,
)
_SCALARS = [
    Any, object, bool, int, float, str, bytes, bytearray, Decimal, UUID, date, datetime, time, timedelta, Colour, Level,
    Word, Literal["red", 3], int | str, int | float, UUID | None, datetime | int, Shape | Circle, Point, Point3, Base,
    Family, Rounding, Holder, Pair, Movie,
]  # fmt: skip
_ANNOTATIONS = [
    *_SCALARS, list, dict, set, tuple, frozenset, *(list[each] for each in _SCALARS),
    *(dict[str, each] for each in _SCALARS), dict[int, Any], dict[float, Any], dict[date, Any], dict[Level, Any],
    set[int], set[str], frozenset[Any], tuple[Any, ...], tuple[int, str], Sequence[Any], Mapping[str, Any],
]  # fmt: skip


def _is_allowed(value: object, read: object) -> bool:
    """Whether two are equal, by another comparison than that of the code: the types of all parts in their order."""
    if isinstance(value, str) and type(read) in (UUID, datetime):
        return True
    return _shape(value) == _shape(read)


def _shape(value: object) -> object:
    """A value as something that is equal only if the value is, with its type; a number is one, whatever its type."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        minutes = (value.utcoffset() or timedelta()) // timedelta(minutes=1)
        return "moment", value.replace(tzinfo=None, fold=0), minutes
    if type(value) is float and value.is_integer():
        # jsonb gives whole numbers from 1e16 on back as int; a dictionary's items are compared by their texts.
        return "number", int(value)
    if type(value) in (int, float):
        return "number", value
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(_shape, value)))
    if isinstance(value, dict):
        return "dict", sorted((repr(_shape(key)), repr(_shape(item))) for key, item in value.items())
    if isinstance(value, pydantic.BaseModel):
        return type(value), [(name, _shape(item)) for name, item in value.__dict__.items()]
    if isinstance(value, msgspec.Struct):
        return type(value), [_shape(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, Point | Holder):
        return type(value), [_shape(item) for item in vars(value).values()]
    if isinstance(value, list | tuple):
        return "tuple" if isinstance(value, tuple) else "list", [_shape(item) for item in value]
    return type(value), value


_SIGNATURES: dict[str, Signature] = {str(annotation): signature_of(annotation) for annotation in _ANNOTATIONS}


@pytest.mark.wide
@settings(max_examples=400)
@given(st.sampled_from(_ANNOTATIONS), _VALUES)
@example(dict[date, Any], {date(2000, 1, 1): 4.0787692739621304e16})
def test_any_value_of_any_type_comes_back_or_is_refused(annotation: object, value: object) -> None:
    """Whatever is stored is equal to what is read, and of its types."""
    signature = _SIGNATURES[str(annotation)]
    quick = signature.encode_call((), {"value": value})
    try:
        stored = f'{{"value": {signature.encode("value", value).decode()}}}'
    except ArgumentError:
        assert quick is None
        return
    for text in filter(None, (quick, stored)):
        read = signature.decode(as_jsonb_has_it(text.encode()).decode())["value"]
        assert _is_allowed(value, read), (annotation, value, read)
