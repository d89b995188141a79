"""Torture: random faults against real relays on a PostgreSQL server of its own, and a check of the rows that they left.

`app` is the application and `producers` commit its jobs; `faults` plans faults from a seed and `inject` does them to
relay processes; `run` plays it all. `history` checks the rows that the database holds in the end, and nothing else.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outboxq.config import MAX_SLOTS
from outboxq.errors import ConfigError

Mode: TypeAlias = Literal["transaction", "lease", "mixed", "flow", "calls"]
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
    """The options of a run. The seed decides which faults there are, in which order, and their parameters.

    Args:
        slots: The slots of each queue in each relay.
        only: The kinds of faults to draw from; empty is all of them.
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
    """The figures of one run. The command prints them by these names, which are those of the demo.

    Attributes:
        jobs_enqueued: Committed; after a pass, as many as `effects_applied` and `dead_letters` together.
        jobs_rolled_back: With their transaction, or with a savepoint.
        commits_unanswered: Jobs whose producer got no answer to COMMIT, so that it cannot know whether they exist.
        commits_unanswered_kept: Those of them that exist, by the other rows of their transaction.
        commits_unanswered_as_promised: Those of them that came to one end if they exist, and to none if they do not.
        jobs_of_killed_relays: Jobs that were under the lease of a relay when it was killed, of all kills together.
        calls_begun: Starts of the handlers of mode `calls`; the other modes do not record them.
        problems: The broken promises, in words; empty is a pass.
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
    longest_stall_seconds: float
    seconds: float
    server: str
    problems: list[str]
