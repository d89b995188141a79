"""Arguments between Python and JSON: typed by the handler's signature, checked when enqueued and when executed.

Each argument is encoded on its own by msgspec and decoded once more by its annotation's decoder, so that what is
accepted at enqueue can be read at execution. Entities (mapped objects) are stored as their primary keys.
"""

import hashlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import NotRequired, Protocol, TypedDict, Union, cast
from uuid import UUID

import msgspec
from sqlalchemy.sql.elements import ClauseElement

from outboxq.codec.entities import (
    EntityKey,
    entity_mapper,
    entity_of,
    entity_state,
    is_locked,
    is_same_key,
    primary_key_of,
    primary_key_type,
)
from outboxq.codec.signature import declared_signature, resolve_annotation
from outboxq.errors import ArgumentError, ConfigError, InvalidKey, PayloadError, RegistryError

MAX_ARGS_BYTES = 256 * 1024
MAX_HEADERS_BYTES = 64 * 1024
MAX_NAME_BYTES = 63
MAX_KEY_BYTES = 512
MAX_SCOPE_BYTES = 255

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
# What msgspec says in its own words and about types alone.
_QUOTES_NOTHING = re.compile(r"Expected |Object missing |Number out of range|Invalid (?!enum value|value)")
# Neither an entity nor an expression, and much the most that is asked about.
PLAIN = frozenset({int, str, float, bool, bytes, type(None)})
_NEVER_ENTITIES = frozenset({bool, int, float, str, bytes, list, dict, tuple, UUID, Decimal, datetime, date})
_EMPTY = inspect.Parameter.empty


class _PydanticLike(Protocol):
    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> object: ...


def _encode_foreign(value: object) -> object:
    """Pydantic models encode themselves; everything else that msgspec does not know is refused."""
    if entity_state(value) is None and hasattr(value, "model_dump"):
        # As the model reads it again: by its aliases, without its computed fields.
        return cast("_PydanticLike", value).model_dump(mode="json", by_alias=True, round_trip=True)
    raise NotImplementedError(type(value).__name__)


def _decode_foreign(annotation: type[object], value: object) -> object:
    validate = getattr(annotation, "model_validate", None)
    if validate is None:
        raise msgspec.ValidationError(f"Expected a type that can be read from JSON, got `{annotation!r}`")
    return validate(value)


_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign)
_canonical_encoder = msgspec.json.Encoder(enc_hook=_encode_foreign, order="sorted")
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_expression(value: object) -> bool:
    """Whether it is SQL, which only the server can compute."""
    return type(value) not in PLAIN and (isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"))


def encode_value(name: str, value: object) -> bytes:
    """One argument as JSON text that jsonb can hold.

    Raises:
        ArgumentError: JSON or jsonb cannot hold the value.
    """
    state = entity_state(value)
    if state is not None:
        value = primary_key_of(value)
    try:
        data = _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"argument {name!r} holds a lone surrogate, which UTF-8 cannot encode") from error
    except NotImplementedError as error:
        raise ArgumentError(f"argument {name!r} cannot be stored as JSON: it holds a value of type {error}") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        # A serializer of the user's may quote the value.
        raise ArgumentError(f"argument {name!r} cannot be stored as JSON: {_refusal_of(error)}") from error
    if b"\\u0000" in data and _NUL.search(data):
        raise ArgumentError(f"argument {name!r} holds a NUL character, which jsonb cannot hold")
    # msgspec writes NaN and infinity as null, silently; only data with a null can hide one.
    if b"null" in data and any(value != value or value in (float("inf"), float("-inf")) for value in _floats(value)):
        raise ArgumentError(f"argument {name!r} holds NaN or infinity, which JSON cannot hold")
    return data


def _refusal_of(error: Exception) -> str:
    own = error.__traceback__ is not None and error.__traceback__.tb_next is None
    return (
        str(error)
        if own
        else f"refused by {type(error).__name__} (its text is withheld, because it may quote the value)"
    )


def _floats(value: object) -> Iterator[float]:
    plain = msgspec.to_builtins(value, enc_hook=_encode_foreign)
    pending: list[object] = [plain]
    while pending:
        item = pending.pop()
        if isinstance(item, float):
            yield item
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)


def join_object(fields: Mapping[str, bytes]) -> str:
    """A JSON object out of encoded values."""
    return msgspec.json.encode({name: msgspec.Raw(data) for name, data in fields.items()}).decode()


def encode_headers(headers: Mapping[str, str]) -> str:
    """Headers as a JSON object; keys and values must be strings, and what the arguments may not hold is refused too."""
    for key, value in headers.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise ArgumentError(f"headers take strings for keys and values, got {key!r}: {type(value).__name__}")
    data = encode_value("headers", dict(headers))
    if len(data) > MAX_HEADERS_BYTES:
        raise ArgumentError(f"headers take up to {MAX_HEADERS_BYTES:,} bytes as JSON, got {len(data):,}")
    return data.decode()


def check_name(what: str, name: str) -> str:
    """Refuse names that PostgreSQL, a channel or the command line could not carry.

    Raises:
        ArgumentError: not 1 to 63 bytes of UTF-8, or with control characters (NUL included).
    """
    if not isinstance(name, str):
        raise ArgumentError(f"a {what} name is a string, got {type(name).__name__}")
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the {what} name {name!r} holds a lone surrogate") from error
    if not 1 <= size_bytes <= MAX_NAME_BYTES:
        raise ArgumentError(f"a {what} name takes 1 to {MAX_NAME_BYTES} bytes, got {size_bytes}: {name[:80]!r}")
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in name):
        raise ArgumentError(f"the {what} name {name!r} holds a control character")
    if what == "queue" and (set(name) & set(",=*") or name != name.strip()):
        raise ArgumentError(f"the queue name {name!r} may not hold ',', '=' or '*', nor begin or end with a space")
    return name


def check_key(what: str, key: str, max_bytes: int = MAX_KEY_BYTES) -> str:
    """Refuse a consumer, a message id, a scope or a key that its column could not hold.

    Raises:
        InvalidKey: not a string, empty, over `max_bytes` of UTF-8, or with control characters (NUL included).
    """
    if not isinstance(key, str):
        raise InvalidKey(f"a {what} is a string, got {type(key).__name__}: {what} = str(...)")
    try:
        size_bytes = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidKey(f"the {what} holds a lone surrogate, which UTF-8 cannot encode") from None
    if not 1 <= size_bytes <= max_bytes:
        raise InvalidKey(
            f"a {what} takes 1 to {max_bytes} bytes, got {size_bytes}: "
            + ("a hash of it, such as hashlib.sha256(...).hexdigest(), is as good" if size_bytes else "it is empty")
        )
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in key):
        raise InvalidKey(f"the {what} {key[:80]!r} holds a control character")
    return key


def fingerprint(payload: object) -> bytes:
    """32 bytes (SHA-256) that stand for a content: of bytes as they are, of anything else as JSON with sorted keys.

    Raises:
        ArgumentError: JSON cannot hold it.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return hashlib.sha256(payload).digest()
    # For its refusals; the order of its keys is that of the dict.
    encode_value("payload", payload)
    return hashlib.sha256(_canonical_encoder.encode(payload)).digest()


def build_decoder(what: str, annotation: object) -> msgspec.json.Decoder[object]:
    """Reads what JSON holds of `annotation`; `object` for JSON's own types.

    Raises:
        ConfigError: an entity, or a type that JSON cannot hold; `what` begins the message.
    """
    if entity_mapper(annotation) is not None:
        raise ConfigError(f"{what}: an entity cannot be its result: return its key, or what you need of it")
    try:
        stored = typing.Any if annotation is object else annotation
        return msgspec.json.Decoder(stored, dec_hook=_decode_foreign)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error


def decode_stored(what: str, decoder: msgspec.json.Decoder[object], text: str) -> object:
    """A stored value, as its type says.

    Raises:
        PayloadError: it does not fit; `what` begins the message, which never quotes a value.
    """
    try:
        return decoder.decode(text.encode())
    except ValueError as error:
        raise PayloadError(f"{what} does not fit its type: {_problem(error)}") from None


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
        """The value as JSON text that `decode` reads again.

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
            self.decoder.decode(data)
        except ValueError as error:
            # Without its cause, whose text may quote the value.
            raise ArgumentError(f"argument {self.name!r}: {_problem(error)}") from None
        return data

    def _check_key(self, entity: object, data: bytes) -> None:
        if entity is None or self.entity is None:
            return
        try:
            key = self.loaded(self.decoder.decode(data))
        except ValueError:
            key = None
        if not (isinstance(key, EntityKey) and self.leads_to(key.identity, entity)):
            raise ArgumentError(
                f"argument {self.name!r}: JSON does not give back the primary key of {type(entity).__name__}: say in "
                "its class what it is (`id: Mapped[UUID]`), or pass what the row can be found by instead"
            )

    def leads_to(self, key: tuple[object, ...], entity: object) -> bool:
        """Whether the relay finds the row of an entity by a key that it has read."""
        state = entity_state(entity)
        assert state is not None
        assert state.key is not None
        assert self.entity is not None
        return is_same_key(self.entity, key, tuple(state.key[1]))

    def plain(self, value: object) -> object:
        """A value that cannot be an entity, or the key of an entity that fits; whatever else is refused.

        Raises:
            ArgumentError: it has to be looked at more closely.
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
            raise ArgumentError(
                f"argument {self.name!r} takes {'an optional' if self.optional else 'a'} {self.entity.__name__}, "
                f"got {type(value).__name__}"
            )

    def decode(self, data: msgspec.Raw) -> object:
        """The stored value, with an `EntityKey` for an entity.

        Raises:
            PayloadError: it does not fit the annotation.
        """
        try:
            value = self.decoder.decode(data)
        except ValueError as error:
            raise PayloadError(f"argument {self.name!r}: {_problem(error)}") from None
        return self.loaded(value)

    def loaded(self, value: object) -> object:
        """A decoded value, with an `EntityKey` for an entity."""
        if self.entity is None or value is None:
            return value
        identity = tuple(value) if isinstance(value, list | tuple) else (value,)
        return EntityKey(self.entity, identity, self.optional, self.locked)


def _problem(error: ValueError) -> str:
    """Why a value does not fit; never in words that quote it, as those of enums and of users' validators do."""
    # msgspec puts what a validator or a Pydantic model raised into its own text, with that error as the cause.
    if error.__cause__ is None and _QUOTES_NOTHING.match(str(error)):
        return str(error)
    if error.__cause__ is None and str(error).startswith("Invalid enum value"):
        return "it is not one of the values that the annotation allows"
    return (
        f"refused by {type(error.__cause__ or error).__name__} (its text is withheld, because it may quote the value)"
    )


class Signature:
    """The arguments of a handler after its context."""

    def __init__(self, kind: str, parameters: tuple[Parameter, ...], binder: inspect.Signature) -> None:
        self._kind = kind
        self._binder = binder
        self.parameters = {parameter.name: parameter for parameter in parameters}
        self._positional = [p.name for p in binder.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.locks = any(parameter.locked for parameter in parameters)
        self._takes_entities = any(parameter.entity is not None for parameter in parameters)
        self._decoder = _object_decoder_of(parameters)
        self._reader = _struct_decoder_of(parameters)
        self._is_plain = all(parameter.required and parameter.entity is None for parameter in parameters)

    def encode_call(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
        """All arguments of a call as a JSON object, in one pass; None where each has to be looked at on its own.

        What it gives is what `bind`, and `encode` for each argument, would give. It refuses nothing by itself.
        """
        values = {**dict(zip(self._positional, args, strict=False)), **kwargs} if args else kwargs
        if args and len(values) != len(args) + len(kwargs):
            return None
        try:
            if self._takes_entities:
                values = {name: self.parameters[name].plain(value) for name, value in values.items()}
            elif not _NEVER_ENTITIES.issuperset(map(type, values.values())):
                return None
            data = _encoder.encode(values)
            # Refuses a missing name, and leaves an unknown one out.
            known = self._decoder.decode(data)
        except (ArgumentError, LookupError, NotImplementedError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        if self._takes_entities and not all(map(self._gives_back, values, values.values(), map(known.get, values))):
            return None
        # Searched as str, which is several times as fast as in bytes.
        text = data.decode()
        return None if len(known) < len(values) or "null" in text or "\\u0000" in text else text

    def _gives_back(self, name: str, stored: object, read: object) -> bool:
        """Whether the primary key of an entity is read as it was stored, and nothing has to be looked at."""
        return self.parameters[name].entity is None or read == (tuple(stored) if type(stored) is list else stored)

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name, as the call gave them; defaults are left to the handler that will run."""
        try:
            return dict(self._binder.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise ArgumentError(f"{self._kind}{self._binder}: {error}") from error

    def encode(self, name: str, value: object) -> bytes:
        return self.parameters[name].encode(value)

    def check_entity(self, name: str, value: object) -> None:
        """Refuse an entity that does not fit, by its class alone: a pending one has no key yet."""
        self.parameters[name].check_entity(value)

    def decode(self, args: str) -> dict[str, object]:
        """The stored JSON object as call arguments, with an `EntityKey` for each entity.

        Raises:
            PayloadError: the text is not such an object; the message never quotes a value.
        """
        try:
            read = msgspec.structs.asdict(self._reader.decode(args))
        except (ValueError, RecursionError):
            return self._decode_each(args)
        if self._is_plain:
            return read
        given = {name: value for name, value in read.items() if value is not msgspec.UNSET}
        return {name: self.parameters[name].loaded(value) for name, value in given.items()}

    def _decode_each(self, args: str) -> dict[str, object]:
        """The same, slower, and it says what does not fit."""
        try:
            fields = _object_decoder.decode(args.encode())
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


def _object_decoder_of(parameters: tuple[Parameter, ...]) -> msgspec.json.Decoder[dict[str, object]]:
    fields = {p.name: p.decoder.type if p.required else NotRequired[p.decoder.type] for p in parameters}
    return msgspec.json.Decoder(TypedDict("Arguments", fields), dec_hook=_decode_foreign)  # type: ignore[operator]  # built at run time


def _struct_decoder_of(parameters: tuple[Parameter, ...]) -> msgspec.json.Decoder[msgspec.Struct]:
    fields = [(p.name, p.decoder.type) if p.required else (p.name, p.decoder.type, msgspec.UNSET) for p in parameters]
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(struct, dec_hook=_decode_foreign)


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
        decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(stored, dec_hook=_decode_foreign)
    except TypeError as error:
        raise RegistryError(f"handler {kind!r}, argument {declared.name!r}: {error}") from error
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
