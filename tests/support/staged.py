"""A database with something of everything that operators list, of fixed names and ids.

Ages are the same for half a minute: they are rounded, and begin at a whole minute.
"""

from datetime import datetime
from uuid import UUID

from sqlalchemy import Connection, Engine, text

from tests.support.leases import lease

ERRORS = """[
  {"attempt": 1, "at": "%(first)s", "type": "ValueError", "message": "card <number> was refused by the bank",
   "where": ["myapp/jobs.py:14 in charge"],
   "chain": [{"type": "ValueError", "message": "card <number> was refused by the bank",
              "frames": [["myapp/jobs.py", 14, "charge"]]}]}
]"""
REASON = "gave up after 1 of 1 attempts: ValueError: card <number> was refused by the bank"

_TABLES = ", ".join(
    f"outboxq.{name}"
    for name in ("job", "dead_job", "done_job", "inbox", "effect", "queue", "relay", "schedule", "batch")
)
_JOB = text(
    "INSERT INTO outboxq.job (id, queue, kind, args, state, run_at, created_at, attempt, parked) VALUES "
    "(:id, :queue, :kind, CAST(:args AS jsonb), :state, CAST(:run_at AS timestamptz), :created_at, :attempt, :parked)"
)


def numbered(number: int) -> UUID:
    """The id of a staged job."""
    return UUID(f"01929e1c-5a7d-7cc3-9a55-{number:012x}")


def stage(engine: Engine) -> datetime:
    """Fill a migrated database anew, as at the time that is returned."""
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {_TABLES}"))
        now: datetime = connection.execute(text("SELECT now()")).scalar_one()
        _stage_jobs(connection)
        _stage_dead(connection)
        _stage_done(connection)
        _stage_memory(connection)
        _stage_schedules(connection)
        _stage_batches(connection)
    return now


def _ago(connection: Connection, interval: str) -> datetime:
    # Of the transaction's beginning, so that all ages are from one moment.
    found: datetime = connection.execute(
        text("SELECT now() - CAST(:interval AS interval)"), {"interval": interval}
    ).scalar_one()
    return found


def _stage_jobs(connection: Connection) -> None:
    jobs = (
        ("ready", "mail", "send_welcome", "ready", "3 minutes", "3 minutes", 0, 0),
        ("ready", "accounts", "credit", "ready", "9 minutes", "9 minutes", 0, 0),
        ("scheduled", "mail", "remind", "scheduled", "26 hours", "-5 hours -10 minutes", 0, 0),
        ("due", "accounts", "charge", "scheduled", "2 hours", "25 minutes", 2, 0),
        ("parked", "accounts", "credit_account", "scheduled", "2 hours", "-4 minutes -20 seconds", 0, 3),
        ("leased", "mail", "export_report", "ready", "10 minutes", "10 minutes", 1, 0),
        ("orphaned", "mail", "export_report", "ready", "11 minutes", "11 minutes", 1, 0),
    )
    for number, (name, queue, kind, state, created, run, attempt, parked) in enumerate(jobs, 1):
        connection.execute(
            _JOB,
            {
                "id": numbered(number), "queue": queue, "kind": kind, "state": state, "attempt": attempt,
                "args": '{"account": 7, "cents": 500}', "run_at": _ago(connection, run),
                "created_at": _ago(connection, created), "parked": parked,
            },
        )  # fmt: skip
        if name in ("leased", "orphaned"):
            lease(connection, numbered(number), "1 hour" if name == "leased" else "-1 hour")
    connection.execute(text("INSERT INTO outboxq.queue (name, paused_at) VALUES ('mail', now() - interval '3 hours')"))


def _stage_dead(connection: Connection) -> None:
    insert = text(
        "INSERT INTO outboxq.dead_job "
        "(id, queue, kind, args, headers, priority, attempt, max_attempts, crashes, errors, "
        "reason, created_at, died_at) VALUES "
        "(:id, :queue, :kind, CAST(:args AS jsonb), '{}', 0, 1, 1, "
        "0, CAST(:errors AS jsonb), :reason, :created_at, :died_at)"
    )
    for number, (queue, kind, age) in enumerate((("accounts", "charge", "5 minutes"), ("mail", "send", "3 days")), 101):
        died = _ago(connection, age)
        connection.execute(
            insert,
            {
                "id": numbered(number), "queue": queue, "kind": kind, "died_at": died,
                "args": '{"number": "4111", "cents": 500}',
                "errors": ERRORS % {"first": died.isoformat()}, "reason": REASON,
                "created_at": _ago(connection, "4 days"),
            },
        )  # fmt: skip


def _stage_done(connection: Connection) -> None:
    connection.execute(
        text(
            "INSERT INTO outboxq.done_job (id, queue, kind, outcome, attempt, created_at, claimed_at, finished_at, "
            "seconds, relay, args, headers, result, expires_at) VALUES "
            "(:report, 'reports', 'make_report', 'done', 1, now() - interval '32 minutes', "
            "now() - interval '31 minutes', now() - interval '30 minutes', 48.5, :relay, '{\"month\": \"2026-01\"}', "
            "'{}', '{\"file\": \"reports/2026-01.pdf\"}', now() + interval '7 days' - interval '30 minutes'), "
            "(:mail, 'mail', 'send_digest', 'discarded', 2, now() - interval '2 hours', now() - interval '2 hours', "
            "now() - interval '2 hours', 0.02, :relay, NULL, NULL, NULL, now() + interval '22 hours')"
        ),
        {"report": numbered(302), "mail": numbered(301), "relay": numbered(401)},
    )


def _stage_memory(connection: Connection) -> None:
    connection.execute(
        text(
            "INSERT INTO outboxq.inbox (consumer, message_id, fingerprint, seen_at, expires_at) VALUES "
            "('payments', 'evt_1Nq2', decode(repeat('ab', 32), 'hex'), now() - interval '20 minutes', "
            "now() + interval '30 days' - interval '20 minutes'), "
            "('payments', 'evt_1Nq3', NULL, now() - interval '10 minutes', now() + interval '30 days')"
        )
    )
    connection.execute(
        text(
            "INSERT INTO outboxq.effect "
            "(scope, key, status, in_doubt, provider_key, attempts, lock_token, locked_until, "
            "first_called_at, changed_at, expires_at, result, error) VALUES "
            "('stripe-charge', 'order-1001', 'done', false, :one, 1, gen_random_uuid(), now() - interval '65 minutes', "
            "now() - interval '65 minutes', now() - interval '65 minutes', now() + interval '30 days', "
            '\'{"charge": "ch_42"}\', NULL), '
            "('stripe-charge', 'order-1002', 'unknown', true, :two, 2, gen_random_uuid(), now() - interval '3 hours', "
            "now() - interval '4 hours', now() - interval '3 hours', NULL, NULL, "
            "'ReadTimeout: the other side did not answer, and it cannot be asked')"
        ),
        {"one": numbered(201), "two": numbered(202)},
    )


def _stage_schedules(connection: Connection) -> None:
    connection.execute(
        text(
            "INSERT INTO outboxq.schedule (name, kind, queue, args, options, cron, time_zone, missed, jitter_seconds, "
            "declared, next_at, last_at, paused_at, created_at) VALUES "
            "('nightly', 'nightly', 'reports', '{}', '{\"fire_time\": [\"fire_time\"]}', '30 2 * * *', "
            "'Europe/Berlin', 'one', 0, true, now() + interval '10 hours', now() - interval '14 hours', "
            "now() - interval '3 hours', now() - interval '40 days'), "
            "('report-7', 'report', 'reports', '{\"tenant\": 7}', '{}', '0 6 * * 1', "
            "'UTC', 'skip', 300, false, now() + interval '3 days', NULL, NULL, now() - interval '2 days')"
        )
    )


def _stage_batches(connection: Connection) -> None:
    """One whose callback waits for three jobs."""
    connection.execute(
        text(
            "INSERT INTO outboxq.batch (id, callback, created_at) VALUES "
            """(:id, '{"kind": "report", "queue": "mail", "args": {"run": 7}}', :created_at)"""
        ),
        {"id": numbered(201), "created_at": _ago(connection, "12 minutes")},
    )
    members = {"id": numbered(201), "jobs": [numbered(number) for number in (2, 4, 5)]}
    connection.execute(text("UPDATE outboxq.job SET batch_id = :id WHERE id = ANY (:jobs)"), members)
