"""The features of this version of outboxq, as far as a scenario needs to know them."""

import importlib

from outboxq import Context
from outboxq.config import SlotGroup
from outboxq.errors import OutboxqError


def missing(app: str, *methods: str) -> str | None:
    """The reason why an application cannot run with this version: a refused option, or a missing method."""
    absent = [name for name in methods if not hasattr(Context, name)]
    if absent:
        return f"not supported by this version: a context has no {', '.join(absent)}"
    try:
        importlib.import_module(f"benchmarks.apps.{app}")
    except (AttributeError, ImportError, TypeError, OutboxqError) as error:
        return f"not supported by this version: {error}"
    return None


def too_many_slots(slots: int) -> str | None:
    """The reason for which a relay of this version cannot have so many slots for a queue, if there is one."""
    try:
        SlotGroup(("bench",), slots)
    except OutboxqError as error:
        return f"not supported by this version: {error}"
    return None
