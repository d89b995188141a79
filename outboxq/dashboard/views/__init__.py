"""The screens: each is a function of a `Look` at a database and of its parameters, and returns a `View`."""
