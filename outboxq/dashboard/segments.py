"""Encoding of names, such as a queue's, for paths: plain names stay as they are, others are base64url after a tilde."""

import base64
import binascii
import re
from collections.abc import Mapping

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


def as_segment(name: str) -> str:
    """Encode a name as one part of a path.

    Proxies and browsers leave the encoded part as it is, while they would change a name such as `..`.
    """
    if _PLAIN.fullmatch(name):
        return name
    return "~" + base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def name_in(segment: str) -> str:
    """Return the name that `as_segment` has encoded.

    Raises:
        ValueError: the segment is not an encoded name.
    """
    if not segment.startswith("~"):
        return segment
    padded = segment[1:] + "=" * (-len(segment[1:]) % 4)
    try:
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("this part of the path is no name") from error


def names_in(parts: Mapping[str, object]) -> dict[str, str]:
    """Return the names in a path's parameters, decoded: `{parameter: name}`.

    The parameter `db`, which names the database, is left out.

    Raises:
        ValueError: a parameter is not an encoded name.
    """
    return {key: name_in(str(value)) for key, value in parts.items() if key != "db"}
