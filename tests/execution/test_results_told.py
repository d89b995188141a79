"""Those who wait for results are told in the strings that end the jobs, and kinds without results send none of it."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

import outboxq.execution.commit as commit_module
import outboxq.execution.lease_mode as lease_module
from outboxq import Context, DeadLetter, Jobs, OutboxSession
from outboxq.events import JobDied, JobDone, JobRetried
from outboxq.execution.keep import NOTHING_KEPT, Keeper, Kept
from outboxq.execution.lease_mode import Unsettled
from outboxq.handlers.keeping import Keeping
from outboxq.job import Job
from outboxq.postgres import Database
from outboxq.statements.done import rows_of_done
from tests.support.results import KEEP, told
from tests.support.statements import _LEASED

Drain = Callable[..., list[Any]]
Sessions = sessionmaker[OutboxSession]
_PLAIN, _KEPT, _RESULTS = Keeper(), Keeper({"send": Keeping(60.0)}), Keeper({"send": Keeping(60.0, result=True)})


def _events(job: Job) -> list[Any]:
    return [JobDone(job, 0.5, "7"), JobDied(job, "no"), JobRetried(job, "E", "", "", 1.0)]


def test_a_kind_without_results_sends_what_it_sent_before() -> None:
    """Byte for byte, in both modes: nothing without `keep`, and with it the INSERT, checked there under a lease."""
    events = _events(_LEASED)
    assert _PLAIN.statements("outboxq", events) == NOTHING_KEPT
    assert _KEPT.statements("outboxq", events) == Kept(rows_of_done("outboxq", _KEPT.kept(events), None))
    for keeper in (_PLAIN, _KEPT):
        leased = Unsettled((events[0],), (), unsure=False, keeper=keeper).script("outboxq")
        assert not any(word in leased for word in ("notify", "advisory"))
        checking = leased.count("SET CONSTRAINTS ALL IMMEDIATE; ")
        assert checking == (keeper is _KEPT)
        assert leased.count(";") - checking == Unsettled((events[0],), (), unsure=False).script("outboxq").count(";")


def test_each_way_to_end_is_told_and_a_retry_is_not() -> None:
    """A dead letter has no row, and is told of too; and so are jobs that were taken along."""
    other = UUID(int=9)
    assert _RESULTS.ended(_events(_LEASED), {_LEASED.id: (other,)}) == [_LEASED.id, other, _LEASED.id, other]
    assert _RESULTS.ended([_events(_LEASED)[2]]) == []
    dead = _RESULTS.statements("outboxq", [JobDied(_LEASED, "no")])
    assert dead.rows is None
    assert str(_LEASED.id) in dead.telling


def test_a_batch_of_many_tries_one_flag() -> None:
    """A server has few locks for each of its sessions."""
    events = [JobDied(Job(UUID(int=n), *_rest()), "no") for n in range(65)]
    assert str(UUID(int=7)) in _RESULTS.statements("outboxq", events[:64]).telling
    assert str(UUID(int=7)) not in _RESULTS.statements("outboxq", events).telling


def _rest() -> tuple[Any, ...]:
    return tuple(getattr(_LEASED, name) for name in Job.__struct_fields__[1:])


@pytest.mark.parametrize("claim", ["transaction", "lease"])
def test_results_cost_no_round_trip_and_without_a_wait_no_notification(
    outboxq_database: Database,
    engine: Engine,
    sessions: Sessions,
    drain: Drain,
    monkeypatch: pytest.MonkeyPatch,
    claim: str,
) -> None:
    """As many strings are sent as without, and one of them holds it."""
    sent: list[str] = []
    for module in (commit_module, lease_module):
        real = module.run_script
        monkeypatch.setattr(
            module, "run_script", lambda connection, script, real=real: sent.append(script) or real(connection, script)
        )
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
                counts.append((len(sent), sum("pg_notify" in script for script in sent)))
        assert heard() == []
    plain, plain_dead, kept, kept_dead, results, results_dead = counts
    assert [told_of for _, told_of in (plain, plain_dead, kept, kept_dead)] == [0, 0, 0, 0]
    assert (results, results_dead) == ((plain[0], 1), (plain_dead[0], 1))
