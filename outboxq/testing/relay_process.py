"""A relay in a process of its own, for tests that stop, kill or disconnect it."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from uuid import uuid4

import msgspec
from sqlalchemy import URL

from outboxq.config import RelayConfig
from outboxq.database.urls import psycopg_url
from outboxq.fault_points import FaultPoint
from outboxq.testing.child import ChildProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOrder:
    """The order to a relay process; the URL's application_name is the relay's name."""

    target: str
    url: str = field(repr=False)
    config: RelayConfig
    kill_at: FaultPoint | None = None
    terminate_at: FaultPoint | None = None
    passing: int = 1
    log_level: str = "WARNING"


class RelayProcess(ChildProcess):
    """A relay in a process of its own, with the import path of this one; ended with the `with` block.

    It also ends when this process does, however that happens.

    Args:
        target: The registry, as `myapp.jobs:jobs`.
        database_url: The database it works on.
        config: Its settings.
        kill_at: The fault point at whose `passing`-th passing it is killed with SIGKILL.
        terminate_at: The fault point at which all of its connections are ended by the server.
    """

    def __init__(
        self,
        target: str,
        database_url: str | URL,
        config: RelayConfig | None = None,
        *,
        kill_at: FaultPoint | None = None,
        terminate_at: FaultPoint | None = None,
        passing: int = 1,
    ) -> None:
        self.name = f"outboxq relay {uuid4().hex[:12]}"
        url = psycopg_url(database_url).update_query_dict({"application_name": self.name})
        order = RelayOrder(
            target=target,
            url=url.render_as_string(hide_password=False),
            config=config or RelayConfig(),
            kill_at=kill_at,
            terminate_at=terminate_at,
            passing=passing,
        )
        # Its standard input ends when this process does, however that happens: then the relay stops.
        super().__init__(
            "outboxq.testing",
            environment={"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
