"""Torture test: random faults against real relays on a separate PostgreSQL server, then a check of all promises.

`app` is the application and `producers` commit its jobs. `faults` plans faults from a random seed, and `inject` carries
them out. `run` starts all of these. `history` checks, by the rows in the database at the end, that no job was lost or
done twice.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outboxq.config import MAX_SLOTS
from outboxq.errors import ConfigError

Mode: TypeAlias = Literal["transaction", "lease", "mixed", "flow", "calls", "windows"]
MODES: tuple[Mode, ...] = get_args(Mode)
OutsideKind: TypeAlias = Literal[
    "relay-killed",
    "relay-stopped",
    "backend-terminated",
    "relay-cut-before-commit",
    "relay-cut-after-commit",
    "relay-frozen-at-commit",
    "producer-cut-before-commit",
    "producer-cut-after-commit",
    "all-connections-cut",
    "backend-killed",
    "server-stopped",
]
# Behaviours of jobs that count as faults of the run.
InsideKind: TypeAlias = Literal["handler-raise", "handler-flush-raise", "handler-exit", "handler-deadlock"]
FaultKind: TypeAlias = OutsideKind | InsideKind
FAULT_KINDS: tuple[FaultKind, ...] = (*get_args(OutsideKind), *get_args(InsideKind))
FEWEST_JOBS = 200
JOBS_PER_FAULT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureOptions:
    """The options of a torture test. The seed determines the faults, their order and their parameters.

    Args:
        mode: The sort of jobs; `mixed` has the jobs of `transaction` and `lease`, `flow` also grouped and other jobs,
            `calls` jobs that wait as if for a service, `windows` jobs that a batch handler sends as if to a broker.
        slots: The number of jobs of each queue that a relay runs at a time.
        only: The kinds of faults to draw from; empty for all kinds.
    """

    jobs: int = 5_000
    faults: int = 50
    seed: int = 0
    mode: Mode = "transaction"
    relays: int = 3
    slots: int = 2
    only: tuple[FaultKind, ...] = ()
    minutes: float = 30.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode takes {', '.join(MODES)}, got {self.mode!r}")
        if self.jobs < FEWEST_JOBS:
            raise ConfigError(
                f"torture takes at least {FEWEST_JOBS} jobs, to have some left to disturb, got {self.jobs}"
            )
        if not 0 <= self.faults <= self.jobs // JOBS_PER_FAULT:
            raise ConfigError(
                f"{self.jobs} jobs take 0 to {self.jobs // JOBS_PER_FAULT} faults, so that each meets work, "
                f"got {self.faults}"
            )
        if not 1 <= self.relays <= 16:
            raise ConfigError(f"torture takes 1 to 16 relays, got {self.relays}")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"torture takes 1 to {MAX_SLOTS} slots for each queue of a relay, got {self.slots}")
        for kind in self.only:
            if kind not in FAULT_KINDS:
                raise ConfigError(f"only takes kinds of faults ({', '.join(FAULT_KINDS)}), got {kind!r}")
        if not 0 < self.minutes <= 24 * 60:
            raise ConfigError(f"minutes takes a number above 0, up to a day, got {self.minutes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureReport:
    """The figures of one torture test; the command prints them by these names, some of which the demo uses too.

    Attributes:
        jobs_enqueued: Committed jobs; after a successful run, as many as `effects_applied` and `dead_letters` together.
        jobs_rolled_back: Jobs that were rolled back with their transaction, or with a savepoint.
        commits_unanswered: Jobs whose producer got no answer to COMMIT, so that it cannot know if they exist.
        commits_unanswered_kept: Those of `commits_unanswered` that were committed, as their business rows show.
        commits_unanswered_as_promised: Those of `commits_unanswered` that were done once if committed, and never if
            not.
        faults_not_met: Planned faults that found nothing to disturb.
        doubled: Jobs that ended more than once.
        sent_again: Messages that were sent more than once, in the mode `windows` only: a relay died, or a call failed,
            after it had sent them.
        jobs_of_killed_relays: Jobs in lease mode that relays were running when they were killed.
        calls_begun: Starts of handlers, in the mode `calls` only.
        longest_stall_seconds: The longest time without progress.
        problems: The broken promises, in words; empty after a successful run.
    """

    seed: int
    mode: Mode
    jobs: int
    jobs_enqueued: int
    jobs_rolled_back: int
    commits_unanswered: int
    commits_unanswered_kept: int
    commits_unanswered_as_promised: int
    faults: dict[str, int]
    faults_not_met: int
    effects_applied: int
    dead_letters: int
    lost: int
    doubled: int
    ran_though_rolled_back: int
    jobs_left: int
    relays_started: int
    jobs_of_killed_relays: int
    calls_begun: int
    sent_again: int
    longest_stall_seconds: float
    seconds: float
    server: str
    problems: list[str]
