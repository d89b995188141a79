"""The plan of a torture test: all that is random, drawn from the seed before anything starts.

The same seed gives the same transactions, the same faults in the same order, and the same parameters. The jobs that the
faults hit are not repeatable: they depend on the machine's speed.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from outboxq.torture import InsideKind, OutsideKind, TortureOptions

# How often each is drawn, relative to the others. Faults that stop every relay are rarer.
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
# The last fault is due after this fraction of all jobs, so that it also meets producers at work.
LAST_FAULT_AT = 0.9


@dataclass(frozen=True, slots=True)
class Fault:
    """A planned fault: something done to a process, a connection or the server.

    Attributes:
        at: The number of finished jobs at which the fault is done.
        pick: A number from 0 to 1 that selects one of the possible targets.
        seconds: How long a process is suspended, a connection is frozen, or the server is down.
        gently: True if a frozen connection continues afterwards, False if it is cut.
    """

    kind: OutsideKind
    at: int
    pick: float
    seconds: float
    gently: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned faults of a torture test.

    Attributes:
        faults: Faults of processes, connections or the server, in their order.
        behaviours: The planned misbehaviours of jobs, by the job's number.
        inside: The number of planned misbehaviours of each kind.
    """

    faults: tuple[Fault, ...]
    behaviours: dict[int, str]
    inside: dict[str, int]


@dataclass(frozen=True, slots=True)
class PlannedTransaction:
    """One transaction that a producer is to execute.

    Attributes:
        behaviours: The behaviour of each job's handler.
        fate: The end of the transaction.
        queue_numbers: The number of each job's kind in the run's list.
    """

    behaviours: tuple[str, ...]
    fate: Literal["commit", "roll back", "roll back a savepoint"]
    queue_numbers: tuple[int, ...]


def plan_run(options: TortureOptions, *, lease_seconds: float) -> Plan:
    """Draw the faults from the seed, spread evenly over the run.

    A relay is suspended for up to twice `lease_seconds`, so that it loses its leases in some cases.
    """
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
            # The names that belong to no handler are those of `OutsideKind`.
            kind: OutsideKind = name
            outside.append(Fault(kind, at, chance.random(), chance.uniform(0.1, longest), chance.random() < 0.5))
    return Plan(tuple(outside), behaviours, inside)


def plan_transactions(options: TortureOptions, plan: Plan, queues: int) -> Iterator[PlannedTransaction]:
    """Yield the producers' transactions, each with 1 to 10 jobs; they commit `options.jobs` jobs in all."""
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
