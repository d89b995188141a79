"""What an application declares: handlers, the registry that they are in, and what a handler is given."""
