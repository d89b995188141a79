"""A primary is killed with relays, producers and an inbox at work, and its synchronous standby takes over."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import sessionmaker

from outboxq import Inbox, OutboxSession
from tests.support import app, cli
from tests.support.failover_app import record_under_lease
from tests.support.haproxy import haproxy
from tests.support.ledger import dead, ledger, rows, waiting
from tests.support.own_server import own_database
from tests.support.pgbouncer import pgbouncer
from tests.support.standby import Pair, primary_and_standby
from tests.support.urls import libpq_url
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.large, pytest.mark.timeout(600)]

SEED = os.environ.get("FAILOVER_SEED", "1")
RELAYS, PRODUCERS = 2, 3
# In the ledger before the kill, and acknowledged after the promotion.
BEFORE, AFTER = 300, 100
PROMOTED_AFTER = 1.0
KINDS = (app.record, app.record_async, app.record_slowly, record_under_lease)
inbox = Inbox("failover")


@contextmanager
def several_hosts(pair: Pair, url: str) -> Iterator[str]:
    hosts = [f"127.0.0.1:{port}" for port in (make_url(url).port, pair.standby_port)]
    query = {"host": hosts, "target_session_attrs": "read-write"}
    yield make_url(url).set(host=None, port=None, query=query).render_as_string(hide_password=False)


@contextmanager
def behind_haproxy(pair: Pair, url: str) -> Iterator[str]:
    with haproxy([libpq_url(url), libpq_url(pair.standby_url(url))]) as port:
        yield make_url(url).set(port=port).render_as_string(hide_password=False)


@contextmanager
def behind_pgbouncer(pair: Pair, url: str) -> Iterator[str]:
    # A connection for each slot of a relay, its lease and its pruning, and for each producer.
    with behind_haproxy(pair, url) as reached, pgbouncer(reached, settings={"default_pool_size": 40}) as pooled:
        yield f"{pooled}?prepare_threshold=none"


WAYS: dict[str, tuple[Callable[[Pair, str], object], tuple[str, ...]]] = {
    "several hosts": (several_hosts, ()),
    "haproxy": (behind_haproxy, ()),
    "pgbouncer behind haproxy": (behind_pgbouncer, ("--no-listen",)),
}


@dataclass
class Work:
    """Producers and a receiver of messages on threads, and the names whose COMMIT was answered."""

    sessions: sessionmaker[OutboxSession]
    random: random.Random
    acknowledged: list[str] = field(default_factory=list)
    stopped: Event = field(default_factory=Event)

    def produce(self, producer: int) -> None:
        """Order after order, each a transaction with the row of each request and its job."""
        number = 0
        while not self.stopped.is_set():
            names = [f"{producer}-{number}-{part}" for part in range(self.random.randint(1, 3))]
            # Another name after an error: the transaction may stand, and the rows tell.
            number += 1
            self._commit(names, lambda session, names=names: self._order(session, names))

    def receive(self) -> None:
        """Messages as a broker delivers them: each until it is acknowledged, and some of them again."""
        number = 0
        while not self.stopped.is_set():
            message, left = f"message-{number}", self.random.choice((1, 1, 1, 2))
            number += 1
            while left:
                left -= self._commit([message], lambda session, message=message: self._accept(session, message))

    def _order(self, session: OutboxSession, names: list[str]) -> None:
        for name in names:
            session.execute(text("INSERT INTO request VALUES (:name)"), {"name": name})
            kind = self.random.choice(KINDS)
            more = {"seconds": 0.05} if kind is app.record_slowly else {}
            session.add_job(kind, name=name, **more)

    def _accept(self, session: OutboxSession, message: str) -> None:
        if inbox.accept(session, message):
            session.execute(text("INSERT INTO request VALUES (:name)"), {"name": message})
            session.add_job(app.record, name=message)

    def _commit(self, names: list[str], write: Callable[[OutboxSession], None]) -> bool:
        self.stopped.wait(self.random.uniform(0, 0.01))
        try:
            with self.sessions.begin() as session:
                write(session)
        except DBAPIError:
            self.stopped.wait(0.05)
            return False
        self.acknowledged.extend(names)
        return True

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ThreadPoolExecutor(PRODUCERS + 1) as pool:
            ended = [*(pool.submit(self.produce, number) for number in range(PRODUCERS)), pool.submit(self.receive)]
            try:
                yield
            finally:
                self.stopped.set()
        for each in ended:
            each.result()


@contextmanager
def relay(url: str, log: Path, options: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    command = cli.command("relay", "tests.support.failover_app:jobs", "--batch-size", 3, *options)
    with (
        log.open("wb") as written,
        subprocess.Popen(command, cwd=cli.REPOSITORY, env=cli.environment(url), stderr=written) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def effects_of(url: str) -> int:
    """The number of effects on the promoted server; 0 while it is a standby."""
    with suppress(psycopg.OperationalError), psycopg.connect(libpq_url(url), autocommit=True) as connection:
        query = "SELECT count(*) FROM effect_ledger WHERE NOT pg_is_in_recovery()"
        (found,) = connection.execute(query).fetchone() or (0,)
        return int(found)
    return 0


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", WAYS)
def test_a_failover_at_work_loses_and_doubles_nothing(way: str, tmp_path: Path) -> None:
    """Every acknowledged request exists and has one effect, every message one acceptance, and no relay ends."""
    reached_by, options = WAYS[way]
    drawn = random.Random(f"{SEED} {way}")
    with ExitStack() as stack:
        pair = stack.enter_context(primary_and_standby())
        database, primary = stack.enter_context(own_database(pair.primary))
        with primary.begin() as connection:
            connection.execute(text("CREATE TABLE request (name text PRIMARY KEY)"))
        pair.wait_for_replay()
        pair.make_synchronous()
        url = stack.enter_context(reached_by(pair, database.url))
        logs = [tmp_path / f"relay-{number}.log" for number in range(RELAYS)]
        processes = [stack.enter_context(relay(url, log, options)) for log in logs]
        # psycopg takes no None in a URL.
        arguments = {"connect_timeout": 5, "prepare_threshold": None}
        plain = make_url(url).difference_update_query(["prepare_threshold"])
        engine = stack.enter_context(disposed(create_engine(plain, pool_pre_ping=True, connect_args=arguments)))
        work = Work(sessionmaker(engine, class_=OutboxSession), drawn)
        with work.at_work():
            wait_until(lambda: ledger(primary).total() >= BEFORE, "effects before the kill")
            # The moment of the kill is drawn, and so is where it meets everybody.
            time.sleep(drawn.uniform(0, 0.5))
            primary.dispose()
            pair.primary.stop_immediately()
            # A time without a primary, as between a death and its discovery: every try fails until it ends.
            time.sleep(PROMOTED_AFTER)
            assert pair.on_standby("SELECT pg_promote()") is True
            promoted_url = pair.standby_url(database.url)
            kept = wait_until(lambda: effects_of(promoted_url), "the promoted server to take writes")
            acknowledged = len(work.acknowledged)
            wait_until(lambda: effects_of(promoted_url) > kept, "an effect after the promotion")
            wait_until(lambda: len(work.acknowledged) >= acknowledged + AFTER, "producers to go on")
        promoted = stack.enter_context(disposed(create_engine(promoted_url)))
        try:
            wait_until(lambda: waiting(promoted) == 0, "the queue to empty", 240)
        except AssertionError as error:
            left = rows(promoted, "SELECT to_jsonb(job) FROM outboxq.job")
            raise AssertionError(f"{left}\n" + "\n".join(log.read_text() for log in logs)) from error
        assert [process.poll() for process in processes] == [None] * RELAYS
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in processes] == [0] * RELAYS, [log.read_text() for log in logs]
        requests = {str(name) for (name,) in rows(promoted, "SELECT name FROM request")}
        messages = {name for name in requests if name.startswith("message")}
        assert {name.partition("-")[0] for name in requests} == {"message", *map(str, range(PRODUCERS))}
        assert set(work.acknowledged) <= requests, "acknowledged, and not there"
        assert ledger(promoted) == Counter(requests)
        assert {name for (name,) in rows(promoted, "SELECT message_id FROM outboxq.inbox")} == messages
        assert dead(promoted) == 0


@contextmanager
def disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()
