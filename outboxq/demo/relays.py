"""The demo's relays: real processes, one of which is killed while it is at work."""

import time
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, text

from outboxq.config import RelayConfig
from outboxq.demo.shop import SCHEMA
from outboxq.errors import OutboxqError
from outboxq.testing.relay_process import RelayProcess

_SLOTS_PER_QUEUE = 2
_SLOTS = 2 * _SLOTS_PER_QUEUE  # of the shop's two queues
_START_SECONDS = 30.0

# A claim is an open transaction that has deleted the job: its id stands in the row's xmax. The lock on the ledger tells
# that the handler has written its effect.
_RUNNING = text(
    f"""\
SELECT job.id, activity.state_change, EXISTS (
  SELECT FROM pg_locks
  WHERE pid = activity.pid AND relation = '{SCHEMA}.effect'::regclass AND mode = 'RowExclusiveLock'
) AS has_written
FROM outboxq.job JOIN pg_stat_activity AS activity ON activity.backend_xid = job.xmax
WHERE activity.application_name = :relay AND activity.state = 'idle in transaction'"""  # noqa: S608  # a constant
)
_CONNECTIONS = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :relay")


class DemoFailed(OutboxqError):
    """The demo could not be played to its end."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A relay that was killed, the jobs that it ran at that moment, and how many had written their effect."""

    relay: str
    pid: int
    running: tuple[UUID, ...]
    written: int


class DemoRelay(RelayProcess):
    """A relay of the shop. Its connections carry its name, so that the database can tell what it does."""

    def __init__(self, number: int, url: str) -> None:
        config = RelayConfig(slots_per_queue=_SLOTS_PER_QUEUE)
        super().__init__("outboxq.demo.shop:jobs", url, config, name=f"relay {number}")

    def check(self) -> None:
        """See that it runs.

        Raises:
            DemoFailed: it ended by itself; the message holds the end of its log.
        """
        code = self.returncode
        if code is not None:
            raise DemoFailed(f"{self.name} (pid {self.pid}) was to run, but ended with code {code}:\n{self.log}")

    def wait_until_it_serves(self, engine: Engine) -> None:
        """Wait for its connections, one a slot.

        Raises:
            DemoFailed: it ended by itself, or takes too long.
        """
        deadline = time.monotonic() + _START_SECONDS
        while self._connections(engine) < _SLOTS:
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailed(f"{self.name} was to serve within {_START_SECONDS:.0f} s: is this machine overloaded?")
            time.sleep(0.05)

    def kill_at_work(self, engine: Engine) -> Kill | None:
        """Kill it with SIGKILL if it runs jobs at this moment, else let it go on and return None.

        It is stopped for the look, so that what it was seen to run is what it ran when it died.
        """
        self.pause()
        try:
            running = self._running(engine)
            # A COMMIT that was on its way when the process was stopped has arrived by now.
            time.sleep(0.1)
            still = self._running(engine)
            ids = tuple(job_id for job_id in still if running.get(job_id) == still[job_id])
            if not ids:
                return None
            self.kill()
            return Kill(self.name, self.pid, ids, sum(still[job_id][1] for job_id in ids))
        finally:
            self.resume()

    def _running(self, engine: Engine) -> dict[UUID, tuple[object, bool]]:
        with engine.connect() as connection:
            rows = connection.execute(_RUNNING, {"relay": self.name})
            return {row.id: (row.state_change, row.has_written) for row in rows}

    def _connections(self, engine: Engine) -> int:
        with engine.connect() as connection:
            return int(connection.execute(_CONNECTIONS, {"relay": self.name}).scalar_one())
