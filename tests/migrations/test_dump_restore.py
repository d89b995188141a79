"""Dump and restore, as docs/operating.md has it: what keeps the installation's id, and what does not."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, Relay, RelayConfig
from outboxq.postgres import Database, Server
from outboxq.postgres.binaries import SourceFailed, embedded_binaries
from tests.support import app
from tests.support.cli import REPOSITORY, call
from tests.support.effects import SyncOnce
from tests.support.ledger import ledger

DOCUMENTED = REPOSITORY / "docs" / "operating.md"


def programs() -> list[Path]:
    """Directories that may hold pg_dump."""
    found = [] if (on_path := shutil.which("pg_dump")) is None else [Path(on_path).parent]
    with suppress(SourceFailed):
        found.append(embedded_binaries().directory)
    return found


def fits(directory: Path, server: int) -> bool:
    """Whether its pg_dump knows this server: not an older one than that."""
    if not (directory / "pg_dump").exists():
        return False
    said = subprocess.run([directory / "pg_dump", "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r" (\d+)", said)[0]) >= server


@pytest.fixture
def tools(engine: Engine) -> Path:
    """The directory of a pg_dump and a pg_restore that know this server."""
    with engine.connect() as connection:
        server = int(connection.execute(text("SELECT current_setting('server_version_num')::int / 10000")).scalar_one())
    found = next((directory for directory in programs() if fits(directory, server)), None)
    if found is None:
        pytest.skip(f"there is no pg_dump for PostgreSQL {server} here")
    return found


@pytest.fixture
def empty(outboxq_server: Server) -> Iterator[Database]:
    with outboxq_server.create_database() as database:
        yield database


@pytest.fixture
def target(empty: Database) -> Iterator[Engine]:
    engine = create_engine(empty.url)
    yield engine
    engine.dispose()


def commands(heading: str) -> list[str]:
    """The command lines of the sample that follows these words in the documentation."""
    sample = DOCUMENTED.read_text().partition(heading)[2].partition("```bash\n")[2].partition("```")[0]
    found = sample.replace("\\\n", " ").splitlines()
    assert found
    return found


@pytest.fixture
def follow(tools: Path, outboxq_database: Database, empty: Database, tmp_path: Path) -> Callable[[str], None]:
    """Runs what the documentation says, from this test's database to the empty one."""

    databases = {"shop": outboxq_database, "copy": empty}

    def run(heading: str) -> None:
        for line in commands(heading):
            words = [url(databases[word]) if word in databases else word for word in shlex.split(line)]
            if words[0] == "outboxq":
                call(*words[1:], url=empty.url).ok()
            else:
                subprocess.run([tools / words[0], *words[1:]], cwd=tmp_path, check=True)

    return run


def url(database: Database) -> str:
    return make_url(database.url).set(drivername="postgresql").render_as_string(hide_password=False)


def id_of(engine: Engine) -> UUID:
    with engine.connect() as connection:
        found: UUID = connection.execute(text("SELECT id FROM outboxq.deployment")).scalar_one()
    return found


@pytest.fixture
def busy(sessions: sessionmaker[OutboxSession], engine: Engine) -> UUID:
    """A database with a job that waits and a call that was made; its installation's id."""
    with sessions.begin() as session:
        session.add_job(app.record, name="copied")
    once = SyncOnce(engine)
    once("charge", key="1", call=lambda _: "charged")
    once.dispose()
    return id_of(engine)


def works(database: Database, engine: Engine) -> bool:
    """Whether what was restored is a whole installation: its job runs, its call is replayed, and it takes new jobs."""
    with sessionmaker(engine, class_=OutboxSession).begin() as session:
        session.add_job(app.record, name="new")
    Relay(database.url, app.jobs, RelayConfig(), hooks=[]).drain()
    once = SyncOnce(engine)
    replayed = once("charge", key="1", call=str)
    once.dispose()
    return replayed == "charged" and ledger(engine) == {"copied": 1, "new": 1}


def test_a_whole_dump_moves_an_installation(follow, busy: UUID, empty: Database, target: Engine) -> None:
    """Its id goes with it: the same calls get the same keys."""
    follow("To move an installation")
    assert id_of(target) == busy
    assert works(empty, target)


def test_a_copy_gets_an_id_of_its_own(follow, busy: UUID, empty: Database, target: Engine) -> None:
    """As the documentation says, before anything runs there."""
    follow("To copy one")
    assert id_of(target) != busy
    assert works(empty, target)


@pytest.mark.wide
def test_data_alone_goes_into_an_installation_that_is_there(
    follow, busy: UUID, empty: Database, target: Engine
) -> None:
    """Without the tables that have their rows already."""
    app.prepare(empty.url)
    follow("To copy the data alone")
    assert id_of(target) != busy
    assert works(empty, target)


def test_data_alone_keeps_the_id_where_the_target_has_none(
    tools: Path, busy: UUID, outboxq_database: Database, empty: Database, target: Engine, tmp_path: Path
) -> None:
    """Its own id and steps are taken out first, as the documentation says."""
    statement = "TRUNCATE outboxq.deployment, outboxq.migration"
    assert f"`{statement}`" in DOCUMENTED.read_text()
    app.prepare(empty.url)
    with target.begin() as connection:
        connection.execute(text(statement))
    dump = tmp_path / "data.dump"
    subprocess.run([tools / "pg_dump", "-Fc", "--data-only", "-f", dump, "-d", url(outboxq_database)], check=True)
    subprocess.run([tools / "pg_restore", "--exit-on-error", "-1", "-d", url(empty), dump], check=True)
    assert id_of(target) == busy
    assert works(empty, target)
