"""A helper for users' tests: crash a relay at every step of a job's life, and count the effects of the handler."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from sqlalchemy import URL, Connection, Engine, select, text

from outboxq.config import RelayConfig
from outboxq.database.engines import make_engine
from outboxq.database.urls import psycopg_url
from outboxq.errors import ConfigError
from outboxq.fault_points import FAULT_POINTS, FaultPoint
from outboxq.outbox.session import OutboxSession
from outboxq.statements.builtin import count
from outboxq.tables import SCHEMA, dead_job, job
from outboxq.testing.proxy import CommitProxy
from outboxq.testing.relay_process import RelayProcess

ConnectionStep: TypeAlias = Literal[
    "connection-cut-before-commit", "connection-cut-after-commit", "connections-terminated-in-handler"
]
CrashStep: TypeAlias = FaultPoint | ConnectionStep
# Killed at each fault point, then three ways to lose the connection.
CRASH_STEPS: tuple[CrashStep, ...] = (*FAULT_POINTS, *get_args(ConnectionStep))
# Sent in the script with which a relay commits a job's work; its other transactions release no savepoint at the end.
COMMIT_SCRIPT = "RELEASE SAVEPOINT oq_"

_GONE_SECONDS = 10.0
_POLL_SECONDS = 0.02

_SESSIONS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name"
)
_PREPARED = text("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()")


def crash_at_every_step(
    target: str,
    *,
    database_url: str | URL,
    enqueue: Callable[[OutboxSession], object],
    effects: Callable[[Connection], int],
    steps: Sequence[CrashStep] = CRASH_STEPS,
    timeout_seconds: float = 60.0,
    **settings: Any,
) -> None:
    """Crash a relay at every step of a job's life, and assert that the job has exactly one effect nevertheless.

    For each step, one job is enqueued. A relay process runs the job, and is killed with SIGKILL at this step (or loses
    its connections there, and goes on). If the relay was killed, a second one finishes the work. Then the effects are
    counted. The test needs a database of its own with empty queues.

    Args:
        target: The registry of jobs, as on a relay's command line: `myapp.jobs:jobs`.
        enqueue: Adds one job to the session that it is called with, without a commit.
        effects: Returns the number of the handler's effects so far, counted by the connection that it is called with.
        steps: The steps to crash at; for a handler that calls `ctx.once` add `EFFECT_FAULT_POINTS`.
        timeout_seconds: The longest time for a step, which includes the wait until the lease of a killed relay runs
            out.
        settings: Settings of `RelayConfig`, for example `lease_seconds=1`.

    Raises:
        AssertionError: an effect is missing or doubled, a job, a session or a prepared transaction is left, or the step
            was never reached; the message names the step.
        ConfigError: the settings are unsuitable, or jobs wait already.
    """
    url = psycopg_url(database_url)
    config = RelayConfig(**{"slots_per_queue": 1, "poll_seconds": 0.1, **settings})
    engine = make_engine(url, application_name="outboxq crash test")
    if config.schema != SCHEMA:
        engine = engine.execution_options(schema_translate_map={SCHEMA: config.schema})
    try:
        for step in steps:
            _CrashTest(step, engine, target, url, config, timeout_seconds).run(enqueue, effects)
    finally:
        engine.dispose()


@dataclass(frozen=True, slots=True)
class _Count:
    waiting: int
    dead: int
    prepared: int
    effects: int


@dataclass(frozen=True, slots=True)
class _CrashTest:
    """The test of one step: enqueue a job, crash a relay at the step, let the job finish, and count its effects."""

    step: CrashStep
    engine: Engine
    target: str
    url: URL
    config: RelayConfig
    timeout_seconds: float

    def run(self, enqueue: Callable[[OutboxSession], object], effects: Callable[[Connection], int]) -> None:
        before = self._count(effects)
        if before.waiting:
            raise ConfigError(f"{before.waiting} jobs wait already: crash_at_every_step needs a database of its own")
        with OutboxSession(self.engine) as session:
            enqueue(session)
            session.commit()
        enqueued = self._count(effects).waiting
        self._expect(enqueued == 1, f"enqueue() is to commit one job, and {enqueued} wait")
        self._crash_and_finish()
        after = self._count(effects)
        self._expect(after.dead == before.dead, f"the job is a dead letter{self._why_dead()}")
        self._expect(after.prepared == before.prepared, "a prepared transaction was left")
        had = after.effects - before.effects
        self._expect(had == 1, f"the job had {had} effects, and exactly one was expected")

    def _crash_and_finish(self) -> None:
        match self.step:
            case "connections-terminated-in-handler":
                with self._start(self.url, terminate_at="after-handler") as relay:
                    self._finish(relay)
            case "connection-cut-before-commit" | "connection-cut-after-commit":
                self._cut_and_finish()
            case fault_point:
                self._kill_and_finish(fault_point)

    def _kill_and_finish(self, point: FaultPoint) -> None:
        with self._start(self.url, kill_at=point) as victim:
            code = victim.wait(self.timeout_seconds)
            killed = code == -signal.SIGKILL
            self._expect(killed, f"the relay was to be killed there, but its end was {code}:\n{victim.log}")
            self._expect_gone(victim)
        with self._start(self.url) as relay:
            self._finish(relay)

    def _cut_and_finish(self) -> None:
        with CommitProxy(self.url) as proxy:
            cut = proxy.cut_before_commit if self.step == "connection-cut-before-commit" else proxy.cut_after_commit
            trap = cut(containing=COMMIT_SCRIPT)
            with self._start(proxy.url) as relay:
                reached = trap.reached.wait(self.timeout_seconds)
                self._expect(reached, f"no transaction of the relay came to its COMMIT:\n{relay.log}")
                self._finish(relay)

    def _start(self, url: str | URL, **fault: Any) -> RelayProcess:
        return RelayProcess(self.target, url, self.config, **fault)

    def _finish(self, relay: RelayProcess) -> None:
        """Wait until no job waits, stop the relay, and check that the server has no connection of the relay left."""
        deadline = time.monotonic() + self.timeout_seconds
        while waiting := self._describe_waiting():
            self._expect_running(relay)
            self._expect(time.monotonic() < deadline, f"the job was not done: {waiting}\n{relay.log}")
            time.sleep(_POLL_SECONDS)
        # Before it is connected, the process may not handle SIGTERM yet.
        while not self._sessions(relay):
            self._expect_running(relay)
            time.sleep(_POLL_SECONDS)
        code = relay.stop()
        self._expect(code == 0, f"the relay did not end in order, but with {code}:\n{relay.log}")
        self._expect_gone(relay)

    def _expect_running(self, relay: RelayProcess) -> None:
        self._expect(relay.returncode is None, f"the relay ended with {relay.returncode}:\n{relay.log}")

    def _expect_gone(self, relay: RelayProcess) -> None:
        # A relay without a session on the server holds no lock and no snapshot.
        deadline = time.monotonic() + _GONE_SECONDS
        while self._sessions(relay):
            in_time = time.monotonic() < deadline
            self._expect(in_time, "the server still serves a connection of the relay that ended")
            time.sleep(_POLL_SECONDS)

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            raise AssertionError(f"at {self.step}: {message}")

    def _sessions(self, relay: RelayProcess) -> int:
        with self.engine.connect() as connection:
            return int(connection.execute(_SESSIONS, {"name": relay.name}).scalar_one())

    def _count(self, effects: Callable[[Connection], int]) -> _Count:
        with self.engine.connect() as connection:
            waiting, dead = (
                connection.execute(select(count()).select_from(table)).scalar_one() for table in (job, dead_job)
            )
            return _Count(waiting, dead, connection.execute(_PREPARED).scalar_one(), int(effects(connection)))

    def _describe_waiting(self) -> str:
        columns = (job.c.kind, job.c.state, job.c.attempt, job.c.crashes, job.c.lease_owner)
        with self.engine.connect() as connection:
            rows = connection.execute(select(*columns).limit(20)).all()
        return "; ".join(
            f"{row.kind} is {row.state}, attempt {row.attempt}, crashes {row.crashes}, lease {row.lease_owner}"
            for row in rows
        )

    def _why_dead(self) -> str:
        with self.engine.connect() as connection:
            reason = connection.execute(select(dead_job.c.reason).order_by(dead_job.c.died_at.desc())).scalar()
        return "" if reason is None else f": {reason}"
