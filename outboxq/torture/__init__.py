"""Torture: random faults against real relays on a PostgreSQL server of its own, and a check of the rows that they left.

`app` is the application and `producers` commit its jobs; `faults` plans faults from a seed and `inject` does them to
relay processes; `run` plays it all. `history` checks the rows that the database holds in the end, and nothing else.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outboxq.errors import ConfigError

Mode: TypeAlias = Literal["transaction", "lease", "mixed"]
MODES: tuple[Mode, ...] = get_args(Mode)
FEWEST_JOBS = 200
JOBS_PER_FAULT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureOptions:
    """What to do to how many jobs. The seed decides which faults there are, in which order, and their parameters."""

    jobs: int = 5_000
    faults: int = 50
    seed: int = 0
    mode: Mode = "transaction"
    relays: int = 3
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
        if not 0 < self.minutes <= 24 * 60:
            raise ConfigError(f"minutes takes a number above 0, up to a day, got {self.minutes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TortureReport:
    """The figures of one run. `problems` says in words what is not as promised; empty is a pass."""

    seed: int
    mode: Mode
    jobs: int
    enqueued: int
    rolled_back: int
    unknown: int
    unknown_resolved: int
    faults: dict[str, int]
    faults_not_met: int
    effects: int
    dead: int
    lost: int
    doubled: int
    ghosts: int
    left: int
    relays_started: int
    longest_stall_seconds: float
    seconds: float
    server: str
    problems: list[str]
