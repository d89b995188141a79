"""`outboxq audit` and `outboxq bulk`, and what commands leave in the audit, also when they are killed."""

import os
import re
import signal
import subprocess
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from outboxq.admin.audit import ACTIONS
from outboxq.cli.app import _Root
from outboxq.postgres import Database
from outboxq.testing import CommitProxy
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support import operators
from tests.support.cli import REPOSITORY, call, command, environment
from tests.support.operators import Table, add, audited, count, marked
from tests.support.waiting import PATIENCE, wait_until

COMMANDS: dict[str, tuple[list[str], Table, str]] = {
    "cancel": (["jobs", "cancel"], "job", "cancelled"),
    "cancel running": (["jobs", "cancel", "--running"], "job", "cancelled"),
    "discard": (["dead", "discard"], "dead_job", "discarded"),
    "retry": (["dead", "retry"], "dead_job", "retried"),
}


# Rows at the ends of pages and within them. The pages are the same code for every command: each is killed on each side
# of its first page's end, and one of them at all moments, among the large tests.
KILLED_AT = [
    pytest.param(name, at, at_commit, id=f"{name}-{at}-{'at COMMIT' if at_commit else 'in a statement'}", marks=marks)
    for name in COMMANDS
    for at in (0, 100, 199, 200, 410)
    for at_commit in (False, True)
    for marks in [() if (at, at_commit) in ((100, False), (199, True), (410, False)) else pytest.mark.large]
    if not marks or name == "cancel"
]


@pytest.mark.first_and_last
@pytest.mark.parametrize(("name", "at", "at_commit"), KILLED_AT)
def test_a_command_that_is_killed_is_gone_on_with_and_each_row_is_counted_once(
    outboxq_database: Database, engine: Engine, name: str, at: int, at_commit: bool
) -> None:
    """By SIGKILL at a row of a page, or while the server is at its COMMIT: the audit says what the tables say."""
    words, table, _ = COMMANDS[name]
    url = outboxq_database.url
    ids = add(engine, 450, table)
    operators.on_change(engine, operators.wait_at(ids[at]), table, at_commit=at_commit)
    with operators.closed_gate(engine) as gate:
        process = subprocess.Popen(
            command(*words, "--queue", "many", "--yes", "--because", "a drill"),
            env=environment(url, OUTBOXQ_ACTOR="anna"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: operators.waiting_pid(engine), "the page that waits")
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE)
        gate.rollback()
    wait_until(lambda: not _sessions(engine), "the server to notice")
    add(engine, 3, table)
    stands = 453 - count(engine, table)
    assert stands in (at // 200 * 200, min(at // 200 * 200 + 200, 450))
    rows = audited(engine)
    assert [row["changed"] for row in rows] == ([stands] if stands else [])
    with engine.begin() as connection:
        connection.exec_driver_sql(f"DROP TRIGGER on_change ON outboxq.{table}")
    if rows and rows[0]["finished_at"] is None:
        assert (rows[0]["actor"], rows[0]["via"], rows[0]["reason"]) == ("anna", "cli", "a drill")
        call("bulk", "resume", rows[0]["id"], url=url).ok()
        # Nothing newer than the question: those came later.
        assert (audited(engine)[0]["changed"], count(engine, table)) == (450, 3)


def _sessions(engine: Engine) -> int:
    """The commands' sessions that are left."""
    statement = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outboxq cli' AND datname = current_database()"
    )
    with engine.connect() as connection:
        return connection.execute(text(statement)).scalar_one()


def test_ctrl_c_says_how_to_go_on_and_leaves_no_suspects(outboxq_database: Database, engine: Engine) -> None:
    """With the id that `bulk resume` takes."""
    ids = add(engine, 450)
    operators.on_change(engine, operators.wait_at(ids[300]))
    with operators.closed_gate(engine) as gate:
        process = subprocess.Popen(
            command("jobs", "cancel", "--queue", "many", "--yes"),
            env=environment(outboxq_database.url),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: operators.waiting_pid(engine), "the page that waits")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=2 * PATIENCE)
        finally:
            process.kill()
            process.wait()
        gate.rollback()
    (row,) = audited(engine)
    assert f"stopped after 200 cancelled: those stand; `outboxq bulk resume {row['id']}` does the rest" in said
    assert (row["changed"], row["error"], marked(engine)) == (200, "KeyboardInterrupt", 0)


@pytest.mark.first_and_last
@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_if_the_answer_to_the_first_commit_is_lost_the_id_is_told(
    outboxq_database: Database, engine: Engine, cut: str, *, as_json: bool
) -> None:
    """With what finds out whether there is a row, and what goes on with it."""
    add(engine, 450)
    with CommitProxy(outboxq_database.url) as proxy:
        (proxy.cut_before_commit if cut == "before" else proxy.cut_after_commit)()
        words = ("jobs", "cancel", "--queue", "many", "--yes", *(("--json",) if as_json else ()))
        said = call(*words, url=proxy.url)
    assert (said.exit_code, "was lost" in said.stderr) == (1, True)
    found = re.search("`outboxq audit show ([0-9a-f-]{36})`", said.stderr)
    assert found is not None
    wait_until(lambda: count(engine, "job") == (450 if cut == "before" else 250), "the server to know of it")
    shown = call("audit", "show", found[1], url=outboxq_database.url)
    assert shown.exit_code == (1 if cut == "before" else 0)
    if cut == "after":
        call("bulk", "resume", found[1], url=outboxq_database.url).ok()
        assert count(engine, "job") == 0


@pytest.mark.wide
def test_every_changing_command_says_who_and_why(
    outboxq_database: Database, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user of the operating system, or OUTBOXQ_ACTOR; the reason as it was given."""
    url = outboxq_database.url
    monkeypatch.delenv("OUTBOXQ_ACTOR", raising=False)
    (job_id,) = add(engine, 1, queue="q")
    (dead,) = add(engine, 1, "dead_job", queue="q")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, seconds, args, headers, "
            "expires_at) "
            f"VALUES ('{UUID(int=7)}', 'q', 'k', 'done', 1, now(), 1, '{{}}', '{{}}', now() + interval '1 day')"
        )
    commands: list[tuple[object, ...]] = [
        ("queues", "pause", "q"),
        ("queues", "resume", "q"),
        ("queues", "set", "q", "--limit", 5, "--keep-dead", "30d"),
        ("kinds", "pause", "k", "--queue", "q"),
        ("kinds", "resume", "k", "--queue", "q"),
        ("schedules", "put", "s", "--kind", "k", "--queue", "q", "--cron", "@daily"),
        ("schedules", "pause", "s"),
        ("schedules", "resume", "s"),
        ("schedules", "run-now", "s"),
        ("schedules", "remove", "s"),
        ("jobs", "change", job_id, "--run-now"),
        ("jobs", "cancel", job_id),
        ("dead", "retry", dead),
        ("dead", "discard", "--queue", "q"),
        ("done", "run-again", UUID(int=7)),
        ("audit", "prune", "--older-than", "400d"),
        ("effects", "new-installation", "--yes"),
    ]
    for words in commands:
        call(*words, "--because", f"why {words[0]} {words[1]}", url=url).ok()
    monkeypatch.setenv("OUTBOXQ_ACTOR", "anna")
    call("inbox", "forget", "c", "m", url=url)
    rows = audited(engine)
    assert [row["action"] for row in rows] == [
        "queue.pause", "queue.resume", "queue.set", "queue.keep_dead", "kind.pause", "kind.resume", "schedule.put",
        "schedule.pause", "schedule.resume", "schedule.run_now", "schedule.remove", "job.change", "job.cancel",
        "dead.retry", "dead.discard", "done.run_again", "audit.prune", "installation.renew", "message.forget",
    ]  # fmt: skip
    users = {row["actor"] for row in rows[:-1]}
    assert users == {_user()}
    assert (rows[-1]["actor"], rows[-1]["reason"]) == ("anna", None)
    assert {row["via"] for row in rows} == {"cli"}
    assert [row["reason"] for row in rows[:2]] == ["why queues pause", "why queues resume"]


def test_old_rows_are_deleted_in_pages(outboxq_database: Database, engine: Engine) -> None:
    """Those that are over; it is counted in a row of its own."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outboxq.audit (id, at, finished_at, actor, via, action) SELECT gen_random_uuid(), now() - n * "
            "interval '1 hour' + interval '1 minute', CASE WHEN n <> 2000 THEN now() END, 'anna', 'cli', 'queue.pause' "
            "FROM generate_series(1, 2500) AS n"
        )
    url = outboxq_database.url
    said = call("audit", "prune", "--older-than", "10d", "--because", "a rule", "--json", url=url).ok()
    assert said.json == {"deleted": 2_259}
    row = audited(engine)[-1]
    assert (row["action"], row["changed"], row["reason"]) == ("audit.prune", 2_259, "a rule")
    assert row["finished_at"] is not None
    assert len(audited(engine)) == 2500 - 2259 + 1
    (open_one,) = [each for each in audited(engine) if each["finished_at"] is None]
    assert open_one["at"] < row["at"] - timedelta(days=80)
    for wrong in ("0d", "3654d", "10", "1h", "-5d", "\u0661d"):
        assert call("audit", "prune", "--older-than", wrong, url=url).exit_code == 2


def test_an_operator_deletes_nothing_from_the_audit(roles: Cast, engine: Engine) -> None:
    """The owner of the tables may; and what was refused is not written down."""
    said = roles.call("operator", "audit", "prune", "--older-than", "1d")
    assert (said.exit_code, "permission denied for table audit" in said.stderr) == (1, True)
    assert audited(engine) == []


@pytest.mark.wide
def test_every_command_that_mends_asks_why() -> None:
    """None that changes something was forgotten."""
    mends = _Root.sections["Mend"]
    assert len(mends) > 15
    assert [name for name in mends if "--because" not in call(*name.split(), "--help").ok().stdout] == []


def _user() -> str:
    said = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def test_an_action_that_there_is_not_is_refused(outboxq_database: Database) -> None:
    """An empty list would look as if none had been done; the message names those that there are."""
    refused = call("audit", "list", "--action", "nonsense", url=outboxq_database.url)
    assert refused.exit_code == 2
    assert "got 'nonsense'" in refused.stderr
    assert "dead.discard, dead.retry, done.run_again" in refused.stderr
    assert "or a sort of them: audit, bulk, dead," in refused.stderr
    page = (REPOSITORY / "docs/audit.md").read_text()
    assert [action for action in ACTIONS if f"`{action}`" not in page] == []


def test_the_audit_is_listed_and_shown(outboxq_database: Database, engine: Engine) -> None:
    """By filters, as a table and as JSON; one action with its filter."""
    url = outboxq_database.url
    add(engine, 2)
    call("queues", "pause", "q", url=url).ok()
    call("jobs", "cancel", "--queue", "many", "--because", "no longer wanted", url=url).ok()
    listed = call("audit", "list", "--json", url=url).ok().json["audit"]
    assert [(row["action"], row["changed"]) for row in listed] == [("job.cancel", 2), ("queue.pause", 1)]
    assert "no longer wanted" in call("audit", "list", "--action", "job", url=url).ok().stdout
    assert call("audit", "list", "--actor", "no-one", "--json", url=url).ok().json["audit"] == []
    assert call("audit", "list", "--since", listed[0]["at"], "--json", url=url).ok().json["audit"] == [listed[0]]
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO outboxq.audit (id, at, finished_at, actor, via, action) "
            "VALUES (gen_random_uuid(), now() - interval '2 hours', now(), 'anna', 'cli', 'queue.pause')"
        )
    assert len(call("audit", "list", "--since", "1h", "--json", url=url).ok().json["audit"]) == 2
    assert len(call("audit", "list", "--since", "1d", "--json", url=url).ok().json["audit"]) == 3
    shown = call("audit", "show", listed[0]["id"], "--json", url=url).ok().json
    assert shown["filter"]["queue"] == "many"
    assert "created_before" in shown["filter"]
    assert "created_before" in call("audit", "show", listed[0]["id"], url=url).ok().stdout
    missing = call("audit", "show", "01929e1c-5a7d-7cc3-9a55-2f8c5c1b7d10", url=url)
    assert (missing.exit_code, "the audit has no action" in missing.stderr) == (1, True)


def test_what_is_over_cannot_be_stopped_or_gone_on_with(outboxq_database: Database, engine: Engine) -> None:
    """And says so, with 1."""
    url = outboxq_database.url
    add(engine, 2)
    call("jobs", "cancel", "--queue", "many", url=url).ok()
    (row,) = audited(engine)
    stopped = call("bulk", "stop", row["id"], "--json", url=url)
    assert (stopped.exit_code, stopped.json["became"]) == (1, "over")
    resumed = call("bulk", "resume", row["id"], url=url)
    assert (resumed.exit_code, "it is over" in resumed.stderr) == (1, True)


def test_dead_letters_are_retried_with_arguments_that_fit(
    outboxq_database: Database, engine: Engine, tmp_path: Path
) -> None:
    """As the registry's handlers take them; without a look at them only if that is asked for."""
    url = outboxq_database.url
    (one,) = add(engine, 1, "dead_job", kind="record")
    (two,) = add(engine, 1, "dead_job", kind="record")
    registry = ("--app", "tests.support.app:jobs")
    wrong = call("dead", "retry", one, "--args", '{"name": 5}', *registry, url=url)
    assert (wrong.exit_code, "do not fit" in wrong.stderr) == (2, True)
    assert call("dead", "retry", one, "--args", "{}", url=url).exit_code == 2
    assert call("dead", "retry", one, "--unchecked", url=url).exit_code == 2
    assert call("dead", "retry", one, "--args", "[]", "--unchecked", url=url).exit_code == 2
    assert (count(engine, "dead_job"), audited(engine)) == (2, [])
    call("dead", "retry", one, "--args", '{"name": "new"}', *registry, url=url).ok()
    call("dead", "retry", two, "--args", '{"any": 1}', "--unchecked", url=url).ok()
    with engine.connect() as connection:
        found = connection.execute(text("SELECT id, args::text FROM outboxq.job")).all()
    assert sorted(found) == sorted([(one, '{"name": "new"}'), (two, '{"any": 1}')])


def test_without_the_table_a_command_works_and_says_so(outboxq_database: Database, engine: Engine) -> None:
    """Tables of the step before: as JSON, too, the notice is on standard error."""
    url = outboxq_database.url
    call("migrate", "--to", 10, url=url).ok()
    said = call("queues", "pause", "q", "--json", url=url).ok()
    assert said.json["paused"] == ["q"]
    assert "not written into the audit" in said.stderr
    assert [row["queue"] for row in call("queues", "list", "--json", url=url).ok().json["queues"]] == ["q"]
    kept = call("queues", "set", "q", "--keep-dead", "30d", url=url)
    assert (kept.exit_code, "outboxq migrate" in kept.stderr) == (1, True)
