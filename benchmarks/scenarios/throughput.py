"""Rows 1 to 7: the number of jobs a second that a relay works off, beside pgbench with the same statements."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import by_hand, limits
from benchmarks.bench import ACCOUNTS, Bench, Workbench
from benchmarks.figures import Comparison, Series, Unsupported
from benchmarks.relays import RelayOptions, drain
from benchmarks.support import missing

Lines = list[Comparison | Unsupported]


@dataclass(frozen=True, slots=True)
class Limit:
    """A pgbench script, and the options with which it runs."""

    name: str
    script: str
    batch: int
    clients: int = 1


@dataclass(frozen=True, slots=True)
class Ours:
    """A relay, the limit that it is compared with, and the ratio that we want.

    Attributes:
        share: A part of the limit's rate that it surely does not exceed: so many jobs are made for it.
        updates: True if each job adds to an account, which is then checked.
    """

    what: str
    relay: RelayOptions
    limit: Limit
    target: float | None
    share: float = 1.0
    updates: bool = False


NOOP_LIMIT = Limit("pgbench, claim and delete 50, 1 client", limits.claim_and_delete(50), 50)
NOOP = Ours("no-op, batches of 50, one process", RelayOptions("noop", 50), NOOP_LIMIT, 0.45)
UPDATE_LIMIT = Limit("pgbench, one job and its UPDATE a transaction, 1 client", limits.claim_and_update_one(), 1)
UPDATE = Ours("Core UPDATE, one job a transaction, one slot", RelayOptions("update"), UPDATE_LIMIT, 0.45, updates=True)
_PIPELINED = Limit(
    "pgbench, 100 jobs a transaction with an UPDATE each, pipelined, 1 client",
    limits.claim_and_update_each(100, ACCOUNTS, pipelined=True),
    100,
)
_BATCH = 50
_TOGETHER = f"SQLAlchemy by hand: {_BATCH} jobs claimed, their entities loaded and changed, a transaction"
_ONE = "SQLAlchemy by hand: one job claimed, its entity loaded and changed, a transaction"
_ONE_ASYNC = f"{_ONE}, AsyncSession"
_EXECUTED = f"SQLAlchemy by hand: {_BATCH} jobs claimed, an UPDATE executed for each, a transaction"
_UPDATE = "SQLAlchemy by hand: one job claimed and its UPDATE executed, a transaction"
_EIGHT = f"{_UPDATE}, eight threads"


def noop(bench: Bench) -> Lines:
    """Row 1."""
    return compare(bench, 1, "noop", [NOOP])


def noop_processes(bench: Bench) -> Lines:
    """Row 2."""
    limit = Limit("pgbench, claim and delete 50, 4 clients", limits.claim_and_delete(50), 50, clients=4)
    relay = RelayOptions("noop", 50, slots=2, processes=2)
    return compare(bench, 2, "processes", [Ours("no-op, batches of 50, two processes", relay, limit, 0.45)])


def entity(bench: Bench) -> Lines:
    """Row 3."""
    what = "ORM handler with an entity, batchable, batches of 50"
    problem = missing("entity")
    if problem:
        return [Unsupported(3, "orm", what, problem)]
    shared = Ours(what, RelayOptions("entity", 50), _PIPELINED, None, updates=True)
    locked = Ours(f"{what}, Locked", RelayOptions("locked", 50), _PIPELINED, 0.25, updates=True)
    alone = Ours("the same handler in batches of one", RelayOptions("entity", 1), _PIPELINED, None, 0.2, updates=True)
    awaited = Ours(f"{alone.what}, async", RelayOptions("entity_async", 1), _PIPELINED, None, 0.2, updates=True)
    with bench.database() as workbench:
        each = _measures(bench, workbench, [shared, locked, alone, awaited])
        hands = {
            _TOGETHER: partial(_by_hand, bench, workbench, _BATCH, by_hand.change_entities),
            _ONE: partial(_by_hand, bench, workbench, 1, by_hand.change_entity),
            _ONE_ASYNC: partial(by_hand.async_rate, bench, workbench, _rows(bench, 1)),
        }
        found = bench.alternate({**each, **hands}, "jobs/s")
    return [
        _line(3, "orm", shared, found),
        _line(3, "orm", locked, found),
        *(
            Comparison(3, "orm", ours.what, found[ours.what], found[limit], limit, target)
            for ours, limit, target in (
                (shared, _TOGETHER, 0.95),
                (locked, _TOGETHER, 1.1),
                (alone, _ONE, 1.6),
                (awaited, _ONE_ASYNC, 1.4),
            )
        ),
    ]


def _rows(bench: Bench, batch: int) -> int:
    """More jobs than a program works off by hand in a repeat."""
    return bench.rows(20_000 if batch > 1 else 5_000)


def _by_hand(bench: Bench, workbench: Workbench, batch: int, change: by_hand.Change, threads: int = 1) -> float:
    return by_hand.rate(bench, workbench, batch, change, _rows(bench, batch), threads=threads)


def core(bench: Bench) -> Lines:
    """Row 4."""
    plain = Limit(
        "pgbench, 100 jobs a transaction with an UPDATE each, 1 client",
        limits.claim_and_update_each(100, ACCOUNTS, pipelined=False),
        100,
    )
    executed = Ours(
        "Core UPDATE by a batchable handler, batches of 50", RelayOptions("executed", 50), plain, None, updates=True
    )
    deferred = Ours("Core UPDATE deferred, batches of 50", RelayOptions("deferred", 50), _PIPELINED, 0.45, updates=True)
    problem = missing("deferred", "defer")
    wanted = [executed] if problem else [executed, deferred]
    with bench.database() as workbench:
        each = _measures(bench, workbench, wanted)
        hand = partial(_by_hand, bench, workbench, _BATCH, by_hand.execute_updates)
        found = bench.alternate({**each, _EXECUTED: hand}, "jobs/s")
    lines: Lines = [_line(4, "core", ours, found) for ours in wanted]
    lines.append(Comparison(4, "core", executed.what, found[executed.what], found[_EXECUTED], _EXECUTED, 0.8))
    return [*lines, Unsupported(4, "core", deferred.what, problem)] if problem else lines


def set_based(bench: Bench) -> Lines:
    """Row 5."""
    what = "batch handler, one set-based UPDATE for 100"
    problem = missing("set_based")
    if problem:
        return [Unsupported(5, "batch", what, problem)]
    limit = Limit("pgbench, the same statement, 1 client", limits.claim_and_update_set(100), 100)
    return compare(bench, 5, "batch", [Ours(what, RelayOptions("set_based", 100), limit, 0.6, updates=True)])


def one_by_one(bench: Bench) -> Lines:
    """Row 6."""
    name = "pgbench, one job and its UPDATE a transaction, 8 clients"
    limit = Limit(name, limits.claim_and_update_one(), 1, clients=8)
    what = "Core UPDATE, one job a transaction, eight slots in one process"
    eight = Ours(what, RelayOptions("update", slots=8), limit, None, updates=True)
    with bench.database() as workbench:
        hands = {
            name: partial(_by_hand, bench, workbench, 1, by_hand.execute_updates, threads)
            for name, threads in ((_UPDATE, 1), (_EIGHT, 8))
        }
        found = bench.alternate({**_measures(bench, workbench, [UPDATE, eight]), **hands}, "jobs/s")
    return [
        _line(6, "one", UPDATE, found),
        _line(6, "one", eight, found),
        Comparison(6, "one", UPDATE.what, found[UPDATE.what], found[_UPDATE], _UPDATE),
        Comparison(6, "one", eight.what, found[eight.what], found[_EIGHT], _EIGHT, 0.9),
    ]


def leased(bench: Bench) -> Lines:
    """Row 7."""
    limit = Limit("pgbench, lease and delete 100 at a time, 1 client", limits.lease_and_delete(100), 100)
    return compare(
        bench, 7, "lease", [Ours("lease mode, no-op, 4 slots", RelayOptions("leased", slots=4), limit, None)]
    )


def compare(bench: Bench, number: int, scenario: str, wanted: Sequence[Ours]) -> Lines:
    """Measure each beside its limit."""
    found = measure(bench, wanted)
    return [_line(number, scenario, ours, found) for ours in wanted]


def measure(bench: Bench, wanted: Sequence[Ours]) -> Mapping[str, Series]:
    """Every limit and every relay, alternating, by their names."""
    with bench.database() as workbench:
        return bench.alternate(_measures(bench, workbench, wanted), "jobs/s")


def measure_limit(bench: Bench, limit: Limit) -> Series:
    """A limit alone."""
    with bench.database() as workbench:
        return bench.alternate({limit.name: partial(_limit, bench, workbench, limit, {})}, "jobs/s")[limit.name]


def _measures(bench: Bench, workbench: Workbench, wanted: Sequence[Ours]) -> dict[str, Callable[[], float]]:
    rates: dict[str, float] = {}
    each: dict[str, Callable[[], float]] = {}
    for ours in wanted:
        each.setdefault(ours.limit.name, partial(_limit, bench, workbench, ours.limit, rates))
        each[ours.what] = partial(_ours, bench, workbench, ours, rates)
    return each


def _limit(bench: Bench, workbench: Workbench, limit: Limit, rates: dict[str, float]) -> float:
    rates[limit.name] = bench.limit(workbench, limit.script, batch=limit.batch, clients=limit.clients)
    return rates[limit.name]


def _ours(bench: Bench, workbench: Workbench, ours: Ours, rates: Mapping[str, float]) -> float:
    rows = bench.rows(rates[ours.limit.name] * ours.share)
    workbench.fill(rows)
    size = bench.size
    drained = drain(
        workbench, ours.relay, rows, seconds=size.seconds, warm_up_seconds=size.warm_up_seconds, updates=ours.updates
    )
    return drained.rate


def _line(number: int, scenario: str, ours: Ours, found: Mapping[str, Series]) -> Comparison:
    limit = ours.limit
    return Comparison(number, scenario, ours.what, found[ours.what], found[limit.name], limit.name, ours.target)
