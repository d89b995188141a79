"""How durable this session's commits are."""

from sqlalchemy import Connection, text

_SETTING = text("SELECT setting, source FROM pg_catalog.pg_settings WHERE name = 'synchronous_commit'")
_EPOCH = text(
    "SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text || ' '"
    " || coalesce((SELECT extract(epoch FROM stats_reset)::text FROM pg_catalog.pg_stat_bgwriter), '')"
)


def synchronous_commit(connection: Connection) -> tuple[str, str]:
    """The value of `synchronous_commit` and, in PostgreSQL's words, where it comes from. Takes no lock."""
    row = connection.execute(_SETTING).one()
    return row.setting, row.source


def server_epoch(connection: Connection) -> str:
    """Which run of which server this is; differs after a restart, a crash of any backend, and a failover.

    The number of a transaction that a crash undid, or that a promoted standby never heard of, is given out again: what
    `pg_xact_status` says of it holds within one epoch only. The cumulative statistics are discarded by every crash
    recovery, also by one that the postmaster survives; reset by hand, they change the epoch for nothing, which is safe.
    """
    epoch: str = connection.execute(_EPOCH).scalar_one()
    return epoch
