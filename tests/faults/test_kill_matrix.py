"""A relay that is killed, or loses its backend, at each moment of a job's way, in each mode: one effect each."""

import os
import signal
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from outboxq import OutboxSession, RelayConfig, SlotGroup
from outboxq.database.urls import psycopg_url
from outboxq.postgres import Database
from outboxq.testing import FAULT_POINTS, CommitProxy, FaultPoint, RelayProcess
from outboxq.testing.crashes import COMMIT_SCRIPT
from outboxq.testing.faults import on_passing, terminate_backends
from tests.conftest import StartRelay
from tests.support import faulty
from tests.support.aftermath import assert_nothing_left, expire_leases
from tests.support.ledger import ledger, waiting
from tests.support.matrices import diagonal
from tests.support.waiting import PATIENCE, wait_until

# What ends a batch, and no other transaction of a relay's, releases the savepoint that was set with its claim.
NAMES = tuple(f"job {number}" for number in range(4))


@dataclass(frozen=True)
class Mode:
    kind: object
    queue: str
    batch_size: int = 1
    slots: int = 1
    suspects: bool = False

    @property
    def config(self) -> RelayConfig:
        groups = (SlotGroup((self.queue,), self.slots),)
        return RelayConfig(groups=groups, batch_size=self.batch_size, lease_seconds=1, poll_seconds=0.05)


# In an order in which each of them meets, in every run, a moment that it has something of its own to do in.
MODES = {
    "lease-async": Mode(faulty.work_leased_async, "lease-async"),
    "batch-async": Mode(faulty.work_async, "tx-async", batch_size=4),
    "transaction-async": Mode(faulty.work_async, "tx-async"),
    "suspects": Mode(faulty.work, "tx", batch_size=4, suspects=True),
    "lease-calls": Mode(faulty.work_leased, "lease", slots=4),
    "batch": Mode(faulty.work, "tx", batch_size=4),
    "transaction": Mode(faulty.work, "tx"),
    "lease": Mode(faulty.work_leased, "lease"),
}
MOMENTS = (*FAULT_POINTS[:3], "inside-handler", *FAULT_POINTS[3:5], "commit-sent", *FAULT_POINTS[5:])
# From its claim to its commit, a suspect is the only one who can have done it.
CHARGED = frozenset(MOMENTS[1:6])

each_mode_and_moment = diagonal(
    pytest.mark.parametrize("mode", MODES.values(), ids=MODES), pytest.mark.parametrize("moment", MOMENTS)
)


def test_the_moments_are_in_the_order_of_the_way() -> None:
    """Each fault point is one of them."""
    assert set(FAULT_POINTS) | {"inside-handler", "commit-sent"} == set(MOMENTS)
    assert "after-commit" not in CHARGED


@each_mode_and_moment
def test_a_relay_killed_at_any_moment_leaves_one_effect_each(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
    mode: Mode,
    moment: str,
) -> None:
    """Another relay does what was not committed, repeats nothing, and charges nobody who did not run alone."""
    enqueue(sessions, engine, mode, "kill" if moment == "inside-handler" else "", tmp_path)
    kill_a_relay(outboxq_database.url, mode, moment)
    assert_as_many_kept_as_done(engine)
    expire_leases(engine)
    with start_relay(faulty.jobs, mode.config):
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert_one_effect_each(engine, mode, moment)
    assert_nothing_left(engine, dead_relays=1)


@each_mode_and_moment
def test_a_relay_whose_backend_ends_at_any_moment_leaves_one_effect_each(
    engine: Engine,
    sessions: sessionmaker[OutboxSession],
    outboxq_database: Database,
    start_relay: StartRelay,
    tmp_path: Path,
    mode: Mode,
    moment: str,
) -> None:
    """The same relay goes on with another connection, and finds out what stands of what it was at."""
    enqueue(sessions, engine, mode, "terminate" if moment == "inside-handler" else "", tmp_path)
    url = psycopg_url(outboxq_database.url).update_query_dict({"application_name": f"relay {uuid4().hex[:12]}"})
    own = url.render_as_string(hide_password=False)
    with ExitStack() as stack:
        proxy = stack.enter_context(CommitProxy(own)) if moment == "commit-sent" else None
        trap = proxy.hold_reply(containing=COMMIT_SCRIPT) if proxy is not None else None
        stack.enter_context(terminating(own, moment))
        stack.enter_context(start_relay(faulty.jobs, mode.config, engine=proxy.url if proxy else own))
        if proxy is not None and trap is not None:
            assert trap.reached.wait(PATIENCE)
            terminate_committed(engine)
            proxy.cut()
        wait_until(lambda: waiting(engine) == 0, "the jobs to be done")
    assert_one_effect_each(engine, mode, moment)
    # A relay that is stopped before it has its connection back leaves its lease to run out.
    assert_nothing_left(engine, dead_relays=1)


def terminating(url: str, moment: str):  # a context manager
    if moment not in FAULT_POINTS:
        return nullcontext()
    return on_passing(moment, passing_of(moment), lambda: terminate_backends(url))


def terminate_committed(engine: Engine) -> None:
    """End the backend whose answer to COMMIT is held."""
    ended = (
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND query LIKE :sent"
    )
    with engine.connect() as connection:
        assert connection.execute(text(ended), {"sent": f"%{COMMIT_SCRIPT}%"}).scalars().all() == [True]


def kill_a_relay(url: str, mode: Mode, moment: str) -> None:
    """Let a relay process work until `moment`, and see it dead."""
    target = "tests.support.faulty:jobs"
    if moment == "commit-sent":
        with CommitProxy(url) as proxy:
            trap = proxy.hold_reply(containing=COMMIT_SCRIPT)
            with RelayProcess(target, proxy.url, mode.config) as relay:
                assert trap.reached.wait(PATIENCE), relay.log
                os.kill(relay.pid, signal.SIGKILL)
                assert relay.wait(PATIENCE) == -signal.SIGKILL
        return
    point: FaultPoint | None = moment if moment in FAULT_POINTS else None
    with RelayProcess(target, url, mode.config, kill_at=point, passing=passing_of(moment)) as relay:
        assert relay.wait(PATIENCE) == -signal.SIGKILL, relay.log


def passing_of(moment: str) -> int:
    """At a handler, the second one: in a batch, one that is neither the first nor the last."""
    return 2 if "handler" in moment else 1


def enqueue(sessions: sessionmaker[OutboxSession], engine: Engine, mode: Mode, fault: str, directory: Path) -> None:
    with sessions.begin() as session:
        for number, name in enumerate(NAMES):
            given = {"fault": fault, "marker": str(directory / "met")} if fault and number == 1 else {}
            session.add_job(mode.kind, name=name, **given)
    if mode.suspects:
        with engine.begin() as connection:
            connection.execute(text("UPDATE outboxq.job SET state = 'suspect'"))


def assert_as_many_kept_as_done(engine: Engine) -> None:
    """A finished job is kept if and only if its effect stands: in one snapshot there are as many of both."""
    counts = "SELECT (SELECT count(*) FROM effect_ledger), (SELECT count(*) FROM outboxq.done_job)"
    with engine.connect() as connection:
        effects, kept = connection.execute(text(counts)).one()
    assert effects == kept


def assert_one_effect_each(engine: Engine, mode: Mode, moment: str) -> None:
    effects = ledger(engine)
    if mode.suspects and moment in CHARGED:
        charged = [name for name in NAMES if faulty.trace(name, crashes=1) in effects]
        assert len(charged) == 1, effects
    else:
        charged = []
    assert_as_many_kept_as_done(engine)
    assert effects == {faulty.trace(name, crashes=int(name in charged)): 1 for name in NAMES}
