"""Ages, counts and sizes for titles, and names that are quoted so that advice can be copied."""

import re

from outboxq.codec.text import duration

_PLAIN_NAME = re.compile("[a-z_][a-z0-9_]*")


def age(seconds: float | None) -> str:
    """The time as `duration` writes it."""
    return "a time that is hidden" if seconds is None else duration(seconds)


def size(number_of_bytes: int) -> str:
    """`512 kB`, `1,234 MB`."""
    return f"{number_of_bytes / 1_000:,.0f} kB" if number_of_bytes < 10**7 else f"{number_of_bytes / 10**6:,.0f} MB"


def identifier(*names: str) -> str:
    """A name for SQL, in double quotes only if it needs them."""
    doubled = (name.replace('"', '""') for name in names)
    return ".".join(name if _PLAIN_NAME.fullmatch(name) else f'"{name}"' for name in doubled)
