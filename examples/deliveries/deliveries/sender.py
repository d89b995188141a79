"""The client: signs messages by the Standard Webhooks scheme and sends them; each endpoint has a secret of its own."""

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook


def secret_of(master_secret: str, endpoint_id: int) -> str:
    """The secret that the owner of an endpoint is given.

    Derived, and so in no table and in no job: the arguments of jobs can be read by everyone who may read the queue.
    """
    digest = hmac.new(master_secret.encode(), str(endpoint_id).encode(), hashlib.sha256).digest()
    return "whsec_" + base64.b64encode(digest).decode()


@dataclass(frozen=True)
class Sender:
    """Sends messages. One serves all calls of a process."""

    client: httpx.AsyncClient
    master_secret: str = field(repr=False)

    async def send(self, endpoint_id: int, url: str, message_id: str, body: str) -> int:
        """Send a message; the status of the answer.

        Raises:
            httpx.TransportError: none came. The message may have been taken in, and is to be sent again.
        """
        now = datetime.now(UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(secret_of(self.master_secret, endpoint_id)).sign(message_id, now, body),
        }
        answer = await self.client.post(url, content=body, headers=headers)
        return answer.status_code
