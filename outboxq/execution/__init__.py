"""One batch on one connection: claim, run, commit, recover."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
