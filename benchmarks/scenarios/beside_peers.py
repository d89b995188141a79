"""Row 10: the same work done by other queues, measured in the same run by `benchmarks.peers`.

Each at its best: so are our batches larger here than elsewhere, as the others' are.
"""

from functools import partial

from benchmarks.bench import Bench, conninfo
from benchmarks.exactly_once import KILLED_JOBS, KILLS, Effects, effects_after_kills
from benchmarks.figures import Better, Comparison, Series, Unsupported
from benchmarks.peers_figures import Figure, Peers
from benchmarks.relays import RelayOptions, fill_and_drain, killed_relay
from benchmarks.scenarios.throughput import NOOP_LIMIT, Ours, measure
from benchmarks.support import missing

_PROCESSES = (1, 2)
# As fast as no relay is.
_MOST_ENTITIES = 20_000


def peers(bench: Bench, figures: Peers) -> list[Comparison | Unsupported]:
    """No-op jobs and one UPDATE a job, in one process and in two; the same ORM handler in one."""
    if not figures:
        return [Unsupported(10, "peers", "other queues beside ours", "not measured: give --peers or --peers-file")]
    lines: list[Comparison | Unsupported] = []
    for processes in _PROCESSES:
        lines += _lines(bench, figures, processes)
    return lines + entities(bench, figures)


def entities(bench: Bench, figures: Peers) -> list[Comparison | Unsupported]:
    """The same ORM handler in one process: processor time of a job, jobs a second, and what is left after kills."""
    costs, fastest = figures.costs("orm"), figures.best_rate("orm", 1)
    if not costs or fastest is None:
        return []
    cheapest = min(costs, key=lambda each: each.series.median)
    relays = {
        f"the same ORM handler, {what}, 1 process, 2 slots, batches of 100": RelayOptions(app, 100, slots=2)
        for what, app in (("a coroutine", "entity_async"), ("a plain function", "entity"))
    }
    cpu_us: dict[str, list[float]] = {what: [] for what in relays}
    with bench.database() as workbench:
        rows = bench.rows(_MOST_ENTITIES)
        drains = {
            what: partial(fill_and_drain, bench, workbench, relay, rows, cpu_us=cpu_us[what])
            for what, relay in relays.items()
        }
        rates = bench.alternate(drains, "jobs/s")
    others = tuple((each.name, each.series) for each in costs)
    slower = tuple((each.name, each.series) for each in figures.rates("orm", 1))
    lines: list[Comparison | Unsupported] = []
    for what, relay in relays.items():
        cpu, cost = Series(tuple(cpu_us[what]), "µs"), f"CPU a job: {what}"
        notes = (f"outboxq: {_effects(bench, relay)}", *figures.effects())
        lines += [
            Comparison(
                10,
                "peers",
                cost,
                cpu,
                cheapest.series,
                cheapest.name,
                10,
                Better.times_less,
                notes,
                others,
                plot="peers-orm-cpu",
            ),
            Comparison(10, "peers", what, rates[what], fastest.series, fastest.name, others=slower, plot="peers-orm"),
        ]
    return lines


def _effects(bench: Bench, relay: RelayOptions) -> Effects:
    jobs, kills = (KILLED_JOBS // 10, 2) if bench.size.name == "quick" else (KILLED_JOBS, KILLS)
    with bench.database() as workbench:
        workbench.fill(jobs)
        effects = effects_after_kills(
            conninfo(workbench.url),
            partial(killed_relay, workbench.url, relay),
            "SELECT count(*) FROM outboxq.job",
            jobs,
            kills,
        )
    bench.say(f"  {relay.app}: {effects}")
    return effects


def _lines(bench: Bench, figures: Peers, processes: int) -> list[Comparison | Unsupported]:
    lines: list[Comparison | Unsupported] = []
    wanted: list[tuple[Ours, list[tuple[Figure | None, float]]]] = []
    any_noop, python_noop = figures.best_rate("noop", processes), figures.best_rate("noop", processes, "python")
    noop = _ours("no-op", RelayOptions("noop", 500, slots=2, processes=processes), updates=False)
    wanted.append((noop, [(any_noop, 0.9), (python_noop, 1.5)]))
    best_update = figures.best_rate("update", processes)
    for what, app, methods, target in (
        ("one UPDATE as an ORM handler", "entity", (), 1.3),
        ("one UPDATE deferred", "deferred", ("defer",), 2.0),
    ):
        problem = missing(app, *methods)
        ours = _ours(what, RelayOptions(app, 100, slots=2, processes=processes), updates=True)
        if problem:
            lines.append(Unsupported(10, "peers", ours.what, problem))
        else:
            wanted.append((ours, [(best_update, target)]))
    found = measure(bench, [ours for ours, _ in wanted])
    for ours, comparisons in wanted:
        scenario = "update" if ours.updates else "noop"
        how = ", raw SQL" if ours.updates else ""
        others = tuple((f"{each.name}{how}", each.series) for each in figures.rates(scenario, processes))
        plot = f"peers-{scenario}-{processes}"
        lines += [
            Comparison(
                10,
                "peers",
                ours.what,
                found[ours.what],
                best.series,
                f"{best.name}{how}",
                target,
                others=others,
                plot=plot,
            )
            for best, target in comparisons
            if best is not None
        ]
    return lines


def _ours(what: str, relay: RelayOptions, *, updates: bool) -> Ours:
    processes, slots = relay.processes, relay.slots
    named = (
        f"{what}, {processes} process{'es' if processes > 1 else ''}, {slots} slot{'s' if slots > 1 else ''} in each, "
        f"batches of {relay.batch_size}"
    )
    return Ours(named, relay, NOOP_LIMIT, 0.0, share=1.5, updates=updates)
