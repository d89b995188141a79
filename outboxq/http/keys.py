"""Identity of a request: its key as the client sent it, its principal, and the fingerprint of its content."""

import hashlib
import hmac
import re
from collections.abc import Callable
from typing import TypeAlias, overload
from urllib.parse import quote

from outboxq.errors import ConfigError, InvalidKey
from outboxq.http.asgi import Scope, header_values
from outboxq.names import MAX_KEY_BYTES, MAX_SCOPE_BYTES, check_key

Principal: TypeAlias = Callable[[Scope], str | None]

MAX_KEY_CHARACTERS = 255
MIN_SECRET_BYTES = 16

# A String of RFC 8941, section 3.3.3, without spaces and without parameters.
_QUOTED = re.compile(rb'"((?:[\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
# A proxy joins two headers of one name with a comma.
_BARE = re.compile(rb"[\x21\x23-\x2b\x2d-\x7e]*")
_ESCAPED = re.compile(rb'\\(["\\])')
_HASHED = "sha256:"


def read_key(values: list[bytes]) -> str:
    """Return the key in these Idempotency-Key headers.

    Raises:
        InvalidKey: there is more than one header, or the text is no key.
    """
    if len(values) != 1:
        raise InvalidKey(f"a request takes one Idempotency-Key header, got {len(values)}")
    value = values[0].strip(b" \t")
    quoted = _QUOTED.fullmatch(value)
    if quoted is None and _BARE.fullmatch(value) is None:
        raise InvalidKey(
            'an Idempotency-Key is a string such as "8e03978e-40d5-43e8-bc93-6894a57f9324", of visible ASCII '
            "characters; without its quotes it holds neither quotes nor commas"
        )
    key = value if quoted is None else _ESCAPED.sub(rb"\1", quoted[1])
    if not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidKey(f"an Idempotency-Key takes 1 to {MAX_KEY_CHARACTERS} characters, got {len(key)}")
    return key.decode("ascii")


def effect_scope(scope: Scope) -> str:
    """Return the value for `effect.scope`: the request's method and path, such as `POST /orders`.

    The path is the one that the client sees, or a hash of that path if it cannot be stored.
    """
    method, path, root = scope["method"], scope["path"], scope.get("root_path", "").rstrip("/")
    # Servers before version 2.4 of the specification omitted it.
    if root and path != root and not path.startswith(f"{root}/"):
        path = root + path
    return _storable(f"{method} {path}", MAX_SCOPE_BYTES) or f"{method} {_hash(path)}"


def effect_key(principal: str | None, key: str) -> str:
    """Return the value for `effect.key`: the principal (the key's owner) and the client's key as one text.

    Two different pairs never have the same text: a key contains no space, so the text before the last space is the
    principal; without a space there is none.
    """
    if principal is None:
        return key
    if principal.startswith(_HASHED):
        principal = _hash(principal)
    return _storable(f"{principal} {key}", MAX_KEY_BYTES) or f"{_hash(principal)} {key}"


def request_fingerprint(scope: Scope, body: bytes) -> bytes:
    """Return a hash (32 bytes) of a request's query string, media type and body, which a retry has to match."""
    content_type = b",".join(header_values(scope["headers"], b"content-type"))
    # Without its parameters, which have many spellings: the body shows what they mean.
    media_type = content_type.split(b";", 1)[0].strip().lower()
    digest = hashlib.sha256()
    for part in (scope.get("query_string", b""), media_type, body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


@overload
def by_authorization(scope: Scope, /) -> str | None: ...


@overload
def by_authorization(*, secret: str | bytes) -> Principal: ...


def by_authorization(scope: Scope | None = None, /, *, secret: str | bytes | None = None) -> str | Principal | None:
    """Return the principal of a request (the owner of its key): a hash of its Authorization header; None without one.

    If called with `secret` and no request, return a function that does this.

    Use this for credentials that stay the same between a request and its retry. The plain `by_authorization` stores
    their SHA-256: right for API keys, which cannot be guessed. Passwords (Basic) can be guessed by comparing hashes:
    `by_authorization(secret=...)` stores an HMAC instead, which is useless without the secret.

    Args:
        secret: 16 bytes at least, the same in every process; another secret makes all principals different.

    Raises:
        ConfigError: the secret is too short, or neither text nor bytes.
    """
    if scope is not None:
        return _authorization_digest(scope, lambda value: hashlib.sha256(value).hexdigest())
    key = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(key, bytes) or len(key) < MIN_SECRET_BYTES:
        raise ConfigError(f"by_authorization takes a secret of {MIN_SECRET_BYTES} bytes or more")
    return lambda given: _authorization_digest(given, lambda value: hmac.digest(key, value, "sha256").hex())


def _authorization_digest(scope: Scope, digest: Callable[[bytes], str]) -> str | None:
    values = header_values(scope["headers"], b"authorization")
    return digest(b"\n".join(values)) if values else None


def nobody(_scope: Scope) -> None:
    """Return None: keys have no owner, so each client that knows a key gets the answer stored for it.

    It can be passed as the argument `principal` of the middleware.
    """


def _storable(text: str, max_bytes: int) -> str | None:
    try:
        return check_key("text", text, max_bytes)
    except InvalidKey:
        return None


def _hash(text: str) -> str:
    # quote() gives even a text that UTF-8 cannot encode a hash.
    return _HASHED + hashlib.sha256(quote(text, errors="surrogatepass").encode()).hexdigest()
