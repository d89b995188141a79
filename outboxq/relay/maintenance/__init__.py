"""A relay's periodic work in addition to its jobs, each task in its own thread and on its own connection."""
