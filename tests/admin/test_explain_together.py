"""`explain_job` of a job with several things in its way at once: its verdict is one of them until the last is gone."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import Context, Jobs, OutboxSession
from outboxq.admin import kinds, queues
from outboxq.admin.explain import CODES, explain_job
from outboxq.events import Event, JobDone
from outboxq.queue_limits import make_limits
from tests.support.doctor import execute, open_session
from tests.support.matrices import sampled

Drain = Callable[..., list[Event]]
jobs = Jobs()


@jobs.handler(queue="mail")
def send(ctx: Context) -> None: ...


@dataclass
class Place:
    engine: Engine
    sessions: sessionmaker[OutboxSession]
    url: str
    job_id: UUID


InTheWay: TypeAlias = Callable[[Place], AbstractContextManager[object]]


@contextmanager
def paused_queue(place: Place) -> Iterator[None]:
    with place.engine.begin() as connection:
        queues.pause(connection, ["mail"])
    yield
    with place.engine.begin() as connection:
        queues.resume(connection, ["mail"])


@contextmanager
def paused_kind(place: Place) -> Iterator[None]:
    with place.engine.begin() as connection:
        kinds.pause(connection, "mail", ["send"])
    yield
    with place.engine.begin() as connection:
        kinds.resume(connection, "mail", ["send"])


@contextmanager
def later_time(place: Place) -> Iterator[None]:
    execute(place.url, _SET.format("state = 'scheduled', run_at = clock_timestamp() + interval '1 hour'"))
    yield
    execute(place.url, _SET.format("state = 'ready', run_at = clock_timestamp()"))


@contextmanager
def used_rate(place: Place) -> Iterator[None]:
    with place.engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(rate="1/h"))
    execute(place.url, "INSERT INTO outboxq.rate VALUES ('mail', clock_timestamp() + interval '1 hour')")
    yield
    with place.engine.begin() as connection:
        queues.set_limits(connection, ["mail"], make_limits(), {"rate"})
    execute(place.url, "DELETE FROM outboxq.rate")


@contextmanager
def earlier_job(place: Place) -> Iterator[None]:
    with place.sessions.begin() as session:
        first = session.add_jobs([send.options(priority=9).job()])[0].id
    yield
    execute(place.url, f"DELETE FROM outboxq.job WHERE id = '{first}'")


_SET = "UPDATE outboxq.job SET {} WHERE priority = 0"
WAYS: dict[str, InTheWay] = {
    "held-by-session": lambda place: open_session(
        place.url, f"SELECT FROM outboxq.job WHERE id = '{place.job_id}' FOR UPDATE"
    ),
    "table-locked": lambda place: open_session(place.url, "LOCK TABLE outboxq.queue IN ACCESS EXCLUSIVE MODE"),
    "queue-paused": paused_queue,
    "kind-paused": paused_kind,
    "scheduled": later_time,
    "rate-limited": used_rate,
    "behind-others": earlier_job,
}
SETS = ["+".join(chosen) for number in (3, 2, 1) for chosen in combinations(WAYS, number)]


@pytest.mark.first_and_last
@pytest.mark.parametrize("chosen", sampled(SETS, 12))
def test_the_first_reason_is_true_until_the_last_is_gone(
    chosen: str, engine: Engine, sessions: sessionmaker[OutboxSession], drain: Drain
) -> None:
    """Each verdict is something that is in the way; when that is taken away, the next one is; then the job runs."""
    url = engine.url.render_as_string(hide_password=False)
    with sessions.begin() as session:
        place = Place(engine, sessions, url, session.add_job(send).id)
    with ExitStack() as served:
        served.enter_context(open_session(url, "SELECT 1", name="outboxq relay"))
        ways = {code: ExitStack() for code in chosen.split("+")}
        # What locks stands last: the others could not be put in the way behind it.
        for code in sorted(ways, key=lambda code: code in ("held-by-session", "table-locked")):
            ways[code].enter_context(WAYS[code](place))
        while ways:
            with engine.connect() as connection:
                found = explain_job(connection, place.job_id)
            codes = [reason.code for reason in found.reasons]
            assert codes == sorted(codes, key=CODES.index)
            assert found.verdict.code in ways, codes
            assert set(codes) <= {*ways, "not-known"}
            ways.pop(found.verdict.code).close()
        with engine.connect() as connection:
            assert explain_job(connection, place.job_id).verdict.code == "due-now"
    assert [type(event) for event in drain(jobs) if isinstance(event, JobDone)] == [JobDone]
