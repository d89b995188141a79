"""A full disk: what needs no new space goes on, what does fails and is tried again, and nothing is lost."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg.errors import DiskFull
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Mapped, mapped_column, sessionmaker

from outboxq import Backoff, Context, JobKind, Jobs, OutboxSession, RelayConfig
from outboxq.events import DatabaseLost, JobRetried
from outboxq.postgres import Database, Server
from outboxq.postgres.binaries import embedded_binaries
from tests.conftest import StartRelay
from tests.support.app import Base, Effect
from tests.support.ledger import dead, ledger, waiting
from tests.support.own_server import own_database, own_server
from tests.support.waiting import wait_until

QUICK = Backoff(max_attempts=1000, first_seconds=0.05, factor=1.0, jitter=0.0)
PAGE = "x" * 4000

jobs = Jobs()


class Report(Base):
    """The business table on the small disk; not compressible, so that a row takes its page."""

    __tablename__ = "report"
    row: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]


@jobs.handler(queue="ledger", retry=QUICK)
def record(ctx: Context, name: str) -> None:
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="ledger", retry=QUICK)
def write_report(ctx: Context, name: str) -> None:
    ctx.session.add(Report(body=PAGE))
    ctx.session.add(Effect(name=name))


@jobs.handler(queue="ledger", retry=QUICK)
def fail_once(ctx: Context, name: str) -> None:
    if ctx.job.attempt == 1:
        raise ValueError("not yet")
    ctx.session.add(Effect(name=name))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with own_server() as server:
        yield server


@pytest.fixture(scope="module")
def small_disk(server: Server) -> Iterator[Path]:
    """A file system of 4 MB that belongs to the server's user."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    directory = Path(tempfile.mkdtemp(prefix="outboxq-small-disk-", dir="/tmp"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "outboxq-test", str(directory)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.strip()}")
        try:
            user = embedded_binaries().user
            assert user is not None
            os.chown(directory, user.uid, user.gid)
            yield directory
        finally:
            # Lazily: the server still holds its files, and goes after us.
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
    finally:
        directory.rmdir()


@pytest.fixture
def small(server: Server, small_disk: Path) -> Iterator[tuple[Database, Engine]]:
    """A database with the tablespace `small`."""
    with own_database(server) as (database, engine):
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"CREATE TABLESPACE small LOCATION '{small_disk}'"))
        try:
            with engine.begin() as connection:
                # Short enough to have no TOAST table, whose index TRUNCATE would have to write.
                connection.execute(text("CREATE TABLE filler (body varchar(400)) TABLESPACE small"))
                connection.execute(text("ALTER TABLE report ALTER body SET STORAGE PLAIN"))
            yield database, engine
        finally:
            engine.dispose()
            database.drop()
            with _autocommit(server) as admin:
                admin.execute(text("DROP TABLESPACE small"))


@contextmanager
def _autocommit(server: Server) -> Iterator[Connection]:
    engine = create_engine(server.url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def fill(engine: Engine) -> None:
    """Take all of the small disk."""
    with contextlib.suppress(OperationalError), engine.connect() as connection:
        for _ in range(2000):
            connection.execute(
                text("INSERT INTO filler SELECT left(:page, 400) FROM generate_series(1, 70)"), {"page": PAGE}
            )
            connection.commit()
        raise AssertionError("the small disk is larger than it should be")


def make_room(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE filler"))


@pytest.mark.large
def test_a_full_disk_under_a_business_table_fails_its_jobs_alone(
    small: tuple[Database, Engine], start_relay: StartRelay
) -> None:
    """Jobs that write elsewhere are done meanwhile; those that write there are retried, and done once there is room."""
    database, engine = small
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE report SET TABLESPACE small"))
    fill(engine)
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        for number in range(20):
            session.add_job(record, name=f"elsewhere-{number}")
            session.add_job(write_report, name=f"there-{number}")
    with start_relay(jobs, RelayConfig(batch_size=5), engine=database.url) as relay:
        wait_until(lambda: ledger(engine).total() == 20, "the jobs that write elsewhere")
        wait_until(lambda: len(relay.of(JobRetried)) >= 20, "the others to be retried")
        assert {event.error_type for event in relay.of(JobRetried)} == {"psycopg.errors.DiskFull"}
        assert waiting(engine) == 20
        make_room(engine)
        wait_until(lambda: waiting(engine) == 0, "the others to be done")
    assert set(ledger(engine).values()) == {1}
    assert ledger(engine).total() == 40
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM report")).scalar_one() == 20
    assert dead(engine) == 0


@pytest.mark.large
def test_a_full_disk_under_the_queue_is_drained(small: tuple[Database, Engine], start_relay: StartRelay) -> None:
    """A claim deletes, and so needs no space: what is in the queue is done although producers are refused."""
    database, engine = small
    move_the_queue(engine)
    accepted = fill_the_queue(engine, record)
    with start_relay(jobs, RelayConfig(batch_size=5), engine=database.url) as relay:
        wait_until(lambda: waiting(engine) == 0, "the queue to be drained")
        assert not relay.of(DatabaseLost)
    assert ledger(engine) == dict.fromkeys(accepted, 1)


@pytest.mark.wide
def test_jobs_that_fail_while_the_queue_has_no_space_are_kept(
    small: tuple[Database, Engine], start_relay: StartRelay
) -> None:
    """Their retry cannot be written: the relay says so and goes on asking, and loses none of them."""
    database, engine = small
    move_the_queue(engine)
    accepted = fill_the_queue(engine, fail_once)
    with start_relay(jobs, RelayConfig(batch_size=5), engine=database.url) as relay:
        wait_until(lambda: any("53100" in event.error for event in relay.of(DatabaseLost)), "the relay to say so")
        make_room(engine)
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert ledger(engine) == dict.fromkeys(accepted, 1)
    assert dead(engine) == 0


def move_the_queue(engine: Engine) -> None:
    """Put the queue's table and its indexes on the small disk."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.job SET TABLESPACE small"))
        query = text("SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'outboxq.job'::regclass")
        for index in connection.execute(query).scalars().all():
            connection.execute(text(f"ALTER INDEX {index} SET TABLESPACE small"))


def fill_the_queue(engine: Engine, handler: JobKind[[str]]) -> list[str]:
    """Enqueue until the full disk refuses it, free space in the table's own pages included; what was accepted."""
    accepted = [f"early-{number}" for number in range(50)]
    for name in accepted:
        enqueue_one(engine, handler, name)
    fill(engine)
    while True:
        try:
            enqueue_one(engine, handler, f"late-{len(accepted)}")
        except OperationalError as error:
            if not isinstance(error.orig, DiskFull):
                raise
            return accepted
        accepted.append(f"late-{len(accepted)}")


def enqueue_one(engine: Engine, handler: JobKind[[str]], name: str) -> None:
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_job(handler, name=name)
