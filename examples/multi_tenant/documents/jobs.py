"""What the relay runs: `outboxq relay documents.jobs:jobs`."""

from outboxq import Context, Jobs

from .models import Activity, Document
from .tenancy import of_tenant

jobs = Jobs()


@jobs.handler(queue="documents")
@of_tenant
def count_words(ctx: Context, document_id: int) -> None:
    """Count a document's words. The id of another tenant's document is not found."""
    document = ctx.session.get_one(Document, document_id)
    document.words = len(document.body.split())
    ctx.session.add(Activity(document_id=document_id, what="words counted"))
