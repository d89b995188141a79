"""The database below outboxq's tables: connections, engines, sessions, and what a statement leaves on them."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
