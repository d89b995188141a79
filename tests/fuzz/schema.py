"""The database of a lane: tables, triggers, a view and functions; the rows that each run starts from; what it left."""

from typing import Any

from sqlalchemy import Connection, create_engine, text

from outboxq.migrations.runner import migrate
from tests.fuzz.models import Base

# Python's `mix` and SQL's: no two of them may be exchanged without it showing.
MODULUS = 97

_DDL = f"""
CREATE VIEW account_view AS SELECT id, value FROM account;
CREATE FUNCTION till_to_branch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  UPDATE branch SET value = value + NEW.value - OLD.value WHERE id = NEW.branch_id;
  RETURN NULL;
END $$;
CREATE TRIGGER till_changed AFTER UPDATE OF value ON till FOR EACH ROW EXECUTE FUNCTION till_to_branch();
CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  NEW.told := OLD.told + 1;
  NEW.untold := NEW.untold + 1;
  RETURN NEW;
END $$;
CREATE TRIGGER stamped_changed BEFORE UPDATE ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();
CREATE RULE ruled_changed AS ON UPDATE TO ruled DO ALSO UPDATE branch SET value = value + 1 WHERE id = 1;
CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (MINVALUE) TO (2);
CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (2) TO (MAXVALUE);
ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
CREATE POLICY only_low ON guarded USING (id < 3);
CREATE FUNCTION mix_account(which int, n int) RETURNS int LANGUAGE sql AS $$
  UPDATE account SET value = (value * 2 + n) % {MODULUS} WHERE id = which RETURNING value
$$;
CREATE FUNCTION mix_branch(which int, n int) RETURNS int LANGUAGE sql AS $$
  UPDATE branch SET value = (value * 2 + n) % {MODULUS} WHERE id = which RETURNING value
$$;
CREATE FUNCTION fuzz_reset() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM outboxq.job; DELETE FROM outboxq.dead_job;
  DELETE FROM note; DELETE FROM leaf; DELETE FROM ticket; DELETE FROM till; DELETE FROM purse; DELETE FROM child;
  DELETE FROM parent; DELETE FROM dog; DELETE FROM animal; DELETE FROM account; DELETE FROM branch; DELETE FROM pair;
  DELETE FROM stamped; DELETE FROM ruled; DELETE FROM versioned; DELETE FROM figured; DELETE FROM summed;
  DELETE FROM touched; DELETE FROM heard; DELETE FROM placed; DELETE FROM parted; DELETE FROM guarded;
  DELETE FROM alike;
  INSERT INTO account (id, value, label, price, code, document)
    SELECT i, i * 10, 'seed', 1.5, 'c', '{{"list": [1], "n": 0}}' FROM generate_series(1, 3) AS i;
  INSERT INTO branch (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO pair (id, side, value) SELECT i, 'l', i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO till (id, value, branch_id) SELECT i, i * 10, i FROM generate_series(1, 3) AS i;
  INSERT INTO stamped (id, value, untold) SELECT i, i * 10, 0 FROM generate_series(1, 3) AS i;
  INSERT INTO ruled (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO versioned (id, value, version) SELECT i, i * 10, 1 FROM generate_series(1, 3) AS i;
  INSERT INTO figured (id, value, memo) SELECT i, i * 10, 'seed' FROM generate_series(1, 3) AS i;
  INSERT INTO summed (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO touched (id, value, by, changes) SELECT i, i * 10, 'seed', 0 FROM generate_series(1, 3) AS i;
  INSERT INTO purse (id, value, label, place, branch_id)
    SELECT i, i * 10, 'p' || i, i, i FROM generate_series(1, 3) AS i;
  INSERT INTO parent (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO child (id, value, parent_id) SELECT i, i * 10, (i + 1) / 2 FROM generate_series(1, 3) AS i;
  INSERT INTO leaf (id, value, account_id, settings) SELECT i, i * 10, i, '{{"n": 0}}' FROM generate_series(1, 3) AS i;
  INSERT INTO ticket (id, value, account_id) SELECT i, i * 10, i FROM generate_series(1, 3) AS i;
  INSERT INTO animal (id, value, sort) SELECT i, i * 10, 'dog' FROM generate_series(1, 3) AS i;
  INSERT INTO dog (id, tricks) SELECT i, 0 FROM generate_series(1, 3) AS i;
  INSERT INTO animal (id, value, sort, lives) SELECT i, i * 10, 'cat', 9 FROM generate_series(11, 13) AS i;
  INSERT INTO placed (id, value, x, y) SELECT i, i * 10, i, i FROM generate_series(1, 3) AS i;
  INSERT INTO parted (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO guarded (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO alike (id, value) SELECT i, i * 10 FROM generate_series(1, 3) AS i;
  INSERT INTO heard (id, value, heard) SELECT i, i * 10, 0 FROM generate_series(1, 3) AS i;
END $$;
"""

_TABLES = {
    "account": "id", "branch": "id", "pair": "id", "till": "id", "stamped": "id", "ruled": "id", "versioned": "id",
    "figured": "id", "summed": "id", "touched": "id", "purse": "id", "parent": "id", "child": "id", "leaf": "id",
    "ticket": "id", "animal": "id", "dog": "id", "heard": "id",
    "placed": "id", "parted": "id", "guarded": "id", "alike": "id",
}  # fmt: skip
_ROWS = ", ".join(
    f"'{name}', (SELECT coalesce(jsonb_agg(to_jsonb(t) ORDER BY {key}), '[]') FROM {name} AS t)"
    for name, key in _TABLES.items()
)
# What is drawn anew each time is left out: ids, times, places in the queue.
_JOB = """jsonb_build_object('queue', queue, 'kind', kind, 'args', args - 'new', 'headers', headers,
  'priority', priority, 'attempt', attempt, 'max_attempts', max_attempts, 'crashes', crashes,
  'errors', (SELECT coalesce(jsonb_agg(e - 'at'), '[]') FROM jsonb_array_elements(errors) AS e)"""
SNAPSHOT = text(f"""
SELECT (SELECT count(*) FROM outboxq.job WHERE state <> 'scheduled' AND queue LIKE 'fuzz%'), jsonb_build_object(
  {_ROWS},
  'note', (SELECT coalesce(jsonb_agg(text ORDER BY number), '[]') FROM note),
  'jobs', (SELECT coalesce(jsonb_agg({_JOB}, 'state', state, 'parked', parked) ORDER BY seq), '[]') FROM outboxq.job),
  'dead', (SELECT coalesce(jsonb_agg({_JOB}, 'reason', reason) ORDER BY args->>'name'), '[]') FROM outboxq.dead_job)
)""")
RESET = text("SELECT fuzz_reset()")
# What was put off is due, in its order; inserted anew, so that a relay which sleeps is woken. Of one priority: one of a
# higher is found by the next claim from the front, and may come before or behind the others.
PROMOTE = text("""
WITH put_off AS (DELETE FROM outboxq.job WHERE state = 'scheduled' AND queue LIKE 'fuzz%' RETURNING *)
INSERT INTO outboxq.job (id, queue, kind, args, headers, priority, attempt, max_attempts, errors, created_at)
SELECT id, queue, kind, args, headers, 0, attempt, max_attempts, errors, created_at FROM put_off
ORDER BY priority DESC, seq""")


def prepare(url: str) -> None:
    """Make everything in an empty database."""
    engine = create_engine(url)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)
        # Without parameters: psycopg reads no % then.
        connection.execution_options(no_parameters=True).exec_driver_sql(_DDL)
    engine.dispose()


def snapshot(connection: Connection) -> tuple[int, dict[str, Any]]:
    """How many jobs are ready, and all rows of all tables."""
    ready, rows = connection.execute(SNAPSHOT).one()
    return ready, rows
