"""Signed webhooks, accepted and applied once each."""
