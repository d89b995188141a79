"""Metrics: what relays count and what the tables hold, for Prometheus."""
