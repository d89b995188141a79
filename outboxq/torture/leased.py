"""The same handlers, claimed with a lease, in queues of their own; and a registry of both modes."""

from outboxq import AsyncContext, Context, DeadLetter, Jobs
from outboxq.torture import app

jobs = Jobs()


@jobs.handler(queue="torture-lease", retry=app.RETRY, claim="lease")
def record_leased(ctx: Context, behaviour: str = "plain") -> DeadLetter | None:
    """As `record`."""
    return app.run(ctx.session, ctx.job.id, ctx.job.attempt, ctx.job.crashes, behaviour)


@jobs.handler(queue="torture-lease-async", retry=app.RETRY, claim="lease")
async def record_leased_async(ctx: AsyncContext, behaviour: str = "plain") -> DeadLetter | None:
    """As `record_async`."""
    job = ctx.job
    return await ctx.session.run_sync(app.run, job.id, job.attempt, job.crashes, behaviour)


mixed = Jobs()
mixed.include(app.jobs)
mixed.include(jobs)
