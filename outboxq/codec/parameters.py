"""Arguments of handlers: a `Parameter` checks and converts one argument, a `Signature` all arguments of a call."""

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
    """One argument of a handler: checks values by the annotation, and converts them to and from JSON.

    Attributes:
        name: The argument's name.
        annotation: The argument's type.
        required: True if the argument has no default.
        entity: The mapped class, if the argument is an entity (a mapped object); otherwise None.
        optional: True if an entity argument may be None.
        locked: True if the entity's row is locked when it is loaded (`Locked[...]`).
        decoder: Decodes the stored JSON: to the value, or to the primary key of an entity.
    """

    name: str
    annotation: object
    required: bool
    entity: type[object] | None
    optional: bool
    locked: bool
    decoder: msgspec.json.Decoder[object]

    def encode(self, value: object) -> bytes:
        """Return the value as JSON text, after a check that `decode` reads an equal value from it.

        Raises:
            ArgumentError: the value does not fit the annotation, or JSON cannot hold it.
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
            # Without the exception's cause: its text may quote the value.
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
        """Return what to encode for a value that needs no check by `encode`: itself, or an entity's primary key.

        With this the caller can encode all arguments of a call in one pass.

        Raises:
            ArgumentError: `encode` has to check the value.
        """
        if self.entity is None and type(value) in _NEVER_ENTITIES:
            return value
        if self.entity is None or not isinstance(value, self.entity):
            raise ArgumentError(f"argument {self.name!r} is not plain")
        return primary_key_of(value)

    def check_entity(self, value: object) -> None:
        """Check that the value is an entity of the annotated class, or None if the annotation allows None.

        Raises:
            ArgumentError: the value is another one, or the annotation is no mapped class.
        """
        if self.entity is None:
            raise ArgumentError(f"argument {self.name!r} is not annotated with a mapped class, got an entity")
        if not (isinstance(value, self.entity) or (value is None and self.optional)):
            wanted = f"{'optional ' if self.optional else ''}{self.entity.__name__}"
            raise ArgumentError(f"argument {self.name!r} takes {with_article(wanted)}, got {type(value).__name__}")

    def decode(self, data: msgspec.Raw) -> object:
        """Decode a stored value by the annotation; return an `EntityKey` for an entity.

        Raises:
            PayloadError: the value does not fit the annotation.
        """
        try:
            value = self.decoder.decode(data)
        except UNREADABLE as error:
            raise PayloadError(f"argument {self.name!r}: {problem_of(error)}") from None
        return self.loaded(value)

    def loaded(self, value: object) -> object:
        """Return the argument for a decoded value: an `EntityKey` for an entity's primary key, else the value."""
        if self.entity is None or value is None:
            return value
        identity = tuple(value) if isinstance(value, list | tuple) else (value,)
        return EntityKey(self.entity, identity, self.optional, self.locked)


class Signature:
    """Checks, encodes and decodes the arguments of a handler's calls.

    The handler's first parameter, the context, is not one of them.
    """

    def __init__(self, kind: str, parameters: tuple[Parameter, ...], binder: inspect.Signature) -> None:
        self._kind = kind
        self._binder = binder
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self._positional = [p.name for p in binder.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.locks = any(parameter.locked for parameter in parameters)
        # The entity parameters by name, with True if None is accepted.
        self.optional = {p.name: p.optional for p in parameters if p.entity is not None}
        self.takes_entities = bool(self.optional)
        self._reader = _struct_decoder_of(parameters)
        # The parameters by name; an entity, which is stored as its key, has a rule of its own.
        self._certain = {p.name: certain_types(p.decoder.type) for p in parameters if p.entity is None}
        # Names and types of calls whose arguments are known to come back unchanged: they are checked once, and not for
        # each call.
        self._certain_calls: set[tuple[object, ...]] = set()
        self._is_plain = all(parameter.required and parameter.entity is None for parameter in parameters)

    def encode_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
        """Encode all arguments of a call together as a JSON object; return None if that is not certainly correct.

        This is the fast way, with the same result as `bind` and then `encode` for each argument. It raises no error:
        after None the caller goes the slow way, which reports an argument that does not fit.
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
            # Binding refuses a missing name and an unknown one.
            read = self._reader.decode(data if is_certain else as_jsonb_has_it(data))
        except Exception:  # noqa: BLE001  # users' serializers and validators raise what they like
            return None
        # Searching a str is several times as fast as searching bytes.
        text = data.decode()
        if is_certain:
            return None if "\\u0000" in text else text
        if not all(self._gives_back(name, values[name], getattr(read, name)) for name in values):
            return None
        if all(type(value) in self._certain.get(name, ()) for name, value in values.items()):
            self._certain_calls.add(names_and_types)
        return None if "null" in text or "\\u0000" in text else text

    def _gives_back(self, name: str, stored: object, read: object) -> bool:
        """Return True if `read`, decoded from the JSON of argument `name`, equals the encoded value `stored`."""
        if name in self._certain:
            return type(stored) in self._certain[name] or change_of_argument(stored, read) is None
        return read == (tuple(stored) if type(stored) is list else stored)

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the arguments of a call by name, without the defaults of omitted ones.

        Defaults are not stored, so that the handler that runs the job uses its own.

        Raises:
            ArgumentError: an argument is missing, unknown, or given twice.
        """
        try:
            return dict(self._binder.bind(*args, **kwargs).arguments)
        except TypeError as error:
            # For a misspelt name Python only says that the right one is missing.
            unknown = [repr(name) for name in kwargs if name not in self.parameters and repr(name) not in str(error)]
            also = f", and there is no argument {', '.join(unknown)}" if unknown else ""
            raise ArgumentError(f"{self._kind}{self._binder}: {error}{also}") from error

    def all_values(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Return the arguments of a call that `bind` accepts, by name, with the defaults of omitted ones."""
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs} if args else kwargs
        if values.keys() == self.parameters.keys() and len(values) == len(args) + len(kwargs):
            # Each argument is there once, so that binding them would change nothing.
            return values
        bound = self._binder.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def entities(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, EntityArgument]:
        """Return the entities among the arguments of a call, as `{name: EntityArgument}`.

        The call must be one that `encode_call` has accepted.
        """
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs}
        return entities_of({name: values[name] for name in self.optional if name in values}, self.optional)

    def encode(self, name: str, value: object) -> bytes:
        """Check one argument, and return it as JSON text.

        Raises:
            ArgumentError: the value does not fit; the message names the handler.
        """
        with self._named():
            return self.parameters[name].encode(value)

    def check_entity(self, name: str, value: object) -> None:
        """Check an entity argument by its class only: a new entity has no primary key yet that could be encoded."""
        with self._named():
            self.parameters[name].check_entity(value)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except ArgumentError as error:
            raise ArgumentError(f"handler {self._kind!r}, {error}") from error.__cause__

    def decode(self, args: str) -> dict[str, object]:
        """Decode a job's stored JSON object to the handler's arguments, by name; an entity is given as an `EntityKey`.

        Raises:
            PayloadError: the text is no object with arguments that fit; the message never quotes a value.
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
        """Decode one argument at a time after `decode` has failed, to raise an error that names the wrong argument."""
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
    """Make the `Signature` of a handler function, without its first parameter, the context.

    Raises:
        RegistryError: a parameter whose values cannot be stored (`*args`, `**kwargs`, an unknown annotation).
    """
    declared = list(declared_signature(function).parameters.values())[1:]
    parameters = tuple(_build_parameter(kind, function, parameter) for parameter in declared)
    # The binder appears in error messages: so it has no context, and annotations as they were written.
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
    # A parameter with a default may be the handler's own concern: a clock, or a client that tests pass.
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
