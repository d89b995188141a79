"""Arguments between Python and JSON: typed by the handler's signature, checked when enqueued and when executed.

msgspec encodes each argument, and the decoder of its annotation reads it back at once, so that an argument accepted at
enqueue can be read at execution. Entities (mapped objects) are stored as their primary keys.
"""

import hashlib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import msgspec
from sqlalchemy.sql.elements import ClauseElement

from outboxq.codec.entities import entity_mapper, entity_state, primary_key_of
from outboxq.codec.text import type_name
from outboxq.errors import ArgumentError, ConfigError, PayloadError

MAX_ARGS_BYTES = 256 * 1024
MAX_HEADERS_BYTES = 64 * 1024

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
# msgspec messages that name types and never values.
_QUOTES_NOTHING = re.compile(r"Expected |Object missing |Number out of range|Invalid (?!enum value|value)")
# Errors that reading a value may raise: users' validators, and a `__post_init__` with an `assert`, may raise any.
UNREADABLE = Exception
# The types of nearly all values; none of them is an entity or an expression.
PLAIN = frozenset({int, str, float, bool, bytes, type(None)})


class _PydanticLike(Protocol):
    def model_dump(self, *, mode: str, by_alias: bool, round_trip: bool) -> object: ...


def _encode_foreign(value: object) -> object:
    """Convert a Pydantic model, for msgspec, which calls this for each value that it cannot encode itself.

    Any other value raises an error.
    """
    if entity_state(value) is None and hasattr(value, "model_dump"):
        # In the form that the model reads: by its aliases, without its computed fields.
        return cast("_PydanticLike", value).model_dump(mode="json", by_alias=True, round_trip=True)
    raise NotImplementedError(type(value).__name__)


def _decode_foreign(annotation: type[object], value: object) -> object:
    if annotation is object:
        return value
    validate = getattr(annotation, "model_validate_json", None)
    if validate is None:
        raise msgspec.ValidationError(f"Expected a type that can be read from JSON, got `{type_name(annotation)}`")
    # As JSON and not as the objects read from it: a strict model accepts a text for a datetime only from JSON, and in a
    # union of UUID and str reads a UUID.
    return validate(msgspec.json.encode(value))


def check_args_size(args: str) -> None:
    """Raise an error if a job's arguments, as JSON text, have more than `MAX_ARGS_BYTES` bytes.

    Raises:
        ArgumentError: the text is too long.
    """
    size_bytes = len(args.encode())
    if size_bytes > MAX_ARGS_BYTES:
        raise ArgumentError(f"args takes up to {MAX_ARGS_BYTES:,} bytes, got {size_bytes:,}")


ENCODER = msgspec.json.Encoder(enc_hook=_encode_foreign)
_CANONICAL_ENCODER = msgspec.json.Encoder(enc_hook=_encode_foreign, order="sorted")


def json_decoder(stored: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder from JSON to the type `stored`, Pydantic models included.

    Raises:
        TypeError: JSON cannot hold the type.
    """
    return msgspec.json.Decoder(stored, dec_hook=_decode_foreign)


def is_expression(value: object) -> bool:
    """Return True if a value is an SQL expression, which has a value only in the database."""
    return type(value) not in PLAIN and (isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"))


def encode_value(name: str, value: object) -> bytes:
    """Encode one argument as JSON text that jsonb can hold; an entity (a mapped object) as its primary key.

    Raises:
        ArgumentError: JSON or jsonb cannot hold the value.
    """
    state = entity_state(value)
    if state is not None:
        value = primary_key_of(value)
    try:
        data = ENCODER.encode(value)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"argument {name!r} holds a lone surrogate, which UTF-8 cannot encode") from error
    except NotImplementedError as error:
        raise ArgumentError(f"argument {name!r} cannot be stored as JSON: it holds a value of type {error}") from error
    except Exception as error:
        # A serializer of the user's may raise any error, and quote the value.
        raise ArgumentError(f"argument {name!r} cannot be stored as JSON: {_refusal_of(error)}") from error
    if b"\\u0000" in data and _NUL.search(data):
        raise ArgumentError(f"argument {name!r} holds a NUL character, which jsonb cannot hold")
    # msgspec writes NaN and infinity as null, silently; only data with a null can hide one.
    if b"null" in data and any(value != value or value in (float("inf"), float("-inf")) for value in _floats(value)):
        raise ArgumentError(f"argument {name!r} holds NaN or infinity, which JSON cannot hold")
    return data


def _refusal_of(error: Exception) -> str:
    is_own = error.__traceback__ is not None and error.__traceback__.tb_next is None
    return str(error) if is_own else _withheld(error)


def _withheld(error: BaseException) -> str:
    return f"refused by {type(error).__name__} (its text is withheld, because it may quote the value)"


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
    """Return a JSON object of these fields, given by name as JSON text."""
    return msgspec.json.encode({name: msgspec.Raw(data) for name, data in fields.items()}).decode()


def encode_headers(headers: Mapping[str, str]) -> str:
    """Encode a job's headers as a JSON object of up to `MAX_HEADERS_BYTES`; keys and values must be strings."""
    for key, value in headers.items():
        # StrEnum members are refused too: they would come back as their text.
        if not (type(key) is str and type(value) is str):
            raise ArgumentError(f"headers take strings for keys and values, got {key!r}: {type(value).__name__}")
    data = encode_value("headers", dict(headers))
    if len(data) > MAX_HEADERS_BYTES:
        raise ArgumentError(f"headers take up to {MAX_HEADERS_BYTES:,} bytes as JSON, got {len(data):,}")
    return data.decode()


def fingerprint(payload: object) -> bytes:
    """Return the SHA-256 of a message or a call's payload, by which a repetition with other content is noticed.

    Bytes are hashed as they are, any other value as JSON with sorted keys.

    Raises:
        ArgumentError: JSON cannot hold the content.
    """
    if isinstance(payload, bytes | bytearray | memoryview):
        return hashlib.sha256(payload).digest()
    # Called only because it refuses bad values; its result keeps the dict's order of keys, and so is no fingerprint.
    encode_value("payload", payload)
    return hashlib.sha256(_CANONICAL_ENCODER.encode(payload)).digest()


def build_decoder(what: str, annotation: object) -> msgspec.json.Decoder[object]:
    """Build a decoder from JSON to `annotation`; `object` reads JSON's own types.

    Raises:
        ConfigError: the annotation is a mapped class, or a type that JSON cannot hold; `what` begins the message.
    """
    if entity_mapper(annotation) is not None:
        raise ConfigError(f"{what}: an entity cannot be its result: return its key, or what you need of it")
    try:
        stored = typing.Any if annotation is object else annotation
        return json_decoder(stored)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}") from error


def decode_stored(what: str, decoder: msgspec.json.Decoder[object], text: str) -> object:
    """Decode a stored JSON text by `decoder`.

    Raises:
        PayloadError: the text does not fit the decoder's type; `what` begins the message, which never quotes a value.
    """
    try:
        return decoder.decode(text.encode())
    except UNREADABLE as error:
        raise PayloadError(f"{what} does not fit its type: {problem_of(error)}") from None


def problem_of(error: Exception) -> str:
    """Return the reason why a value could not be decoded, without quoting the value.

    The messages of enums and of users' validators are left out, because they may quote the value.
    """
    # msgspec wraps an error of a validator or a Pydantic model in its own, as the cause; errors of other types arrive
    # unwrapped.
    if not isinstance(error, msgspec.MsgspecError):
        return _withheld(error)
    if error.__cause__ is None and _QUOTES_NOTHING.match(str(error)):
        return str(error)
    if error.__cause__ is None and str(error).startswith("Invalid enum value"):
        return "it is not one of the values that the annotation allows"
    return _withheld(error.__cause__ or error)
