"""`outboxq relay`."""

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.options import DEFAULT_SCHEMA, DatabaseUrl, Schema

if TYPE_CHECKING:
    from sqlalchemy import URL

    from outboxq.config import RelayConfig


class LogLevel(StrEnum):
    """Python's levels."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def relay(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE:ATTRIBUTE", help="The registry, such as myapp.jobs:jobs.", show_default=False),
    ],
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            metavar="NAMES[=SLOTS]",
            help="How many jobs of which queues run at once: accounts=4, or urgent,normal=2 (in this order of "
            "precedence), or *=2 for all others. May be repeated. Without it, two of each queue.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=256, help="How many such relays to keep running.")
    ] = 1,
    drain: Annotated[bool, typer.Option("--drain", help="Stop when nothing is ready or due any more.")] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=1_000, help="Jobs that a slot takes into one transaction.")
    ] = 1,
    poll_seconds: Annotated[
        float, typer.Option("--poll-seconds", help="The longest pause between two looks at an empty queue.")
    ] = 1.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="How long a stopping relay waits for its handlers.")
    ] = 30.0,
    listen_url: Annotated[
        str | None,
        typer.Option(
            "--listen-url",
            metavar="URL",
            help="A direct way to the server where the database URL leads to a transaction pooler. Prefer the "
            "variable OUTBOXQ_LISTEN_URL, as for --database-url.",
            show_default=False,
        ),
    ] = None,
    no_listen: Annotated[bool, typer.Option("--no-listen", help="Poll only.")] = False,
    schema: Schema = DEFAULT_SCHEMA,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="What to log to standard error.")] = LogLevel.info,
    database_url: DatabaseUrl = None,
) -> None:
    """Claim jobs and run their handlers, until SIGTERM or Ctrl-C.

    A stopping relay lets the running handlers finish. While the database is down it waits and says so. Exit codes: 0
    it stopped as told or the queues are drained, whatever became of the jobs (see `outboxq dead list`); 1 it failed; 2
    it could not be started like this.

    \b
    Examples:
      outboxq relay myapp.jobs:jobs
      outboxq relay myapp.jobs:jobs --queue accounts=4 --queue urgent,normal=2 --processes 2
      outboxq relay myapp.jobs:jobs --drain
    """
    from outboxq import config

    url = config.database_url(database_url)
    settings = config.RelayConfig(
        groups=tuple(config.SlotGroup.parse(text) for text in queue or ()),
        batch_size=batch_size,
        poll_seconds=poll_seconds,
        drain_seconds=drain_seconds,
        listen=not no_listen,
        listen_url=config.listen_url(listen_url),
        schema=schema,
    )
    if processes == 1:
        _run(target, url, settings, drain=drain, level=log_level.value)
    else:
        _supervise(target, url, settings, processes, queue or [], drain=drain, level=log_level.value)


def _run(target: str, url: "URL", settings: "RelayConfig", *, drain: bool, level: str) -> None:
    """One relay, in this process."""
    from outboxq import config
    from outboxq.cli.loading import load_jobs
    from outboxq.relay import Relay
    from outboxq.signals import stop_when_parent_dies

    jobs = load_jobs(target)
    _set_up_logging(level)
    relay = Relay(url, jobs, settings)
    parent = config.parent_pipe()
    if parent is not None:
        stop_when_parent_dies(parent, relay.stop)
    _say_why_it_waits(url)
    report = relay.drain() if drain else relay.run()
    if drain:
        typer.echo(f"done {report.done:,}, failed attempts {report.failed:,}, dead {report.died:,}")


def _supervise(
    target: str,
    url: "URL",
    settings: "RelayConfig",
    processes: int,
    queue: list[str],
    *,
    drain: bool,
    level: str,
) -> None:
    """Several relays, a process each, started with this same command line."""
    from outboxq import config
    from outboxq.events import Emitter
    from outboxq.logs import log_event
    from outboxq.supervisor import supervise

    _set_up_logging(level)
    command = [sys.executable, "-m", "outboxq", "relay", target, "--schema", settings.schema, "--log-level", level]
    command += [part for text in queue for part in ("--queue", text)]
    command += ["--batch-size", str(settings.batch_size), "--poll-seconds", str(settings.poll_seconds)]
    command += ["--drain-seconds", str(settings.drain_seconds)]
    command += ["--drain"] if drain else []
    command += [] if settings.listen else ["--no-listen"]
    exit_code = supervise(
        command,
        processes,
        environment=config.child_environment(_secrets(url, settings)),
        drain_seconds=settings.drain_seconds,
        emit=Emitter((log_event,), lambda _hook, _event: None),
        finite=drain,
    )
    raise typer.Exit(exit_code)


def _secrets(url: "URL", settings: "RelayConfig") -> Mapping[str, str]:
    """What must not stand in a command line, which every user of the machine can read."""
    from outboxq import config

    secrets = {config.DATABASE_URL_VARIABLE: url.render_as_string(hide_password=False)}
    if settings.listen_url is not None:
        secrets[config.LISTEN_URL_VARIABLE] = settings.listen_url
    return secrets


def _say_why_it_waits(url: "URL") -> None:
    """The relay waits for a database that is down; only here is it known what libpq said, and where."""
    import logging

    from outboxq.cli.database import connect
    from outboxq.cli.failures import DatabaseUnreachable

    try:
        with connect(url):
            return
    except DatabaseUnreachable as error:
        logging.getLogger("outboxq.relay").warning("%s", error)


def _set_up_logging(level: str) -> None:
    """Standard error, unless the application has set up its own; the level is ours either way."""
    import logging

    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s [%(process)d] %(message)s"
    )
    logging.getLogger("outboxq").setLevel(level.upper())
