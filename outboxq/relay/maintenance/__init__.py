"""What a relay does now and then beside its work, each task in a thread and on a connection of its own."""
