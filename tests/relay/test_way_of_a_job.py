"""The way of one job: from the serve loop to its handler it passes few functions of ours."""

import traceback
from pathlib import Path

import pytest
from sqlalchemy.orm import sessionmaker

import outboxq
from outboxq import Context, Jobs, OutboxSession, Relay, RelayConfig
from outboxq.postgres import Database

_HOUSE = str(Path(outboxq.__file__).parent)


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_eleven_functions_at_most_lead_from_the_serve_loop_to_a_handler(
    claim: str, sessions: sessionmaker[OutboxSession], outboxq_database: Database
) -> None:
    """The traceback of a handler is the way of its job, short enough to be read; two of them end what it forks."""
    jobs, ways = Jobs(), []

    @jobs.handler(queue="q", claim=claim)  # type: ignore[arg-type]  # one of the two modes
    def look(ctx: Context) -> None:
        ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_HOUSE)]
        names = [frame.name for frame in ours]
        ways.append(names[names.index("_serve") :])

    with sessions.begin() as session:
        session.add_job(look)
    Relay(outboxq_database.url, jobs, RelayConfig(slots_per_queue=1)).drain()
    (way,) = ways
    assert len(way) <= 11, "\n".join(way)
