"""What `outboxq relay` does in its process: run a relay, or keep several processes that run one each."""

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

import typer
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from outboxq import config
from outboxq.admin.stats import count_left
from outboxq.cli.database import connect, open_database
from outboxq.cli.errors import DatabaseUnreachable
from outboxq.cli.output import notice
from outboxq.cli.relay import LogLevel, RelayOptions
from outboxq.config import RelayConfig
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.events import Emitter
from outboxq.handlers.loading import load_jobs
from outboxq.observability.logging import LineFormatter, log_event
from outboxq.relay import health
from outboxq.relay.relay import Relay
from outboxq.relay.signals import stop_signals, stop_when_parent_dies
from outboxq.relay.slot_groups import resolve_groups
from outboxq.relay.startup import check_database
from outboxq.relay.state import RelayReport
from outboxq.relay.supervisor import EXIT_STUCK, Supervisor

_LAST_WORDS_SECONDS = 2.0
_log = logging.getLogger("outboxq.relay")


def run_relay(options: RelayOptions) -> None:
    """Run one relay in this process, or several in processes of their own."""
    url, settings = config.database_url(options.database_url), options.config()
    if options.processes == 1:
        _run(options, url, settings)
    else:
        # Once, for all of them.
        _check_database(url, settings)
        _set_up_logging(options.log_level)
        _supervise(options, url, settings)


def _run(options: RelayOptions, url: URL, settings: RelayConfig) -> None:
    """Run one relay in this process."""
    # Before the application's code, which may start processes of its own.
    parent, heartbeat = config.parent_pipe(), config.heartbeat_pipe()
    jobs = load_jobs(options.target)
    _set_up_logging(options.log_level)
    state = health.StateHook()
    relay = Relay(url, jobs, settings, hooks=(log_event, state))
    with stop_signals(relay.stop), health.health_file(options.health_file, lambda: health.Health(state.state)):
        if parent is not None:
            stop_when_parent_dies(parent, relay.stop)
        if heartbeat is not None:
            health.send_beats(heartbeat, lambda: state.state)
        if parent is None:
            _check_database(url, settings)
        report = _work(relay, drain=options.drain)
    if options.drain:
        typer.echo(f"done {report.done:,}, failed attempts {report.failed:,}, dead {report.died:,}")
        if state.state != "stopping":
            queues = [name for group, _ in resolve_groups(settings, jobs.resolve()) for name in group.queues]
            _say_what_is_left(url, settings.schema, queues)


def _work(relay: Relay, *, drain: bool) -> RelayReport:
    """Work until it is told to stop, or until the queues are drained."""
    try:
        return relay.drain() if drain else relay.run()
    except RelayStuck as error:
        _end_stuck(error)
    except SchemaError as error:
        raise ConfigError(str(error)) from error


_LEFT = {
    "in_backoff": "in backoff after a failed attempt",
    "later": "due later",
    "parked": "of kinds that this registry does not know",
    "paused": "in paused queues",
    "elsewhere": "held by others, or new",
    "not_served": "in queues that are not served",
}


def _say_what_is_left(url: URL, schema: str, queues: Sequence[str]) -> None:
    """Print how many jobs of each sort a drain leaves, if any."""
    try:
        with open_database(url.render_as_string(hide_password=False), schema) as begin, begin() as connection:
            left = count_left(connection, queues)
    except (DBAPIError, DatabaseUnreachable) as error:
        # No error: the drain itself is done.
        notice(f"what is left could not be counted ({type(error).__name__})")
        return
    if left:
        typer.echo("left: " + ", ".join(f"{left[sort]:,} {words}" for sort, words in _LEFT.items() if sort in left))


def _end_stuck(error: Exception) -> NoReturn:
    """End without waiting for any thread: Python might wait for the one that is stuck, and it may hold any lock."""

    def say() -> None:
        _log.critical("%s", error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    speaker = threading.Thread(target=say, name="outboxq-last-words", daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS_SECONDS)
    os._exit(EXIT_STUCK)


def _supervise(options: RelayOptions, url: URL, settings: RelayConfig) -> NoReturn:
    """Keep several relays running, a process each."""
    # Passed as variables: a command line can be read by every user of the machine.
    secrets = {config.DATABASE_URL_VARIABLE: url.render_as_string(hide_password=False)}
    if settings.listen_url is not None:
        secrets[config.LISTEN_URL_VARIABLE] = settings.listen_url
    supervisor = Supervisor(
        options.of_one_process(),
        options.processes,
        environment=config.child_environment(secrets),
        drain_seconds=settings.drain_seconds,
        emit=Emitter((log_event,), lambda _hook, _event: None),
        finite=options.drain,
        stall_seconds=options.stall_seconds,
        health_path=options.health_file,
    )
    raise typer.Exit(supervisor.run())


def _check_database(url: URL, settings: RelayConfig) -> None:
    """Refuse to start if waiting would not help; if it would, log what libpq said, which the relay does not know.

    Raises:
        ConfigError: the server knows no such database, role or password; or the tables or a setting do not fit.
    """
    try:
        with connect(url) as connection:
            check_database(connection, settings)
    except DatabaseUnreachable as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        _log.warning("%s", error)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    except DBAPIError:
        # The relay will meet the same error, and reports it.
        return


def _set_up_logging(level: LogLevel) -> None:
    """Log to standard error, unless the application has set up its own logging; the level is ours either way."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s [%(process)d] %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("outboxq").setLevel(level.upper())
