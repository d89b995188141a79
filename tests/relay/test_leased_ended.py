"""Leased handlers that end the transaction of the relay: what they have committed is never run again."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, DeadLetter, Discard, Jobs, OutboxSession, Retry, Snooze
from outboxq.events import Event
from outboxq.outcomes import Outcome
from tests.support.app import Effect
from tests.support.ledger import ledger, rows, waiting

Drain = Callable[..., list[Event]]
OUTCOMES: dict[str, Outcome | None] = {
    "done": None,
    "retry": Retry(timedelta(0)),
    "snooze": Snooze(timedelta(0)),
    "dead": DeadLetter("x"),
    "discard": Discard("x"),
}


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", ["commit", "unseen"])
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_leased_handler_that_committed_never_runs_again(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, name: str, way: str
) -> None:
    """Whatever it returns: nothing is settled outside of the transaction, not even if the end of it was not seen."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", claim="lease", retry=Backoff(max_attempts=9, first_seconds=0.0, jitter=0.0))
    def book(ctx: Context) -> Outcome | None:
        ctx.session.add(Effect(name="row"))
        ctx.session.flush()
        if way == "commit":
            ctx.session.connection().connection.driver_connection.commit()
        else:
            ctx.session.bind._dbapi_connection.dbapi_connection.pgconn.exec_(b"COMMIT")
        return OUTCOMES[name]

    with sessions.begin() as session:
        session.add_job(book)
    drain(jobs, slots_per_queue=1)
    assert ledger(engine) == {"row": 1}
    assert rows(engine, "SELECT reason FROM outboxq.dead_job") == [
        ("committed by its handler: some of its rows may stand, so it never runs again",)
    ]
    assert waiting(engine) == 0
