"""A database that has one secret wherever a payload may have it, at any depth and however it is written down."""

import json

from sqlalchemy import Engine, text

from tests.support.dashboard import stage_dashboard
from tests.support.staged import numbered

CANARY = "hunter2-canary"
_ARGS = {
    "password": CANARY,
    "nested": {"list": [{"apiKey": CANARY}, {"X-Api-Key": CANARY}], "authToken": {"deep": [CANARY]}},
    "inner_json": json.dumps({"client_secret": CANARY, "n": 1}),
    "url": f"postgresql://user:{CANARY}@host/db",
    "card_number": CANARY,
    "order_id": 7,
}


def stage_secrets(engine: Engine) -> None:
    """Fill a database with something for every screen, and with the secret."""
    stage_dashboard(engine)
    args, headers = json.dumps(_ARGS), json.dumps({"authorization": f"Bearer {CANARY}"})
    errors = json.dumps([{
        "attempt": 1, "at": "2026-01-01T00:00:00+00:00", "type": "ValueError", "message": f"password={CANARY} is wrong",
        "where": ["jobs.py:1"],
        "chain": [{"type": "ValueError", "message": f"sent {CANARY}", "notes": [f"token: {CANARY}"], "frames": []}],
    }])  # fmt: skip
    reason = f"another attempt cannot help: E: {CANARY}"
    values = {"args": args, "headers": headers, "errors": errors, "reason": reason}
    with engine.begin() as connection:
        for table in ("job", "dead_job"):
            connection.execute(text(
                f"UPDATE outboxq.{table} SET args = CAST(:args AS jsonb), headers = CAST(:headers AS jsonb), "
                "errors = CAST(:errors AS jsonb)"), values)  # fmt: skip
        connection.execute(text("UPDATE outboxq.dead_job SET reason = :reason"), values)
        connection.execute(text(
            "UPDATE outboxq.done_job SET args = CAST(:args AS jsonb), headers = CAST(:headers AS jsonb), "
            "result = CAST(:args AS jsonb)"), values)  # fmt: skip
        connection.execute(
            text("UPDATE outboxq.effect SET result = CAST(:args AS jsonb) WHERE status = 'done'"), values
        )
        connection.execute(text("UPDATE outboxq.effect SET error = :reason WHERE error IS NOT NULL"), values)
        # One that is tried again, dead letters of a kind whose page is looked at, and notes of a job that runs.
        connection.execute(text(
            "UPDATE outboxq.job SET attempt = 1, state = 'scheduled', run_at = now() + interval '1 hour' "
            "WHERE kind = 'send_welcome'"))  # fmt: skip
        connection.execute(text("UPDATE outboxq.dead_job SET kind = 'credit'"))
        connection.execute(text("UPDATE outboxq.dead_job SET errors = '[]' WHERE queue = 'mail'"))
        note = {"job": numbered(6), "note": f"token={CANARY}"}
        connection.execute(text(
            "INSERT INTO outboxq.progress (job_id, attempt, fraction, note, relay) "
            "VALUES (:job, 1, 0.5, :note, gen_random_uuid())"), note)  # fmt: skip
        connection.execute(text("UPDATE outboxq.schedule SET args = CAST(:args AS jsonb)"), values)


def give_words(engine: Engine) -> None:
    """Have a word before the secret in every text: without a key and a word nothing can know it as one."""
    it = {"it": f"token={CANARY}"}
    with engine.begin() as connection:
        connection.execute(text("UPDATE outboxq.dead_job SET reason = 'it failed: ' || :it"), it)
        connection.execute(text("UPDATE outboxq.effect SET error = :it WHERE error IS NOT NULL"), it)
