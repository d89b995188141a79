"""A torture test from start to end: server, proxies, relays and producers, the faults at their times, and the check."""

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from outboxq.errors import OutboxqError
from outboxq.migrations.runner import migrate
from outboxq.outbox.kinds import JobKind
from outboxq.postgres import Server, start_embedded
from outboxq.relay.signals import stop_signals
from outboxq.testing.proxy import CommitProxy
from outboxq.torture import Mode, TortureOptions, TortureReport, app
from outboxq.torture.faults import Fault, plan_run, plan_transactions
from outboxq.torture.history import CREATE, SCHEMA, check_history
from outboxq.torture.inject import LEASE_SECONDS, MAX_CRASHES, FaultInjector, Relays
from outboxq.torture.lanes import LIMIT_THE_QUEUE
from outboxq.torture.producers import Producers
from outboxq.torture.starts import Start, read_starts
from outboxq.torture.watcher import Watcher

_BACKLOG = 600
_AHEAD_OF_FAULT = 300
_AHEAD_OF_LAST_FAULT = 0.05
_POLL_SECONDS = 0.1
_SAY_SECONDS = 5.0
# Longer than any pause of a relay that waits for a server; a run without progress for this long is given up.
_STALL_LIMIT_SECONDS = 90.0

_SERVER_SETTINGS = {"deadlock_timeout": "100ms", "log_min_messages": "fatal"}
# Connections of the producers, the watcher, and relays for other purposes than their slots.
_OTHER_CONNECTIONS = 100
# More connections than a relay needs that has not one for each slot.
_MOST_CONNECTIONS = 1_500
_NOTE_START = text(f"INSERT INTO {SCHEMA}.start (job_id, token) VALUES (:job_id, :token)")
_NOTE_SENT = text(
    f"INSERT INTO {SCHEMA}.effect (job_id, attempt, crashes) "
    f"SELECT :job_id, 0, 0 WHERE NOT EXISTS (SELECT FROM {SCHEMA}.effect WHERE job_id = :job_id)"
)
_FORGET_STARTS = text(f"TRUNCATE {SCHEMA}.start")


class TortureFailed(OutboxqError):
    """Raised if the torture test could not be completed. It does not mean that outboxq has broken a promise."""


def run_torture(options: TortureOptions, say: Callable[[str], None]) -> TortureReport:
    """Run a torture test: start a server, relays and producers, do the faults, and check all promises.

    All of it is deleted at the end. No configured database is touched.

    Args:
        say: Called with a line of progress from time to time.

    Raises:
        PostgresUnavailable: the embedded server does not run here.
        TortureFailed: a relay could not be started, or Ctrl-C was pressed.
    """
    interrupted = threading.Event()
    slots = options.relays * options.slots * len(_kinds(options.mode))
    settings = {**_SERVER_SETTINGS, "max_connections": str(min(slots + _OTHER_CONNECTIONS, _MOST_CONNECTIONS))}
    with (
        stop_signals(interrupted.set),
        start_embedded(settings=settings) as server,
        tempfile.TemporaryDirectory(prefix="outboxq-torture-") as starts,
    ):
        say(f"PostgreSQL {server.version} of its own (pid {server.pid}), seed {options.seed}")
        database = server.create_database()
        with Watcher(database.url) as watcher:
            watcher.ask(_prepare)
            return _Run(options, server, database.url, watcher, say, interrupted, starts).play()


def _prepare(connection: Connection) -> None:
    migrate(connection)
    connection.execute(text(CREATE))
    connection.execute(text(LIMIT_THE_QUEUE))
    connection.commit()


def _note_starts(connection: Connection, starts: Sequence[Start]) -> None:
    connection.execute(_FORGET_STARTS)
    if starts:
        connection.execute(_NOTE_START, [{"job_id": each.job_id, "token": each.token} for each in starts])


def _note_sent(connection: Connection, sent: Iterable[UUID]) -> None:
    """Record each sent message as its job's effect; a message that was sent again is one effect."""
    connection.execute(_NOTE_SENT, [{"job_id": job_id} for job_id in sent])
    connection.commit()


def _kinds(mode: Mode) -> list[JobKind[...]]:
    plain: list[JobKind[...]] = [app.record, app.record_async]
    leases: list[JobKind[...]] = [app.record_leased, app.record_leased_async]
    flow: list[JobKind[...]] = [
        app.group, app.group_async, app.group_leased, app.limit, app.coalesce, app.coalesce_leased, app.unique,
        app.unique_leased, app.batched, app.batched_leased,
    ]  # fmt: skip
    everything = plain + leases
    calls: list[JobKind[...]] = [app.call]
    of_mode: dict[Mode, list[JobKind[...]]] = {
        "transaction": plain, "lease": leases, "mixed": everything, "flow": everything + flow, "calls": calls,
        "windows": [app.window, app.window_async],
    }  # fmt: skip
    return of_mode[mode]


@dataclass(eq=False)
class _Run:
    """One torture test, from the start of the relays to the report."""

    options: TortureOptions
    server: Server
    url: str
    watcher: Watcher
    say: Callable[[str], None]
    interrupted: threading.Event
    starts: str

    def __post_init__(self) -> None:
        self._begun = self._moved_at = time.monotonic()
        self._plan = plan_run(self.options, lease_seconds=LEASE_SECONDS)
        self._due = list(reversed(self._plan.faults))
        self._done: Counter[str] = Counter(self._plan.inside)
        self._not_met = 0
        self._last_ends: tuple[object, ...] = ()
        self._longest_stall = 0.0
        self._backlog = 0
        self._said_at = 0.0
        # Twice what all slots hold, so that a killed relay has all of its slots at work.
        self._room = 2 * self.options.relays * self.options.slots
        self._sent = set[UUID]()

    def play(self) -> TortureReport:
        """Run the test from the start of the relays; return the report. All processes end, even after an error."""
        with ExitStack() as stack:
            relay_proxy = stack.enter_context(CommitProxy(self.url))
            producer_proxy = stack.enter_context(CommitProxy(self.url))
            self._relays = Relays(relay_proxy.url, self.options.mode, self.options.relays, self.options.slots)
            stack.callback(self._relays.close)
            full = self.options.slots if self.options.mode == "calls" else 0
            everything = (self.server, self.watcher, self._relays, relay_proxy, producer_proxy)
            self._injector = FaultInjector(*everything, self.interrupted, self._let_producers_ahead, full)
            kinds = _kinds(self.options.mode)
            transactions = plan_transactions(self.options, self._plan, len(kinds))
            self._producers = Producers(producer_proxy.url, transactions, kinds, self.starts)
            stack.callback(self._producers.close)
            gave_up = self._torture()
            self._producers.close()
            self.watcher.wait_until_connected(self._relays.names)
            self._relays.stop()
        return self._report(gave_up)

    def _torture(self) -> str | None:
        """Observe the run, resume or replace relays, and do the faults that are due, until all jobs are done.

        Return the reason if the run took too long or made no progress, otherwise None.
        """
        while True:
            self._observe()
            self._relays.tend()
            if self._due and self._finished >= self._due[-1].at:
                self._inject(self._due.pop())
            # In this order: after the producers have finished, no more jobs are enqueued.
            if self._producers.have_finished() and not self._due and not self.watcher.progress().backlog:
                return None
            if time.monotonic() - self._begun > self.options.minutes * 60:
                return f"it took longer than {self.options.minutes:g} minutes"
            if time.monotonic() - self._moved_at > _STALL_LIMIT_SECONDS:
                return f"nothing moved for {_STALL_LIMIT_SECONDS:.0f} seconds"
            if self.interrupted.wait(_POLL_SECONDS):
                raise TortureFailed("interrupted: the relays and the server were ended, nothing is left")

    @property
    def _finished(self) -> int:
        return self._producers.journal.enqueued - self._backlog

    def _observe(self) -> None:
        """Record the progress and the leases, write the producers' outcomes, and permit the producers more jobs."""
        if self.options.mode == "windows":
            self._note_sent()
        row = self.watcher.progress()
        self.watcher.note_leases()
        self.watcher.ask(self._producers.journal.flush)
        now, ends = time.monotonic(), (row.last_effect, row.dead)
        if ends != self._last_ends or not row.is_due:
            self._longest_stall = max(self._longest_stall, now - self._moved_at)
            self._last_ends, self._moved_at = ends, now
        self._backlog = row.backlog
        self._allow()
        if now - self._said_at > _SAY_SECONDS:
            self._said_at = now
            outside_done = self._done.total() - sum(self._plan.inside.values())
            self.say(
                f"{self._finished:,} of {self.options.jobs:,} jobs, {outside_done:,} faults done, "
                f"{row.backlog:,} jobs wait, longest stall {self._longest_stall:.1f} s, {now - self._begun:.0f} s"
            )

    def _note_sent(self) -> None:
        sent = {start.job_id for start in read_starts(self.starts)}
        if fresh := sent - self._sent:
            self.watcher.ask(lambda connection: _note_sent(connection, fresh))
            self._sent = sent

    def _allow(self, more: int = 0) -> None:
        limit = self._finished + max(_BACKLOG, self._room)
        if self._due:
            ahead = min(max(_AHEAD_OF_FAULT, self._room), int(self.options.jobs * _AHEAD_OF_LAST_FAULT))
            limit = min(limit, self._due[-1].at + ahead)
        self._producers.allow(limit + more)

    def _let_producers_ahead(self) -> None:
        self._allow(more=int(self.options.jobs * _AHEAD_OF_LAST_FAULT) // 2)

    def _inject(self, fault: Fault) -> None:
        if self._injector.inject(fault):
            self._done[fault.kind] += 1
        else:
            self._not_met += 1

    def _report(self, gave_up: str | None) -> TortureReport:
        self.watcher.ask(self._producers.journal.flush)
        starts, sent_again = list(read_starts(self.starts)), 0
        if self.options.mode == "windows":
            self._note_sent()
            sent_again = len(starts) - len(self._sent)
        else:
            self.watcher.ask(lambda connection: _note_starts(connection, starts))
        self.watcher.wait_until_alone()
        verdict = self.watcher.ask(
            lambda connection: check_history(connection, max_attempts=app.MAX_ATTEMPTS, max_crashes=MAX_CRASHES)
        )
        return TortureReport(
            seed=self.options.seed,
            mode=self.options.mode,
            jobs=self.options.jobs,
            jobs_enqueued=self._producers.journal.told["ok"] + verdict.figures["commits_unanswered_kept"],
            jobs_rolled_back=self._producers.rolled_back,
            faults=dict(sorted(self._done.items())),
            faults_not_met=self._not_met,
            **verdict.figures,
            lost=verdict.counts["lost"],
            doubled=verdict.counts["doubled"],
            ran_though_rolled_back=verdict.counts["ran though rolled back"],
            jobs_left=verdict.counts["left"],
            relays_started=self._relays.started,
            jobs_of_killed_relays=self._injector.jobs_of_killed_relays,
            calls_begun=len(starts),
            sent_again=sent_again,
            longest_stall_seconds=round(self._longest_stall, 1),
            seconds=round(time.monotonic() - self._begun, 1),
            server=f"PostgreSQL {self.server.version}",
            problems=[*([gave_up] if gave_up else []), *verdict.problems, *self._relays.problems],
        )
