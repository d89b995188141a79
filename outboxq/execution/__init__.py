"""One batch on one connection: claim, run, commit, recover."""
