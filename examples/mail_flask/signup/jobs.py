"""What the relay runs: `outboxq relay signup.jobs:jobs`."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from outboxq import Backoff, Context, DeadLetter, Jobs
from outboxq.errors import EffectUnknown

from .mail import Mailer
from .models import User
from .settings import read_mail_server

SENDER = "welcome@example.org"


@contextmanager
def connect() -> Iterator[Mailer]:
    """The mailer that handlers find as `ctx.state`."""
    yield Mailer(read_mail_server(), SENDER)


jobs = Jobs(lifespan=connect)
WELCOMES = jobs.scope("welcome-mail", retention=timedelta(days=90))


@jobs.handler(queue="mail", claim="lease", retry=Backoff(first_seconds=1, max_attempts=10), timeout_seconds=60)
def send_welcome(ctx: Context[Mailer], user_id: int, name: str, email: str) -> DeadLetter | None:
    """Send the one mail of welcome, and write down that it was sent, in the transaction that removes the job.

    All that the mail needs is an argument: the session is first used after the call, so that no transaction is open
    while the mail server takes its time.

    SMTP knows no idempotency keys. So nothing is given to `ctx.once` but the call: after one whose end is not known, it
    does not call again, and an operator looks for the mail's Message-ID in the log of the mail server.
    """
    welcome = partial(ctx.state.send, email, "Welcome", f"Dear {name},\n\nwelcome, and thank you for signing up.\n")
    try:
        ctx.once(WELCOMES, key=f"user-{user_id}", call=welcome)
    except EffectUnknown:
        return DeadLetter("it is not known whether the mail was sent: see `outboxq effects list --status unknown`")
    ctx.session.get_one(User, user_id).is_welcomed = True
    return None
