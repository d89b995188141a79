"""The limit: the statements that a scenario cannot do without, as scripts for pgbench.

Prepared, and with as few round trips as the scenario allows. What a claim returns is what any worker must know.
"""

from typing import LiteralString

_PICKED: LiteralString = """\
WITH picked AS MATERIALIZED (
  SELECT id FROM outboxq.job WHERE queue = 'bench' AND state = 'ready'
  ORDER BY (-priority), seq LIMIT {limit} FOR UPDATE SKIP LOCKED
)"""
_RETURNED: LiteralString = "job.id, job.kind, job.args::text, job.attempt, job.max_attempts, job.priority, job.seq"
_DELETE: LiteralString = _PICKED + " DELETE FROM outboxq.job AS job USING picked WHERE job.id = picked.id RETURNING "
_ADD: LiteralString = "UPDATE account SET balance = balance + 1 WHERE id = "


_LEASE: LiteralString = (
    "UPDATE outboxq.job AS job SET state = 'leased', lease_owner = '00000000-0000-7000-8000-000000000001', "
    "lease_token = lease_token + 1, attempt = attempt + 1 "
    f"FROM picked WHERE job.id = picked.id RETURNING {_RETURNED}, job.lease_token"
)


def claim_and_delete(batch: int) -> str:
    """One statement, one transaction: claim `batch` jobs, delete them, return them."""
    return (_DELETE + _RETURNED).format(limit=batch) + ";\n"


def claim_by_hand() -> str:
    """The same for SQLAlchemy's `text()`, with the batch as a parameter."""
    return (_DELETE + _RETURNED).format(limit=":how_many")


def claim_and_update_one() -> str:
    """One job a transaction, and the UPDATE that its arguments ask for."""
    wanted = "(job.args->>'account')::int AS account"
    claim = f"{_DELETE}{wanted}, {_RETURNED}".format(limit=1)
    return f"BEGIN;\n{claim} \\gset\n{_ADD}:account;\nCOMMIT;\n"


def update_and_claim_the_next(jobs: int, accounts: int) -> str:
    """One job a transaction in two round trips: the UPDATE, and COMMIT with the next claim; `jobs` of them.

    A script may not end within a transaction: the last COMMIT has a round trip of its own. Nor does a pipeline pass
    values to later statements: the accounts are drawn at random.
    """
    claim = f"BEGIN;\n{claim_and_delete(1)}\\endpipeline\n"
    update = f"\\set account random(1, {accounts})\n{_ADD}:account;\n"
    return f"\\startpipeline\n{claim}" + f"\\startpipeline\nCOMMIT;\n{claim}".join([update] * jobs) + "COMMIT;\n"


def claim_and_update_each(batch: int, accounts: int, *, pipelined: bool) -> str:
    """`batch` jobs a transaction and an UPDATE each, every one its own statement.

    pgbench cannot loop over the rows that it was given, so the accounts are drawn by itself.
    """
    draws = "".join(f"\\set account{n} random(1, {accounts})\n" for n in range(batch))
    updates = "".join(f"{_ADD}:account{n};\n" for n in range(batch))
    body = f"BEGIN;\n{claim_and_delete(batch)}{updates}COMMIT;\n"
    return draws + (f"\\startpipeline\n{body}\\endpipeline\n" if pipelined else body)


def claim_and_update_set(batch: int) -> str:
    """`batch` jobs a transaction and one UPDATE for all of them."""
    deleted = _DELETE.replace("DELETE FROM", ", deleted AS (DELETE FROM", 1).format(limit=batch)
    arrays = "array_agg(account)::text AS accounts, array_agg(cents)::text AS cents"
    claim = (
        f"{deleted}(job.args->>'account')::int AS account, (job.args->>'cents')::int AS cents, {_RETURNED})\n"
        f"SELECT {arrays}, array_agg(args) AS args FROM deleted \\gset\n"
    )
    update = (
        "UPDATE account SET balance = balance + paid.cents FROM "
        "(SELECT id, sum(cents) AS cents FROM unnest(:accounts::int[], :cents::int[]) AS job (id, cents) GROUP BY id) "
        "AS paid WHERE account.id = paid.id;\n"
    )
    return f"BEGIN;\n{claim}{update}COMMIT;\n"


def lease_and_delete(batch: int) -> str:
    """Lease `batch` jobs in one transaction, and delete them in another, each by its token."""
    claim = _PICKED.format(limit=batch) + (
        f", claimed AS ({_LEASE})\n"
        "SELECT array_agg(id)::text AS ids, array_agg(lease_token)::text AS tokens, array_agg(args) AS args "
        "FROM claimed \\gset\n"
    )
    delete = (
        "DELETE FROM outboxq.job AS job USING unnest(:ids::uuid[], :tokens::bigint[]) AS held (id, token) "
        "WHERE job.id = held.id AND job.lease_token = held.token;\n"
    )
    return claim + delete


def lease_one() -> str:
    """Lease one job, and return it, its token last; for a client that takes the row."""
    return f"{_PICKED.format(limit=1)} {_LEASE}"
