"""The source of the README's figures: `python -m benchmarks`, run from the root of the repository.

Every figure is a ratio to a limit that is measured beside it, in the same run on the same machine: in most scenarios
the same SQL, driven by pgbench. See docs/benchmarks.md.
"""
