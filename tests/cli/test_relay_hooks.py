"""Hooks and arounds of a registry in the processes of `outboxq relay --processes 2`."""

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession
from outboxq.postgres import Database
from tests.support import hooked_app
from tests.support.cli import REPOSITORY, run
from tests.support.ledger import dead_reasons, ledger, waiting
from tests.support.matrices import sampled

COUNT = 60


@pytest.mark.wide
@pytest.mark.parametrize("misdeed", sampled(["raise", "none", "block"]))
def test_hooks_and_arounds_run_in_each_process_and_cost_no_job(
    misdeed: str, tmp_path: Path, outboxq_database: Database, engine: Engine, sessions: sessionmaker[OutboxSession]
) -> None:
    """A hook that raises or blocks for ever is counted; an around that raises or blocks fails its own job alone."""
    names = [*(f"job {number}" for number in range(COUNT)), "raising", "blocking"]
    with sessions.begin() as session:
        for name in names:
            session.add_job(hooked_app.act, name=name)
    told = tmp_path / "told"
    options = ("--processes", 2, "--queue", "q=2", "--batch-size", 5, "--drain")
    ended = run(
        *("relay", "tests.support.hooked_app:jobs", *options),
        url=outboxq_database.url,
        cwd=REPOSITORY,
        env={"HOOKED_TOLD": str(told), "HOOKED_MISDEED": misdeed},
    ).ok()
    assert waiting(engine) == 0
    assert ledger(engine) == Counter({**dict.fromkeys(names[:COUNT], 1), "wrapped": COUNT})
    errors = sorted(str(reason).rpartition(": ")[2] for _, reason in dead_reasons(engine))
    assert errors == ["ValueError", "outboxq.errors.HandlerTimedOut"]
    stopped = [line for line in ended.stderr.splitlines() if "relay stopped" in line]
    assert len(stopped) == 2
    if misdeed == "block":
        # Each process that ran jobs has a hook that never ends, and events behind it; one that comes late finds none.
        reports = [line for line in ended.stdout.splitlines() if line.startswith("done ")]
        at_work = len(reports) - reports.count("done 0, failed attempts 0, dead 0")
        assert ended.stderr.count("hooks did not end within 5 s, and are left behind") == at_work > 0
        return
    lines = told.read_text().splitlines()
    assert len(lines) == COUNT == len({line.split()[1] for line in lines})
    failures = sum(int(line.partition("hook_failures=")[2].split()[0]) for line in stopped if "hook_failures" in line)
    assert failures == (COUNT + 2 if misdeed == "raise" else 0)
    assert ended.stderr.count("a hook failed") == failures
