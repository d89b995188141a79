"""Row 10: the same work done by other queues, measured in the same run by `benchmarks.peers`.

Each at its best: so are our batches larger here than elsewhere, as the others' are.
"""

from benchmarks.bench import Bench
from benchmarks.figures import Comparison, Unsupported
from benchmarks.peers_figures import Figure, Peers
from benchmarks.relays import RelayOptions
from benchmarks.scenarios.throughput import NOOP_LIMIT, Ours, measure
from benchmarks.support import missing

_PROCESSES = (1, 2)


def peers(bench: Bench, figures: Peers) -> list[Comparison | Unsupported]:
    """No-op jobs and one UPDATE a job, in one process and in two."""
    if not figures:
        return [Unsupported(10, "peers", "other queues beside ours", "not measured: give --peers or --peers-file")]
    lines: list[Comparison | Unsupported] = []
    for processes in _PROCESSES:
        lines += _lines(bench, figures, processes)
    return lines


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
        others = tuple((each.name, each.series) for each in figures.rates(scenario, processes))
        plot = f"peers-{scenario}-{processes}"
        lines += [
            Comparison(
                10, "peers", ours.what, found[ours.what], best.series, best.name, target, others=others, plot=plot
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
