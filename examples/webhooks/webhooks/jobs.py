"""What the relay runs: `outboxq relay webhooks.jobs:jobs`."""

from datetime import timedelta
from typing import Annotated

from msgspec import Meta, Struct
from sqlalchemy.dialects.postgresql import insert

from outboxq import Context, Jobs

from .models import Change, Invoice, Status

jobs = Jobs()

# Longer than the sender goes on delivering: an id that comes after that is a new message. A relay does not start if a
# handler may still retry when the message it works for is forgotten.
inbox = jobs.inbox("invoice-webhooks", retention=timedelta(days=30))


class InvoiceChanged(Struct, frozen=True):
    """What the provider says of an invoice: its whole state as of a version."""

    id: Annotated[str, Meta(min_length=1, max_length=100)]
    version: Annotated[int, Meta(ge=1)]
    status: Status
    cents: int


@jobs.handler(queue="webhooks")
def apply_change(ctx: Context, invoice: InvoiceChanged) -> None:
    """Bring the invoice up to this version, unless a newer one is known: events arrive in any order.

    One statement, judged under the row's lock: of two versions at the same time the second waits for the first, and
    then compares with what that one has written.
    """
    new = insert(Invoice).values(id=invoice.id, version=invoice.version, status=invoice.status, cents=invoice.cents)
    newest = new.on_conflict_do_update(
        index_elements=[Invoice.id],
        set_={"version": new.excluded.version, "status": new.excluded.status, "cents": new.excluded.cents},
        where=Invoice.version < new.excluded.version,
    ).returning(Invoice.id)
    is_newest = ctx.session.execute(newest).first() is not None
    ctx.session.add(Change(invoice_id=invoice.id, version=invoice.version, is_newest=is_newest))
