"""The check of a torture test: finds broken promises by the rows that the database has at the end.

The tables have no unique constraints, so that forbidden rows, such as a second effect, can exist. They are:

- `enqueue`: each producer's knowledge of each job: COMMIT was answered (`ok`), the job was rolled back (`failed`), or
  COMMIT got no answer (`unknown`).
- `request`: the business row, written in the job's transaction: it shows if an `unknown` job was committed. For a
  coalesced job it has the key, and the job's place among the jobs of that key: a job with a later place may have run in
  its place.
- `effect`: a row for each time that a handler's rows were committed, with the attempt, the crashes and the lease token
  of that run.
- `violation`: a breach that a handler saw: it ran together with another job of its group or key, or with more jobs than
  its queue may run.
- `start`: a row for each time that a handler of mode `calls` began, with its lease token.
- `sighting`: the token and owner of leases, as an observer saw them in rows of jobs.
- outboxq's own `job` and `dead_job`.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, text

SCHEMA = "torture"

CREATE = f"""\
CREATE SCHEMA {SCHEMA};
CREATE TABLE {SCHEMA}.enqueue (job_id uuid NOT NULL, outcome text NOT NULL);
CREATE TABLE {SCHEMA}.request (job_id uuid NOT NULL, key text, number bigint);
CREATE TABLE {SCHEMA}.effect (
  row bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  job_id uuid NOT NULL,
  attempt integer NOT NULL,
  crashes integer NOT NULL,
  token bigint,
  counted boolean NOT NULL DEFAULT false,
  lane text,
  seq bigint,
  key text,
  number bigint,
  batch_id uuid
);
CREATE TABLE {SCHEMA}.violation (job_id uuid NOT NULL, what text NOT NULL);
CREATE TABLE {SCHEMA}.start (job_id uuid NOT NULL, token bigint NOT NULL);
CREATE TABLE {SCHEMA}.sighting (job_id uuid NOT NULL, token bigint NOT NULL, owner uuid);
CREATE TABLE {SCHEMA}.misbehaved (job_id uuid PRIMARY KEY);
CREATE TABLE {SCHEMA}.counter (id integer PRIMARY KEY, value bigint NOT NULL DEFAULT 0);
INSERT INTO {SCHEMA}.counter (id) SELECT generate_series(0, 1);
CREATE INDEX ON {SCHEMA}.enqueue (job_id);
CREATE INDEX ON {SCHEMA}.request (job_id);
CREATE INDEX ON {SCHEMA}.effect (job_id);
CREATE INDEX ON {SCHEMA}.sighting (job_id, token)"""

_SAMPLE = 5


@dataclass(frozen=True, slots=True)
class Rule:
    """A promise that the check tests.

    Attributes:
        broken: SQL for the ids of jobs that break it.
        meaning: A description of such jobs, for the report.
    """

    name: str
    broken: str
    meaning: str


# The end of each job: its number of effects and of dead letters, true if its row still waits, and the highest attempt
# and number of crashes in any of these.
_ENDS = f"""\
WITH enqueued AS (
  SELECT job_id, min(outcome) AS outcome, count(*) AS told,
    EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id) AS is_true,
    EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id AND key IS NOT NULL) AS may_be_merged
  FROM {SCHEMA}.enqueue GROUP BY job_id
), ends AS (
  SELECT job_id, sum(effects) AS effects, sum(dead) AS dead, sum(waiting) AS waiting,
    max(attempt) AS attempt, max(crashes) AS crashes
  FROM (
    SELECT job_id, 1 AS effects, 0 AS dead, 0 AS waiting, attempt, crashes FROM {SCHEMA}.effect
    UNION ALL SELECT id, 0, 1, 0, attempt, crashes FROM outboxq.dead_job
    UNION ALL SELECT id, 0, 0, 1, attempt, crashes FROM outboxq.job
  ) AS every_end GROUP BY job_id
), jobs AS (
  SELECT coalesce(enqueued.job_id, ends.job_id) AS job_id, outcome, coalesce(told, 0) AS told,
    coalesce(is_true, EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = ends.job_id)) AS is_true,
    coalesce(effects, 0) AS effects, coalesce(dead, 0) AS dead, coalesce(waiting, 0) AS waiting,
    attempt, crashes, coalesce(may_be_merged, false) AS may_be_merged
  FROM enqueued FULL JOIN ends USING (job_id)
)
"""


def _by_ends(name: str, condition: str, meaning: str) -> Rule:
    return Rule(name, f"{_ENDS}SELECT job_id FROM jobs WHERE {condition}", meaning)


RULES = (
    _by_ends(
        "lost",
        "effects + dead + waiting = 0 AND (outcome = 'ok' OR is_true) AND NOT may_be_merged",
        "committed jobs without an effect or a dead letter",
    ),
    _by_ends("doubled", "effects + dead + waiting > 1", "jobs that ended more than once"),
    _by_ends(
        "ran though rolled back",
        "effects + dead + waiting > 0 AND (outcome = 'failed' OR NOT is_true)",
        "jobs that came to something although they were rolled back",
    ),
    _by_ends("left", "waiting > 0", "jobs that still wait"),
    _by_ends(
        "untrue",
        "(outcome = 'ok' AND NOT is_true) OR (outcome = 'failed' AND is_true)",
        "jobs whose business row contradicts the answer that the producer got",
    ),
    _by_ends("untold", "told <> 1", "jobs that no producer has noted, or two"),
    _by_ends("over attempts", "attempt > :max_attempts", "jobs with more attempts than they are allowed"),
    _by_ends("over crashes", "crashes > :max_crashes", "jobs with more crashes than they are allowed"),
    Rule(
        "two owners",
        f"SELECT job_id FROM {SCHEMA}.sighting WHERE owner IS NOT NULL GROUP BY job_id, token "
        "HAVING count(DISTINCT owner) > 1",
        "jobs with one lease token in two hands",
    ),
    Rule(
        "old token",
        f"SELECT effect.job_id FROM {SCHEMA}.effect JOIN {SCHEMA}.sighting USING (job_id) "
        "WHERE sighting.token > effect.token",
        "jobs whose effect was committed under a lease that had been replaced",
    ),
    Rule(
        "begun twice",
        # A deadlock is repeated at once, without counting an attempt.
        f"SELECT DISTINCT job_id FROM (SELECT job_id FROM {SCHEMA}.start GROUP BY job_id, token "
        f"HAVING count(*) > 1) AS begun WHERE job_id NOT IN (SELECT job_id FROM {SCHEMA}.effect WHERE counted)",
        "jobs whose call began twice under one lease token",
    ),
    Rule(
        "out of order",
        f"SELECT job_id FROM (SELECT job_id, seq, lag(seq) OVER (PARTITION BY lane ORDER BY row) AS before "
        f"FROM {SCHEMA}.effect WHERE lane IS NOT NULL) AS ordered WHERE seq < before",
        "jobs that ran after a later one of their group",
    ),
    Rule(
        "not alone",
        f"SELECT DISTINCT job_id FROM {SCHEMA}.violation WHERE what = 'beside its group'",
        "jobs that ran beside another one of their group",
    ),
    Rule(
        "twice at a time",
        f"SELECT DISTINCT job_id FROM {SCHEMA}.violation WHERE what = 'beside its key'",
        "jobs that ran beside another one of their unique key",
    ),
    Rule(
        "too early",
        f"SELECT DISTINCT callback.job_id FROM {SCHEMA}.effect AS callback "
        f"JOIN {SCHEMA}.effect AS member ON member.batch_id = callback.job_id WHERE member.row > callback.row",
        "callbacks of batches that ran before a member",
    ),
    Rule(
        "over limit",
        f"SELECT DISTINCT job_id FROM {SCHEMA}.violation WHERE what = 'over its limit'",
        "jobs that ran though their queue had as many as it may",
    ),
    # A dead letter counts as a run, because it had its attempts.
    Rule(
        "unseen",
        f"""\
SELECT newest.job_id FROM (
  SELECT DISTINCT ON (key) key, number, job_id FROM {SCHEMA}.request WHERE key IS NOT NULL ORDER BY key, number DESC
) AS newest
WHERE number > (
  SELECT coalesce(max(number), 0) FROM (
    SELECT number FROM {SCHEMA}.effect WHERE effect.key = newest.key
    UNION ALL SELECT (args ->> 'number')::bigint FROM outboxq.dead_job
    WHERE replace(unique_key, pg_catalog.chr(31), ' ') = newest.key
  ) AS ran
)""",
        "jobs that were the newest of their key, and that no run has seen",
    ),
)
_UNKNOWN = f"SELECT count(*) FROM {SCHEMA}.enqueue WHERE outcome = 'unknown'"
_FIGURES = {
    "effects_applied": f"SELECT count(*) FROM {SCHEMA}.effect",
    "dead_letters": "SELECT count(*) FROM outboxq.dead_job",
    "commits_unanswered": _UNKNOWN,
    "commits_unanswered_kept": _UNKNOWN
    + f" AND EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id)",
    "commits_unanswered_as_promised": _UNKNOWN
    + f"""\
 AND EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id) = (
  EXISTS (SELECT FROM {SCHEMA}.effect WHERE effect.job_id = enqueue.job_id)
  OR EXISTS (SELECT FROM outboxq.dead_job WHERE id = enqueue.job_id)
  -- It may have gone into a later one of its key, which the rule of these says.
  OR EXISTS (SELECT FROM {SCHEMA}.request WHERE request.job_id = enqueue.job_id AND key IS NOT NULL)
)""",
}

# A handler that adds to two counters, and writes an effect that says so, does all of it or nothing.
_HALF_DONE = (
    f"SELECT (SELECT coalesce(sum(value), 0) FROM {SCHEMA}.counter) - 2 * count(*) FROM {SCHEMA}.effect WHERE counted"
)

# Afterwards the checker is the only session, so nothing else may be held or open.
OPEN_TRANSACTIONS = {
    "prepared transactions": "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()",
    "open transactions": """\
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND (xact_start IS NOT NULL OR state LIKE 'idle in transaction%')""",
    "locks": """\
SELECT count(*) FROM pg_locks
JOIN pg_database ON pg_database.oid = pg_locks.database JOIN pg_stat_activity USING (pid)
WHERE pg_database.datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND (relation IS NOT NULL OR locktype = 'advisory')""",
}
_KNOWN = text(
    f"""\
SELECT (SELECT string_agg(outcome, ' and ') FROM {SCHEMA}.enqueue WHERE job_id = :job_id) AS outcomes,
  (SELECT string_agg(attempt::text, ' and ' ORDER BY row) FROM {SCHEMA}.effect WHERE job_id = :job_id) AS attempts,
  (SELECT string_agg(reason, ' and ') FROM outboxq.dead_job WHERE id = :job_id) AS reason,
  (SELECT string_agg(state, ' and ') FROM outboxq.job WHERE id = :job_id) AS state"""
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `check_history`, from which the `TortureReport` is made.

    Attributes:
        counts: The number of jobs that break each rule.
        figures: Numbers, by their names in `TortureReport`.
        problems: All broken promises, in words.
    """

    counts: dict[str, int]
    figures: dict[str, int]
    problems: tuple[str, ...]


def check_history(connection: Connection, *, max_attempts: int, max_crashes: int) -> Verdict:
    """Check every rule, and that no lock, open transaction or prepared transaction is left.

    No job may have more than `max_attempts` attempts or `max_crashes` crashes.
    """
    bounds = {"max_attempts": max_attempts, "max_crashes": max_crashes}
    counts: dict[str, int] = {}
    problems: list[str] = []
    for rule in RULES:
        used = {name: value for name, value in bounds.items() if f":{name}" in rule.broken}
        found = [str(job_id) for job_id in connection.execute(text(rule.broken), used).scalars()]
        counts[rule.name] = len(found)
        if found:
            told = "; ".join(_describe(connection, job_id) for job_id in found[:_SAMPLE])
            problems.append(f"{rule.name}: {len(found)} {rule.meaning}, such as {told}")
    # Without this, a transaction sees the other sessions as it saw them first.
    connection.execute(text("SELECT pg_stat_clear_snapshot()"))
    half_done = connection.execute(text(_HALF_DONE)).scalar_one()
    if half_done:
        problems.append(f"counters differ by {half_done} from the effects that were to count")
    for name, query in OPEN_TRANSACTIONS.items():
        number = connection.execute(text(query)).scalar_one()
        if number:
            problems.append(f"{number} {name} after the end")
    figures = {name: int(connection.execute(text(query)).scalar_one()) for name, query in _FIGURES.items()}
    return Verdict(counts, figures, tuple(problems))


def _describe(connection: Connection, job_id: str) -> str:
    row = connection.execute(_KNOWN, {"job_id": job_id}).one()
    known = {
        "enqueue": row.outcomes,
        "attempts with an effect": row.attempts,
        "dead letter": row.reason,
        "waits as": row.state,
    }
    return f"{job_id} (" + ", ".join(f"{name}: {value}" for name, value in known.items() if value is not None) + ")"
