"""Metrics for Prometheus: counts of relays, and figures of the tables."""
