"""A handler's arguments: each checked, stored and read by its annotation, together encoded and decoded."""

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Union
from uuid import UUID

import msgspec

from outboxq.codec.entities import (
    EntityArgument,
    EntityKey,
    entities_of,
    entity_mapper,
    entity_of,
    entity_state,
    is_locked,
    is_same_key,
    primary_key_of,
    primary_key_type,
)
from outboxq.codec.readable import unreadable_in
from outboxq.codec.sameness import as_jsonb_has_it, certain_types, change_of_argument, refusal_of
from outboxq.codec.signature import declared_signature, resolve_annotation
from outboxq.codec.text import type_name
from outboxq.codec.values import ENCODER, UNREADABLE, encode_value, json_decoder, problem_of
from outboxq.errors import ArgumentError, PayloadError, RegistryError
from outboxq.names import with_article

_NEVER_ENTITIES = frozenset({bool, int, float, str, bytes, list, dict, tuple, UUID, Decimal, datetime, date})
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a handler: how it is checked, stored and read."""

    name: str
    annotation: object
    required: bool
    entity: type[object] | None
    optional: bool
    locked: bool
    decoder: msgspec.json.Decoder[object]

    def encode(self, value: object) -> bytes:
        """The value as JSON text, which `decode` reads as the same value.

        Raises:
            ArgumentError: it does not fit the annotation, or JSON cannot hold it.
        """
        if self.entity is not None or entity_state(value) is not None:
            self.check_entity(value)
            data = encode_value(self.name, value)
            self._check_key(value, data)
            return data
        data = encode_value(self.name, value)
        try:
            read = self.decoder.decode(as_jsonb_has_it(data))
        except UNREADABLE as error:
            # Without its cause, whose text may quote the value.
            raise ArgumentError(f"argument {self.name!r}: {problem_of(error)}") from None
        change = change_of_argument(value, read)
        if change is not None:
            raise ArgumentError(f"argument {self.name!r} {refusal_of(change)}")
        return data

    def _check_key(self, entity: object, data: bytes) -> None:
        state = entity_state(entity)
        if state is None or state.key is None or self.entity is None:
            return
        try:
            key = self.loaded(self.decoder.decode(data))
        except UNREADABLE:
            key = None
        if not (isinstance(key, EntityKey) and is_same_key(self.entity, key.identity, tuple(state.key[1]))):
            raise ArgumentError(
                f"argument {self.name!r}: JSON does not give back the primary key of {type(entity).__name__}: say in "
                "its class what it is (`id: Mapped[UUID]`), or pass what the row can be found by instead"
            )

    def plain(self, value: object) -> object:
        """A value that cannot be an entity, or the key of an entity that fits; everything else is refused.

        Raises:
            ArgumentError: it needs a closer check.
        """
        if self.entity is None and type(value) in _NEVER_ENTITIES:
            return value
        if self.entity is None or not isinstance(value, self.entity):
            raise ArgumentError(f"argument {self.name!r} is not plain")
        return primary_key_of(value)

    def check_entity(self, value: object) -> None:
        """Refuse a value that is not an entity of the annotated class."""
        if self.entity is None:
            raise ArgumentError(f"argument {self.name!r} is not annotated with a mapped class, got an entity")
        if not (isinstance(value, self.entity) or (value is None and self.optional)):
            wanted = f"{'optional ' if self.optional else ''}{self.entity.__name__}"
            raise ArgumentError(f"argument {self.name!r} takes {with_article(wanted)}, got {type(value).__name__}")

    def decode(self, data: msgspec.Raw) -> object:
        """The stored value, with an `EntityKey` for an entity.

        Raises:
            PayloadError: it does not fit the annotation.
        """
        try:
            value = self.decoder.decode(data)
        except UNREADABLE as error:
            raise PayloadError(f"argument {self.name!r}: {problem_of(error)}") from None
        return self.loaded(value)

    def loaded(self, value: object) -> object:
        """A decoded value, with an `EntityKey` for an entity."""
        if self.entity is None or value is None:
            return value
        identity = tuple(value) if isinstance(value, list | tuple) else (value,)
        return EntityKey(self.entity, identity, self.optional, self.locked)


class Signature:
    """The arguments of a handler after its context."""

    def __init__(self, kind: str, parameters: tuple[Parameter, ...], binder: inspect.Signature) -> None:
        self._kind = kind
        self._binder = binder
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self._positional = [p.name for p in binder.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.locks = any(parameter.locked for parameter in parameters)
        # Entity parameters by name, each with whether it accepts None.
        self.optional = {p.name: p.optional for p in parameters if p.entity is not None}
        self.takes_entities = bool(self.optional)
        self._reader = _struct_decoder_of(parameters)
        # By name; an entity, which is stored as its key, has a rule of its own.
        self._certain = {p.name: certain_types(p.decoder.type) for p in parameters if p.entity is None}
        # Names and types of calls whose arguments come back as they are: checked once, not for each call.
        self._certain_calls: set[tuple[object, ...]] = set()
        self._is_plain = all(parameter.required and parameter.entity is None for parameter in parameters)

    def encode_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
        """All arguments of a call as a JSON object, in one pass; None if each has to be checked on its own.

        The result is the same as of `bind`, and `encode` for each argument. It refuses nothing by itself.
        """
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs} if args else kwargs
        if args and len(values) != len(args) + len(kwargs):
            return None
        names_and_types = (*values, *map(type, values.values()))
        is_certain = names_and_types in self._certain_calls
        try:
            if not is_certain:
                values = {name: self.parameters[name].plain(value) for name, value in values.items()}
            data = ENCODER.encode(values)
            # Refuses a missing name, and an unknown one.
            read = self._reader.decode(data if is_certain else as_jsonb_has_it(data))
        except Exception:  # noqa: BLE001  # users' serializers and validators raise what they like
            return None
        # A str is searched several times as fast as bytes.
        text = data.decode()
        if is_certain:
            return None if "\\u0000" in text else text
        if not all(self._gives_back(name, values[name], getattr(read, name)) for name in values):
            return None
        if all(type(value) in self._certain.get(name, ()) for name, value in values.items()):
            self._certain_calls.add(names_and_types)
        return None if "null" in text or "\\u0000" in text else text

    def _gives_back(self, name: str, stored: object, read: object) -> bool:
        """Return True if an argument, or an entity's primary key, is read as it was stored and needs no other check."""
        if name in self._certain:
            return type(stored) in self._certain[name] or change_of_argument(stored, read) is None
        return read == (tuple(stored) if type(stored) is list else stored)

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name, as the call gave them; defaults are left to the handler that will run."""
        try:
            return dict(self._binder.bind(*args, **kwargs).arguments)
        except TypeError as error:
            # Of a misspelt name Python says that the right one is missing, and no more.
            unknown = [repr(name) for name in kwargs if name not in self.parameters and repr(name) not in str(error)]
            also = f", and there is no argument {', '.join(unknown)}" if unknown else ""
            raise ArgumentError(f"{self._kind}{self._binder}: {error}{also}") from error

    def all_values(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """The arguments by name of a call that `bind` allows, with the defaults of those that it left out."""
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs} if args else kwargs
        if values.keys() == self.parameters.keys() and len(values) == len(args) + len(kwargs):
            # Each once, so that binding them would change nothing.
            return values
        bound = self._binder.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def entities(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, EntityArgument]:
        """The entities by name among the arguments of a call that `encode_call` allows."""
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        return entities_of({name: values[name] for name in self.optional if name in values}, self.optional)

    def encode(self, name: str, value: object) -> bytes:
        """One argument as JSON text.

        Raises:
            ArgumentError: it does not fit; the message names the handler.
        """
        with self._named():
            return self.parameters[name].encode(value)

    def check_entity(self, name: str, value: object) -> None:
        """Refuse an entity that does not fit, by its class alone: a pending one has no key yet."""
        with self._named():
            self.parameters[name].check_entity(value)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ArgumentError as error:
            raise ArgumentError(f"handler {self._kind!r}, {error}") from error.__cause__

    def decode(self, args: str) -> dict[str, object]:
        """The stored JSON object as call arguments, with an `EntityKey` for each entity.

        Raises:
            PayloadError: the text is not such an object; the message never quotes a value.
        """
        try:
            read = msgspec.structs.asdict(self._reader.decode(args))
        except UNREADABLE:
            return self._decode_each(args)
        if self._is_plain:
            return read
        given = {name: value for name, value in read.items() if value is not msgspec.UNSET}
        return {name: self.parameters[name].loaded(value) for name, value in given.items()}

    def _decode_each(self, args: str) -> dict[str, object]:
        """Decode one argument at a time: slower than `decode`, and it says which one does not fit."""
        try:
            fields = msgspec.json.decode(args.encode(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError) as error:
            raise PayloadError("the stored arguments are not a JSON object that can be decoded") from error
        unknown = sorted(fields.keys() - self.parameters.keys())
        missing = [p.name for p in self.parameters.values() if p.required and p.name not in fields]
        if unknown or missing:
            raise PayloadError(
                f"the stored arguments do not fit {self._kind}{self._binder}: "
                f"unknown {unknown or 'none'}, missing {missing or 'none'}"
            )
        return {name: self.parameters[name].decode(data) for name, data in fields.items()}


def _struct_decoder_of(parameters: tuple[Parameter, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    fields = [(p.name, p.decoder.type) if p.required else (p.name, p.decoder.type, msgspec.UNSET) for p in parameters]
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return json_decoder(struct)


def build_signature(kind: str, function: Callable[..., object]) -> Signature:
    """Read a handler's signature, leaving out its first parameter, the context.

    Raises:
        RegistryError: a parameter that cannot be stored (`*args`, `**kwargs`, an unknown annotation).
    """
    declared = list(declared_signature(function).parameters.values())[1:]
    parameters = tuple(_build_parameter(kind, function, parameter) for parameter in declared)
    # The binder shows in error texts: without the context, and with annotations as they were written.
    return Signature(kind, parameters, inspect.Signature(declared))


def _build_parameter(kind: str, function: Callable[..., object], declared: inspect.Parameter) -> Parameter:
    if declared.kind in (declared.VAR_POSITIONAL, declared.VAR_KEYWORD):
        raise RegistryError(
            f"handler {kind!r} takes {declared}: its stored arguments need names, so write each one out"
        )
    if declared.kind is declared.POSITIONAL_ONLY:
        raise RegistryError(
            f"handler {kind!r}, argument {declared.name!r}: stored arguments go by name, so remove the '/'"
        )
    annotation = object if declared.annotation is _EMPTY else resolve_annotation(function, declared)
    entity, optional = entity_of(annotation)
    stored = typing.Any if annotation is object else annotation
    if entity is None:
        _refuse_nested_entities(kind, declared.name, annotation)
    else:
        stored = primary_key_type(entity)
        stored = Union[stored, None] if optional and stored is not typing.Any else stored  # noqa: UP007  # at run time
    try:
        decoder = json_decoder(stored)
    except TypeError as error:
        raise RegistryError(f"handler {kind!r}, argument {declared.name!r}: {error}") from error
    # One that may be left out can be the handler's own affair: a clock, or a client that tests pass.
    unreadable = unreadable_in(stored) if entity is None and declared.default is _EMPTY else None
    if unreadable is not None:
        raise RegistryError(
            f"handler {kind!r}, argument {declared.name!r}: JSON cannot hold {type_name(unreadable)}: store what it is "
            "made of, such as a text or numbers, and make it again in the handler"
        )
    locked = is_locked(annotation)
    if locked and entity is None:
        raise RegistryError(
            f"handler {kind!r}, argument {declared.name!r}: Locked[...] takes a mapped class, or one of them or None"
        )
    return Parameter(declared.name, annotation, declared.default is _EMPTY, entity, optional, locked, decoder)


def _refuse_nested_entities(kind: str, name: str, annotation: object) -> None:
    if entity_mapper(annotation) is not None:
        raise RegistryError(
            f"handler {kind!r}, argument {name!r}: an entity must be an argument of its own "
            "(`account: Account` or `account: Account | None`); inside other types pass its key"
        )
    for member in typing.get_args(annotation):
        _refuse_nested_entities(kind, name, member)
