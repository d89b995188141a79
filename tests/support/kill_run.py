"""What runs under kills share: relays that are replaced when they are killed, counts, and the command line."""

import argparse
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from sqlalchemy import Engine, TextClause, create_engine, text

from outboxq import RelayConfig
from outboxq.migrations.runner import migrate
from outboxq.postgres import start_embedded
from outboxq.testing.relay_process import RelayProcess
from tests.support.fork_server import forking

WAITING = text("SELECT count(*) FROM outboxq.job")
DEAD = text("SELECT count(*) FROM outboxq.dead_job")
CONNECTED = text(
    "SELECT count(DISTINCT application_name) FROM pg_stat_activity WHERE application_name LIKE 'outboxq relay %'"
)


class Report(Protocol):
    """What a run has seen."""

    @property
    def problems(self) -> int:
        """How much is not as it should be."""
        ...


class Run(Protocol):
    """A run on a database that has outboxq's tables."""

    def __call__(self, url: str, *, seconds: float, mode: str, seed: int) -> Report: ...


@dataclass(slots=True)
class Relays:
    """Relays in processes of their own, which are replaced when they are killed."""

    target: str
    url: str
    config: RelayConfig
    running: list[RelayProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start one more."""
        self.running.append(RelayProcess(self.target, self.url, self.config))

    def kill_one(self, chance: random.Random) -> None:
        """Kill one, and start another."""
        victim = self.running.pop(chance.randrange(len(self.running)))
        victim.kill()
        victim.close()
        self.start()


@contextmanager
def running(target: str, url: str, config: RelayConfig, number: int) -> Iterator[Relays]:
    """So many relays of a registry; they are ended behind the block."""
    relays = Relays(target, url, config)
    try:
        for _ in range(number):
            relays.start()
        yield relays
    finally:
        for relay in relays.running:
            relay.close()


def count(engine: Engine, statement: TextClause) -> int:
    """The number that a statement returns."""
    with engine.connect() as connection:
        return int(connection.execute(statement).scalar_one())


def ended(engine: Engine, statement: TextClause, **parameters: object) -> int:
    """How many backends a statement ends, which has a row for each."""
    with engine.connect() as connection:
        return len(connection.execute(statement, parameters).all())


def command(
    name: str, description: str, modes: Collection[str], run: Run, arguments: Sequence[str] | None = None
) -> int:
    """Run on a server of its own, and print the report; the exit code is 1 if it has a problem."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.{name}.under_kills", description=description.splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--mode", choices=tuple(modes), default="transaction")
    parser.add_argument("--seed", type=int, default=1)
    order = parser.parse_args(arguments)
    # Relays that start in a tenth of the time meet more faults at work.
    with forking(), start_embedded() as server, server.create_database() as database:
        engine = create_engine(database.url)
        with engine.begin() as connection:
            migrate(connection)
        engine.dispose()
        report = run(database.url, seconds=order.seconds, mode=order.mode, seed=order.seed)
    print(f"{order.mode}, seed {order.seed}: {report}")
    return 1 if report.problems else 0
