"""The command line: `python -m documents add acme Plan "buy low, sell high" | list acme`."""

import argparse

from sqlalchemy import Engine, create_engine, select

from .jobs import count_words
from .models import Document
from .settings import read_settings
from .tenancy import TenantSession, tenant_session


def add_document(session: TenantSession, title: str, body: str) -> Document:
    """Add a document and the job that counts its words to the session: they commit together, or neither does."""
    document = Document(title=title, body=body)
    session.add(document)
    # For its number.
    session.flush()
    session.add_job(count_words, document_id=document.id)
    return document


def show(engine: Engine, tenant: str) -> None:
    """Print the documents of a tenant. The query names no tenant: there are no others."""
    with tenant_session(engine, tenant) as session:
        for document in session.scalars(select(Document).order_by(Document.id)):
            words = "not counted yet" if document.words is None else f"{document.words} words"
            print(f"{document.id} {document.title}: {words}")


def main() -> None:
    """Run one command for one tenant."""
    parser = argparse.ArgumentParser(prog="python -m documents", description="Documents of many tenants.")
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="add a document")
    adding.add_argument("tenant")
    adding.add_argument("title")
    adding.add_argument("body")
    commands.add_parser("list", help="list the documents").add_argument("tenant")
    given = parser.parse_args()
    engine = create_engine(read_settings().database_url)
    if given.command == "add":
        with tenant_session(engine, given.tenant) as session:
            add_document(session, given.title, given.body)
            session.commit()
    show(engine, given.tenant)


if __name__ == "__main__":
    main()
