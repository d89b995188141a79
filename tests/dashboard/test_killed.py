"""A dashboard that is killed while many rows are changed: what the audit says, and how that is gone on with."""

import re
import signal
import subprocess
import sys

import httpx
import pytest
from sqlalchemy import Engine, text

from outboxq.postgres import Database
from tests.support.cli import environment, run
from tests.support.dashboard import stage_dashboard
from tests.support.many_dead import add_dead, count_dead, slow_down, until
from tests.support.matrices import sampled
from tests.support.waiting import PATIENCE

_LINK = re.compile(r"(http://[^/\s]+)/login\?token=(\S+)")
_TOTAL = 3_000


@pytest.mark.wide
@pytest.mark.parametrize("how", sampled([signal.SIGKILL, signal.SIGTERM]), ids=lambda how: how.name)
def test_a_dashboard_that_ends_leaves_an_audit_that_counts_and_that_is_gone_on_with(
    how: signal.Signals, outboxq_database: Database, engine: Engine
) -> None:
    """`changed` is the number of rows that were changed; the command line does the rest, and nothing newer."""
    stage_dashboard(engine)
    add_dead(engine, _TOTAL)
    slow_down(engine, 0.1)
    command = [sys.executable, "-m", "outboxq", "dashboard", "--listen", "127.0.0.1:0", "--role", "admin"]
    process = subprocess.Popen(command, env=environment(outboxq_database.url), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        link = _LINK.search(process.stderr.readline())
        assert link is not None
        entry = _begin(link[1], link[2])
        _add_newer(engine)
        until(lambda: _changed(engine, entry) >= 600)
    finally:
        process.send_signal(how)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == (-signal.SIGKILL if how is signal.SIGKILL else 0)
    until(lambda: not _is_connected(engine))
    changed = _changed(engine, entry)
    assert 600 <= changed < _TOTAL
    assert count_dead(engine) == _TOTAL + 1 - changed
    done = run("bulk", "resume", entry, url=outboxq_database.url)
    assert done.exit_code == 0, done.stderr
    assert _changed(engine, entry) == _TOTAL
    assert count_dead(engine) == 1


def _begin(address: str, link_token: str) -> str:
    """Log in, look, and apply what was shown; the id in the audit."""
    headers = {"origin": address, "accept": "application/json"}
    with httpx.Client(base_url=address, headers=headers, timeout=PATIENCE) as program:
        program.get("/login", params={"token": link_token})
        token = program.get("/token").json()["token"]
        (database,) = re.findall(r"[^/.]+", program.get("/").headers["location"])
        asked = {"what": "dead.discard", "kind": "bulk", "csrf": token}
        found = program.post(f"/{database}/bulk/preview", data=asked).json()
        form = {"intent": found["intent"], "typed": str(_TOTAL), "csrf": token}
        return str(program.post(f"/{database}/bulk/apply", data=form).json()["audit"])


def _add_newer(engine: Engine) -> None:
    with engine.begin() as connection:
        newer = "UPDATE outboxq.dead_job SET kind = 'bulk', died_at = clock_timestamp() WHERE kind = 'send'"
        connection.execute(text(newer))


def _changed(engine: Engine, entry: str) -> int:
    with engine.connect() as connection:
        found: int = connection.execute(
            text("SELECT changed FROM outboxq.audit WHERE id = CAST(:entry AS uuid)"), {"entry": entry}
        ).scalar_one()
        return found


def _is_connected(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outboxq dashboard'")
            ).scalar_one()
        )
