"""`outboxq doctor`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.options import DEFAULT_SCHEMA, AsJson, DatabaseUrl, Schema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outboxq.admin.roles import Part
    from outboxq.doctor import Finding, Limits
    from outboxq.handlers.registry import Registry


class Purpose(StrEnum):
    """What the role of the URL is for."""

    relay = "relay"
    producer = "producer"
    receiver = "receiver"
    reader = "reader"
    operator = "operator"


_HEADINGS = {"problem": "Problems", "warning": "Warnings", "info": "Good to know"}


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:ATTRIBUTE]",
            help="A registry, such as myapp.jobs:jobs: kinds that wait are compared with it.",
            show_default=False,
        ),
    ] = None,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="SECONDS",
            min=0,
            help="Name transactions that are open, and jobs that wait, for this long.",
        ),
    ] = 300.0,
    older_than_transactions: Annotated[
        int,
        typer.Option(
            "--older-than-transactions",
            metavar="NUMBER",
            min=0,
            help="Name slots and standbys that hold a snapshot back by this many transactions.",
        ),
    ] = 1_000_000,
    dead_rows: Annotated[
        int, typer.Option("--dead-rows", metavar="NUMBER", min=1, help="Name tables with this many dead rows.")
    ] = 100_000,
    short_timeout: Annotated[
        float,
        typer.Option("--short-timeout", metavar="SECONDS", min=0, help="Name time-outs of the server below this."),
    ] = 60.0,
    purpose: Annotated[
        Purpose, typer.Option("--for", help="What the role of the URL is for: decides which rights it needs.")
    ] = Purpose.relay,
    listen_url: Annotated[
        str | None,
        typer.Option(
            "--listen-url",
            metavar="URL",
            help="The relays' direct way to the server, if they have one: it is looked at too. Prefer the variable "
            "OUTBOXQ_LISTEN_URL.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    schema: Schema = DEFAULT_SCHEMA,
    database_url: DatabaseUrl = None,
) -> None:
    """Find what keeps jobs from running, or will, and say what to do.

    Looks at sessions and prepared transactions that hold jobs, what pins old snapshots, kinds that nobody knows, queues
    that nobody serves, the tables' version and indexes, dead rows, rights, time-outs and the way to the server. Reads
    only, and waits for no lock. Some checks need the role pg_monitor.

    Exit codes: 0 nothing needs attention, 1 there is a problem or a warning (a check that could not be made is one), 2
    wrong usage.

    \b
    Examples:
      outboxq doctor
      outboxq doctor myapp.jobs:jobs --older-than 60
      outboxq doctor --json | jq -r '.findings[] | select(.severity == "problem") | .code'
    """
    from outboxq.cli.output import print_json
    from outboxq.doctor import Limits

    limits = Limits(
        older_than_seconds=older_than,
        older_than_transactions=older_than_transactions,
        dead_tuples=dead_rows,
        short_timeout_seconds=short_timeout,
    )
    found = _examine(database_url, listen_url, schema, limits, purpose.value, _load(target))
    if as_json:
        print_json({"findings": found})
    else:
        _print_findings(found)
    if any(finding.needs_attention for finding in found):
        raise typer.Exit(1)


def _load(target: str | None) -> "Registry | None":
    if target is None:
        return None
    from outboxq.cli.loading import load_jobs

    return load_jobs(target).resolve()


def _examine(
    given_url: str | None,
    given_listen_url: str | None,
    schema: str,
    limits: "Limits",
    use: "Part",
    registry: "Registry | None",
) -> "list[Finding]":
    from outboxq import config
    from outboxq.cli.database import connect
    from outboxq.cli.errors import DatabaseUnreachable
    from outboxq.database.urls import psycopg_url
    from outboxq.doctor import run_checks, unreachable

    url = config.database_url(given_url)
    listen = config.listen_url(given_listen_url)
    config.check_schema(schema)
    try:
        return run_checks(
            lambda: connect(url),
            schema=schema,
            limits=limits,
            use=use,
            registry=registry,
            listen_connect=None if listen is None else lambda: connect(psycopg_url(listen)),
        )
    except DatabaseUnreachable as error:
        return [unreachable(error)]


def _print_findings(found: "Sequence[Finding]") -> None:
    from outboxq.cli.output import count
    from outboxq.codec.text import printable

    if not found:
        typer.echo("Nothing found: all is well.")
        return
    for severity, heading in _HEADINGS.items():
        group = [finding for finding in found if finding.severity == severity]
        if group:
            typer.echo(f"{heading}:")
        for finding in group:
            typer.echo(f"  {finding.code}: {printable(finding.title)}")
            typer.echo(f"      {printable(finding.advice)}")
    attention = sum(finding.needs_attention for finding in found)
    typer.echo(
        f"{count(attention, 'finding needs', 'findings need')} attention." if attention else "Nothing needs attention."
    )
