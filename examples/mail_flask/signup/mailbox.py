"""A mail server to practise with: takes mails, prints them, and loses its answers as it is told.

    python -m signup.mailbox --port 8025 --lose-answers 1

Real SMTP, by aiosmtpd; tests use it too.
"""

import argparse
import signal
import socket
import threading
from asyncio import WriteTransport
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session


@dataclass(frozen=True)
class Mail:
    """What can be told of a mail by the log of a mail server."""

    to: str
    message_id: str


@dataclass
class Mailbox:
    """Takes every mail that comes, and keeps what can be told of it.

    Args:
        unknown_recipients: Refused, for good.
        busy: So many of the next mails are answered with "not now", and not taken.
        lose_answers: So many of the next mails are taken, and the connection ends without an answer.
    """

    unknown_recipients: tuple[str, ...] = ()
    busy: int = 0
    lose_answers: int = 0
    is_printing: bool = False
    mails: list[Mail] = field(default_factory=list)

    async def handle_RCPT(  # noqa: N802  # the name that aiosmtpd gives it
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """A recipient is named."""
        if address in self.unknown_recipients:
            return "550 no such recipient"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(  # noqa: N802  # the name that aiosmtpd gives it
        self, server: SMTP, _session: Session, envelope: Envelope
    ) -> str:
        """A mail has come."""
        if self.busy:
            self.busy -= 1
            return "451 not now"
        message = message_from_bytes(envelope.original_content or b"")
        mail = Mail(envelope.rcpt_tos[0], message["Message-ID"])
        self.mails.append(mail)
        if self.is_printing:
            print(f"to={mail.to} message-id={mail.message_id}", flush=True)
        if self.lose_answers:
            self.lose_answers -= 1
            assert isinstance(server.transport, WriteTransport)
            server.transport.abort()
        return "250 taken"


@contextmanager
def serve(mailbox: Mailbox, port: int = 0) -> Iterator[str]:
    """Serve on loopback, in a thread, within the block; the address. Port 0: any that is free."""
    controller = Controller(mailbox, hostname="127.0.0.1", port=port or _free_port())
    controller.start()
    try:
        yield f"127.0.0.1:{controller.port}"
    finally:
        controller.stop()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="A mail server to practise with.")
    parser.add_argument("--port", type=int, default=8025, help="where to listen on loopback")
    parser.add_argument("--lose-answers", type=int, default=0, help="take so many mails without an answer")
    given = parser.parse_args()
    ended = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: ended.set())
    with serve(Mailbox(lose_answers=given.lose_answers, is_printing=True), given.port):
        ended.wait()


if __name__ == "__main__":
    main()
