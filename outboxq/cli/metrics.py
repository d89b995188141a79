"""`outboxq metrics`: serve metrics of the tables for Prometheus, or print the shipped alert rules or dashboard."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outboxq.cli.errors import CommandFailed
from outboxq.cli.options import DEFAULT_SCHEMA, DatabaseUrls, Schema, takes
from outboxq.cli.replica import ReadUrls, replicas_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outboxq.observability.metrics.exporter import DatabaseExporter
    from outboxq.observability.metrics.server import Expose


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsOptions:
    """The options of `outboxq metrics`."""

    listen: Annotated[
        str,
        typer.Option("--listen", metavar="ADDRESS", help="Where to serve /metrics and /healthz: [HOST:]PORT."),
    ] = "127.0.0.1:9465"
    once: Annotated[
        bool, typer.Option("--once", help="Look once, print the metrics, and end: for the textfile collector.")
    ] = False
    from_history: Annotated[
        bool,
        typer.Option(
            "--from-history",
            help="Export what became of jobs too, by the history that relays write. Not beside relays with --metrics "
            "on the same Prometheus: each job would count twice.",
        ),
    ] = False
    shipped: Annotated[
        Literal["dashboard", "rules"] | None,
        typer.Option(
            "--print",
            metavar="WHAT",
            help="Print what is shipped, and end. dashboard: a board for Grafana, as JSON; rules: alerts for "
            "Prometheus, as YAML.",
            show_default=False,
        ),
    ] = None
    schema: Schema = DEFAULT_SCHEMA
    databases: Annotated[
        list[str] | None,
        typer.Option(
            "--database",
            metavar="NAME=URL",
            help="A database, and the value of the label `database` for it. May be repeated. Other users of the "
            "machine can see the URL here: without this option those of OUTBOXQ_DATABASE_URL are looked at, under the "
            "names of the databases.",
            show_default=False,
        ),
    ] = field(default=None, repr=False)
    database_url: DatabaseUrls = field(default=None, repr=False)
    read_url: ReadUrls = field(default=None, repr=False)


@takes(MetricsOptions)
def metrics(options: MetricsOptions) -> None:
    """Serve metrics of the tables for Prometheus: what waits, what died, which relays live, what the doctor finds.

    Measures each database every 15 seconds, however many scrape, with queries that are bounded by two seconds and wait
    for no lock; the doctor runs once a minute. A database that is down is one whose outboxq_exporter_up is 0. Needs
    outboxq[metrics], and a role that may read: outboxq_reader, with pg_monitor for the ages of transactions.

    Exit codes: 0 it was stopped, or printed; 1 with --once, a database could not be looked at, or has older tables; 2
    wrong usage.

    \b
    Examples:
      outboxq metrics
      outboxq metrics --listen 0.0.0.0:9465 --from-history
      outboxq metrics --once
      outboxq metrics --print rules
    """
    if options.shipped is not None:
        _print_shipped(options.shipped)
        return
    # Needs the extra.
    from outboxq.observability.metrics.exposition import expose, registry_of

    exporters = _exporters(options)
    registry = registry_of(lambda: {name: exporter.read() for name, exporter in exporters.items()})
    if options.once:
        _look_once(exporters)
        typer.echo(expose(registry)[0].decode(), nl=False)
        down = [name for name, exporter in exporters.items() if not exporter.is_up]
        if down:
            raise CommandFailed(f"not looked at: {', '.join(down)}")
        for exporter in exporters.values():
            if exporter.missing is not None:
                raise exporter.missing
        return
    _serve(options, exporters, partial(expose, registry))


def _look_once(exporters: "Mapping[str, DatabaseExporter]") -> None:
    for exporter in exporters.values():
        exporter.look()


def _serve(options: MetricsOptions, exporters: "Mapping[str, DatabaseExporter]", expose: "Expose") -> None:
    import logging
    import sys
    import threading

    from outboxq.observability.logging import LineFormatter
    from outboxq.observability.metrics.server import parse_address, serving
    from outboxq.relay.signals import stop_signals

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
    logging.basicConfig(level="INFO", handlers=[handler])
    stopping = threading.Event()

    def is_healthy() -> bool:
        return all(exporter.is_alive for exporter in exporters.values())

    with ExitStack() as stack:
        stack.enter_context(stop_signals(stopping.set))
        stack.enter_context(serving(parse_address(options.listen), expose, is_healthy))
        for exporter in exporters.values():
            exporter.start()
            stack.callback(exporter.stop)
        stopping.wait()


def _exporters(options: MetricsOptions) -> "dict[str, DatabaseExporter]":
    from outboxq import config
    from outboxq.cli.database import connect, named_databases
    from outboxq.doctor import run_checks
    from outboxq.observability.metrics.exporter import DatabaseExporter
    from outboxq.observability.metrics.minutes import MinuteSums

    schema = config.check_schema(options.schema)
    named = named_databases(options.databases, options.database_url)
    replicas = replicas_of(named, options.read_url, options.databases or options.database_url)
    return {
        name: DatabaseExporter(
            connect=partial(connect, replicas.get(name, url)),
            schema=schema,
            find=partial(run_checks, partial(connect, url), schema=schema, use="reader"),
            minutes=MinuteSums() if options.from_history else None,
        )
        for name, url in named.items()
    }


def _print_shipped(what: Literal["dashboard", "rules"]) -> None:
    from outboxq.observability.metrics import shipped

    typer.echo(shipped.dashboard() if what == "dashboard" else shipped.rules(), nl=False)
