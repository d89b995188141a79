"""Signed texts, by which the dashboard recognises the session cookies, form tokens and messages that it has made."""

import base64
import hashlib
import hmac
import secrets

import msgspec

from outboxq.errors import ConfigError

MIN_SECRET_BYTES = 32


class Seal:
    """Signs texts with a secret. Each text is signed for one purpose, and is not valid for another.

    Args:
        secret: 32 bytes at least; if None, a random secret that other processes do not have.

    Raises:
        ConfigError: a secret that is too short.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(f"secret takes {MIN_SECRET_BYTES} random bytes or more, got {len(secret)}")
        self._secret = secret or secrets.token_bytes(MIN_SECRET_BYTES)

    def mac(self, purpose: str, text: str) -> str:
        """Return the signature of a text for this purpose, in hexadecimal."""
        # The length separates the purpose from the text, so that no other pair has the same bytes.
        message = f"{len(purpose)}:{purpose}{text}".encode(errors="replace")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def is_mac(self, purpose: str, text: str, given: str) -> bool:
        """Return True if `given` is the signature of a text for this purpose.

        The comparison takes constant time, so that the time reveals nothing of the signature.
        """
        return hmac.compare_digest(self.mac(purpose, text).encode(), given.encode(errors="replace"))

    def close(self, purpose: str, value: object) -> str:
        """Return a value as a signed text, for a cookie or a form.

        The value is encoded as JSON and not encrypted: anyone can read it.
        """
        # Without padding, because cookies with it would be quoted.
        text = base64.urlsafe_b64encode(msgspec.json.encode(value)).decode().rstrip("=")
        return f"{text}.{self.mac(purpose, text)}"

    def open(self, purpose: str, sealed: str, kind: type[msgspec.Struct]) -> msgspec.Struct | None:
        """Return the value in a text that `close` has signed; None if this dashboard did not sign it for this purpose.

        Args:
            kind: The class of the value.
        """
        text, _, mac = sealed.rpartition(".")
        if not text or not self.is_mac(purpose, text, mac):
            return None
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
        except (ValueError, msgspec.MsgspecError):
            return None
