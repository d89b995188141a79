"""The demo: a small shop on a PostgreSQL server of its own, and a relay that is killed in the middle of its work.

`shop` is the application, as a user would write it; `story` runs the demo, and `proof` counts the outcome in the
database.
"""
