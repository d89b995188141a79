"""Effects: calls to other services that are made once for a key, with their results recorded."""
