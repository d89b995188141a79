"""The other side: signs events by the Standard Webhooks scheme and delivers them."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook


@dataclass(frozen=True)
class Message:
    """One event. Its id stays the same however often it is delivered; the timestamp and the signature do not."""

    id: str
    body: str

    def headers(self, webhook: Webhook, at: datetime | None = None) -> dict[str, str]:
        """What a delivery made now, or `at` another time, is signed with."""
        signed_at = at or datetime.now(UTC)
        return {
            "content-type": "application/json",
            "webhook-id": self.id,
            "webhook-timestamp": str(int(signed_at.timestamp())),
            "webhook-signature": webhook.sign(self.id, signed_at, self.body),
        }


def invoice_changed(message_id: str, invoice_id: str, version: int, status: str, cents: int = 1_000) -> Message:
    """The event that says what an invoice is like as of a version."""
    data = {"id": invoice_id, "version": version, "status": status, "cents": cents}
    return Message(message_id, json.dumps({"type": "invoice.changed", "data": data}))


def deliver(address: str, webhook: Webhook, message: Message, at: datetime | None = None) -> httpx.Response:
    """Deliver a message; the answer.

    Raises:
        httpx.TransportError: none came. The message may have been taken in, and is to be delivered again.
    """
    return httpx.post(f"{address}/webhooks", content=message.body, headers=message.headers(webhook, at), timeout=30)
