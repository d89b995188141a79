"""What operators do with waiting jobs, dead letters, queues, messages and effects: the command line stands on it."""
