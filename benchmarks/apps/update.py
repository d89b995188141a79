"""One Core UPDATE a job, executed by the handler."""

from sqlalchemy import bindparam, update

from benchmarks.apps.accounts import account as accounts
from benchmarks.apps.counting import COUNTER
from outboxq import Context, Jobs

jobs = Jobs()

ADD = (
    update(accounts)
    .where(accounts.c.id == bindparam("account"))
    .values(balance=accounts.c.balance + bindparam("cents"))
)


@jobs.handler(queue="bench", kind="job")
def add(ctx: Context, account: int, cents: int, reference: str) -> None:
    """Change the account."""
    ctx.session.execute(ADD, {"account": account, "cents": cents})
    COUNTER[0] += 1
