"""Effects: calls to the outside that count once."""
