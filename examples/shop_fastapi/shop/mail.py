"""Sends e-mail by SMTP, and says of each failure what is known about the mail.

- *Not taken*, for sure: no connection came about, it ended before the mail was sent, or the server said "not now".
- *Refused*: the server does not take this mail, or knows no such recipient, and will say so again.
- Everything else is left as it is: the mail was sent, and the connection ended, or timed out, before the server's
  answer came. The mail may be on its way.
"""

import smtplib
from contextlib import closing, suppress
from email.message import EmailMessage
from email.policy import SMTP

from outboxq import CallNotApplied, CallRefused


class Mailer:
    """Sends mail by the server at `address`, a connection for each.

    Args:
        address: The host and the port, as `localhost:8025`.
        sender: What mails are from.
    """

    def __init__(self, address: str, sender: str, timeout_seconds: float = 10.0) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._sender = sender
        self._timeout_seconds = timeout_seconds

    def send(self, to: str, subject: str, text: str, key: str) -> None:
        """Hand one mail to the server.

        Args:
            key: Becomes the Message-ID, by which the mail is found again in the server's log.

        Raises:
            CallNotApplied: the server has not taken the mail, and may take it later.
            CallRefused: the server has not taken it, and will not.
            Exception: anything else; the mail may have been sent.
        """
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self._sender, to, subject
        message["Message-ID"] = f"<{key}@{self._sender.rpartition('@')[2]}>"
        message.set_content(text)
        with closing(self._connect()) as server:
            self._announce(server, to)
            _deliver(server, message)
            with suppress(OSError):  # The mail is sent, however the conversation ends.
                server.quit()

    def _connect(self) -> smtplib.SMTP:
        try:
            return smtplib.SMTP(self._host, self._port, timeout=self._timeout_seconds)
        except OSError as error:
            raise CallNotApplied(f"no connection to the mail server ({type(error).__name__})") from error

    def _announce(self, server: smtplib.SMTP, to: str) -> None:
        """Name the sender and the recipient. Nothing of the mail is sent so far, so no failure leaves a doubt."""
        try:
            server.ehlo_or_helo_if_needed()
            sender_code, _ = server.mail(self._sender)
            code, _ = server.rcpt(to)
        except OSError as error:
            raise CallNotApplied(f"the mail server ended the conversation ({type(error).__name__})") from error
        # A refusal of the sender is no answer to this mail: it would come for any.
        if sender_code >= 400:
            raise CallNotApplied(f"the mail server answered {sender_code} to the sender")
        _check(code, "the recipient")


def _deliver(server: smtplib.SMTP, message: EmailMessage) -> None:
    """Send the mail. From here on an error without an answer says nothing."""
    try:
        code, _ = server.data(message.as_bytes(policy=SMTP))
    except smtplib.SMTPDataError as error:
        # The answer to the command that comes before the mail.
        raise CallNotApplied(f"the mail server answered {error.smtp_code}") from error
    _check(code, "the mail")


def _check(code: int, what: str) -> None:
    """5xx stays as it is, 4xx may be otherwise later."""
    if code >= 500:
        raise CallRefused(f"the mail server answered {code} to {what}")
    if code >= 400:
        raise CallNotApplied(f"the mail server answered {code} to {what}")
