"""Metrics for Prometheus: counts of relays, and values read from the tables."""
