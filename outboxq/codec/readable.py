"""Finds types that cannot be read from JSON, so that a handler with such a parameter is refused at once."""

from collections.abc import Iterator
from typing import Any

from msgspec import inspect


def unreadable_in(annotation: object) -> type[Any] | None:
    """Return the first class in an annotation that can never be read from JSON; None if there is none.

    Types that msgspec knows can be read, and classes with a `model_validate_json`, such as Pydantic's models. In a
    dataclass or similar class, a field that may be None is not examined, because it can be left empty.
    """
    return next(_unreadable(inspect.type_info(annotation), set()), None)


def _unreadable(found: object, seen: set[int]) -> Iterator[type[Any]]:
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, inspect.CustomType):
        if found.cls is not object and not hasattr(found.cls, "model_validate_json"):
            yield found.cls
        return
    for field in getattr(found, "fields", ()):
        if not _may_be_none(field.type):
            yield from _unreadable(field.type, seen)
    for name in ("item_type", "key_type", "value_type", "type"):
        yield from _unreadable(getattr(found, name, None), seen)
    for name in ("item_types", "types"):
        for each in getattr(found, name, ()):
            yield from _unreadable(each, seen)


def _may_be_none(found: inspect.Type) -> bool:
    return isinstance(found, inspect.UnionType) and found.includes_none
