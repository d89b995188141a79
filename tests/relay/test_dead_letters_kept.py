"""Dead letters are deleted when their queue's time is over, and only then, by the relays' pruner."""

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from outboxq import Context, Jobs
from outboxq.admin import queues
from outboxq.database.engines import listen_connector, resolve_engines
from outboxq.emitter import Emitter
from outboxq.errors import ArgumentError, RegistryError
from outboxq.events import DeadLettersPruned, Event, Pruned
from outboxq.migrations.runner import migrate
from outboxq.postgres import Database
from outboxq.queue_limits import keep_text, parse_keep
from outboxq.relay.maintenance.pruner import Pruner
from outboxq.statements import prune as statements
from tests.admin.test_roles import Cast
from tests.admin.test_roles import roles as roles
from tests.support.cli import call
from tests.support.doctor import execute, named, only
from tests.support.operators import add, audited, count
from tests.support.waiting import wait_until

DAY = 86_400
AGE = "UPDATE outboxq.dead_job SET died_at = now() - interval '{}' WHERE queue = '{}'"

jobs = Jobs()
jobs.keep_dead_letters("kept", timedelta(days=1))


@jobs.handler(queue="kept")
def send(ctx: Context) -> None: ...


APP = f"{__name__}:jobs"


def prune(url: str, keep_dead: Mapping[str, float] | None = None, **settings: int) -> list[Event]:
    """One round of the pruner; the events."""
    events: list[Event] = []
    connect = listen_connector(resolve_engines(url, None), None, lambda: None)
    emit = Emitter([events.append], lambda *_: None)
    pruner = Pruner(connect, "outboxq", emit, threading.Event(), seconds=60, keep_dead=keep_dead or {}, **settings)
    pruner.run_once()
    return events


def keep(engine: Engine, seconds: float | None, queue: str = "kept") -> None:
    with engine.begin() as connection:
        queues.keep_dead(connection, [queue], seconds)


def fill(engine: Engine, queue: str, number: int, age: str) -> None:
    before = count(engine, "dead_job")
    add(engine, number, "dead_job", queue=queue)
    with engine.begin() as connection:
        connection.execute(text(AGE.format(age, queue) + " AND died_at > now() - interval '1 minute'"))
    assert count(engine, "dead_job") == before + number


def left(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT queue, count(*) FROM outboxq.dead_job GROUP BY 1"))
        return {row.queue: row.count for row in rows}


def test_what_has_been_dead_for_longer_goes_and_the_rest_stays(engine: Engine, outboxq_database: Database) -> None:
    """Of the queues that keep them for a time, whether operators said so or the application; others keep all."""
    fill(engine, "kept", 3, "31 days")
    fill(engine, "kept", 2, "29 days")
    fill(engine, "declared", 4, "2 hours")
    fill(engine, "other", 5, "900 days")
    assert prune(outboxq_database.url) == []
    keep(engine, 30 * DAY)
    events = prune(outboxq_database.url, {"declared": 3600.0})
    assert events == [DeadLettersPruned("declared", 4), DeadLettersPruned("kept", 3)]
    assert left(engine) == {"kept": 2, "other": 5}
    assert audited(engine) == []


def test_what_operators_have_set_comes_first(engine: Engine, outboxq_database: Database) -> None:
    """Also for ever; without it, what the application declares holds again."""
    declared = {"kept": 3600.0}
    fill(engine, "kept", 3, "2 hours")
    keep(engine, 0)
    assert prune(outboxq_database.url, declared) == []
    keep(engine, DAY)
    assert prune(outboxq_database.url, declared) == []
    keep(engine, None)
    assert prune(outboxq_database.url, declared) == [DeadLettersPruned("kept", 3)]


def test_a_setting_that_is_taken_back_holds_for_the_next_deletion(engine: Engine) -> None:
    """It is read in the statement itself, and not at the round's beginning."""
    fill(engine, "kept", 3, "2 days")
    keep(engine, DAY)
    keep(engine, 0)
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statements.delete_dead("outboxq", "kept", 60.0, 10)).scalar_one() == 0
    keep(engine, None)
    with engine.begin() as connection:
        assert connection.exec_driver_sql(statements.delete_dead("outboxq", "kept", None, 10)).scalar_one() == 0
        assert connection.exec_driver_sql(statements.delete_dead("outboxq", "kept", 60.0, 2)).scalar_one() == 2


def test_a_round_is_bounded_and_goes_in_small_transactions(engine: Engine, outboxq_database: Database) -> None:
    """So many batches of so many rows, the oldest first."""
    fill(engine, "kept", 20, "3 days")
    fill(engine, "kept", 20, "2 days")
    keep(engine, DAY)
    assert prune(outboxq_database.url, batch_rows=5, max_batches=4) == [DeadLettersPruned("kept", 20)]
    with engine.connect() as connection:
        oldest = connection.execute(text("SELECT max(now() - died_at) FROM outboxq.dead_job")).scalar_one()
    assert oldest < timedelta(days=2, hours=1)
    assert prune(outboxq_database.url, batch_rows=5, max_batches=10) == [DeadLettersPruned("kept", 20)]


def test_what_another_transaction_holds_is_passed_over(engine: Engine, outboxq_database: Database) -> None:
    """An operator who retries it, perhaps; it is not waited for."""
    fill(engine, "kept", 5, "2 days")
    keep(engine, DAY)
    with engine.connect() as holder:
        holder.execute(text("SELECT FROM outboxq.dead_job ORDER BY died_at LIMIT 2 FOR UPDATE"))
        assert prune(outboxq_database.url) == [DeadLettersPruned("kept", 3)]
    assert prune(outboxq_database.url) == [DeadLettersPruned("kept", 2)]


def test_a_job_that_dies_again_meanwhile_stays(engine: Engine) -> None:
    """Between the look and the lock its row became another: its time begins anew."""
    fill(engine, "kept", 1, "2 days")
    keep(engine, DAY)
    # Without SKIP LOCKED the deletion stands still between its look and its lock.
    waiting = statements.delete_dead("outboxq", "kept", None, 10).replace("SKIP LOCKED", "")
    with engine.connect() as relay, engine.connect() as pruner:
        relay.execute(text("UPDATE outboxq.dead_job SET died_at = now()"))
        outcome: list[int] = []
        thread = threading.Thread(target=lambda: outcome.append(pruner.exec_driver_sql(waiting).scalar_one()))
        thread.start()
        _wait_for_lock(engine)
        relay.commit()
        thread.join(60)
        pruner.commit()
    assert outcome == [0]
    assert left(engine) == {"kept": 1}


def _wait_for_lock(engine: Engine) -> None:
    statement = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"

    def waits() -> int:
        with engine.connect() as connection:
            return connection.execute(text(statement)).scalar_one()

    wait_until(waits, "the deletion to wait")


def test_the_deletion_goes_by_the_index(engine: Engine) -> None:
    """From the queue's oldest on, however many dead letters others have."""
    fill(engine, "other", 5_000, "2 days")
    fill(engine, "kept", 3, "2 days")
    keep(engine, DAY)
    with engine.begin() as connection:
        connection.exec_driver_sql(statements.BEGIN.partition("; ")[2])
        connection.exec_driver_sql("ANALYZE outboxq.dead_job")
        plan = connection.exec_driver_sql(f"EXPLAIN {statements.delete_dead('outboxq', 'kept', None, 10)}").scalars()
        text_of_plan = "\n".join(plan)
    assert "Index Scan using dead_job_queue" in text_of_plan
    assert "Seq Scan on dead_job" not in text_of_plan


@pytest.mark.parametrize("prunes", [True, False])
def test_a_relay_prunes_what_its_application_declares(
    engine: Engine, drain: Callable[..., list[Event]], prunes: bool
) -> None:
    """Also one that drains; with prune_seconds=0 nothing is deleted."""
    fill(engine, "kept", 3, "2 days")
    events = drain(jobs, prune_seconds=60 if prunes else 0)
    found = [event for event in events if isinstance(event, DeadLettersPruned)]
    assert found == ([DeadLettersPruned("kept", 3)] if prunes else [])


def test_a_role_without_the_right_is_told_once_and_only_if_a_queue_asks_for_it(
    roles: Cast, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Roles that were made before prune all else."""
    group = roles.groups["relay"].replace('"', '""')
    execute(roles.database.url, f'REVOKE DELETE ON outboxq.dead_job FROM "{group}"')
    fill(engine, "kept", 1, "2 days")
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO outboxq.inbox (consumer, message_id, expires_at) VALUES ('c', 'm', now() - interval '1 h')"
            )
        )
    with caplog.at_level(logging.WARNING):
        assert prune(roles.url("relay")) == [Pruned(1, 0)]
        assert caplog.records == []
        keep(engine, DAY)
        assert prune(roles.url("relay")) == []
    (record,) = caplog.records
    assert "dead letters could not be deleted" in record.getMessage()
    assert "outboxq roles --sql" in record.getMessage()


def test_tables_of_before_keep_what_operators_set_and_prune_what_is_declared(
    engine: Engine, outboxq_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Without the column nothing fails."""
    fill(engine, "kept", 3, "2 days")
    with engine.begin() as connection:
        queues.pause(connection, ["kept"])
        migrate(connection, to=10)
    with caplog.at_level(logging.WARNING):
        assert prune(outboxq_database.url, {"kept": float(DAY)}) == [DeadLettersPruned("kept", 3)]
    assert caplog.records == []
    with engine.connect() as connection:
        assert [each.keep_dead_seconds for each in queues.list_queues(connection)] == [None]


@pytest.mark.large
def test_the_command_line_sets_and_shows_it(outboxq_database: Database, engine: Engine) -> None:
    """With a limit or alone, and taken back."""
    url = outboxq_database.url
    call("queues", "set", "kept", "--keep-dead", "30d", "--limit", 5, url=url).ok()
    (row,) = call("queues", "list", "--json", url=url).ok().json["queues"]
    assert (row["keep_dead"], row["limit"]) == ("30d", 5)
    call("queues", "set", "kept", "--keep-dead", "forever", url=url).ok()
    assert "forever" in call("queues", "list", url=url).ok().stdout
    call("queues", "set", "kept", "--no-keep-dead", url=url).ok()
    (row,) = call("queues", "list", "--json", url=url).ok().json["queues"]
    assert (row["keep_dead"], row["limit"]) == (None, 5)
    for words in (("--keep-dead", "30"), ("--keep-dead", "4000d"), ("--keep-dead", "0m"), ()):
        assert call("queues", "set", "kept", *words, url=url).exit_code == 2
    assert call("queues", "set", "kept", "--keep-dead", "1d", "--no-keep-dead", url=url).exit_code == 2


def test_times_are_read_and_written() -> None:
    """Each as it can be given again."""
    for written in ("1m", "90m", "12h", "30d", "3653d", "forever"):
        assert keep_text(parse_keep(written)) == written
    assert keep_text(parse_keep("24h")) == "1d"
    assert keep_text(90.0) == "90s"
    with pytest.raises(ArgumentError):
        parse_keep("³d")


def test_a_registry_declares_it_once_for_a_queue_of_its_own() -> None:
    """Of an included registry too; another time, or a queue without handlers, is refused."""
    other = Jobs()
    other.include(jobs)
    assert dict(other.resolve().keep_dead) == {"kept": timedelta(days=1)}
    other.keep_dead_letters("kept", timedelta(days=1))
    with pytest.raises(RegistryError, match="twice"):
        other.keep_dead_letters("kept", timedelta(days=2))
    for time in (timedelta(seconds=59), timedelta(days=3_654), 30):
        with pytest.raises(ArgumentError):
            other.keep_dead_letters("kept", time)  # type: ignore[arg-type]
    other.keep_dead_letters("no such", timedelta(days=1))
    with pytest.raises(RegistryError, match="no handler"):
        other.resolve()


@pytest.mark.large
def test_the_doctor_names_what_no_relay_deletes(outboxq_database: Database, engine: Engine) -> None:
    """A day late; by what operators have set, or by the registry that it is given."""
    url = outboxq_database.url
    fill(engine, "kept", 1, "47 hours")
    assert named(url, "dead-letters-overdue", APP) == []
    fill(engine, "kept", 1, "50 hours")
    assert named(url, "dead-letters-overdue") == []
    found = only(url, "dead-letters-overdue", APP)
    assert (found["severity"], found["detail"]["queue"], found["detail"]["keep_seconds"]) == ("warning", "kept", DAY)
    keep(engine, 0)
    assert named(url, "dead-letters-overdue", APP) == []
    keep(engine, 2 * 3600)
    assert only(url, "dead-letters-overdue")["detail"]["keep_seconds"] == 7200
