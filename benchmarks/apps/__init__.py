"""The applications whose handlers the relays run, each a registry: `outboxq relay benchmarks.apps.noop:jobs`."""
