"""Conversion of values to and from JSON (arguments, results, mapped objects), and texts safe to show or store."""
