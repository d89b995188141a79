"""Access to the database: connections, engines, sessions and errors, and a watch over handlers' statements."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
