"""Texts that this dashboard has signed, so that it recognises its own: sessions, tokens of forms, messages."""

import base64
import hashlib
import hmac
import secrets

import msgspec

from outboxq.errors import ConfigError

MIN_SECRET_BYTES = 32


class Seal:
    """Signs texts with a secret, each for one purpose.

    Args:
        secret: 32 bytes at least; a random one without it, which other processes do not have.

    Raises:
        ConfigError: a secret that is too short.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"secret takes {MIN_SECRET_BYTES} random bytes or more, got {len(secret)}")
        self._secret = secret or secrets.token_bytes(MIN_SECRET_BYTES)

    def mac(self, purpose: str, text: str) -> str:
        """The signature of a text for this purpose, in hexadecimal."""
        # The length keeps a purpose and a text from being read as another pair.
        message = f"{len(purpose)}:{purpose}{text}".encode(errors="replace")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def is_mac(self, purpose: str, text: str, given: str) -> bool:
        """Return True if this is the signature of a text, in a time that reveals nothing of it."""
        return hmac.compare_digest(self.mac(purpose, text).encode(), given.encode(errors="replace"))

    def close(self, purpose: str, value: object) -> str:
        """A value that can be written as JSON, signed; for a cookie, whose text is anyone's to read."""
        # Without padding, which would have cookies quoted.
        text = base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")
        return f"{text}.{self.mac(purpose, text)}"

    def open(self, purpose: str, sealed: str, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """The value that `close` was given; None if it is not ours."""
        text, _, mac = sealed.rpartition(".")
        if not text or not self.is_mac(purpose, text, mac):
            return None
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
        except (ValueError, msgspec.MsgspecError):
            return None
