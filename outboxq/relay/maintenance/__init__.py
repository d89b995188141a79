"""A relay's periodic work besides its jobs, each task in its own thread and on its own connection."""
