"""`outboxq doctor`: find what keeps jobs from running."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.options import DatabaseOptions, DatabaseUrls, takes
from outboxq.cli.output import print_json, print_wrapped
from outboxq.codec.text import printable, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import URL

    from outboxq.doctor import Finding
    from outboxq.handlers.resolved import Registry

_HEADINGS = {"problem": "Problems", "warning": "Warnings", "info": "Good to know"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorOptions(DatabaseOptions):
    """The options of `outboxq doctor`."""

    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:ATTRIBUTE",
            help="A registry, such as myapp.jobs:jobs, to compare the kinds of waiting jobs with.",
            show_default=False,
        ),
    ] = None
    older_than_seconds: Annotated[
        float,
        typer.Option(
            "--older-than",
            metavar="SECONDS",
            min=0,
            help="Report transactions that have been open, and jobs that have waited, for this long.",
        ),
    ] = 300.0
    older_than_transactions: Annotated[
        int,
        typer.Option(
            "--older-than-transactions",
            metavar="NUMBER",
            min=0,
            help="Report replication slots and standbys that hold a snapshot back by this many transactions.",
        ),
    ] = 1_000_000
    dead_tuples: Annotated[
        int, typer.Option("--dead-rows", metavar="NUMBER", min=1, help="Report tables with this many dead rows.")
    ] = 100_000
    short_timeout_seconds: Annotated[
        float,
        typer.Option("--short-timeout", metavar="SECONDS", min=0, help="Report time-outs of the server below this."),
    ] = 60.0
    purpose: Annotated[
        Literal["relay", "producer", "receiver", "reader", "operator"] | None,
        typer.Option(
            "--for",
            metavar="PART",
            help="What the role of the URL is for, which decides the rights that it needs: relay, producer, receiver, "
            "reader or operator. By default as it is a member of a group that `outboxq roles` makes, else relay.",
            show_default=False,
        ),
    ] = None
    listen_url: Annotated[
        list[str] | None,
        typer.Option(
            "--listen-url",
            metavar="URL",
            help="The direct URL of the server that relays LISTEN on, if they have one, to be checked too; for several "
            "databases one for each, in their order. Prefer the variable OUTBOXQ_LISTEN_URL.",
            show_default=False,
        ),
    ] = field(default=None, repr=False)
    database_url: DatabaseUrls = field(default=None, repr=False)  # type: ignore[assignment]  # one or several


@takes(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Find what keeps jobs from running, or soon will, and say what to do.

    Looks at sessions and prepared transactions that hold jobs, what pins old snapshots, kinds that no relay knows,
    queues that no relay serves, the tables' version and indexes, dead rows, rights, time-outs and the connection to the
    server. Reads only, and waits for no lock. Some checks need the role pg_monitor.

    Exit codes: 0 nothing needs attention; 1 there is a problem or a warning, such as a check that could not be made; 2
    wrong usage.

    \b
    Examples:
      outboxq doctor
      outboxq doctor myapp.jobs:jobs --older-than 60
      outboxq doctor --json | jq -r '.findings[] | .severity + " " + .code'
    """
    found = examine(options)
    if len(found) == 1:
        (findings,) = found.values()
        if options.as_json:
            print_json({"findings": findings})
        else:
            _print_findings(findings)
    elif options.as_json:
        print_json({"databases": [{"database": name, "findings": each} for name, each in found.items()]})
    else:
        for name, each in found.items():
            typer.echo(f"{printable(name)}:")
            _print_findings(each)
    if any(finding.needs_attention for each in found.values() for finding in each):
        raise typer.Exit(1)


def examine(options: DoctorOptions) -> "dict[str, list[Finding]]":
    """Run the doctor on each database of the options; return the findings by the databases' names."""
    from outboxq import config
    from outboxq.cli.database import naming
    from outboxq.handlers.loading import load_jobs

    registry = None if options.target is None else load_jobs(options.target).resolve()
    urls = config.database_urls(options.database_url)
    listen = config.listen_urls(options.listen_url, len(urls))
    found: dict[str, list[Finding]] = {}
    for (name, url), to_listen in zip(urls.items(), listen, strict=True):
        with naming(name if len(urls) > 1 else None):
            found[name] = _check(options, url, to_listen, registry)
    return found


def _check(options: DoctorOptions, url: "URL", listen: str | None, registry: "Registry | None") -> "list[Finding]":
    from outboxq import config
    from outboxq.cli.database import connect
    from outboxq.cli.errors import DatabaseUnreachable
    from outboxq.database.urls import psycopg_url
    from outboxq.doctor import Limits, run_checks, unreachable

    limits = Limits(**{limit.name: getattr(options, limit.name) for limit in fields(Limits)})
    try:
        return run_checks(
            lambda: connect(url),
            schema=config.check_schema(options.schema),
            limits=limits,
            use=options.purpose,
            registry=registry,
            listen_connect=None if listen is None else lambda: connect(psycopg_url(listen)),
        )
    except DatabaseUnreachable as error:
        return [unreachable(error)]


def _print_findings(found: "Sequence[Finding]") -> None:
    if not found:
        typer.echo("Nothing found: all is well.")
        return
    for severity, heading in _HEADINGS.items():
        group = [finding for finding in found if finding.severity == severity]
        if group:
            typer.echo(f"{heading}:")
        for finding in group:
            print_wrapped(f"{finding.code}: {printable(finding.title)}", "  ", "    ")
            print_wrapped(printable(finding.advice), "      ")
    attention = sum(finding.needs_attention for finding in found)
    number = several(attention, "finding needs", "findings need") if attention else "Nothing needs"
    typer.echo(f"{number} attention.")
