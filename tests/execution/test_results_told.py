"""Those who wait for results are told in the strings that end the jobs, and kinds without results send none of it."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from outboxq import Context, DeadLetter, Jobs, OutboxSession
from outboxq.events import JobDied, JobDone, JobRetried
from outboxq.execution.keep import FinishedRows, Keeper
from outboxq.handlers.keeping import Keeping
from outboxq.job import Job
from outboxq.postgres import Database
from outboxq.statements.by_index import PLANNED_ONCE
from outboxq.statements.transaction import UNTIMED
from tests.support.results import KEEP, told
from tests.support.scripts import change_scripts, note_scripts
from tests.support.statements import _LEASED

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
_PLAIN, _KEPT, _RESULTS = Keeper(), Keeper({"send": Keeping(60.0)}), Keeper({"send": Keeping(60.0, result=True)})


def _events(job: Job) -> list[Any]:
    return [JobDone(job, 0.5, "7"), JobDied(job, "no"), JobRetried(job, "E", "", "", 1.0)]


def test_a_kind_without_results_sends_what_it_sent_before(
    sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, in both modes: nothing without `keep`, and with it the INSERT, checked there under a lease."""
    events = _events(_LEASED)
    assert _PLAIN.steps("outboxq", events) == []
    rows = _KEPT.finished_rows(events)
    assert rows is not None
    assert _KEPT.steps("outboxq", events) == [FinishedRows(_KEPT, "outboxq", rows)]
    plain, kept = (_settled_under_a_lease(options, sessions, drain, monkeypatch) for options in ({}, {"keep": KEEP}))
    assert not any(word in statement for statement in plain + kept for word in ("notify", "advisory"))
    assert [statement for statement in kept if "WITH oq_held" not in statement] == [
        *(statement for statement in plain[: plain.index(PLANNED_ONCE)]), "SET CONSTRAINTS ALL IMMEDIATE",
    ]  # fmt: skip
    assert (sum("INSERT" in statement for statement in plain), sum("INSERT" in each for each in kept)) == (0, 1)


def _settled_under_a_lease(
    options: dict[str, Any], sessions: Sessions, drain: Drain, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The statements by which a job that wrote nothing is settled, up to the next claim."""
    jobs, sent = Jobs(), list[list[str]]()

    @jobs.handler(claim="lease", **options)
    def work(ctx: Context) -> None: ...

    with sessions.begin() as session:
        session.add_job(work)
    with monkeypatch.context() as patched:
        change_scripts(patched, lambda script: sent.append([statement for _, statement in script.parts]))
        drain(jobs)
    (settled,) = (each for each in sent if any(statement.startswith("/* as RELEASE") for statement in each))
    return settled[: settled.index(UNTIMED)]


def test_each_way_to_end_is_told_and_a_retry_is_not() -> None:
    """A dead letter has no row, and is told of too; and so are jobs that were taken along."""
    other = UUID(int=9)
    assert _RESULTS.ended(_events(_LEASED), {_LEASED.id: (other,)}) == [_LEASED.id, other, _LEASED.id, other]
    assert _RESULTS.ended([_events(_LEASED)[2]]) == []
    (dead,) = _RESULTS.steps("outboxq", [JobDied(_LEASED, "no")])
    assert str(_LEASED.id) in str(dead.statements())


def test_a_batch_of_many_tries_one_flag() -> None:
    """A server has few locks for each of its sessions."""
    events = [JobDied(Job(UUID(int=n), *_rest()), "no") for n in range(65)]
    (some,), (many,) = (_RESULTS.steps("outboxq", given) for given in (events[:64], events))
    assert str(UUID(int=7)) in str(some.statements())
    assert str(UUID(int=7)) not in str(many.statements())


def _rest() -> tuple[Any, ...]:
    return tuple(getattr(_LEASED, name) for name in Job.__struct_fields__[1:])


@pytest.mark.large
@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_results_cost_no_round_trip_and_without_a_wait_no_notification(
    outboxq_database: Database,
    engine: Engine,
    sessions: Sessions,
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    claim: str,
) -> None:
    """The one string that ends a job holds it."""
    sent = note_scripts(monkeypatch)
    counts = []
    with told(outboxq_database) as heard:
        for options in ({}, {"keep": KEEP}, {"keep": KEEP, "keep_result": True}):
            for dies in (False, True):
                jobs = Jobs()

                @jobs.handler(claim=claim, **options)
                def work(ctx: Context, dies: bool) -> Any:
                    return DeadLetter("no") if dies else None

                with sessions.begin() as session:
                    session.add_job(work, dies=dies)
                sent.clear()
                drain(jobs, slots_per_queue=1)
                ending = [script for script in sent if "SET CONSTRAINTS" in script or "WITH oq_held" in script]
                counts.append((len(ending), sum("pg_notify" in script for script in sent)))
        assert heard() == []
    # Two for each of the options: a job that is done, and one that dies.
    assert counts == [(1, 0)] * 4 + [(1, 1)] * 2
