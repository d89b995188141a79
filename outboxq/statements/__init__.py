"""All SQL that runs outside migrations: a file per verb, a function per statement."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
