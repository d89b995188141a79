"""Executes one batch of jobs on one connection: claim the jobs, run them, commit, or recover from an error."""

import outboxq.libpq  # noqa: F401  # before a module here imports psycopg
