"""Database URLs in the spelling of libpq."""

from sqlalchemy import make_url


def libpq_url(url: str) -> str:
    """SQLAlchemy's URL, as psycopg and psql take it."""
    # SQLAlchemy leaves spaces as they are.
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False).replace(" ", "%20")
