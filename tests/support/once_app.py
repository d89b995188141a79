"""An application whose handler calls the outside once: a "provider" with a database transaction of its own."""

from datetime import timedelta

from sqlalchemy import create_engine, insert, select

from outboxq import Backoff, Context, Jobs
from tests.support.app import Effect

jobs = Jobs()


@jobs.handler(queue="once", retry=Backoff(max_attempts=3, first_seconds=0.0, jitter=0.0), claim="lease")
def record_once(ctx: Context, name: str) -> None:
    """Have one row written elsewhere."""

    def write_elsewhere(provider_key: str) -> None:
        engine = create_engine(ctx.session.get_bind().engine.url)
        with engine.begin() as connection:
            # As a provider that honours its keys.
            if connection.execute(select(Effect.row).where(Effect.name == provider_key)).first() is None:
                connection.execute(insert(Effect).values(name=provider_key))
        engine.dispose()

    ctx.once("record", key=name, call=write_elsewhere, provider_remembers=timedelta(hours=1))
