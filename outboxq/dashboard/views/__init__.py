"""The functions that make the pages about a database: each takes a `Look` and parameters, and returns a `View`."""
