"""The database below outboxq's tables: connections, engines and sessions, and what statements leave on a connection."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
