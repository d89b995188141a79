"""libpq, PostgreSQL's client library, which psycopg needs: the first import of psycopg names it if it is missing.

The packages whose modules import psycopg import this module first.
"""

from outboxq.errors import LibpqMissing

try:
    import psycopg  # noqa: F401  # importing it is the question
except ImportError as error:
    if "no pq wrapper" not in str(error):
        raise
    raise LibpqMissing from error
