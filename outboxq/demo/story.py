"""The course of the demo: customers order, relays run jobs, one relay is killed and replaced, the proof is counted."""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sqlalchemy import Engine, Row, TextClause, create_engine, text
from sqlalchemy.schema import CreateSchema

from outboxq.config import RelayConfig
from outboxq.demo.customers import CUSTOMERS, Customers, PlannedOrder, add_products, plan_orders
from outboxq.demo.proof import Kill, Proof, prove
from outboxq.demo.shop import SCHEMA, Base
from outboxq.demo.show import Show, open_show
from outboxq.errors import ConfigError, OutboxqError
from outboxq.migrations.runner import migrate
from outboxq.postgres import Server, start_embedded
from outboxq.relay.signals import stop_signals
from outboxq.testing.relay_process import RelayProcess

FEWEST_JOBS = 100
_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.05
_STOP_SECONDS = 15.0
INTERRUPTED = 130

_SLOTS_PER_QUEUE = 2
_SLOTS = 2 * _SLOTS_PER_QUEUE  # the slots of the shop's two queues
_START_SECONDS = 30.0

# A claim is an open transaction that has deleted the job: its id is the row's xmax. The lock on the ledger shows that
# the handler has written its effect.
_RUNNING = text(
    f"""\
SELECT job.id, activity.state_change, EXISTS (
  SELECT FROM pg_locks
  WHERE pid = activity.pid AND relation = '{SCHEMA}.effect'::regclass AND mode = 'RowExclusiveLock'
) AS has_written
FROM outboxq.job JOIN pg_stat_activity AS activity ON activity.backend_xid = job.xmax
WHERE activity.application_name = :relay AND activity.state = 'idle in transaction'"""  # noqa: S608  # SCHEMA is a constant
)
_CONNECTIONS = text("SELECT FROM pg_stat_activity WHERE application_name = :relay")
_PROGRESS = text("SELECT count(*) AS done, EXISTS (SELECT FROM outboxq.job) AS has_jobs FROM shop.effect")


def run_demo(*, jobs: int, seed: int | None = None, json: bool = False) -> int:
    """Run the demo on a server of its own, and print its proof.

    Starts a PostgreSQL server and three relay processes; all of it is deleted at the end, even after Ctrl-C. No
    configured database is touched.

    Args:
        jobs: The number of committed jobs, at least 100; up to two more may be committed.
        seed: The seed of an earlier run, to repeat its customers; None draws one.
        json: Print one JSON object instead of progress and a table.

    Returns:
        0 if the proof holds, 1 if it does not, 130 after Ctrl-C.

    Raises:
        ConfigError: too few jobs, or rich is not installed.
        DemoFailed: a relay did not start, or ended by itself.
        PostgresUnavailable: the embedded server does not run here.
    """
    if jobs < FEWEST_JOBS:
        raise ConfigError(f"the demo takes at least {FEWEST_JOBS} jobs, to have some left to kill, got {jobs}")
    seed = random.randrange(1_000_000) if seed is None else seed
    begun = time.monotonic()
    # Checked between steps: a KeyboardInterrupt may be raised, and be lost, in a destructor of any library.
    interrupted = threading.Event()
    with open_show(as_json=json) as show, stop_signals(interrupted.set):
        try:
            with start_embedded(durable=True) as server:
                proof = _play_on(server, show, plan_orders(jobs, seed), seed, interrupted)
        except Interrupted:
            show.say("Interrupted: the relays and the server were ended, nothing is left.")
            return INTERRUPTED
        facts = {"server": described(server), "seed": seed, "seconds": round(time.monotonic() - begun, 1)}
        show.finish(proof, facts)
    return 0 if proof.holds else 1


class DemoFailed(OutboxqError):
    """The demo could not be run to its end, because a relay did not start or ended by itself."""


class Interrupted(OutboxqError):
    """Ctrl-C was pressed during the demo; `run_demo` then returns 130."""


def _play_on(server: Server, show: Show, orders: list[PlannedOrder], seed: int, interrupted: threading.Event) -> Proof:
    show.say(f"Server: {described(server)}, started for this run alone (pid {server.pid}).")
    with prepared(server) as (url, engine), ExitStack() as stack:
        story = _Story(url, engine, show, orders, stack)
        story.start_relays()
        show.say(f"{len(CUSTOMERS)} customers place {len(orders)} orders (seed {seed}), some of which are rolled back.")
        customers = Customers(engine, orders)
        stack.callback(customers.stop)
        kill = story.watch(customers, interrupted)
        story.stop_relays()
        with engine.connect() as connection:
            return prove(connection, kill)


class _Story:
    """One run of the demo: its relays, and methods for its steps."""

    def __init__(self, url: str, engine: Engine, show: Show, orders: list[PlannedOrder], stack: ExitStack) -> None:
        self._url, self._engine, self._show, self._stack = url, engine, show, stack
        self._jobs = sum(order.jobs for order in orders)
        self._relays: list[RelayProcess] = []
        self._started = 0

    def start_relays(self) -> None:
        """Start two relays, and wait until both can run jobs."""
        for _ in range(2):
            self._start_relay()
        for relay in self._relays:
            wait_until_it_serves(self._engine, relay)
        names = " and ".join(f"{relay.name} (pid {relay.pid})" for relay in self._relays)
        self._show.say(f"{names} serve the queues warehouse (sync handlers) and mail (async handlers).")

    def watch(self, customers: Customers, interrupted: threading.Event) -> Kill | None:
        """Wait until every job is done; half-way, kill the second relay and start a third.

        Returns the killed relay and its jobs, or None if the relay never ran jobs when it was to be killed.
        """
        kill: Kill | None = None
        deadline = time.monotonic() + _LIMIT_SECONDS
        while time.monotonic() < deadline:
            [seen] = self._ask(_PROGRESS)
            self._show.progress(seen.done, self._jobs)
            for relay in self._relays:
                check_runs(relay)
            if kill is None and seen.done >= self._jobs // 2:
                kill = self._kill_second_relay(seen.done)
            # In this order, so that jobs enqueued after the query are not missed.
            if customers.have_finished() and not seen.has_jobs and not self._ask(_PROGRESS)[0].has_jobs:
                return kill
            if interrupted.wait(_POLL_SECONDS):
                raise Interrupted
        # The proof counts the remaining jobs.
        return kill

    def stop_relays(self) -> None:
        """Stop all relays after they have finished their jobs, so that nothing changes while the proof is counted."""
        for relay in self._relays:
            relay.ask_to_stop()
        for relay in self._relays:
            relay.wait(_STOP_SECONDS)

    def _start_relay(self) -> RelayProcess:
        """Start a relay, with its name on its database connections, so that the proof can see which relay did a job."""
        self._started += 1
        config = RelayConfig(slots_per_queue=_SLOTS_PER_QUEUE)
        relay = RelayProcess("outboxq.demo.shop:jobs", self._url, config, name=f"relay {self._started}")
        self._stack.callback(relay.close)
        self._relays.append(relay)
        return relay

    def _kill_second_relay(self, done: int) -> Kill | None:
        victim = self._relays[1]
        kill = self._kill_at_work(victim)
        if kill is None:
            return None
        self._relays.remove(victim)
        self._show.say(
            f"{kill.relay} (pid {kill.pid}) killed with SIGKILL after {done} effects, while it ran "
            f"{len(kill.running)} jobs; {kill.written} of them had written their effect and not committed it."
        )
        third = self._start_relay()
        others = " and ".join(f"{relay.name} (pid {relay.pid})" for relay in self._relays)
        self._show.say(f"{third.name} (pid {third.pid}) started in its place: {others} take over.")
        return kill

    def _kill_at_work(self, relay: RelayProcess) -> Kill | None:
        """Kill the relay with SIGKILL if it runs jobs at this moment; otherwise leave it alive and return None.

        The process is suspended first. So the database shows exactly the jobs that the relay runs when it is killed.
        """
        relay.pause()
        try:
            running = self._ask(_RUNNING, relay=relay.name)
            # A COMMIT that was on its way when the process was stopped has arrived by now.
            time.sleep(0.1)
            still = [row for row in self._ask(_RUNNING, relay=relay.name) if row in running]
            if not still:
                return None
            relay.kill()
            return Kill(relay.name, relay.pid, tuple(row.id for row in still), sum(row.has_written for row in still))
        finally:
            relay.resume()

    def _ask(self, question: TextClause, **parameters: object) -> Sequence[Row[Any]]:
        with self._engine.connect() as connection:
            return connection.execute(question, parameters).all()


def check_runs(relay: RelayProcess) -> None:
    """Check that the relay's process is alive.

    Raises:
        DemoFailed: the process has ended; the message ends with its log.
    """
    code = relay.returncode
    if code is not None:
        raise DemoFailed(f"{relay.name} (pid {relay.pid}) was to run, but ended with code {code}:\n{relay.log}")


def wait_until_it_serves(engine: Engine, relay: RelayProcess, slots: int = _SLOTS) -> None:
    """Wait until a relay can run jobs: it has `slots` connections to the database.

    Raises:
        DemoFailed: the relay ended, or takes too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with engine.connect() as connection:
            if len(connection.execute(_CONNECTIONS, {"relay": relay.name}).all()) >= slots:
                return
        check_runs(relay)
        if time.monotonic() > deadline:
            raise DemoFailed(f"{relay.name} was to serve within {_START_SECONDS:.0f} s: is this machine overloaded?")
        time.sleep(_POLL_SECONDS)


@contextmanager
def prepared(server: Server) -> Iterator[tuple[str, Engine]]:
    """Run the block with a new database that has outboxq's tables and the shop's; yield its URL and an engine."""
    database = server.create_database()
    engine = create_engine(database.url, pool_size=len(CUSTOMERS) + 1, connect_args={"application_name": "shop"})
    try:
        with engine.begin() as connection:
            migrate(connection)
            connection.execute(CreateSchema(SCHEMA))
            Base.metadata.create_all(connection)
        add_products(engine)
        yield database.url, engine
    finally:
        engine.dispose()


def described(server: Server) -> str:
    return f"PostgreSQL {server.version} from {server.source}, with fsync on"
