"""The producer's side: a job becomes a row in the caller's own transaction."""
