"""A row of another server in the worker's or the producer's transaction: two commits that look like one."""

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.errors import SerializationFailure

from tests.queues_that_look_right.scene import Crew, one, page_sql


@pytest.fixture
def delivery(crew: Crew) -> Crew:
    """`delivery` is a foreign table; `there.delivery` is the table that it stands for."""
    known = conninfo_to_dict(crew.conninfo)
    place = {"host": known["host"], "port": known["port"], "dbname": known["dbname"]}
    login = {name: known[name] for name in ("user", "password") if name in known}
    try:
        crew.looker.execute("CREATE EXTENSION postgres_fdw")
    except (psycopg.errors.FeatureNotSupported, psycopg.errors.InsufficientPrivilege) as error:
        # A server without PostgreSQL's contrib modules, or a role that is no superuser: both are allowed for the tests.
        pytest.skip(f"needs the extension postgres_fdw: {error}")
    crew.looker.execute("CREATE SCHEMA there CREATE TABLE delivery (task_id bigint)")
    crew.looker.execute(f"CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw OPTIONS ({_options(place)})")
    crew.looker.execute(f"CREATE USER MAPPING FOR CURRENT_USER SERVER other OPTIONS ({_options(login)})")
    crew.looker.execute("CREATE FOREIGN TABLE delivery (task_id bigint) SERVER other OPTIONS (schema_name 'there')")
    return crew


def _options(given: dict[str, object]) -> str:
    return ", ".join(f"{name} '{value}'" for name, value in given.items())


def deliveries(crew: Crew) -> list[object]:
    return [task_id for (task_id,) in crew.looker.execute("SELECT task_id FROM there.delivery")]


def meet_another(crew: Crew, sql: str) -> None:
    """Commit a transaction that has read what the other one changes, and changes what that has read."""
    with crew.worker() as other:
        other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        other.execute("SELECT count(*) FROM task")
        other.execute(sql)
        other.commit()


def test_a_foreign_row_stands_although_its_commit_failed(delivery: Crew) -> None:
    """The worker's COMMIT is refused here when it has been made there: the job is handed out again."""
    claim, deliver = page_sql("A table of another server")
    delivery.add(1)
    with delivery.worker() as worker:
        worker.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        assert one(worker, claim) == (1,)
        meet_another(delivery, "INSERT INTO task (priority) VALUES (1)")
        worker.execute(deliver, {"id": 1})
        with pytest.raises(SerializationFailure):
            worker.commit()
        assert deliveries(delivery) == [1]
        assert one(worker, claim) == (1,)
        worker.execute(deliver, {"id": 1})
        worker.commit()
    assert deliveries(delivery) == [1, 1]


def test_a_foreign_row_stands_without_its_job(delivery: Crew) -> None:
    """The same of a producer: its row is there, and no job."""
    _, deliver = page_sql("A table of another server")
    with delivery.worker() as producer:
        producer.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        producer.execute("SELECT count(*) FROM task")
        producer.execute("INSERT INTO task DEFAULT VALUES")
        meet_another(delivery, "INSERT INTO task (state) VALUES ('done')")
        producer.execute(deliver, {"id": 1})
        with pytest.raises(SerializationFailure):
            producer.commit()
    assert deliveries(delivery) == [1]
    assert delivery.states() == ["done"]
