"""The database below outboxq's tables: connections, engines, sessions, and what a statement leaves behind on them."""
