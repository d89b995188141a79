"""The peers: where each is, its settings and where these are from, and how to see that it has finished."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

DRIVERS = Path(__file__).parent

Settings = Mapping[str, int | float | bool | str]


class Scenario(StrEnum):
    """The work of a peer.

    Jobs that do nothing; jobs that update a row each; jobs that change an ORM entity each; the same while their worker
    is killed again and again; a few jobs a second, timed; jobs that do nothing, at the end of a long drain while a
    session holds a snapshot.
    """

    noop = "noop"
    update = "update"
    orm = "orm"
    kill = "kill"
    latency = "latency"
    snapshot = "snapshot"


_WITHOUT_ORM = (Scenario.noop, Scenario.update, Scenario.latency, Scenario.snapshot)


class Language(StrEnum):
    """The language of a peer and its driver."""

    python = "python"
    node = "node"


@dataclass(frozen=True, slots=True)
class Peer:
    """One job queue at its settings.

    Attributes:
        package: The folder of its driver and of its environment; two peers may share it.
        settings: The settings that the driver receives and the report prints.
        unfinished: A query that counts the jobs that are not done.
        jobs: How many are enqueued before each run of a scenario.
        python: The interpreter's minor versions that it runs on, best first; empty for the one that runs this.
        scenarios: What of it is measured.
    """

    name: str
    package: str
    language: Language
    settings: Settings
    unfinished: str
    jobs: Mapping[Scenario, int]
    python: Sequence[str] = ()
    scenarios: Sequence[Scenario] = field(default=_WITHOUT_ORM)

    @property
    def directory(self) -> Path:
        """Its driver and its definition file."""
        return DRIVERS / self.package

    @property
    def definition(self) -> Path:
        """The file that pins the versions of what is installed for it."""
        return self.directory / ("requirements.txt" if self.language is Language.python else "package.json")

    @property
    def version(self) -> str:
        """The version that its definition file pins."""
        pattern = rf'^\W*{re.escape(self.package)}(?:\[\w+\])?"?(?:==|: ")([\w.]+)'
        pinned = re.search(pattern, self.definition.read_text(), re.MULTILINE)
        if pinned is None:
            raise ValueError(f"{self.definition} pins no version of {self.package}")
        return pinned[1]


# docs/guides/performance-tuning.md of janbjorge/pgqueuer: a larger batch_size for short jobs, a direct asyncpg
# connection for each manager, `pgq autovac`, the default durability. Its own benchmark (tools/benchmark.py) runs
# several managers in one process on uvloop.
_PGQUEUER = Peer(
    "pgqueuer",
    "pgqueuer",
    Language.python,
    {"batch_size": 500, "managers": 2, "max_concurrent_tasks": 0, "pool": 8},
    "SELECT count(*) FROM pgqueuer",
    {Scenario.noop: 60_000, Scenario.update: 20_000, Scenario.orm: 4_000, Scenario.snapshot: 100_000},
    scenarios=tuple(Scenario),
)

# docs/discussions.md of procrastinate-org/procrastinate, "Mind the size of your PostgreSQL pool": for short jobs as
# many connections as the concurrency, plus one. `delete_jobs`: the docstring of App.run_worker_async.
_PROCRASTINATE = Peer(
    "procrastinate",
    "procrastinate",
    Language.python,
    {"concurrency": 10, "connector_pool": 11, "delete_jobs": "successful", "listen_notify": True, "pool": 10},
    "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
    {Scenario.noop: 2_000, Scenario.update: 2_000, Scenario.orm: 2_000, Scenario.snapshot: 10_000},
    scenarios=tuple(Scenario),
)

# worker.graphile.org/docs/performance: the configuration under "Quick stats", which is for throughput. Statements are
# prepared by default.
_GRAPHILE_WORKER = Peer(
    "graphile-worker",
    "graphile-worker",
    Language.node,
    {
        "concurrentJobs": 24,
        "maxPoolSize": 25,
        "localQueue.size": 500,
        "completeJobBatchDelay": 0,
        "failJobBatchDelay": 0,
        "pool": 10,
    },
    "SELECT count(*) FROM graphile_worker.jobs",
    {Scenario.noop: 80_000, Scenario.update: 16_000, Scenario.snapshot: 100_000},
)

# pgboss.io/api/workers, and the comments on these options in its types.d.ts: a batch, `burstWhenBatchFull` to fetch
# without a pause while there is more, LISTEN/NOTIFY for latency. With `transactional` the handler's statements and
# the job's completion are one transaction on one connection.
_PG_BOSS = Peer(
    "pg-boss",
    "pg-boss",
    Language.node,
    {
        "batchSize": 1000,
        "localConcurrency": 2,
        "burstWhenBatchFull": True,
        "pollingIntervalSeconds": 0.5,
        "notifyPollingIntervalSeconds": 0.5,
        "useListenNotify": True,
        "transactional": False,
        "max": 10,
        "pool": 10,
    },
    "SELECT count(*) FROM pgboss.job WHERE name = 'touch' AND state < 'completed'",
    {Scenario.noop: 80_000, Scenario.update: 16_000, Scenario.snapshot: 100_000},
)
_PG_BOSS_TRANSACTIONAL = replace(
    _PG_BOSS,
    name="pg-boss-transactional",
    settings={**_PG_BOSS.settings, "transactional": True},
    scenarios=(Scenario.update,),
)

# docs/production.md and docs/defining_queues.md of oban-bg/oban-py: a pool of 10 is enough for a queue of any limit; a
# higher limit and a short pause between fetches for short jobs.
_OBAN = Peer(
    "oban",
    "oban",
    Language.python,
    {"limit": 100, "debounce_interval": 0.005, "pool_max_size": 10, "pool": 10},
    "SELECT count(*) FROM oban_jobs WHERE state IN ('available', 'executing', 'retryable', 'scheduled')",
    {Scenario.noop: 8_000, Scenario.update: 8_000, Scenario.snapshot: 20_000},
    python=("3.14", "3.13", "3.12"),
)

PEERS: Mapping[str, Peer] = {
    peer.name: peer for peer in (_PGQUEUER, _PROCRASTINATE, _GRAPHILE_WORKER, _PG_BOSS, _PG_BOSS_TRANSACTIONAL, _OBAN)
}
