"""Metrics for Prometheus: counts that relays keep, and values that are read from the tables."""
