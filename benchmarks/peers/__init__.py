"""The same work done by other job queues on PostgreSQL: `python -m benchmarks.peers`. See docs/benchmark-peers.md.

Each peer is installed from its registry into an environment of its own, runs at its own documented settings, and is
driven by a small program of its own in the folder of its name.
"""
