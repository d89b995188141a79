"""Declarations of an application: handlers, the registry that holds them, and the arguments of a handler."""
