"""The demo as people run it: a process that ends with 0 only if its proof holds, and leaves nothing behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.schema import CreateSchema

from outboxq import Relay
from outboxq.demo import customers, shop
from outboxq.demo.proof import Kill, prove
from outboxq.demo.show import as_object, open_show
from outboxq.demo.story import run_demo
from outboxq.errors import ConfigError
from outboxq.migrations.runner import migrate
from outboxq.outbox.session import OutboxSession
from outboxq.postgres import Server

# Whole programs.
pytestmark = pytest.mark.large

LIMIT_SECONDS = 120

RUN = "import sys; from outboxq.demo.story import run_demo; sys.exit(run_demo(jobs=150, seed=1, json={as_json}))"

# Between the last relay's end and the count, the ledger is changed.
TAMPER = """
import outboxq.demo.story as story
from sqlalchemy import text
honest = story.prove
def prove(connection, kill):
    connection.execute(text({statement!r}))
    return honest(connection, kill)
story.prove = prove
"""
DOUBLE = "INSERT INTO shop.effect (job_id, kind) SELECT job_id, kind FROM shop.effect ORDER BY id LIMIT 1"
LOSE = "DELETE FROM shop.effect WHERE id = (SELECT min(id) FROM shop.effect)"


def run_in_process(*, as_json: bool, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.program", f"{before}\n{RUN.format(as_json=as_json)}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


@pytest.mark.wide
def test_the_demo_kills_a_relay_at_work_and_finds_nothing_lost_or_doubled() -> None:
    """Exit code 0, and the figures counted from the database say why."""
    run = run_in_process(as_json=True)

    assert run.returncode == 0, run.stdout + run.stderr
    shown = json.loads(run.stdout)
    assert shown["ok"] is True
    assert shown["differences"] == []
    assert shown["jobs_enqueued"] == shown["effects_applied"] >= 150
    assert shown["orders_committed"] > 0
    assert shown["orders_rolled_back"] > 0
    assert shown["savepoints_rolled_back"] > 0
    zero = ["lost", "doubled", "ran_though_rolled_back", "stock_off_by", "jobs_left", "dead_letters"]
    assert {name: shown[name] for name in zero} == dict.fromkeys(zero, 0)
    assert shown["killed"]["signal"] == "SIGKILL"
    assert shown["taken_over"] == shown["killed"]["running_jobs"] > 0
    # In so short a run the third may find nothing left to do.
    assert {"relay 1", "relay 2"} <= set(shown["effects_by_relay"])


@pytest.mark.wide
@pytest.mark.parametrize(("statement", "figure"), [(DOUBLE, "doubled"), (LOSE, "lost")])
def test_a_doubled_or_lost_effect_makes_the_demo_fail(statement: str, figure: str) -> None:
    """The proof can fail: a changed ledger is found, shown, and ends with exit code 1."""
    run = run_in_process(as_json=False, before=TAMPER.format(statement=statement))

    assert run.returncode == 1, run.stdout + run.stderr
    assert f"FAILED  {figure}: expected 0, counted 1" in run.stdout
    assert "nothing doubled" not in run.stdout


def _command_of(process: psutil.Process) -> list[str]:
    """Its command line; none if it has ended meanwhile, as a backend of the server may."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.mark.wide
def test_ctrl_c_ends_the_demo_and_every_process_that_it_started() -> None:
    """After SIGINT the exit code is 130, and neither a process nor the server's directory is left."""
    program = "import sys; from outboxq.demo.story import run_demo; sys.exit(run_demo(jobs=5000))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            # Its third line: the relays serve and the customers order.
            lines = [demo.stdout.readline() for _ in range(3)]
            started = psutil.Process(demo.pid).children(recursive=True)
            watchdogs = [line for process in started if "postgres/watchdog.py" in str(line := _command_of(process))]
            demo.send_signal(signal.SIGINT)
            rest = demo.stdout.read()
            demo.wait(LIMIT_SECONDS)
        finally:
            demo.kill()
    assert "customers place" in lines[2]
    assert len(started) >= 4, "a watchdog, a server and two relays"
    assert demo.returncode == 130
    assert "Interrupted" in rest
    assert psutil.wait_procs(started, timeout=10)[1] == []
    assert [Path(command[-1]).exists() for command in watchdogs] == [False], "its argument is the server's directory"


def test_too_few_jobs_are_refused() -> None:
    """A run without enough work to kill a relay in would prove nothing."""
    with pytest.raises(ConfigError, match=r"at least 100 jobs, .* got 7"):
        run_demo(jobs=7)


@pytest.fixture(scope="module")
def outboxq_template(outboxq_server: Server) -> str:
    """A database with the demo's shop."""

    def prepare(url: str) -> None:
        engine = create_engine(url)
        with engine.begin() as connection:
            migrate(connection)
            connection.execute(CreateSchema(shop.SCHEMA))
            shop.Base.metadata.create_all(connection)
        customers.add_products(engine)
        engine.dispose()

    return outboxq_server.create_template(prepare)


@pytest.fixture
def played(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Kill]:
    """A shop whose orders were all worked off, as if after the kill of another relay."""
    monkeypatch.setattr(shop, "WORK_SECONDS", 0)
    sessions = sessionmaker(engine, class_=OutboxSession)
    for order in customers.plan_orders(30, seed=1):
        try:
            customers.place_order(sessions, "Ada", order)
        except customers.CardDeclined:
            continue
    Relay(engine.url, shop.jobs).drain()
    with engine.connect() as connection:
        ids = tuple(connection.execute(text("SELECT job_id FROM shop.effect ORDER BY id LIMIT 2")).scalars())
    return engine, Kill("relay 2", 4711, ids, written=2)


def test_an_honest_database_proves_it(played: tuple[Engine, Kill]) -> None:
    """What the tests below change is the only difference."""
    engine, kill = played
    with engine.connect() as connection:
        proof = prove(connection, kill)
    assert proof.differences() == []
    assert proof.holds


@pytest.mark.wide
@pytest.mark.parametrize(
    ("statement", "difference"),
    [
        (DOUBLE, "doubled: expected 0, counted 1"),
        (LOSE, "lost: expected 0, counted 1"),
        (
            "INSERT INTO shop.effect (job_id, kind) VALUES (gen_random_uuid(), 'x')",
            "ran though rolled back: expected 0",
        ),
        ("UPDATE shop.product SET stock = stock - 1 WHERE sku = 'red cup'", "stock off by: expected 0, counted 1"),
        ("SELECT outboxq.add_job('ship_order', queue => 'warehouse')", "jobs left: expected 0, counted 1"),
        ("TRUNCATE shop.enqueued_job, shop.effect", "jobs enqueued: expected some"),
        ("UPDATE shop.effect SET relay = 'relay 2'", "done by others, counted 0"),
    ],
)
def test_every_figure_can_fail(played: tuple[Engine, Kill], statement: str, difference: str) -> None:
    """Each wrong row is found by a figure of its own."""
    engine, kill = played
    with engine.begin() as connection:
        connection.execute(text(statement))
        proof = prove(connection, kill)
    assert not proof.holds
    assert any(difference in found for found in proof.differences()), proof.differences()
    assert as_object(proof, {})["ok"] is False


@pytest.mark.wide
@pytest.mark.parametrize("running", [None, ()])
def test_a_run_without_a_kill_at_work_proves_nothing(
    played: tuple[Engine, Kill], running: tuple[()] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A perfect ledger is not enough: the point is that a relay died while it ran jobs."""
    engine, _ = played
    with engine.connect() as connection:
        proof = prove(connection, None if running is None else Kill("relay 2", 4711, running, written=0))
    assert not proof.holds
    with open_show(as_json=False) as show:
        show.finish(proof, {"seconds": 1})
    assert "FAILED  no relay was killed while it ran jobs" in capsys.readouterr().out


def test_the_same_seed_plans_the_same_orders() -> None:
    """A run can be repeated, and another seed is another run."""
    orders = customers.plan_orders(200, seed=7)
    assert customers.plan_orders(200, seed=7) == orders != customers.plan_orders(200, seed=8)
    assert 200 <= sum(order.jobs for order in orders) <= 202
