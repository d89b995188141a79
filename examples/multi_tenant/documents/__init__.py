"""Documents of many tenants, kept apart by row level security."""
