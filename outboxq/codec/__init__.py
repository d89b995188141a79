"""Values between Python and JSON: a handler's arguments, mapped objects, and texts from anywhere."""
