"""Checks that vacuum keeps the tables clean: dead rows, its settings, and bloated indexes."""

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Row

from outboxq.codec.text import several
from outboxq.database.driver import run_script
from outboxq.doctor.findings import CheckContext, Finding
from outboxq.doctor.formatting import age, identifier, size
from outboxq.relay.maintenance.reindexer import BYTES_PER_ENTRY, MIN_BYTES
from outboxq.statements import reindex
from outboxq.statements.doctor import tables as statements

_MEMORY_SETTINGS: Mapping[str, str] = {
    "autovacuum_vacuum_scale_factor": "0.02",
    "autovacuum_vacuum_threshold": "5000",
    "vacuum_index_cleanup": "on",
}
# The settings that the migrations give to tables that vacuum must visit often.
_OWN_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "job": {
        "autovacuum_vacuum_scale_factor": "0",
        "autovacuum_vacuum_threshold": "2000",
        "autovacuum_vacuum_cost_delay": "0",
        "vacuum_index_cleanup": "on",
        "vacuum_truncate": "off",
    },
    "inbox": _MEMORY_SETTINGS,
    "effect": _MEMORY_SETTINGS,
}
_SPELLINGS = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off"}


def find_neglected_tables(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for tables with autovacuum switched off, or with many dead rows (`Limits.dead_tuples`)."""
    limit = context.limits.dead_tuples
    for row in context.rows(statements.vacuum_state(context.schema)):
        options = {option.lower() for option in row.options}
        if options & {"autovacuum_enabled=false", "autovacuum_enabled=off", "autovacuum_enabled=0"}:
            yield Finding(
                "autovacuum-off",
                "problem" if row.table == "job" else "warning",
                f"autovacuum is switched off for table {row.table}: dead rows stay, and claims slow down",
                {"table": row.table},
                f"ALTER TABLE {identifier(context.schema, row.table)} RESET (autovacuum_enabled);",
            )
        if row.dead >= limit and row.dead >= row.live / 5:
            yield _many_dead(row)


def _many_dead(row: Row[Any]) -> Finding:
    vacuumed = f"{age(row.vacuumed_seconds_ago)} ago" if row.vacuumed_seconds_ago is not None else "never"
    return Finding(
        "dead-tuples",
        "warning",
        f"table {row.table} has {several(row.dead, 'dead row', 'dead rows')} beside {row.live:,} live ones, and was "
        f"last vacuumed {vacuumed}",
        {
            "table": row.table,
            "dead": row.dead,
            "live": row.live,
            "vacuumed_seconds_ago": row.vacuumed_seconds_ago,
        },
        "If another finding names a pinned snapshot, end that first. Then: VACUUM (VERBOSE) the table; a shorter "
        "autovacuum_naptime (10s), or more autovacuum_max_workers, if it does not keep up.",
    )


def find_changed_settings(context: CheckContext) -> Iterator[Finding]:
    """Yield findings for vacuum settings of outboxq's tables that are missing or differ from the migrations'."""
    for row in context.rows(statements.vacuum_state(context.schema)):
        wanted = _OWN_SETTINGS.get(row.table, {})
        options = dict(option.partition("=")[::2] for option in row.options)
        lost = [name for name in wanted if name not in options]
        changed = [name for name in wanted if name in options and not _is_same(name, options[name], wanted[name])]
        if lost:
            late = (
                "it is vacuumed too late for a queue" if row.table == "job" else "what has expired slows pruning down"
            )
            yield Finding(
                "autovacuum-settings-lost",
                "warning",
                f"table {row.table} has lost settings of its own for vacuum ({', '.join(lost)}): {late}",
                {"table": row.table, "settings": lost},
                _set(context.schema, row.table, lost),
            )
        if changed:
            yield _settings_changed(context.schema, row.table, changed, options)


def _is_same(name: str, found: str, wanted: str) -> bool:
    if name.startswith("vacuum_"):
        return _SPELLINGS.get(found.lower(), found.lower()) == wanted
    return float(found) == float(wanted)


def _settings_changed(schema: str, table: str, changed: list[str], options: Mapping[str, str]) -> Finding:
    found = ", ".join(f"{name} = {options[name]}" for name in changed)
    uncleaned = table == "job" and options.get("vacuum_index_cleanup", "").lower() in ("off", "false", "no")
    return Finding(
        "autovacuum-settings-changed",
        "warning" if uncleaned else "info",
        f"table {table} was set to {found}"
        + (": dead entries stay in the indexes, and claims walk over them" if uncleaned else ""),
        {"table": table, "settings": [f"{name}={options[name]}" for name in changed]},
        f"Migrations leave it so. To have ours: {_set(schema, table, changed)}",
    )


def _set(schema: str, table: str, names: list[str]) -> str:
    settings = ", ".join(f"{name} = {_OWN_SETTINGS[table][name]}" for name in names)
    return f"ALTER TABLE {identifier(schema, table)} SET ({settings});"


def find_wasted_indexes(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each index of the table `job` that is large and nearly empty."""
    wasted = reindex.wasted_indexes(context.schema, MIN_BYTES, BYTES_PER_ENTRY)
    for name, given in run_script(context.connection, wasted):
        index, number_of_bytes = str(name), int(str(given))
        yield Finding(
            "index-mostly-empty",
            "info",
            f"index {index!r} has {size(number_of_bytes)} and next to nothing in it: claims do not notice, but each "
            "vacuum of the queue reads all of it",
            {"index": index, "bytes": number_of_bytes},
            "A relay whose role owns the tables builds it again by itself, unless it was started with --no-reindex. "
            f"By hand, as the owner: REINDEX INDEX CONCURRENTLY {identifier(context.schema, index)};",
        )
