"""The plan of a run: everything random, drawn from the seed before anything starts.

The same seed gives the same transactions, the same faults in the same order, and the same parameters. The jobs that
they meet are not repeated: which job a relay runs at that moment is up to the machine.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outboxq.torture import InsideKind, OutsideKind, TortureOptions

# How often each is drawn, relative to the others. Those that stop every relay are rarer.
_OUTSIDE: dict[OutsideKind, int] = {
    "relay-killed": 12,
    "relay-stopped": 6,
    "backend-terminated": 12,
    "relay-cut-before-commit": 12,
    "relay-cut-after-commit": 12,
    "relay-frozen-at-commit": 6,
    "producer-cut-before-commit": 8,
    "producer-cut-after-commit": 8,
    "all-connections-cut": 3,
    "backend-killed": 2,
    "server-stopped": 2,
}
_INSIDE: dict[InsideKind, int] = {
    "handler-raise": 6,
    "handler-flush-raise": 6,
    "handler-exit": 5,
    "handler-deadlock": 6,
}
_PER_MILLE_GIVING_UP = 5

MAX_TRANSACTION_JOBS = 10
# The last fault is due after this fraction of all jobs, so that it, too, meets producers at work.
LAST_FAULT_AT = 0.9


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a process, a connection or the server.

    Attributes:
        at: How many jobs are finished when it is due.
        pick: From 0 to 1: which of those that it could hit.
        seconds: How long a pause, a standstill or a stop lasts.
        gently: Whether a frozen connection goes on afterwards, instead of being cut; whether COMMIT arrives.
    """

    kind: OutsideKind
    at: int
    pick: float
    seconds: float
    gently: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults in their order, and the behaviours of single jobs, by their number."""

    faults: tuple[Fault, ...]
    behaviours: dict[int, str]
    inside: dict[str, int]


@dataclass(frozen=True, slots=True)
class PlannedTransaction:
    """One transaction of a producer: its jobs' behaviours, and how it ends."""

    behaviours: tuple[str, ...]
    fate: Literal["commit", "roll back", "roll back a savepoint"]
    queue_numbers: tuple[int, ...]


def plan_run(options: TortureOptions, *, lease_seconds: float) -> Plan:
    """Draw the faults, spread evenly over the run."""
    chance = random.Random(f"{options.seed}-faults")
    weights: list[tuple[str, int]] = [*_OUTSIDE.items(), *_INSIDE.items()]
    names, shares = zip(*(each for each in weights if not options.only or each[0] in options.only), strict=True)
    drawn = chance.choices(names, weights=shares, k=options.faults)
    outside: list[Fault] = []
    behaviours: dict[int, str] = {}
    inside: Counter[str] = Counter()
    for position, name in enumerate(drawn):
        at = int(options.jobs * LAST_FAULT_AT) * (position + 1) // (options.faults + 1)
        if name in _INSIDE:
            inside[name] += 1
            if name == "handler-deadlock":
                behaviours[at], behaviours[at + 1] = "deadlock-up", "deadlock-down"
            else:
                behaviours[at] = name.removeprefix("handler-")
        else:
            longest = lease_seconds * 2 if name == "relay-stopped" else 0.5
            # The names that are not of handlers are those of `OutsideKind`.
            kind: OutsideKind = name
            outside.append(Fault(kind, at, chance.random(), chance.uniform(0.1, longest), chance.random() < 0.5))
    return Plan(tuple(outside), behaviours, inside)


def plan_transactions(options: TortureOptions, plan: Plan, queues: int) -> Iterator[PlannedTransaction]:
    """The producers' transactions, which commit `options.jobs` jobs, a few at a time."""
    chance = random.Random(f"{options.seed}-transactions")
    number = 0
    while number < options.jobs:
        size = min(chance.randint(1, MAX_TRANSACTION_JOBS), options.jobs - number)
        fate: Literal["commit", "roll back", "roll back a savepoint"] = chance.choices(
            ("commit", "roll back", "roll back a savepoint"), weights=(8, 1, 1)
        )[0]
        behaviours = ["give-up" if chance.randrange(1000) < _PER_MILLE_GIVING_UP else "plain" for _ in range(size)]
        numbers = tuple(chance.randrange(queues) for _ in range(size))
        if fate != "roll back":
            behaviours = [plan.behaviours.get(number + index, told) for index, told in enumerate(behaviours)]
            number += size
        yield PlannedTransaction(tuple(behaviours), fate, numbers)
