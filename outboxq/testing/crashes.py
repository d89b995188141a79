"""Faults for users' tests: a relay that dies at a chosen step, and one call that tries every step."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, cast, get_args
from uuid import uuid4

import msgspec
from sqlalchemy import URL, Connection, Engine, select, text

from outboxq.config import RelayConfig, child_environment
from outboxq.database.engines import make_engine
from outboxq.database.urls import psycopg_url
from outboxq.errors import ConfigError
from outboxq.fault_points import EFFECT_FAULT_POINTS, FAULT_POINTS, FaultPoint
from outboxq.outbox.session import OutboxSession
from outboxq.statements.builtin import count
from outboxq.tables import SCHEMA, dead_job, job
from outboxq.testing.proxy import CommitProxy, Trap
from outboxq.testing.relay_process import RelayOrder

ConnectionStep: TypeAlias = Literal[
    "connection-cut-before-commit", "connection-cut-after-commit", "connections-terminated-in-handler"
]
CrashStep: TypeAlias = FaultPoint | ConnectionStep
# Killed at each fault point, then three ways to lose the connection.
CRASH_STEPS: tuple[CrashStep, ...] = (*FAULT_POINTS, *get_args(ConnectionStep))

# The certificate with which a relay commits what a job did; its other transactions release no savepoint at the end.
_CERTIFICATE = "RELEASE SAVEPOINT oq_"
_LOG_TAIL_BYTES = 4_000
_STOP_SECONDS = 20.0
_GONE_SECONDS = 10.0
_LOOK_SECONDS = 0.02

_SESSIONS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name"
)
_PREPARED = text("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()")


class RelayProcess:
    """A relay in a process of its own, with the import path of this one; ended with the `with` block.

    It also ends when this process does, however that happens.

    Args:
        target: The registry, as `myapp.jobs:jobs`.
        database_url: Where it works.
        config: Its settings.
        kill_at: The fault point at whose `passing`-th passing it is killed with SIGKILL.
        terminate_at: The fault point at which all of its connections are ended by the server.
    """

    def __init__(
        self,
        target: str,
        database_url: str | URL,
        config: RelayConfig | None = None,
        *,
        kill_at: FaultPoint | None = None,
        terminate_at: FaultPoint | None = None,
        passing: int = 1,
    ) -> None:
        self.name = f"outboxq relay {uuid4().hex[:12]}"
        url = psycopg_url(database_url).update_query_dict({"application_name": self.name})
        order = RelayOrder(
            target=target,
            url=url.render_as_string(hide_password=False),
            config=config or RelayConfig(),
            kill_at=kill_at,
            terminate_at=terminate_at,
            passing=passing,
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(  # this interpreter, with a module of this package
            [sys.executable, "-m", "outboxq.testing"],
            env=child_environment({"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Not a session of its own: a stopped process of this session is woken and hung up when its parent dies.
            process_group=0,
        )
        assert self._process.stdin is not None
        # Its end of file will tell the relay that we are gone.
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended, as `subprocess` puts it (-9 after SIGKILL); None while it runs."""
        return self._process.poll()

    @property
    def log(self) -> str:
        """The end of what it has printed."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip() or "(no output)"

    def wait(self, seconds: float) -> int | None:
        """Wait for its end; None where it still runs after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """SIGKILL, and see it dead."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self, seconds: float = _STOP_SECONDS) -> int | None:
        """SIGTERM; its exit code once the running handlers are done, None where that takes too long."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        return self.wait(seconds)

    def close(self) -> None:
        """See it ended, by force where it does not end by itself."""
        if self.stop() is None:
            self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
    """Crash a handler at every step of its way, and assert that each job had exactly one effect.

    For each step: enqueue one job, let a relay process run it that is killed with SIGKILL at this step (or loses its
    connections there, and goes on), let a second one finish what is left, and count. Needs a database of the test's own
    whose queues are empty.

        def test_credit_survives_every_crash(outboxq_database):
            crash_at_every_step(
                "myapp.jobs:jobs",
                database_url=outboxq_database.url,
                enqueue=lambda session: session.add_job(credit, account_id=1, cents=5),
                effects=lambda connection: connection.scalar(text("SELECT balance / 5 FROM account WHERE id = 1")),
            )

    Args:
        target: The registry, as a relay is given it: `myapp.jobs:jobs`.
        enqueue: Adds one job to the session; the commit is ours.
        effects: Counts the effects so far, in a transaction of its own.
        steps: Where to crash; for a handler that calls `ctx.once` add `EFFECT_FAULT_POINTS`.
        timeout_seconds: How long a step may take at most, a lease that has to run out included.
        settings: `RelayConfig`'s, for example `lease_seconds=1`.

    Raises:
        AssertionError: an effect is missing or doubled, something is left behind, or the step was never reached; the
            message names the step.
        ConfigError: settings that do not fit, or jobs that wait already.
    """
    given: dict[str, Any] = {"slots_per_queue": 1, "poll_seconds": 0.1, **settings}
    crash = _Crash(target, psycopg_url(database_url), RelayConfig(**given), timeout_seconds)
    engine = make_engine(crash.url, application_name="outboxq crash test")
    try:
        for step in steps:
            _try_step(engine, crash, step, enqueue, effects)
    finally:
        engine.dispose()


@dataclass(frozen=True, slots=True)
class _Crash:
    """What all steps have in common."""

    target: str
    url: URL
    config: RelayConfig
    timeout_seconds: float

    def start(self, url: str | URL, **fault: Any) -> RelayProcess:
        return RelayProcess(self.target, url, self.config, **fault)


@dataclass(frozen=True, slots=True)
class _Count:
    waiting: int
    dead: int
    prepared: int
    effects: int


def _try_step(
    engine: Engine,
    crash: _Crash,
    step: CrashStep,
    enqueue: Callable[[OutboxSession], object],
    effects: Callable[[Connection], int],
) -> None:
    before = _count(engine, crash, effects)
    if before.waiting:
        raise ConfigError(f"{before.waiting} jobs wait already: crash_at_every_step needs a database of its own")
    with OutboxSession(engine.execution_options(**_translated(crash))) as session:
        enqueue(session)
        session.commit()
    enqueued = _count(engine, crash, effects).waiting
    _expect(step, enqueued == 1, f"enqueue() is to commit one job, and {enqueued} wait")
    if step in (*FAULT_POINTS, *EFFECT_FAULT_POINTS):
        _kill_and_finish(engine, crash, step)
    else:
        _disconnect_and_finish(engine, crash, cast("ConnectionStep", step))
    after = _count(engine, crash, effects)
    _expect(step, after.dead == before.dead, f"the job is a dead letter{_why_dead(engine, crash)}")
    _expect(step, after.prepared == before.prepared, "a prepared transaction was left")
    had = after.effects - before.effects
    _expect(step, had == 1, f"the job had {had} effects, and exactly one was expected")


def _kill_and_finish(engine: Engine, crash: _Crash, step: CrashStep) -> None:
    with crash.start(crash.url, kill_at=step) as victim:
        code = victim.wait(crash.timeout_seconds)
        _expect(
            step, code == -signal.SIGKILL, f"the relay was to be killed there, but its end was {code}:\n{victim.log}"
        )
        _expect_gone(engine, victim, step)
    with crash.start(crash.url) as relay:
        _finish(engine, crash, relay, step)


def _disconnect_and_finish(engine: Engine, crash: _Crash, step: ConnectionStep) -> None:
    if step == "connections-terminated-in-handler":
        with crash.start(crash.url, terminate_at="after-handler") as relay:
            _finish(engine, crash, relay, step)
        return
    with CommitProxy(crash.url) as proxy:
        cut = proxy.cut_before_commit if step == "connection-cut-before-commit" else proxy.cut_after_commit
        trap: Trap = cut(containing=_CERTIFICATE)
        with crash.start(proxy.url) as relay:
            reached = trap.reached.wait(crash.timeout_seconds)
            _expect(step, reached, f"no transaction of the relay came to its COMMIT:\n{relay.log}")
            _finish(engine, crash, relay, step)


def _finish(engine: Engine, crash: _Crash, relay: RelayProcess, step: CrashStep) -> None:
    """Let the relay work until nothing waits, end it in order, and see that the server keeps nothing of it."""
    deadline = time.monotonic() + crash.timeout_seconds
    while waiting := _waiting(engine, crash):
        _expect(step, relay.returncode is None, f"the relay ended with {relay.returncode}:\n{relay.log}")
        _expect(step, time.monotonic() < deadline, f"the job was not done: {waiting}\n{relay.log}")
        time.sleep(_LOOK_SECONDS)
    # Before it is connected it may know nothing of SIGTERM.
    while not _sessions(engine, relay):
        _expect(step, relay.returncode is None, f"the relay ended with {relay.returncode}:\n{relay.log}")
        time.sleep(_LOOK_SECONDS)
    code = relay.stop()
    _expect(step, code == 0, f"the relay did not end in order, but with {code}:\n{relay.log}")
    _expect_gone(engine, relay, step)


def _expect_gone(engine: Engine, relay: RelayProcess, step: CrashStep) -> None:
    # Without a session of its own it holds no lock and no snapshot.
    deadline = time.monotonic() + _GONE_SECONDS
    while _sessions(engine, relay):
        _expect(step, time.monotonic() < deadline, "the server still serves a connection of the relay that ended")
        time.sleep(_LOOK_SECONDS)


def _sessions(engine: Engine, relay: RelayProcess) -> int:
    with engine.connect() as connection:
        return int(connection.execute(_SESSIONS, {"name": relay.name}).scalar_one())


def _expect(step: CrashStep, holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(f"at {step}: {message}")


def _count(engine: Engine, crash: _Crash, effects: Callable[[Connection], int]) -> _Count:
    with _look(engine, crash) as connection:
        waiting, dead = (
            connection.execute(select(count()).select_from(table)).scalar_one() for table in (job, dead_job)
        )
        return _Count(waiting, dead, connection.execute(_PREPARED).scalar_one(), int(effects(connection)))


def _waiting(engine: Engine, crash: _Crash) -> str:
    """What waits, in words; empty where nothing does."""
    columns = (job.c.kind, job.c.state, job.c.attempt, job.c.crashes, job.c.lease_owner)
    with _look(engine, crash) as connection:
        rows = connection.execute(select(*columns).limit(20)).all()
    return "; ".join(
        f"{row.kind} is {row.state}, attempt {row.attempt}, crashes {row.crashes}, lease {row.lease_owner}"
        for row in rows
    )


def _why_dead(engine: Engine, crash: _Crash) -> str:
    with _look(engine, crash) as connection:
        reason = connection.execute(select(dead_job.c.reason).order_by(dead_job.c.died_at.desc())).scalar()
    return "" if reason is None else f": {reason}"


@contextmanager
def _look(engine: Engine, crash: _Crash) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection.execution_options(**_translated(crash))


def _translated(crash: _Crash) -> dict[str, Any]:
    return {} if crash.config.schema == SCHEMA else {"schema_translate_map": {SCHEMA: crash.config.schema}}
