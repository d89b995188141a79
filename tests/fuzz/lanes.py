"""Lanes: databases of equal content, each with a relay of its own that runs batches in its own way."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self
from unittest import mock

from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from outboxq import Relay, RelayConfig
from outboxq.config import SlotGroup
from outboxq.database.engines import make_async_engine, make_engine
from outboxq.events import Event, JobDied, JobDiscarded, JobDone, JobRetried, JobSnoozed
from outboxq.handlers import set_based
from outboxq.postgres import Server
from tests.fuzz.handlers import Handlers, Ledger
from tests.fuzz.program import Batch
from tests.fuzz.schema import PROMOTE, RESET, prepare, snapshot

_PATIENCE_SECONDS = 120.0
_SETTLED = (JobDone, JobDied, JobDiscarded, JobRetried, JobSnoozed)


@dataclass(frozen=True)
class Mode:
    """How a lane's relay runs jobs; where its engines have a listener, SQLAlchemy reads and writes all rows."""

    name: str
    batchable: bool
    batch_size: int
    is_heard: bool = False


ALONE = Mode("alone", batchable=False, batch_size=1, is_heard=True)
LONE = Mode("lone", batchable=False, batch_size=1)
SHARED = Mode("shared", batchable=True, batch_size=50)
SAVEPOINTS = Mode("savepoints", batchable=False, batch_size=50)


@dataclass
class Observed:
    """What a batch left: all rows, what became of each job, and what its handler saw when it last ran."""

    rows: Mapping[str, object]
    outcomes: Mapping[str, str]
    seen: Mapping[str, object]
    surprises: list[str] = field(default_factory=list)
    # Not compared: how often a handler began.
    calls: int = 0


class Lane:
    """One database with its relay, which runs in a thread for as long as the lane is open."""

    def __init__(self, url: str, mode: Mode) -> None:
        self.mode = mode
        self._engine = create_engine(url)
        self._looking = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        self._ledger = Ledger()
        self._handlers = Handlers(self._ledger, batchable=mode.batchable)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        groups = (SlotGroup(("fuzz-sync",)), SlotGroup(("fuzz-async",)))
        # No reindexer: it would come at its own times.
        config = RelayConfig(groups=groups, batch_size=mode.batch_size, prune_seconds=0, reindex=False)
        engine, among = make_engine(url), make_async_engine(url)
        if mode.is_heard:
            for heard in (engine, among.sync_engine):
                event.listen(heard, "before_execute", lambda *_: None)
        self._relay = Relay(engine, self._handlers.jobs, config, async_engine=among, hooks=[self._events.put])
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"lane {mode.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.stop()
        self._thread.join(_PATIENCE_SECONDS)
        self._looking.close()
        self._engine.dispose()

    def _run(self) -> None:
        try:
            self._relay.run()
        except BaseException as error:  # noqa: BLE001  # raised where the batch waits
            self._error = error
        finally:
            self._events.put(None)

    def execute(self, statement: str) -> None:
        """Change the lane's database."""
        self._looking.exec_driver_sql(statement)

    def run(self, batch: Batch) -> Observed:
        """Run a batch from the first rows to the last attempt of each of its jobs."""
        self._ledger.tasks.clear()
        self._ledger.seen.clear()
        self._ledger.within.clear()
        self._ledger.calls = 0
        names = self._enqueue(batch)
        observed = Observed({}, {}, self._ledger.seen)
        outcomes: dict[str, str] = {}
        self._wait(names, outcomes, observed)
        if any(job["state"] == "scheduled" and job["queue"].startswith("fuzz") for job in observed.rows["jobs"]):  # type: ignore[attr-defined]
            with self._engine.begin() as connection:
                connection.execute(PROMOTE)
            self._wait({}, outcomes, observed)
        observed.outcomes = dict(sorted(outcomes.items()))
        observed.seen = dict(self._ledger.seen)
        observed.calls = self._ledger.calls
        return observed

    def _enqueue(self, batch: Batch) -> dict[str, str]:
        """The names of the jobs, by their ids."""
        with Session(self._engine) as session, session.begin():
            session.execute(RESET)
            handles = {
                f"job {number}": self._handlers.add(session, batch.flavour, f"job {number}", task)
                for number, task in enumerate(batch.tasks, start=1)
            }
            return {str(handle.id): name for name, handle in handles.items()}

    def _wait(self, names: Mapping[str, str], outcomes: dict[str, str], observed: Observed) -> None:
        """Until each job by these names has come to something, and nothing is left to run."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        missing = {key.replace("-", "") for key in names}
        plain = {key.replace("-", ""): name for key, name in names.items()}
        while True:
            if not missing:
                ready, observed.rows = snapshot(self._looking)
                if not ready:
                    return
            try:
                told = self._events.get(timeout=min(0.05, deadline - time.monotonic()) if not missing else 1.0)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the batch did not end; {self.mode.name}: {missing}") from None
                continue
            if told is None:
                raise RuntimeError(f"the relay of lane {self.mode.name} ended") from self._error
            if isinstance(told, _SETTLED):
                key = told.job.id.hex
                if key in missing:
                    outcomes[plain[key]] = described(told)
                    missing.discard(key)
            elif type(told).__name__ != "RelayStarted":
                observed.surprises.append(type(told).__name__)


def described(event: Event) -> str:
    """What became of a job, in words that are equal for equal ends."""
    parts = [type(event).__name__, *(str(getattr(event, name, "")) for name in ("error_type", "message", "reason"))]
    return " ".join(part for part in parts if part)


@contextmanager
def open_lanes(server: Server, *modes: Mode) -> Iterator[list[Lane]]:
    """Lanes on databases of their own."""
    template = server.create_template(prepare)
    with ExitStack() as stack:
        # Here too, where few rows come together, they go out as one statement over arrays.
        stack.enter_context(mock.patch.object(set_based, "_LEAST_ROWS", 2))
        databases = [stack.enter_context(server.create_database(template=template)) for _ in modes]
        yield [stack.enter_context(Lane(db.url, mode)) for db, mode in zip(databases, modes, strict=True)]
