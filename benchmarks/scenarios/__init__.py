"""The scenarios: the thing that each measures, and its function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.bench import Bench
from benchmarks.figures import Comparison, Unsupported
from benchmarks.peers_figures import Peers
from benchmarks.scenarios import (
    beside_peers,
    callback_batches,
    coalescing,
    cost,
    grouped,
    large,
    latency,
    leases,
    limits,
    network,
    observing,
    producing,
    queues,
    throughput,
)

Measure: TypeAlias = Callable[[Bench, Peers], list[Comparison | Unsupported]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table, under its name on the command line."""

    number: int
    name: str
    title: str
    measure: Measure


def _alone(measure: Callable[[Bench], list[Comparison | Unsupported]]) -> Measure:
    return lambda bench, _peers: measure(bench)


SCENARIOS = (
    Scenario(1, "noop", "no-op jobs in batches of 50, one process", _alone(throughput.noop)),
    Scenario(2, "processes", "the same, two processes", _alone(throughput.noop_processes)),
    Scenario(3, "orm", "an ORM handler with an entity, in shared batches and alone", _alone(throughput.entity)),
    Scenario(4, "core", "a Core UPDATE in batches: executed by the handler, and deferred", _alone(throughput.core)),
    Scenario(5, "batch", "a batch handler, one set-based UPDATE for 100 jobs", _alone(throughput.set_based)),
    Scenario(6, "one", "one job a transaction: one slot, and eight", _alone(throughput.one_by_one)),
    Scenario(7, "lease", "lease mode, no-op jobs", _alone(throughput.leased)),
    Scenario(8, "bulk", "add_jobs, 1,000 a transaction", _alone(producing.bulk)),
    Scenario(9, "add-job", "what one add_job adds to a transaction", _alone(producing.beside)),
    Scenario(10, "peers", "other queues beside ours", beside_peers.peers),
    Scenario(11, "latency", "from COMMIT to the handler's start at 50 jobs/s", latency.latency),
    Scenario(12, "large", "rows 1 and 6 with many waiting, many scheduled, behind a snapshot", large.large),
    Scenario(13, "network", "one job a transaction over a network with 1 ms each way", _alone(network.network)),
    Scenario(14, "cost", "memory, --help, start, and statements when idle", _alone(cost.cost)),
    Scenario(15, "queues", "the same jobs in one queue and in many", _alone(queues.queues)),
    Scenario(16, "coalesce", "jobs with a key to be coalesced by", _alone(coalescing.coalesce)),
    Scenario(17, "limits", "claims of queues with a limit", _alone(limits.limits)),
    Scenario(18, "groups", "jobs of groups, one of each at a time", _alone(grouped.groups)),
    Scenario(19, "unique", "add_job of unique jobs", _alone(producing.unique)),
    Scenario(
        20,
        "job-batches",
        "jobs of a batch with a callback, and jobs of none",
        _alone(callback_batches.callback_batches),
    ),
    Scenario(21, "observing", "the history, metrics, and jobs that are kept", _alone(observing.observing)),
    Scenario(22, "lease-slots", "lease mode, no-op jobs, many slots in one process", _alone(leases.no_op)),
    Scenario(23, "lease-one", "lease mode, one call at a time in one slot", _alone(leases.one)),
    Scenario(24, "waits", "async calls that wait, all at the same time", _alone(leases.waits)),
    Scenario(25, "waits-threads", "plain calls that wait, all at the same time", _alone(leases.waits_in_threads)),
    Scenario(26, "lease-latency", "from COMMIT to the start of a leased call", _alone(leases.start)),
    Scenario(27, "behind-slow", "fast calls among slow ones, with free slots", _alone(leases.behind_slow)),
)
