"""Checks that a value is read back from its JSON as an equal value, so that a job receives what it was given.

Values are compared by type, part by part, because `==` is not enough: an int equals a member of an `IntEnum`, and two
objects with the same fields differ if their class has no `__eq__`.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

import msgspec
from msgspec import inspect

from outboxq.codec.entities import entity_state
from outboxq.codec.values import UNREADABLE, encode_value, json_decoder
from outboxq.errors import ArgumentError
from outboxq.names import with_article

# A stored value, the value read, and their place in the whole.
_Pair: TypeAlias = tuple[object, object, str]

# Types of which `==` sees every difference of two values.
_FLAT = frozenset({bool, int, float, str, bytes, UUID, date, type(None)})
# An object of a class derived from one of these arrives as the builtin, if that is equal: an ORM's list, a driver's
# UUID.
_BASES = frozenset({dict, list, tuple, set, frozenset, UUID})
# By msgspec's name of an annotation: the types of values that come back unchanged, if msgspec reads them at all.
_CERTAIN: Mapping[type[inspect.Type], frozenset[type[Any]]] = {
    inspect.AnyType: frozenset({bool, int, str}),
    inspect.BoolType: frozenset({bool}),
    inspect.BytesType: frozenset({bytes}),
    inspect.DateType: frozenset({date}),
    inspect.DateTimeType: frozenset({str}),
    inspect.FloatType: frozenset({float}),
    inspect.IntType: frozenset({int}),
    inspect.LiteralType: frozenset({int, str}),
    inspect.StrType: frozenset({str}),
    inspect.UUIDType: frozenset({UUID, str}),
}
_NUMBERS = {int, float}
_READ_FROM_TEXT = frozenset({UUID, datetime})
_OF_ITEMS = frozenset({dict, list})
_MISSING = object()
# Positive exponents; jsonb spells out negative ones too, but these numbers are not whole.
_EXPONENTS_FROM = 1e16
_EXPONENT = re.compile(rb"[0-9]e[0-9]")
# The unit in which msgspec and RFC 3339 write an offset: some offsets before 1972 had seconds.
_OFFSET_UNIT = timedelta(minutes=1)
_A_DAY = date(2000, 1, 1)


def certain_types(annotation: object) -> frozenset[type[Any]]:
    """Return the types of arguments that come back from JSON as equal values, if `annotation` can read them.

    Arguments of these types need no comparison with what was read.
    """
    found = inspect.type_info(annotation)
    if isinstance(found, inspect.UnionType):
        # An int or a float: the type that arrives depends on the value.
        return frozenset().union(*(_CERTAIN.get(type(each), ()) for each in found.types)) - {float}
    return _CERTAIN.get(type(found), frozenset())


def change_of_argument(given: object, read: object) -> str | None:
    """Return the difference between an argument and the value read from its JSON, as `change_of` does.

    Return None if they are the same. A text that the annotation reads as a UUID or a datetime counts as the same.
    """
    return None if type(given) is str and type(read) in _READ_FROM_TEXT else change_of(given, read)


def change_of_result(value: object, data: bytes, declared: msgspec.json.Decoder[Any]) -> str | None:
    """Return the difference between a handler's result and the value read from its JSON `data`; None if there is none.

    The JSON is read without a type first. If that changes the value, the JSON is read again by the declared type.
    Without a declared type (`Any`), an object with fields, such as a dataclass, is read by its own class.
    """
    data = as_jsonb_has_it(data)
    change = change_of(value, msgspec.json.decode(data))
    if change is None:
        return None
    try:
        own = declared if declared.type is not Any or _fields(value) is None else json_decoder(type(value))
        return change if own.type is Any else change_of(value, own.decode(data))
    except UNREADABLE:
        return change


def encode_unread(name: str, value: object) -> bytes:
    """Encode an argument as JSON text for a handler of another program, whose annotations are not known here.

    An object with fields, such as a dataclass, is checked by its own class: if the class can read the JSON, the result
    must be equal.

    Raises:
        ArgumentError: JSON cannot hold the value, or its class reads another value from it.
    """
    data = encode_value(name, value)
    if entity_state(value) is None and _fields(value) is not None:
        try:
            change = change_of(value, json_decoder(type(value)).decode(data))
        except UNREADABLE:
            # One example is a model that writes other names than it reads.
            return data
        if change is not None:
            raise ArgumentError(f"argument {name!r} {refusal_of(change)}")
    return data


def refusal_of(change: str) -> str:
    """Return the end of an error message for a value that JSON would change, with advice.

    `change` is the difference, as `change_of` returns it.
    """
    return f"would not come back the same: {change}; annotate the type that it has, or pass what JSON gives back"


def as_jsonb_has_it(data: bytes) -> bytes:
    """Return JSON as PostgreSQL's jsonb returns it: large numbers without exponents, such as all digits of 1e23.

    Such a number is read as an int, in a check of the value as later by a relay.
    """
    return msgspec.json.encode(_spelt_out(msgspec.json.decode(data))) if _EXPONENT.search(data) else data


def _spelt_out(value: object) -> object:
    match value:
        case float() if abs(value) >= _EXPONENTS_FROM:
            return int(Decimal(repr(value)))
        case dict():
            return {key: _spelt_out(item) for key, item in value.items()}
        case list():
            return [_spelt_out(item) for item in value]
        case _:
            return value


def change_of(stored: object, read: object) -> str | None:
    """Return the first difference between a value and the one read from its JSON, in words; None if there is none.

    The words name types, fields and positions, never contents, which may be secret.
    """
    pending = [(stored, read, "")]
    while pending:
        one, other, place = pending.pop()
        if _are_flat_twins(one, other):
            continue
        found = _compare(one, other)
        if isinstance(found, str):
            kind = with_article(type(one).__name__)
            return f"{place}, {kind}, {found}" if place else f"{kind} {found}"
        pending.extend((part, counterpart, f"{place}{label}") for part, counterpart, label in found)
    return None


def _compare(one: object, other: object) -> str | Iterable[_Pair]:
    """Compare two values without their parts; return the difference in words, or the pairs of parts to compare next."""
    kind = type(other)
    if one is other:
        return ()
    if other is _MISSING:
        return "would be lost"
    # JSON has one sort of numbers: 1 is read as a float, and jsonb's 1e16 as an int.
    is_number = {kind, type(one)} == _NUMBERS
    if not (type(one) is kind or is_number or (kind in _BASES and isinstance(one, kind))):
        return f"would be {with_article(kind.__name__)}"
    parts = None if kind in _FLAT else _parts(one, other)
    if parts is not None:
        return parts
    return () if _are_equal(one, other) else "would be another one"


def _parts(one: Any, other: Any) -> str | Iterable[_Pair] | None:
    """Return the pairs of parts (items, entries or fields) of two values of the same type, to be compared.

    Returns the difference in words if parts were lost, and None if values of this type have no parts.
    """
    if isinstance(other, dict):
        return _different_entries(one, other)
    if isinstance(other, list | tuple):
        return _different_items(one, other)
    if isinstance(other, set | frozenset):
        counterparts = {each: each for each in other}
        return "would be another one" if one != other else [(each, counterparts[each], "[...]") for each in one]
    fields, others = _fields(one), _fields(other)
    if fields is None or others is None:
        return None
    return [(fields.get(name, _MISSING), others.get(name, _MISSING), f".{name}") for name in {**others, **fields}]


def _different_entries(one: dict[object, object], other: dict[object, object]) -> str | Iterable[_Pair]:
    if len(one) != len(other):
        return f"would have {len(other)} of its {len(one)} keys"
    return _entries(one, other)


def _entries(one: dict[object, object], other: dict[object, object]) -> Iterator[_Pair]:
    # A key can be as secret as a value, so its place is named instead. JSON keeps the order.
    same = {key: key for key in other}
    for at, (key, beside) in enumerate(zip(one, other, strict=True), 1):
        counterpart = same.get(key, beside)
        yield one[key], other[counterpart], f"[key {at}]"
        yield key, counterpart, f" key {at}"


def _different_items(one: Collection[object], other: Collection[object]) -> str | Iterable[_Pair]:
    if len(one) != len(other):
        return f"would have {len(other)} of its {len(one)} items"
    return ((item, counterpart, f"[{at}]") for at, (item, counterpart) in enumerate(zip(one, other, strict=True)))


def _are_flat_twins(one: Any, other: Any) -> bool:
    """Return True if two values are certainly the same: they are equal, and their items have the same simple types.

    This is so for most values, and saves the comparison part by part.
    """
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is dict and not _have_same_flat_types(one.values(), other.values()):
        return False
    return (kind in _FLAT or (kind in _OF_ITEMS and _have_same_flat_types(one, other))) and bool(one == other)


def _have_same_flat_types(some: Iterable[object], others: Iterable[object]) -> bool:
    kinds = list(map(type, some))
    return _FLAT.issuperset(kinds) and kinds == list(map(type, others))


def _fields(value: Any) -> dict[str, object] | None:
    """Return the fields of a Struct, dataclass, attrs or Pydantic object, by name; None for any other value."""
    kind = type(value)
    if hasattr(kind, "__pydantic_private__"):
        # Private attributes and extra fields count for `==` of a model too.
        named = {name: value.__dict__.get(name, _MISSING) for name in kind.model_fields}
        return {**(value.__pydantic_private__ or {}), **(value.__pydantic_extra__ or {}), **named}
    if isinstance(value, msgspec.Struct):
        names: Iterable[str] = kind.__struct_fields__
    elif dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif hasattr(kind, "__attrs_attrs__"):
        names = [field.name for field in kind.__attrs_attrs__]
    else:
        return None
    return {name: getattr(value, name, _MISSING) for name in names}


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, time):
        one, other = datetime.combine(_A_DAY, one), datetime.combine(_A_DAY, other)
    if isinstance(one, datetime):
        return _are_same_moment(one, other)
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001  # users' code, which may raise what it likes: these are not known to be equal
        return False


def _are_same_moment(one: datetime, other: datetime) -> bool:
    # Not compared by `==`: it takes a time in the repeated hour for unequal to one with another tzinfo.
    if (one.tzinfo is None) is not (other.tzinfo is None):
        return False
    gap = one - other
    return not gap or (one.replace(tzinfo=None) == other.replace(tzinfo=None) and abs(gap) < _OFFSET_UNIT)
