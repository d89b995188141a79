"""The command line: `python -m webhooks send msg_1 INV-1 2 paid | invoices`."""

import argparse

from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from .models import Change, Invoice
from .sender import deliver, invoice_changed
from .settings import read_secrets, read_settings


def send(address: str, message_id: str, invoice_id: str, version: int, status: str) -> None:
    """Deliver one event, signed with the newest secret, and print the answer."""
    message = invoice_changed(message_id, invoice_id, version, status)
    answer = deliver(address, Webhook(read_secrets()[0]), message)
    print(answer.status_code, answer.text)


def show_invoices() -> None:
    """Print each invoice, and the changes that were applied, in their order."""
    with Session(create_engine(read_settings().database_url)) as session:
        for invoice in session.scalars(select(Invoice).order_by(Invoice.id)):
            print(f"{invoice.id} is {invoice.status}, version {invoice.version}")
        for change in session.scalars(select(Change).order_by(Change.id)):
            print(f"  {change.invoice_id} version {change.version}: {'newest' if change.is_newest else 'came late'}")


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(
        prog="python -m webhooks", description="The provider, and what came of its events."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    sending = commands.add_parser("send", help="deliver an event, signed, as the provider does")
    sending.add_argument("message_id")
    sending.add_argument("invoice_id")
    sending.add_argument("version", type=int)
    sending.add_argument("status", choices=["draft", "open", "paid", "void"])
    sending.add_argument("--to", default="http://localhost:8000", help="where the application listens")
    commands.add_parser("invoices", help="show the invoices, and which change came when")
    given = parser.parse_args()
    if given.command == "send":
        send(given.to, given.message_id, given.invoice_id, given.version, given.status)
    else:
        show_invoices()


if __name__ == "__main__":
    main()
