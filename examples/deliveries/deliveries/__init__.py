"""Webhooks that go out: events, sent to every endpoint that wants them."""
