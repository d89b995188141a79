"""Texts for findings: ages and sizes in words, and names that are quoted for the SQL in advice."""

import re

from outboxq.codec.text import duration

_PLAIN_NAME = re.compile("[a-z_][a-z0-9_]*")


def age(seconds: float | None) -> str:
    """Format an age in seconds, such as `12 min`; for None, return words for an age that this role may not read."""
    return "a time that is hidden" if seconds is None else duration(seconds)


def size(number_of_bytes: int) -> str:
    """Format a number of bytes as `512 kB` or `1,234 MB`."""
    return f"{number_of_bytes / 1_000:,.0f} kB" if number_of_bytes < 10**7 else f"{number_of_bytes / 10**6:,.0f} MB"


def identifier(*names: str) -> str:
    """Join the parts of a name with dots, for SQL; a part is in double quotes only if it needs them."""
    doubled = (name.replace('"', '""') for name in names)
    return ".".join(name if _PLAIN_NAME.fullmatch(name) else f'"{name}"' for name in doubled)
