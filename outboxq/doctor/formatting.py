"""Ages, counts and sizes for titles, and names that are quoted so that advice can be copied."""

import re

_PLAIN_NAME = re.compile("[a-z_][a-z0-9_]*")


def age(seconds: float | None) -> str:
    """`42 s`, `12 min`, `3.5 h`, `4 days`."""
    if seconds is None:
        return "a time that is hidden"
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def size(number_of_bytes: int) -> str:
    """`512 kB`, `1,234 MB`."""
    return f"{number_of_bytes / 1_000:,.0f} kB" if number_of_bytes < 10**7 else f"{number_of_bytes / 10**6:,.0f} MB"


def identifier(*names: str) -> str:
    """A name for SQL, in double quotes only if it needs them."""
    doubled = (name.replace('"', '""') for name in names)
    return ".".join(name if _PLAIN_NAME.fullmatch(name) else f'"{name}"' for name in doubled)
