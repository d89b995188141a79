"""A run: server, proxies, relays and producers, the faults at their places, and in the end the check."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from outboxq.config import RelayConfig
from outboxq.database.engines import make_engine
from outboxq.errors import OutboxqError
from outboxq.migrations.runner import migrate
from outboxq.outbox.kinds import JobKind
from outboxq.postgres import Server, start_embedded
from outboxq.relay.signals import stop_signals
from outboxq.testing.crashes import COMMIT_SCRIPT
from outboxq.testing.relay_process import RelayProcess
from outboxq.testing.proxy import CommitProxy, Trap
from outboxq.torture import Mode, TortureOptions, TortureReport
from outboxq.torture.app import EXIT_CODE, MAX_ATTEMPTS
from outboxq.torture.faults import Fault, Plan, plan_run, plan_transactions
from outboxq.torture.history import CREATE, SCHEMA, Verdict, check_history
from outboxq.torture.producers import Pace, Producers

LEASE_SECONDS = 2.0
MAX_CRASHES = 10
# A relay of each size: alone, in small batches, in large ones.
BATCH_SIZES = (1, 5, 20)
SLOTS_PER_QUEUE = 2

_BACKLOG = 600
_AHEAD_OF_FAULT = 300
_AHEAD_OF_LAST_FAULT = 0.05
_LOOK_SECONDS = 0.1
_SAY_SECONDS = 5.0
# Longer than any pause of a relay that waits for a server; a run in which nothing moves for so long is over.
_STALL_LIMIT_SECONDS = 90.0
_FAULT_SECONDS = 5.0
_SERVER_SECONDS = 60.0
_GONE_SECONDS = 20.0

_SERVER_SETTINGS = {"deadlock_timeout": "100ms", "log_min_messages": "fatal"}

_LOOK = text(
    f"""\
SELECT (SELECT count(*) FROM outboxq.job) AS backlog,
  EXISTS (
    SELECT FROM outboxq.job WHERE state <> 'scheduled' OR run_at <= clock_timestamp()
  ) AS is_due,
  (SELECT max(row) FROM {SCHEMA}.effect) AS last_effect,
  (SELECT count(*) FROM outboxq.dead_job) AS dead"""
)
_SIGHT = text(
    f"""\
INSERT INTO {SCHEMA}.sighting (job_id, token, owner)
SELECT id, lease_token, lease_owner FROM outboxq.job AS job WHERE state = 'leased' AND NOT EXISTS (
  SELECT FROM {SCHEMA}.sighting
  WHERE job_id = job.id AND token = job.lease_token AND owner IS NOT DISTINCT FROM job.lease_owner
)"""
)
_WORKING = text(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL "
    "AND pid <> pg_backend_pid() ORDER BY pid"
)
_RELAY_BACKENDS = text(
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name LIKE 'outboxq relay %' ORDER BY pid"
)
_RELAY_NAMES = text("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
_OTHERS = text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
_UNKNOWN = text(
    f"""\
SELECT count(*) AS unknown, count(*) FILTER (
  WHERE EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id) = (
    EXISTS (SELECT FROM {SCHEMA}.effect WHERE effect.job_id = enqueue.job_id)
    OR EXISTS (SELECT FROM outboxq.dead_job WHERE id = enqueue.job_id)
  )
) AS resolved FROM {SCHEMA}.enqueue WHERE outcome = 'unknown'"""
)

T = TypeVar("T")


class TortureFailed(OutboxqError):
    """The run could not be played to its end."""


def play(options: TortureOptions, say: Callable[[str], None]) -> TortureReport:
    """See `outboxq.torture.run_torture`."""
    interrupted = threading.Event()
    with stop_signals(interrupted.set), start_embedded(settings=_SERVER_SETTINGS) as server:
        say(f"PostgreSQL {server.version} of its own (pid {server.pid}), seed {options.seed}")
        database = server.create_database()
        with _Watcher(database.url) as watcher:
            watcher.ask(_prepare)
            return _Run(options, server, database.url, watcher, say, interrupted).play()


def _prepare(connection: Connection) -> None:
    migrate(connection)
    connection.execute(text(CREATE))
    connection.commit()


class _Watcher:
    """A connection that is not tortured, except when the server is: whatever is asked is asked until it is answered."""

    def __init__(self, url: str) -> None:
        self._engine: Engine = make_engine(url, application_name="outboxq torture")
        self._connection: Connection | None = None

    def ask(self, question: Callable[[Connection], T]) -> T:
        """Run `question`, again and again while the server is away. It must bear repetition."""
        deadline = time.monotonic() + _SERVER_SECONDS
        while True:
            try:
                if self._connection is None:
                    self._connection = self._engine.connect()
                answer = question(self._connection)
                self._connection.commit()
                return answer
            except DBAPIError as error:
                self._forget()
                if time.monotonic() > deadline or not (error.connection_invalidated or _is_away(error)):
                    raise
                time.sleep(0.05)

    def _forget(self) -> None:
        if self._connection is not None:
            with suppress(DBAPIError):
                self._connection.invalidate()
                self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forget()
        self._engine.dispose()


def _is_away(error: DBAPIError) -> bool:
    sqlstate = getattr(error.orig, "sqlstate", None)
    return sqlstate is None or sqlstate[:2] in ("57", "08")


class _Relays:
    """The relay processes: whichever ends is replaced."""

    def __init__(self, url: str, mode: Mode, number: int) -> None:
        self.started = 0
        self.problems: list[str] = []
        self._url = url
        self._target = _target(mode)
        self._running = [self._start(slot) for slot in range(number)]
        self._paused: dict[int, float] = {}

    @property
    def names(self) -> set[str]:
        """As the server knows them; without those that have ended."""
        return {relay.name for relay in self._running if relay.returncode is None}

    def pick(self, fraction: float) -> RelayProcess:
        """One of them."""
        return self._running[int(fraction * len(self._running))]

    def pause(self, fraction: float, seconds: float) -> None:
        """Stop one with SIGSTOP; `tend` wakes it after `seconds`."""
        position = int(fraction * len(self._running))
        self._running[position].pause()
        self._paused[position] = time.monotonic() + seconds

    def tend(self) -> None:
        """Wake who has slept long enough, and replace who has ended."""
        for position in [position for position, until in self._paused.items() if until <= time.monotonic()]:
            del self._paused[position]
            self._running[position].resume()
        for position, relay in enumerate(self._running):
            code = relay.returncode
            if code is None:
                continue
            if code not in (-signal.SIGKILL, EXIT_CODE):
                self.problems.append(f"a relay ended by itself with code {code}: {relay.log[-500:]}")
            self._paused.pop(position, None)
            relay.close()
            self._running[position] = self._start(position)

    def stop(self) -> None:
        """Let all finish in order."""
        for relay in self._running:
            code = relay.stop(30)
            if code != 0:
                self.problems.append(f"a relay that was told to stop ended with {code}: {relay.log[-500:]}")

    def close(self) -> None:
        for relay in self._running:
            relay.close()

    def _start(self, position: int) -> RelayProcess:
        self.started += 1
        return RelayProcess(self._target, self._url, _relay_config(BATCH_SIZES[position % len(BATCH_SIZES)]))


def _relay_config(batch_size: int) -> RelayConfig:
    return RelayConfig(
        batch_size=batch_size,
        slots_per_queue=SLOTS_PER_QUEUE,
        poll_seconds=0.5,
        lease_seconds=LEASE_SECONDS,
        max_crashes=MAX_CRASHES,
    )


def _target(mode: Mode) -> str:
    names = {"transaction": "app:jobs", "lease": "leased:jobs", "mixed": "leased:mixed"}
    return f"outboxq.torture.{names[mode]}"


def _kinds(mode: Mode) -> list[JobKind[...]]:
    from outboxq.torture import app

    plain: list[JobKind[...]] = [app.record, app.record_async]
    if mode == "transaction":
        return plain
    from outboxq.torture import leased

    leases: list[JobKind[...]] = [leased.record_leased, leased.record_leased_async]
    return leases if mode == "lease" else plain + leases


class _Run:
    """One run, from the first relay to the report."""

    def __init__(
        self,
        options: TortureOptions,
        server: Server,
        url: str,
        watcher: _Watcher,
        say: Callable[[str], None],
        interrupted: threading.Event,
    ) -> None:
        self._options = options
        self._server = server
        self._url = url
        self._watcher = watcher
        self._say = say
        self._interrupted = interrupted
        self._begun = time.monotonic()
        self._plan: Plan = plan_run(options, lease_seconds=LEASE_SECONDS)
        self._due = list(reversed(self._plan.faults))
        self._done: Counter[str] = Counter(self._plan.inside)
        self._not_met = 0
        self._pace = Pace()
        self._moved_at = time.monotonic()
        self._last_look: tuple[object, ...] = ()
        self._longest_stall = 0.0
        self._backlog = 0
        self._said_at = 0.0

    def play(self) -> TortureReport:
        """Everything in its order; what was started is ended, whatever happens."""
        with ExitStack() as stack:
            self._relay_proxy = stack.enter_context(CommitProxy(self._url))
            self._producer_proxy = stack.enter_context(CommitProxy(self._url))
            self._relays = _Relays(self._relay_proxy.url, self._options.mode, self._options.relays)
            stack.callback(self._relays.close)
            kinds = _kinds(self._options.mode)
            transactions = plan_transactions(self._options, self._plan, len(kinds))
            self._producers = Producers(self._producer_proxy.url, transactions, kinds, self._pace)
            stack.callback(self._producers.close)
            gave_up = self._torture()
            self._producers.close()
            self._wait_until_relays_are_up()
            self._relays.stop()
        return self._report(gave_up)

    def _torture(self) -> str | None:
        """Look, tend, and do what is due, until everything is done; else why it was given up."""
        while True:
            self._look()
            self._relays.tend()
            if self._due and self._finished >= self._due[-1].at:
                self._do(self._due.pop())
            # In this order: whatever is enqueued after the producers have finished does not exist.
            if self._producers.have_finished() and not self._due and not self._count_backlog():
                return None
            if time.monotonic() - self._begun > self._options.minutes * 60:
                return f"it took longer than {self._options.minutes:g} minutes"
            if time.monotonic() - self._moved_at > _STALL_LIMIT_SECONDS:
                return f"nothing moved for {_STALL_LIMIT_SECONDS:.0f} seconds"
            if self._interrupted.wait(_LOOK_SECONDS):
                raise TortureFailed("interrupted: the relays and the server were ended, nothing is left")

    @property
    def _finished(self) -> int:
        return self._producers.journal.enqueued - self._backlog

    def _look(self) -> None:
        """See how far it is, note what is leased, take over the producers' journal, and let them go on."""
        row = self._watcher.ask(lambda connection: connection.execute(_LOOK).one())
        self._watcher.ask(lambda connection: connection.execute(_SIGHT).rowcount)
        self._watcher.ask(self._producers.journal.flush)
        now, seen = time.monotonic(), (row.last_effect, row.dead)
        if seen != self._last_look or not row.is_due:
            self._longest_stall = max(self._longest_stall, now - self._moved_at)
            self._last_look, self._moved_at = seen, now
        self._backlog = row.backlog
        self._allow()
        if now - self._said_at > _SAY_SECONDS:
            self._said_at = now
            self._say(
                f"{self._finished:,} of {self._options.jobs:,} jobs, {self._outside_done:,} faults done, "
                f"{row.backlog:,} jobs wait, longest stall {self._longest_stall:.1f} s, {now - self._begun:.0f} s"
            )

    @property
    def _outside_done(self) -> int:
        return self._done.total() - sum(self._plan.inside.values())

    def _allow(self, more: int = 0) -> None:
        limit = self._finished + _BACKLOG
        if self._due:
            ahead = min(_AHEAD_OF_FAULT, int(self._options.jobs * _AHEAD_OF_LAST_FAULT))
            limit = min(limit, self._due[-1].at + ahead)
        self._pace.allow(limit + more)

    def _count_backlog(self) -> int:
        return self._watcher.ask(lambda connection: int(connection.execute(_LOOK).one().backlog))

    def _do(self, fault: Fault) -> None:
        if self._happens(fault):
            self._done[fault.kind] += 1
        else:
            self._not_met += 1

    def _happens(self, fault: Fault) -> bool:
        """Do it; False where there was nothing to do it to."""
        match fault.kind:
            case "relay-killed":
                self._relays.pick(fault.pick).kill()
            case "relay-stopped":
                self._relays.pause(fault.pick, fault.seconds)
            case "backend-terminated":
                return self._signal_backend(_WORKING, fault, terminate=True)
            case "backend-killed":
                return self._signal_backend(_RELAY_BACKENDS, fault, terminate=False)
            case "relay-cut-before-commit":
                return self._caught(self._relay_proxy.cut_before_commit(containing=COMMIT_SCRIPT))
            case "relay-cut-after-commit":
                return self._caught(self._relay_proxy.cut_after_commit(containing=COMMIT_SCRIPT))
            case "relay-frozen-at-commit":
                return self._freeze(fault)
            case "producer-cut-before-commit":
                return self._caught(self._producer_proxy.cut_before_commit(containing="request"))
            case "producer-cut-after-commit":
                return self._caught(self._producer_proxy.cut_after_commit(containing="request"))
            case "all-connections-cut":
                return self._relay_proxy.cut() + self._producer_proxy.cut() > 0
            case "server-stopped":
                self._server.stop_immediately()
                self._interrupted.wait(fault.seconds)
                self._server.start_again()
        return True

    def _caught(self, trap: Trap) -> bool:
        """Wait until somebody has run into it, who may have to be let in first."""
        deadline = time.monotonic() + _FAULT_SECONDS
        self._allow(more=int(self._options.jobs * _AHEAD_OF_LAST_FAULT) // 2)
        while not trap.reached.wait(0.05):
            self._relays.tend()
            if time.monotonic() > deadline or self._interrupted.is_set():
                trap.release()
                return False
        return True

    def _freeze(self, fault: Fault) -> bool:
        trap = self._relay_proxy.freeze_at_commit(arrives=fault.pick < 0.5, containing=COMMIT_SCRIPT)
        if not self._caught(trap):
            return False
        self._interrupted.wait(fault.seconds)
        if fault.gently:
            trap.release()
        else:
            self._relay_proxy.cut()
        return True

    def _signal_backend(self, query: Any, fault: Fault, *, terminate: bool) -> bool:
        deadline = time.monotonic() + _FAULT_SECONDS
        while time.monotonic() < deadline and not self._interrupted.is_set():
            pids = self._watcher.ask(lambda connection: list(connection.execute(query).scalars()))
            if pids:
                pid = int(pids[int(fault.pick * len(pids))])
                return self._terminate(pid) if terminate else _kill(pid)
            self._relays.tend()
            time.sleep(0.005)
        return False

    def _terminate(self, pid: int) -> bool:
        query = text("SELECT pg_terminate_backend(:pid)")
        return bool(self._watcher.ask(lambda connection: connection.execute(query, {"pid": pid}).scalar_one()))

    def _report(self, gave_up: str | None) -> TortureReport:
        self._watcher.ask(self._producers.journal.flush)
        self._wait_until_alone()
        verdict: Verdict = self._watcher.ask(
            lambda connection: check_history(connection, max_attempts=MAX_ATTEMPTS, max_crashes=MAX_CRASHES)
        )
        unknown = self._watcher.ask(lambda connection: connection.execute(_UNKNOWN).one())
        problems = [*([] if gave_up is None else [gave_up]), *verdict.problems, *self._relays.problems]
        return TortureReport(
            seed=self._options.seed,
            mode=self._options.mode,
            jobs=self._options.jobs,
            enqueued=self._producers.journal.enqueued,
            rolled_back=self._producers.rolled_back,
            unknown=unknown.unknown,
            unknown_resolved=unknown.resolved,
            faults=dict(sorted(self._done.items())),
            faults_not_met=self._not_met,
            effects=self._count(f"{SCHEMA}.effect"),
            dead=self._count("outboxq.dead_job"),
            lost=verdict.counts["lost"],
            doubled=verdict.counts["doubled"],
            ghosts=verdict.counts["ghosts"],
            left=verdict.counts["left"],
            relays_started=self._relays.started,
            longest_stall_seconds=round(self._longest_stall, 1),
            seconds=round(time.monotonic() - self._begun, 1),
            server=f"PostgreSQL {self._server.version}",
            problems=problems,
        )

    def _count(self, table: str) -> int:
        query = text(f"SELECT count(*) FROM {table}")
        return self._watcher.ask(lambda connection: int(connection.execute(query).scalar_one()))

    def _wait_until_relays_are_up(self) -> None:
        """One that is still starting would die of the signal instead of stopping in order."""
        deadline = time.monotonic() + _SERVER_SECONDS
        while time.monotonic() < deadline:
            connected = self._watcher.ask(lambda connection: set(connection.execute(_RELAY_NAMES).scalars()))
            if self._relays.names <= connected:
                return
            time.sleep(0.05)

    def _wait_until_alone(self) -> None:
        """The server notices in its own time that a client is gone; who is still there then is a problem."""
        deadline = time.monotonic() + _GONE_SECONDS
        while self._watcher.ask(lambda connection: connection.execute(_OTHERS).scalar_one()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)


def _kill(pid: int) -> bool:
    """kill -9 of a backend, after which the server ends all others and recovers."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
