"""Events of relays as logs, metrics and traces; and the history, the counts of jobs that relays store."""
