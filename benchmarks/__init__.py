"""Where the figures of the README come from: `python -m benchmarks`, from the root of the repository.

Every figure is a ratio to a limit that is measured beside it, in the same run on the same machine: mostly the same SQL
driven by pgbench. See docs/benchmarks.md.
"""
