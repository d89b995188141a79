"""Checks of servers that are no plain PostgreSQL: tables under Citus, and servers that refuse relays' statements."""

from collections.abc import Iterator
from uuid import UUID

import psycopg

from outboxq.database.driver import run_script
from outboxq.database.errors import INSUFFICIENT_PRIVILEGE, LOCK_NOT_AVAILABLE, QUERY_CANCELED, sqlstate_of
from outboxq.doctor.findings import CheckContext, Finding
from outboxq.statements.citus import citus_state
from outboxq.statements.claim import ClaimStatements
from outboxq.statements.group_claim import GroupScript
from outboxq.statements.server import server_facts

_NOBODY = UUID(int=0)


def find_one_phase(context: CheckContext) -> Iterator[Finding]:
    """Yield findings if Citus manages outboxq's tables, or commits the rows of users' tables separately from outboxq's.

    A crash between the two commits would lose jobs, and run others twice.
    """
    if not server_facts(context.connection).has_citus:
        return
    state = context.connection.execute(citus_state(context.schema)).one()
    if state.managed:
        yield Finding(
            "citus-manages-tables",
            "problem",
            f"Citus manages outboxq's {', '.join(state.managed)}: it refuses claims on such tables",
            {"tables": list(state.managed)},
            "Make them plain tables of the coordinator again (SELECT undistribute_table(...); of a distributed schema, "
            "citus_schema_undistribute(...)), then run `outboxq migrate`.",
        )
    if state.unguarded:
        yield Finding(
            "citus-one-phase",
            "problem" if state.has_distributed else "warning",
            "Citus commits the rows of distributed tables before those of outboxq "
            f"({', '.join(state.unguarded)}): a crash in between loses jobs, and runs others twice",
            {"tables": list(state.unguarded), "distributed": state.has_distributed},
            "Run `outboxq migrate`, or call outboxq.migrations.upgrade(op, ...) in your own revision: then both are "
            "committed in two phases.",
        )


def find_refused_claims(context: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each of the relays' claim statements that the server refuses.

    The statements are sent with EXPLAIN, which executes nothing.
    """
    if context.use != "relay":
        return
    claims = ClaimStatements(context.schema, "default", _NOBODY)
    of_suspects = (claims.lease_suspect, claims.lease_suspects_in_company, claims.lease_suspect_alone)
    ordinary = (claims.ready, claims.due, claims.lease_ready, claims.lease_due, *of_suspects)
    grouped = (GroupScript(context.schema, "default", owner) for owner in (None, _NOBODY))
    for script in (*(claim.text(1) for claim in ordinary), *(claim.one(_NOBODY) for claim in grouped)):
        try:
            run_script(context.connection, f"EXPLAIN {script}")
        except psycopg.Error as error:
            sqlstate = sqlstate_of(error)
            if sqlstate == INSUFFICIENT_PRIVILEGE:
                # The check of the rights reports this.
                return
            if sqlstate in (None, LOCK_NOT_AVAILABLE, QUERY_CANCELED):
                raise
            reason = error.diag.message_primary
            yield Finding(
                "claim-refused",
                "problem",
                f"the server refuses a claim, so that jobs wait for ever: {reason}",
                {"reason": reason, "sqlstate": sqlstate},
                "outboxq needs PostgreSQL's own ordinary tables: look for rules on them, and at what this server is.",
            )
            return
