"""Functions by which operators list and change jobs, queues, schedules and effects; the command line calls them."""
