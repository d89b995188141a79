"""Producers and relays of a few keys under kills: a run follows each add, and has seen what it stands for.

    python -m tests.coalescing.under_kills --seconds 30 --mode lease --seed 7

Ends with 1 if a check fails. The server is an embedded one, or that of OUTBOXQ_TEST_DATABASE_URL.
"""

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Literal, get_args

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession, RelayConfig, config
from outboxq.migrations.runner import migrate_committing
from outboxq.postgres import find_server
from outboxq.testing import RelayProcess
from tests.support.fork_server import forking
from tests.support.waiting import wait_until

Mode = Literal["transaction", "lease"]

PRODUCERS, RELAYS, KEYS = 6, 4, 5
# Documents behind those: all of their jobs have `every`.
THROTTLED, WINDOW = 2, timedelta(seconds=0.5)
_QUICK = Backoff(max_attempts=10_000, first_seconds=0.02, factor=1.0, jitter=0.5)

transaction_jobs, lease_jobs = Jobs(), Jobs()


def _rebuild(ctx: Context, doc: int, change: int) -> None:
    """See all changes of a document first, then be slow, and sometimes fail."""
    session, job = ctx.session, ctx.job
    run = session.execute(
        text(
            "INSERT INTO flow_run (doc, change, job, token, added_at, xid, began_at) VALUES (:doc, :change, :job, "
            ":token, :added_at, pg_current_xact_id()::text::bigint, clock_timestamp()) RETURNING id"
        ),
        {"doc": doc, "change": change, "job": job.id, "token": job.lease_token, "added_at": job.created_at},
    ).scalar_one()
    session.execute(
        text("INSERT INTO flow_seen (run, change) SELECT :run, id FROM flow_change WHERE doc = :doc"),
        {"run": run, "doc": doc},
    )
    time.sleep(random.uniform(0, 0.03))
    if random.random() < 0.1:
        raise ValueError("no luck")


for _jobs, _mode in ((transaction_jobs, "transaction"), (lease_jobs, "lease")):
    _jobs.handler(
        queue="rebuild",
        kind="rebuild",
        claim=_mode,  # type: ignore[arg-type]  # one of both
        retry=_QUICK,
        coalesce=lambda doc: f"doc-{doc}",
    )(_rebuild)

# Each job that leaves the table, in the transaction that removes it: only of those that are committed rows stay.
_SETUP = """
CREATE TABLE flow_change (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, doc int NOT NULL, job uuid);
CREATE INDEX ON flow_change (doc, id);
CREATE TABLE flow_run (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, doc int NOT NULL, change bigint NOT NULL,
  job uuid NOT NULL, token bigint, added_at timestamptz NOT NULL, xid bigint NOT NULL,
  began_at timestamptz NOT NULL);
CREATE INDEX ON flow_run (job);
CREATE INDEX ON flow_run (xid);
CREATE TABLE flow_seen (run bigint NOT NULL, change bigint NOT NULL, PRIMARY KEY (run, change));
CREATE TABLE flow_gone (job uuid NOT NULL, doc int NOT NULL, change bigint NOT NULL, added_at timestamptz NOT NULL,
  pid int NOT NULL, xid bigint NOT NULL, at timestamptz NOT NULL);
CREATE INDEX ON flow_gone (xid, job);
CREATE TABLE flow_lease (job uuid NOT NULL, doc int NOT NULL, token bigint NOT NULL, pid int NOT NULL,
  at timestamptz NOT NULL);
CREATE INDEX ON flow_lease (pid, doc, at);
CREATE TABLE flow_window (key text NOT NULL, job uuid NOT NULL, until timestamptz NOT NULL, xid bigint NOT NULL,
  at timestamptz NOT NULL);
CREATE INDEX ON flow_window (job, at);
CREATE FUNCTION flow_note_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO flow_lease VALUES (NEW.id, (NEW.args->>'doc')::int, NEW.lease_token, pg_backend_pid(), clock_timestamp());
  RETURN NULL;
END $$;
CREATE TRIGGER flow_note_lease AFTER UPDATE ON outboxq.job FOR EACH ROW
  WHEN (NEW.state = 'leased' AND NEW.lease_token IS DISTINCT FROM OLD.lease_token)
  EXECUTE FUNCTION flow_note_lease();
CREATE FUNCTION flow_note_window() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO flow_window VALUES (NEW.key, NEW.job_id, NEW.kept_until, pg_current_xact_id()::text::bigint,
    clock_timestamp());
  RETURN NULL;
END $$;
CREATE TRIGGER flow_note_window AFTER INSERT OR UPDATE ON outboxq.unique_key FOR EACH ROW
  EXECUTE FUNCTION flow_note_window();
CREATE FUNCTION flow_note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO flow_gone VALUES (OLD.id, (OLD.args->>'doc')::int, (OLD.args->>'change')::bigint, OLD.created_at,
    pg_backend_pid(), pg_current_xact_id()::text::bigint, clock_timestamp());
  RETURN NULL;
END $$;
CREATE TRIGGER flow_note AFTER DELETE ON outboxq.job FOR EACH ROW EXECUTE FUNCTION flow_note();
"""

# The run that stands for a job which was taken along. In transaction mode it is of the same transaction. Under a lease
# it is that of the job which the backend had leased last, of those of the key that did not go too, by its token. If
# that run failed or was killed, none is committed, and what it stood for is seen by the run that follows (`unseen`).
_STANDS = """
stands AS MATERIALIZED (
  SELECT gone.job, gone.change, gone.added_at, run.id AS run, run.added_at AS run_added_at
  FROM flow_gone AS gone JOIN flow_run AS run ON run.doc = gone.doc AND run.xid = gone.xid
  WHERE NOT :lease AND run.job <> gone.job
  UNION ALL
  SELECT gone.job, gone.change, gone.added_at, run.id, run.added_at
  FROM flow_gone AS gone CROSS JOIN LATERAL (
    SELECT job, token FROM flow_lease AS lease
    WHERE lease.pid = gone.pid AND lease.doc = gone.doc AND lease.at < gone.at
      AND NOT EXISTS (SELECT FROM flow_gone AS too WHERE too.xid = gone.xid AND too.job = lease.job)
    ORDER BY at DESC LIMIT 1) AS lease
  JOIN flow_run AS run ON run.job = lease.job AND run.token = lease.token
  WHERE :lease AND NOT EXISTS (SELECT FROM flow_run AS own WHERE own.xid = gone.xid)
)"""
# The window of each run of a key with `every`: that which its job took in the same transaction, or last before the run
# under a lease, under which lone suspects run in either mode.
_WINDOWS = f"""
windows AS MATERIALIZED (
  SELECT run.doc, run.job, (
    SELECT until FROM flow_window AS taken
    WHERE taken.job = run.job AND taken.key = chr(30) || 'rebuild' || chr(31) || 'doc-' || run.doc
      AND taken.at < run.began_at AND (run.token IS NOT NULL OR taken.xid = run.xid)
    ORDER BY at DESC LIMIT 1) AS until
  FROM flow_run AS run WHERE run.doc >= {KEYS}
)"""
_CHECKS = {
    # Whose change no run has seen that began after its commit.
    "unseen": "SELECT count(*) FROM flow_change AS c WHERE NOT EXISTS (SELECT FROM flow_seen WHERE change = c.id)",
    "taken_along": f"WITH {_STANDS} SELECT count(*) FROM stands",
    # Taken along by a run that had not seen it.
    "blind": f"WITH {_STANDS} SELECT count(*) FROM stands WHERE NOT EXISTS (SELECT FROM flow_seen AS seen "
    "WHERE seen.run = stands.run AND seen.change = stands.change)",
    # Taken along by a run with older arguments.
    "stale": f"WITH {_STANDS} SELECT count(*) FROM stands WHERE added_at > run_added_at",
    # Runs of a key with `every` that had no window, or one that another run had.
    "crowded": f"WITH {_WINDOWS} SELECT count(*) FILTER (WHERE until IS NULL) + count(until) - "
    "count(DISTINCT (doc, until)) FILTER (WHERE until IS NOT NULL) FROM windows",
    "throttled": f"SELECT count(*) FROM flow_run WHERE doc >= {KEYS}",
    "left": "SELECT count(*) FROM outboxq.job",
    "dead": "SELECT count(*) FROM outboxq.dead_job",
    "adds": "SELECT count(*) FROM flow_change",
    "runs": "SELECT count(*) FROM flow_run",
}


@dataclass(frozen=True)
class Verdict:
    """What became of the adds: all but the first six numbers are to be 0."""

    adds: int
    runs: int
    throttled: int
    taken_along: int
    kills: int
    terminated: int
    unseen: int
    blind: int
    stale: int
    crowded: int
    left: int
    dead: int

    @property
    def is_right(self) -> bool:
        return not any((self.unseen, self.blind, self.stale, self.crowded, self.left, self.dead))


def run(url: str, seconds: float, mode: Mode, seed: int) -> Verdict:
    """Producers, relays and faults on a migrated database of their own, then the checks."""
    engine, chance = create_engine(url, pool_size=PRODUCERS + 2), random.Random(seed)
    with engine.begin() as connection:
        connection.exec_driver_sql(_SETUP)
    try:
        with ExitStack() as stack:
            relays = [stack.enter_context(_relay(url, mode)) for _ in range(RELAYS)]
            while not _count(engine, _CHECKS["adds"], mode):
                _produce(engine, mode, chance, time.monotonic() + 0.1)
            wait_until(lambda: _count(engine, _CHECKS["runs"], mode) > 0, "the first run", 240)
            until = time.monotonic() + seconds
            producers = [
                threading.Thread(target=_produce, args=(engine, mode, random.Random(chance.random()), until))
                for _ in range(PRODUCERS)
            ]
            for producer in producers:
                producer.start()
            kills = terminated = 0
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.5, 1.5))
                if chance.random() < 0.5:
                    victim = chance.randrange(RELAYS)
                    relays[victim].kill()
                    relays[victim] = stack.enter_context(_relay(url, mode))
                    kills += 1
                else:
                    terminated += _terminate(engine, chance)
            for producer in producers:
                producer.join()
            wait_until(lambda: _count(engine, _CHECKS["left"], mode) == 0, "the last runs", 240)
        found = {name: _count(engine, query, mode) for name, query in _CHECKS.items()}
        return Verdict(**found, kills=kills, terminated=terminated)
    finally:
        engine.dispose()


def _relay(url: str, mode: Mode) -> RelayProcess:
    settings = RelayConfig(
        batch_size=1 if mode == "lease" else 3, lease_seconds=2.0, poll_seconds=0.2, max_crashes=1_000
    )
    return RelayProcess(f"tests.coalescing.under_kills:{mode}_jobs", url, settings)


def _produce(engine: Engine, mode: Mode, chance: random.Random, until: float) -> None:
    rebuild = (lease_jobs if mode == "lease" else transaction_jobs).resolve().handlers["rebuild"]
    with sessionmaker(engine, class_=OutboxSession)() as session:
        while time.monotonic() < until:
            doc = chance.randrange(KEYS + THROTTLED)
            change = session.execute(
                text("INSERT INTO flow_change (doc) VALUES (:doc) RETURNING id"), {"doc": doc}
            ).scalar_one()
            options = {"every": WINDOW} if doc >= KEYS or chance.random() < 0.2 else {}
            session.add_job(rebuild.options(**options), doc=doc, change=change)
            # Rolled back now and then, and often committed later than others that began later.
            time.sleep(chance.uniform(0, 0.02))
            session.rollback() if chance.random() < 0.1 else session.commit()


def _terminate(engine: Engine, chance: random.Random) -> int:
    """End a relay's backend that is in a transaction; how many."""
    with engine.begin() as connection:
        found = connection.execute(
            text(
                "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'outboxq relay%' "
                "AND datname = current_database() AND backend_xid IS NOT NULL"
            )
        ).scalars()
        pids = list(found)
        if not pids:
            return 0
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": chance.choice(pids)})
    return 1


def _count(engine: Engine, query: str, mode: Mode) -> int:
    with engine.connect() as connection:
        given = {"lease": mode == "lease"} if ":lease" in query else {}
        found: int = connection.execute(text(query), given).scalar_one()
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.coalescing.under_kills", description=str(__doc__).splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--mode", choices=get_args(Mode), default="transaction")
    parser.add_argument("--seed", type=int, default=1)
    order = parser.parse_args(arguments)
    with (
        forking(),
        find_server(configured_url=config.test_database_url(), binaries=config.local_binaries()) as server,
        server.create_database() as database,
    ):
        engine = create_engine(database.url)
        with engine.connect() as connection:
            migrate_committing(connection)
        engine.dispose()
        verdict = run(database.url, order.seconds, order.mode, order.seed)
    print(", ".join(f"{name} {value}" for name, value in asdict(verdict).items()))  # a command
    print("right" if verdict.is_right else "WRONG")  # a command
    return 0 if verdict.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
