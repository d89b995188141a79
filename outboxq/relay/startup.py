"""What a relay checks of its database before it works."""

from sqlalchemy import Connection

from outboxq.errors import ConfigError
from outboxq.statements.server import synchronous_commit


def check_durability(connection: Connection, *, allowed: bool) -> None:
    """Refuse sessions whose COMMIT answers before it is on the disk, unless `allowed`.

    Raises:
        ConfigError: `synchronous_commit` is off; the message says where and what to do.
    """
    if allowed:
        return
    setting, source = synchronous_commit(connection)
    if setting == "off":
        raise ConfigError(
            f"synchronous_commit is off on the relay's sessions (set by: {source}), so a crash of the server could "
            "undo jobs that were reported as done: ALTER ROLE <the relay's role> SET synchronous_commit = on, or "
            "allow it by name with --allow-asynchronous-commit (RelayConfig(allow_asynchronous_commit=True))"
        )
