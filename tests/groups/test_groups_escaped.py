"""Groups whose batchable handlers end the transaction: no later job of a group stands before an earlier one."""

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import Backoff, Context, Jobs, OutboxSession
from outboxq.events import Event
from tests.support.app import Effect
from tests.support.ledger import rows, waiting

Drain = Callable[..., list[Event]]


@pytest.mark.first_and_last
@pytest.mark.parametrize("way", ["statement", "commit", "cursor", "unseen", "unseen, begun again"])
def test_the_order_of_a_group_outlasts_a_handler_that_ends_the_transaction(
    engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain, way: str
) -> None:
    """What earlier jobs wrote stands before that of the job which ended it; later ones run after it."""
    jobs = Jobs()

    @jobs.handler(queue="ledger", batchable=True, group="a", retry=Backoff(max_attempts=1))
    def book(ctx: Context, number: int) -> None:
        ctx.session.add(Effect(name=str(number)))
        if number != 3:
            return
        if way == "statement":
            ctx.session.execute(text("COMMIT"))
        elif way == "commit":
            ctx.session.connection().connection.driver_connection.commit()
        elif way == "cursor":
            ctx.session.connection().connection.cursor().execute("COMMIT; BEGIN")
        else:
            commit = b"COMMIT; BEGIN" if way.endswith("again") else b"COMMIT"
            ctx.session.bind._dbapi_connection.dbapi_connection.pgconn.exec_(commit)

    with sessions.begin() as session:
        for number in range(1, 6):
            session.add_job(book, number=number)
    drain(jobs, slots_per_queue=1, batch_size=10)
    done = [name for (name,) in rows(engine, "SELECT name FROM effect_ledger ORDER BY row")]
    assert done == sorted(set(done))
    died = {args["number"] for (args,) in rows(engine, "SELECT args FROM outboxq.dead_job")}
    # Each job has one end that is seen: with the last way it is not known whose rows stand.
    assert died | {int(name) for name in done} == {1, 2, 3, 4, 5}
    assert waiting(engine) == 0
