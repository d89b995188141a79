"""PostgreSQL for everyone: finds or starts a server, and hands out databases on it.

The demo, our tests and users' tests get their databases here. A server that is started here ends with its owner, the
process that started it: by `close()`, by its normal end, or killed. On a server that runs already, everything happens
in databases with random names, which `close()` drops.
"""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
from outboxq.postgres.binaries import PostgresUnavailable
from outboxq.postgres.server import Database, Server
from outboxq.postgres.sources import find_server, start_embedded

__all__ = ["Database", "PostgresUnavailable", "Server", "find_server", "start_embedded"]
