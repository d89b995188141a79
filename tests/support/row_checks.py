"""The table of jobs without the checks on its rows."""

from sqlalchemy import Engine, text

CHECKS = ("job_numbers", "job_lease", "job_sizes")


def drop_checks(engine: Engine) -> None:
    """As before the migration steps that add them."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE outboxq.job " + ", ".join(f"DROP CONSTRAINT {name}" for name in CHECKS)))
