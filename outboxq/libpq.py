"""A check that psycopg finds libpq, PostgreSQL's client library: importing this module raises `LibpqMissing` if not."""

from outboxq.errors import LibpqMissing

try:
    import psycopg  # noqa: F401  # importing it is the question
except ImportError as error:
    if "no pq wrapper" not in str(error):
        raise
    raise LibpqMissing from error
