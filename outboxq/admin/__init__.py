"""Operators' work on waiting jobs, dead letters, queues, messages and effects; the command line is built on it."""
