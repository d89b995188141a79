"""Settings of a role or a database change neither what our statements mean nor what we read of their answers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, timedelta

import psycopg
import pytest
from sqlalchemy import Connection, Engine, NullPool, TextClause, TextualSelect, create_engine, event, text
from sqlalchemy.orm import Session

from outboxq import Inbox, OutboxSession, cancel, doctor, find_job, schedules
from outboxq.admin.bulk import preview
from outboxq.admin.bulk_actions import CancelJobs
from outboxq.admin.dead_letters import list_dead, show_dead
from outboxq.admin.effects import list_effects, show_effect
from outboxq.admin.explain import explain_job, explain_queue
from outboxq.admin.finished import list_finished, show_finished
from outboxq.admin.history import read_history
from outboxq.admin.jobs import JobFilter, list_jobs, show_job
from outboxq.admin.messages import list_messages, show_message
from outboxq.admin.queues import list_queues
from outboxq.admin.relays import list_relays
from outboxq.admin.schedules import seconds_to_next
from outboxq.admin.snapshot import find_dead_groups, take_snapshot
from outboxq.admin.stats import collect_stats
from outboxq.dashboard import Role, create_app
from outboxq.database.driver import run_script
from outboxq.events import Event, JobDone
from outboxq.observability.gauges import write_gauges
from outboxq.postgres import Database
from tests.support import app
from tests.support.cli import call
from tests.support.dashboard import as_user, client_of, path_of, screens, stage_dashboard
from tests.support.parsed_sql import queries
from tests.support.staged import numbered
from tests.support.statements import all_statements, compiled_text
from tests.support.urls import libpq_url
from tests.tools.command_line import SAMPLES

# What a role may have set, and what a statement of ours could mean something else by, or answer in another form.
HOSTILE = {
    "datestyle": "German, DMY",
    "intervalstyle": "sql_standard",
    "timezone": "Australia/Lord_Howe",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "standard_conforming_strings": "off",
    "escape_string_warning": "off",
    "transform_null_equals": "on",
    "quote_all_identifiers": "on",
    "xmlbinary": "hex",
    "search_path": "public, pg_catalog",
    "default_transaction_isolation": "serializable",
    "jit": "on",
    "jit_above_cost": "0",
    "jit_optimize_above_cost": "-1",
}
# They go on without an end, or look at no database.
_ENDLESS = {"relay", "health", "metrics", "dashboard", "top", "migrate", "roles"}
# The types whose texts depend on a setting: of times and of intervals.
_TIMES = {1082, 1083, 1114, 1184, 1186, 1266}
_FLOATS = {700, 701}
# Sent as text in a relay's transactions, which set DateStyle for themselves.
_OF_RELAYS = {
    "claim.ClaimStatements",
    "claim.adopt",
    "claim.claim_by_id",
    "coalesce.take_along",
    "coalesce.take_along_leased",
    "windows.take_windows",
}


def make_hostile(engine: Engine, *, of_role: bool = False) -> None:
    """Set all of it for whoever connects next, for the database or for this role in it."""
    database = engine.url.database
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        whose = f'ALTER ROLE CURRENT_USER IN DATABASE "{database}"' if of_role else f'ALTER DATABASE "{database}"'
        for name, value in HOSTILE.items():
            given = value if name in ("datestyle", "search_path") else f"'{value}'"
            connection.execute(text(f"{whose} SET {name} = {given}"))
    engine.dispose()


@pytest.fixture
def hostile(engine: Engine) -> Engine:
    """A database with something of everything, whose settings are hostile."""
    stage_dashboard(engine)
    make_hostile(engine)
    return engine


@pytest.mark.wide
def test_no_answer_has_a_form_that_depends_on_a_setting(engine: Engine) -> None:
    """Of all statements that are sent on a connection of users': times come as numbers."""
    found: dict[str, set[str]] = {}
    with psycopg.connect(libpq_url(engine.url.render_as_string(hide_password=False)), autocommit=True) as driver:
        for where, statement, _ in all_statements():
            forms = _TIMES if isinstance(statement, str | TextClause | TextualSelect) else _TIMES | _FLOATS
            for query in queries(compiled_text(statement)):
                driver.pgconn.prepare(b"", query.encode())
                answer = driver.pgconn.describe_prepared(b"")
                names = {str(answer.fname(place)) for place in range(answer.nfields) if answer.ftype(place) in forms}
                if names and where not in _OF_RELAYS:
                    found.setdefault(where, set()).update(names)
    assert found == {}


@pytest.mark.wide
@pytest.mark.parametrize("of_role", [False, True], ids=["database", "role"])
def test_every_command_ends_as_without_them(of_role: bool, engine: Engine, outboxq_database: Database) -> None:
    """Each sample of the command line, with the exit code and the kind of answer that it has else."""
    commands = [(name, sample) for name, samples in SAMPLES.items() if name not in _ENDLESS for sample in samples]
    ended: list[list[tuple[str, int]]] = []
    # What fills the tables reads times as text.
    at_ease = create_engine(outboxq_database.url, connect_args={"options": "-c datestyle=ISO"}, poolclass=NullPool)
    for turn in range(2):
        if turn:
            make_hostile(engine, of_role=of_role)
        ended.append([])
        for name, sample in commands:
            stage_dashboard(at_ease)
            outcome = call(*name.split(), *sample, url=outboxq_database.url)
            assert "Traceback" not in outcome.stderr, (name, outcome)
            ended[-1].append((f"{name} {sample}", outcome.exit_code))
    assert ended[1] == ended[0]


@pytest.mark.wide
def test_every_screen_answers(hostile: Engine) -> None:
    """With the times that it has without them."""
    app = create_app({"orders": hostile}, auth=as_user(Role.READER))
    with client_of(app) as client:
        for screen in screens():
            answer = client.get(path_of(screen, hostile, "orders"), headers={"accept": "application/json"})
            assert answer.status_code == 200, (screen.path, answer.text)
            assert "not_known" not in answer.json(), (screen.path, answer.json())


@pytest.mark.wide
def test_what_operators_call_on_their_own_connection_reads_the_same(engine: Engine) -> None:
    """And leaves the connection's settings as they were, also within the transaction."""
    stage_dashboard(engine)
    before = _looked_at(engine)
    make_hostile(engine)
    assert _looked_at(engine) == before
    with engine.connect() as connection:
        collect_stats(connection)
        preview(connection, CancelJobs(JobFilter(queue="mail")))
        kept = {name: connection.execute(text(f"SHOW {name}")).scalar_one() for name in HOSTILE}
        assert kept == HOSTILE


def _looked_at(engine: Engine) -> list[object]:
    """What operators see that does not change with the time; each in a transaction of its own."""
    found: list[object] = []
    looks: list[Callable[..., object]] = [
        lambda c: [(each.id, each.created_at, each.run_at) for each in list_jobs(c)],
        lambda c: show_job(c, numbered(4)).job.created_at.astimezone(UTC).isoformat(),
        lambda c: [(each.id, each.died_at) for each in list_dead(c)],
        lambda c: show_dead(c, numbered(101)).dead.died_at,
        lambda c: [(each.id, each.finished_at, each.seconds) for each in list_finished(c)],
        lambda c: show_finished(c, numbered(302)).expires_at,
        lambda c: [(each.key, each.first_called_at) for each in list_effects(c)],
        lambda c: show_effect(c, "stripe-charge", "order-1002").effect.first_called_at,
        lambda c: [(each.message_id, each.seen_at) for each in list_messages(c)],
        lambda c: show_message(c, "payments", "evt_1Nq2"),
        lambda c: [(each.host, each.started_at) for each in list_relays(c)],
        lambda c: [each.at for each in read_history(c, since=timedelta(hours=2))],
        lambda c: [(each.queue, each.ready, each.dead, each.paused_at) for each in collect_stats(c).queues],
        lambda c: [each.next_look_at for each in collect_stats(c, exact=True).parked_kinds],
        lambda c: [each.code for each in explain_job(c, numbered(4)).reasons],
        lambda c: [each.code for each in explain_queue(c, "mail").reasons],
        lambda c: [(each.queue, each.paused_at) for each in list_queues(c)],
        lambda c: [(each.jobs, each.first_died_at) for each in find_dead_groups(c)],
        lambda c: [each.queue for each in take_snapshot(c).queues],
        lambda c: [(each.name, each.next_at, each.jitter_seconds) for each in schedules.list_schedules(c)],
        lambda c: seconds_to_next(c) < 1e9,
    ]
    for look in looks:
        with engine.connect() as connection:
            found.append(look(connection))
    return found


@pytest.mark.wide
def test_producers_and_consumers_work(hostile: Engine, drain: Callable[..., list[Event]]) -> None:
    """On the user's own connection: jobs, schedules, messages and cancellations; and relays, in both claim modes."""
    with OutboxSession(hostile) as session, session.begin():
        session.execute(text("DELETE FROM outboxq.job"))
        handle = session.add_job(app.record, name="x")
        later = session.add_job(app.record.options(delay=timedelta(days=1), unique="a"), name="y")
        put = schedules.put(session, "often", app.record.job(name="z"), cron="@hourly")
        assert put.next_at.astimezone(UTC).minute == 0
        assert Inbox("them").accept(session, "1", payload="x")
        assert not Inbox("them").accept(session, "1", payload="x")
    with Session(hostile) as plain, plain.begin():
        found = find_job(plain, handle)
        assert found is not None
        assert cancel(plain, later) == "cancelled"
    assert any(isinstance(each, JobDone) for each in drain())
    findings = doctor.run_checks(hostile.connect)
    assert not [finding for finding in findings if finding.code == "check-not-made"]
    with hostile.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.gauge"))
        assert write_gauges(connection, "outboxq") > 0


@contextmanager
def noting_settings() -> Iterator[list[tuple[str, str, str]]]:
    """The values of `jit` and of `datestyle` at each statement of SQLAlchemy's that names our tables."""
    seen: list[tuple[str, str, str]] = []

    def note(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "outboxq" in statement:
            (jit,), (style,) = (run_script(connection, f"SHOW {name}")[0] for name in ("jit", "datestyle"))
            seen.append((statement, str(jit), str(style)))

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


_LOOKS = (
    ("stats",),
    ("jobs", "list"),
    ("history",),
    ("doctor",),
    ("top", "--once"),
    ("jobs", "cancel", "--queue", "mail", "--dry-run"),
)


@pytest.mark.first_and_last
@pytest.mark.parametrize("words", _LOOKS, ids=" ".join)
@pytest.mark.parametrize("options", ["", "-c jit=on -c datestyle=German"], ids=["default", "PGOPTIONS"])
def test_statements_of_a_command_are_not_compiled(
    words: tuple[str, ...], options: str, hostile: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do they meet another DateStyle than ISO; also if startup options of the user's win over ours."""
    monkeypatch.setenv("PGOPTIONS", options)
    with noting_settings() as seen:
        call(*words, url=hostile.url.render_as_string(hide_password=False))
    assert seen
    assert not [each for each in seen if each[1] != "off" or not each[2].startswith("ISO")]


@pytest.mark.wide
def test_statements_of_pages_gauges_and_callers_are_not_compiled(hostile: Engine) -> None:
    """Each looks at many jobs: those of the dashboard, of a relay's gauges, and of an operator's own connection."""
    app = create_app({"orders": hostile}, auth=as_user(Role.READER))
    paths = [path_of(screen, hostile, "orders") for screen in screens()]
    with hostile.begin() as connection:
        connection.execute(text("DELETE FROM outboxq.gauge"))
    with client_of(app) as client, noting_settings() as seen:
        for path in paths:
            client.get(path)
        with hostile.begin() as connection:
            write_gauges(connection, "outboxq")
        with hostile.connect() as connection:
            collect_stats(connection)
            preview(connection, CancelJobs(JobFilter(queue="mail")))
    assert seen
    assert not [each for each in seen if each[1] != "off"]
