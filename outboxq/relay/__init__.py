"""The process that claims jobs and runs their handlers: slots, their connections, and other threads."""
