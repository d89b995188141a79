"""`outboxq relay`."""

import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outboxq.cli.options import DEFAULT_SCHEMA, DatabaseUrl, Schema

if TYPE_CHECKING:
    from typing import NoReturn

    from sqlalchemy import URL

    from outboxq.config import RelayConfig


_LAST_WORDS_SECONDS = 2.0


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
            "precedence), or *=2 for all others, in turns. May be repeated. Without it, two of each queue.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, max=256, help="How many such relays to keep running.")
    ] = 1,
    drain: Annotated[
        bool, typer.Option("--drain", help="Stop when nothing is ready or due any more, and say what is left.")
    ] = False,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=1_000, help="Jobs that a slot takes into one transaction.")
    ] = 1,
    poll_seconds: Annotated[
        float, typer.Option("--poll-seconds", help="The longest pause between two looks at an empty queue.")
    ] = 1.0,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", help="How long a stopping relay waits for its handlers.")
    ] = 30.0,
    lease_seconds: Annotated[
        float,
        typer.Option(
            "--lease-seconds",
            help="How long jobs in lease mode stay this relay's after its last sign of life.",
        ),
    ] = 30.0,
    max_crashes: Annotated[
        int,
        typer.Option(
            "--max-crashes", help="How often a job may take its relay with it, alone, before it is a dead letter."
        ),
    ] = 3,
    prune_seconds: Annotated[
        float,
        typer.Option(
            "--prune-seconds",
            help="The longest pause between two looks for messages and effects whose retention is over. 0: never.",
        ),
    ] = 60.0,
    no_reindex: Annotated[
        bool,
        typer.Option(
            "--no-reindex",
            help="Never build an index of the queue again that is a file of almost nothing. Only a relay whose role "
            "owns the tables does.",
        ),
    ] = False,
    allow_asynchronous_commit: Annotated[
        bool,
        typer.Option(
            "--allow-asynchronous-commit",
            help="Work although synchronous_commit is off: a crash of the server may undo what was reported as done.",
        ),
    ] = False,
    stall_seconds: Annotated[
        float,
        typer.Option(
            "--stall-seconds",
            help="With several processes: kill and replace one that has shown no life for so long. 0: never.",
        ),
    ] = 60.0,
    health_file: Annotated[
        Path | None,
        typer.Option(
            "--health-file",
            metavar="PATH",
            help="Write what the relay is doing into this file, once a second, for `outboxq health`.",
            show_default=False,
        ),
    ] = None,
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

    A stopping relay lets the running handlers finish; a second signal ends it at once, and what was open is rolled
    back. While the database is down it waits and says so; a database, role or password that the server does not know at
    the first connection, and missing tables, end it with 2. Exit codes: 0 it stopped as told or the queues are drained,
    whatever became of the jobs (see `outboxq dead list`); 1 it failed; 2 it could not be started like this; 3 a
    handler could not be freed within its deadline, so that the process must be replaced.

    \b
    Examples:
      outboxq relay myapp.jobs:jobs
      outboxq relay myapp.jobs:jobs --queue accounts=4 --queue urgent,normal=2 --processes 2
      outboxq relay myapp.jobs:jobs --processes 4 --health-file /tmp/relay.json
      outboxq relay myapp.jobs:jobs --drain
    """
    from outboxq import config

    url = config.database_url(database_url)
    settings = config.RelayConfig(
        groups=tuple(config.SlotGroup.parse(text) for text in queue or ()),
        batch_size=batch_size,
        poll_seconds=poll_seconds,
        drain_seconds=drain_seconds,
        lease_seconds=lease_seconds,
        max_crashes=max_crashes,
        prune_seconds=prune_seconds,
        reindex=not no_reindex,
        allow_asynchronous_commit=allow_asynchronous_commit,
        listen=not no_listen,
        listen_url=config.listen_url(listen_url),
        schema=schema,
    )
    if processes == 1:
        _run(target, url, settings, drain=drain, level=log_level.value, health_file=health_file)
    else:
        # Once, for all of them.
        _look_at_database(url, settings)
        command = _child_command(target, settings, queue or [], drain=drain, level=log_level.value)
        _set_up_logging(log_level.value)
        _supervise(
            command,
            processes,
            url,
            settings,
            drain=drain,
            stall_seconds=stall_seconds,
            health_file=health_file,
        )


def _run(
    target: str, url: "URL", settings: "RelayConfig", *, drain: bool, level: str, health_file: Path | None
) -> None:
    """One relay, in this process."""
    from outboxq import config
    from outboxq.cli.loading import load_jobs
    from outboxq.errors import ConfigError, RelayStuck, SchemaError
    from outboxq.observability.logging import log_event
    from outboxq.relay import health
    from outboxq.relay.relay import Relay
    from outboxq.relay.signals import stop_signals, stop_when_parent_dies
    from outboxq.relay.slot_groups import resolve_groups

    # Before the application's code, which may start processes of its own.
    parent, heartbeat = config.parent_pipe(), config.heartbeat_pipe()
    jobs = load_jobs(target)
    _set_up_logging(level)
    state = health.StateHook()
    relay = Relay(url, jobs, settings, hooks=(log_event, state))
    with stop_signals(relay.stop), health.health_file(health_file, lambda: health.Health(state.state)):
        if parent is not None:
            stop_when_parent_dies(parent, relay.stop)
        if heartbeat is not None:
            health.send_beats(heartbeat, lambda: state.state)
        if parent is None:
            _look_at_database(url, settings)
        try:
            report = relay.drain() if drain else relay.run()
        except RelayStuck as error:
            _end_stuck(error)
        except SchemaError as error:
            raise ConfigError(str(error)) from error
    if drain:
        typer.echo(f"done {report.done:,}, failed attempts {report.failed:,}, dead {report.died:,}")
        if state.state != "stopping":
            queues = [name for group, _ in resolve_groups(settings, jobs.resolve()) for name in group.queues]
            _say_what_is_left(url, settings.schema, queues)


_LEFT = {
    "in_backoff": "in backoff after a failed attempt",
    "later": "due later",
    "parked": "of kinds that this registry does not know",
    "paused": "in paused queues",
    "elsewhere": "held by others, or new",
    "not_served": "in queues that are not served",
}


def _say_what_is_left(url: "URL", schema: str, queues: Sequence[str]) -> None:
    """How many jobs of each sort a drain leaves, if any."""
    from sqlalchemy.exc import DBAPIError

    from outboxq.admin.stats import count_left
    from outboxq.cli.database import open_database
    from outboxq.cli.errors import DatabaseUnreachable
    from outboxq.cli.output import notice

    try:
        with open_database(url.render_as_string(hide_password=False), schema) as begin, begin() as connection:
            left = count_left(connection, queues)
    except (DBAPIError, DatabaseUnreachable) as error:
        # What was asked for is done.
        notice(f"what is left could not be counted ({type(error).__name__})")
        return
    counts = {words: getattr(left, sort) for sort, words in _LEFT.items()}
    if any(counts.values()):
        typer.echo("left: " + ", ".join(f"{number:,} {words}" for words, number in counts.items() if number))


def _end_stuck(error: Exception) -> "NoReturn":
    """End without waiting for anybody: the thread that is stuck may be one that Python waits for, or hold any lock."""
    import logging
    import os
    import threading

    from outboxq.relay.supervisor import EXIT_STUCK

    def say() -> None:
        logging.getLogger("outboxq.relay").critical("%s", error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    speaker = threading.Thread(target=say, name="outboxq-last-words", daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS_SECONDS)
    os._exit(EXIT_STUCK)


def _child_command(target: str, settings: "RelayConfig", queue: list[str], *, drain: bool, level: str) -> list[str]:
    """This same command line, for one process."""
    command = [sys.executable, "-m", "outboxq", "relay", target, "--schema", settings.schema, "--log-level", level]
    command += [part for text in queue for part in ("--queue", text)]
    command += ["--batch-size", str(settings.batch_size), "--poll-seconds", str(settings.poll_seconds)]
    command += ["--drain-seconds", str(settings.drain_seconds), "--lease-seconds", str(settings.lease_seconds)]
    command += ["--max-crashes", str(settings.max_crashes), "--prune-seconds", str(settings.prune_seconds)]
    command += [] if settings.reindex else ["--no-reindex"]
    command += ["--allow-asynchronous-commit"] if settings.allow_asynchronous_commit else []
    command += ["--drain"] if drain else []
    command += [] if settings.listen else ["--no-listen"]
    return command


def _supervise(
    command: list[str],
    processes: int,
    url: "URL",
    settings: "RelayConfig",
    *,
    drain: bool,
    stall_seconds: float,
    health_file: Path | None,
) -> None:
    """Several relays, a process each."""
    from outboxq import config
    from outboxq.events import Emitter
    from outboxq.observability.logging import log_event
    from outboxq.relay.supervisor import Supervisor

    supervisor = Supervisor(
        command,
        processes,
        environment=config.child_environment(_secrets(url, settings)),
        drain_seconds=settings.drain_seconds,
        emit=Emitter((log_event,), lambda _hook, _event: None),
        finite=drain,
        stall_seconds=stall_seconds,
        health_path=health_file,
    )
    raise typer.Exit(supervisor.run())


def _secrets(url: "URL", settings: "RelayConfig") -> Mapping[str, str]:
    """What must not stand in a command line, which every user of the machine can read."""
    from outboxq import config

    secrets = {config.DATABASE_URL_VARIABLE: url.render_as_string(hide_password=False)}
    if settings.listen_url is not None:
        secrets[config.LISTEN_URL_VARIABLE] = settings.listen_url
    return secrets


def _look_at_database(url: "URL", settings: "RelayConfig") -> None:
    """Refuse to start if no waiting helps, and say why if it does; only here is it known what libpq said, and where.

    Raises:
        ConfigError: the server knows no such database, role or password; or the tables or a setting do not fit.
    """
    import logging

    from sqlalchemy.exc import DBAPIError

    from outboxq.cli.database import connect
    from outboxq.cli.errors import DatabaseUnreachable
    from outboxq.errors import ConfigError, SchemaError
    from outboxq.relay.startup import check_database

    try:
        with connect(url) as connection:
            check_database(connection, settings)
    except DatabaseUnreachable as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        logging.getLogger("outboxq.relay").warning("%s", error)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    except DBAPIError:
        # The relay meets it too, and says what it is.
        return


def _set_up_logging(level: str) -> None:
    """Standard error, unless the application has set up its own; the level is ours either way."""
    import logging

    from outboxq.observability.logging import LineFormatter

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("outboxq").setLevel(level.upper())
