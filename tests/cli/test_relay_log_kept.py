"""An application that configures logging does not silence its relay, wherever it does so."""

from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, external
from outboxq.postgres import Database
from tests.support.cli import run

# As Alembic's own template has it; `fileConfig` disables existing loggers by default.
INI = """\
[loggers]
keys = root

[handlers]
keys = console

[formatters]
keys = generic

[logger_root]
level = WARNING
handlers = console

[handler_console]
class = StreamHandler
args = (sys.stderr,)
level = NOTSET
formatter = generic

[formatter_generic]
format = %(levelname)-5.5s [%(name)s] %(message)s
"""
APPLICATION = """\
import logging.config
from contextlib import contextmanager
from outboxq import Context, Jobs

def configure(place):
    if place == PLACE:
        logging.config.fileConfig("alembic.ini")

@contextmanager
def lifespan():
    configure("lifespan")
    yield

jobs = Jobs(lifespan=lifespan)

@jobs.handler(queue="q")
def handle(ctx: Context) -> None:
    configure("handler")

configure("import")
"""


@pytest.mark.first_and_last
@pytest.mark.parametrize("place", ["import", "lifespan", "handler"])
def test_the_log_goes_on(
    outboxq_database: Database, sessions: sessionmaker[OutboxSession], tmp_path: Path, place: str
) -> None:
    """Its own loggers stay enabled, and it says so once."""
    (tmp_path / "alembic.ini").write_text(INI)
    (tmp_path / "configuring.py").write_text(f"PLACE = {place!r}\n{APPLICATION}")
    with sessions.begin() as session:
        session.add_job(external("handle", queue="q"))
    said = run("relay", "configuring:jobs", "--drain", url=outboxq_database.url, cwd=tmp_path).ok()
    assert "[outboxq.relay] relay stopped: done=1" in said.stderr
    assert said.stderr.count("existing loggers are disabled: outboxq's stay enabled") == 1
