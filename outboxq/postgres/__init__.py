"""A PostgreSQL server for demos and tests: finds a running one or starts one, and creates databases on it.

The demo, outboxq's tests and users' tests get their databases here. A server that is started here ends with the process
that started it, which is called its owner: at `close()`, at the owner's normal end, or when the owner is killed. On a
server that ran before, only databases with random names are used, which `close()` drops.
"""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
from outboxq.postgres.binaries import PostgresUnavailable
from outboxq.postgres.server import Database, Server
from outboxq.postgres.sources import find_server, start_embedded

__all__ = ["Database", "PostgresUnavailable", "Server", "find_server", "start_embedded"]
