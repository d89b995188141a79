"""Signatures by the Standard Webhooks scheme, with more than one secret while they are changed."""

from collections.abc import Iterable, Mapping

from standardwebhooks import Webhook, WebhookVerificationError


class BadSignature(Exception):
    """A message was not signed with a secret of ours, or not within the last five minutes."""


class Verifier:
    """Verifies messages by any of its secrets.

    To change the secret, add the new one in front, have the sender sign with it, and take the old one away. No message
    is refused in between, whichever of the two it was signed with.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._webhooks = tuple(Webhook(secret) for secret in secrets)

    def verify(self, body: bytes, headers: Mapping[str, str]) -> str:
        """The message's id, which is signed together with the body.

        Raises:
            BadSignature: no secret fits.
        """
        if not any(_fits(webhook, body, headers) for webhook in self._webhooks):
            raise BadSignature("the signature does not fit")
        return headers["webhook-id"]


def _fits(webhook: Webhook, body: bytes, headers: Mapping[str, str]) -> bool:
    try:
        webhook.verify(body, dict(headers), json_parse=False)
    # ValueError: a signature that is not even well-formed, or a body that is not UTF-8.
    except (WebhookVerificationError, ValueError):
        return False
    return True
