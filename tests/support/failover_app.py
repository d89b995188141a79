"""The small application with a handler under a lease, for relays that a failover meets in every mode."""

from outboxq import Context, Jobs
from tests.support import app

jobs = Jobs()
jobs.include(app.jobs)


@jobs.handler(queue="leased", claim="lease", retry=app.QUICK)
def record_under_lease(ctx: Context, name: str) -> None:
    ctx.session.add(app.Effect(name=name))
