"""Events as logs, metrics and traces; and the history of relays."""
