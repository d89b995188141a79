"""The work of `outboxq relay`: run a relay in this process, or supervise several processes with a relay each."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import typer
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from outboxq import config
from outboxq.admin.stats import count_left
from outboxq.cli.database import connect, naming, open_database
from outboxq.cli.errors import DatabaseUnreachable, explain
from outboxq.cli.output import notice
from outboxq.cli.relay import RelayOptions
from outboxq.cli.reload import run_reloading
from outboxq.codec.text import printable
from outboxq.config import RelayConfig
from outboxq.emitter import Emitter
from outboxq.errors import ConfigError, RelayStuck, SchemaError
from outboxq.events import Event, Hook, RelayStarted
from outboxq.handlers.loading import load_jobs
from outboxq.observability.logging import EventLog, JsonFormatter, LineFormatter, keep_loggers_enabled
from outboxq.observability.metrics.counter import EventCounter
from outboxq.observability.metrics.reading import Reading, without_kinds
from outboxq.relay import health
from outboxq.relay.metrics import ChildMetrics, MetricsTeller, read_relay
from outboxq.relay.relay import Relay
from outboxq.relay.signals import stop_signals, stop_when_parent_dies
from outboxq.relay.startup import check_database, resolve_groups
from outboxq.relay.state import RelayReport
from outboxq.relay.supervisor import EXIT_STUCK, Supervisor

_LAST_WORDS_SECONDS = 2.0
_log = logging.getLogger("outboxq.relay")


def run_relay(options: RelayOptions) -> None:
    """Run a relay in this process, several in processes of their own, or one that restarts when files change.

    The options `processes`, `reload` and `database_url` decide which of these.
    """
    if options.log_format is not None:
        # Set up before the application is imported, so that its own logging set-up finds this one.
        _set_up_logging(options)
    try:
        _start(options)
    except Exception as error:
        failure = explain(error) if options.log_format == "json" else None
        if failure is None:
            # The process of one of several databases: the log already has the database's name.
            with naming(config.database_label()):
                raise
        _log.critical("%s", failure.message)
        raise typer.Exit(failure.exit_code) from error


def _start(options: RelayOptions) -> None:
    urls = config.database_urls(options.database_url)
    options.check_reload(len(urls))
    listen = config.listen_urls(options.listen_url, len(urls))
    databases = {
        name: (url, options.config(to_listen)) for (name, url), to_listen in zip(urls.items(), listen, strict=True)
    }
    first = next(iter(databases.values()))
    if options.processes == 1 and not options.reload and len(databases) == 1:
        _run(options, next(iter(databases)), *first)
        return
    # Once for all processes.
    for name, (url, settings) in databases.items():
        with naming(name if len(databases) > 1 else None):
            _check_database(url, settings, f"{name}: " if len(databases) > 1 else "")
    _set_up_logging(options)
    if options.reload:
        run_reloading(options, _child_environment(*first))
    else:
        _supervise(options, databases)


def _run(options: RelayOptions, name: str, url: URL, settings: RelayConfig) -> None:
    """Run one relay in this process until it has stopped, with logging, metrics, health file and signal handlers."""
    # Before the application's code, which may start processes of its own.
    parent, heartbeat, metrics = config.parent_pipe(), config.heartbeat_pipe(), config.metrics_socket()
    keep_loggers_enabled()
    jobs = load_jobs(options.target)
    _set_up_logging(options)
    state = health.StateHook()
    hooks: list[Hook] = [EventLog(tracebacks=not options.no_log_tracebacks), state]
    counter = None if options.metrics is None and metrics is None else EventCounter()
    if counter is not None:
        hooks.append(counter)
    relay = Relay(url, jobs, settings, hooks=hooks if options.drain else [*hooks, _SaysThatItWaits()])
    with ExitStack() as stack:
        if counter is not None:
            _tell_metrics(stack, options, metrics, lambda: {name: read_relay(relay.look(), counter)})
        stack.enter_context(stop_signals(relay.stop))
        stack.enter_context(health.health_file(options.health_file, lambda: health.Health(state.state)))
        if parent is not None:
            stop_when_parent_dies(parent, relay.stop)
        if heartbeat is not None:
            health.send_beats(heartbeat, lambda: state.state)
        if parent is None:
            _check_database(url, settings)
        report = _work(relay, drain=options.drain)
    if options.drain:
        label = config.database_label()
        counted = f"done {report.done:,}, failed attempts {report.failed:,}, dead {report.died:,}"
        typer.echo(counted if label is None else f"{label}: {counted}")
        if state.state != "stopping":
            queues = [name for group, *_ in resolve_groups(settings, jobs.resolve()) for name in group.queues]
            _say_what_is_left(url, settings.schema, queues)


def _tell_metrics(
    stack: ExitStack, options: RelayOptions, metrics: int | None, read: Callable[[], dict[str, Reading]]
) -> None:
    """Send the relay's counters to the supervisor, or serve them over HTTP if there is no supervisor.

    Args:
        stack: Closes the sender or the server at the end.
        metrics: The file descriptor of the supervisor's socket; None without a supervisor.
        read: Returns the present values of the counters.
    """
    if metrics is not None:
        teller = MetricsTeller(metrics, lambda: next(iter(read().values())))
        stack.callback(teller.finish)
    else:
        _serve_metrics(stack, options, read)


def _serve_metrics(stack: ExitStack, options: RelayOptions, read: Callable[[], dict[str, Reading]]) -> None:
    if options.metrics is None:
        return
    # Needs the extra.
    from outboxq.observability.metrics.exposition import expose, registry_of
    from outboxq.observability.metrics.server import parse_address, serving

    has_kinds = options.metrics_detail == "kind"

    def shown() -> dict[str, Reading]:
        found = read()
        return found if has_kinds else {name: without_kinds(reading) for name, reading in found.items()}

    registry = registry_of(shown)
    stack.enter_context(serving(parse_address(options.metrics), partial(expose, registry)))


# The garbage collector runs only after so many new objects.
_YOUNG_OBJECTS = 5_000


class _SaysThatItWaits:
    """A hook that logs, once the relay has started, that it is ready and waits for jobs."""

    events = frozenset({RelayStarted})

    def __call__(self, _event: Event) -> None:
        _log.info("waiting for jobs, until SIGTERM or Ctrl-C")


def _work(relay: Relay, *, drain: bool) -> RelayReport:
    """Run the relay until it is stopped or, to drain its queues, until no job is left; return its report.

    If a handler does not end at its deadline, end the process.
    """
    try:
        # The garbage collector skips imported objects, which stay, and runs less often: a job's objects are freed at
        # its end without it.
        gc.freeze()
        young, *older = gc.get_threshold()
        if young:
            gc.set_threshold(max(young, _YOUNG_OBJECTS), *older)
        return relay.drain() if drain else relay.run()
    except RelayStuck as error:
        _end_stuck(error)
    except SchemaError as error:
        raise ConfigError(str(error)) from error


_LEFT = {
    "in_backoff": "in backoff after a failed attempt",
    "behind": "behind another job of their group",
    "later": "due later",
    "parked": "of kinds that are paused, or that this registry does not know",
    "paused": "in paused queues",
    "elsewhere": "held by others, or new",
    "not_served": "in queues that are not served",
}


def _say_what_is_left(url: URL, schema: str, queues: Sequence[str]) -> None:
    """Print how many jobs a drain has left in the queues, by the reason why they were not run."""
    try:
        with open_database(url.render_as_string(hide_password=False), schema) as begin, begin() as connection:
            left = count_left(connection, queues)
    except (DBAPIError, DatabaseUnreachable) as error:
        # This is no error: the drain itself succeeded.
        notice(f"what is left could not be counted ({type(error).__name__})")
        return
    if left:
        label = config.database_label()
        sorts = ", ".join(f"{left[sort]:,} {words}" for sort, words in _LEFT.items() if sort in left)
        typer.echo(f"left: {sorts}" if label is None else f"{label}: left: {sorts}")


def _end_stuck(error: Exception) -> NoReturn:
    """Log the error that a handler does not end, and end the process without waiting for any thread.

    At a normal exit Python might wait for the handler's thread, and the thread may hold any lock.
    """

    def say() -> None:
        _log.critical("%s", error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    speaker = threading.Thread(target=say, name="outboxq-last-words", daemon=True)
    speaker.start()
    speaker.join(_LAST_WORDS_SECONDS)
    os._exit(EXIT_STUCK)


def _supervise(options: RelayOptions, databases: Mapping[str, tuple[URL, RelayConfig]]) -> NoReturn:
    """Keep `--processes` relay processes for each database running until they are stopped, then end the command."""
    several = {
        name: {**_secrets(url, settings), config.DATABASE_LABEL_VARIABLE: name}
        for name, (url, settings) in databases.items()
    }
    url, settings = next(iter(databases.values()))
    named = len(several) > 1
    metrics = None if options.metrics is None else ChildMetrics({name if named else "": name for name in databases})
    supervisor = Supervisor(
        options.of_one_process(),
        options.processes,
        environment=_child_environment(url, settings),
        drain_seconds=settings.drain_seconds,
        emit=Emitter((EventLog(),), lambda _hook, _event: None),
        databases=several if named else {},
        finite=options.drain,
        stall_seconds=options.stall_seconds,
        health_path=options.health_file,
        metrics=metrics,
    )
    with ExitStack() as stack:
        if metrics is not None:
            _serve_metrics(stack, options, metrics.read)
        exit_code = supervisor.run()
    raise typer.Exit(exit_code)


def _child_environment(url: URL, settings: RelayConfig) -> Mapping[str, str]:
    """Return the environment variables for a relay process, with the URLs of its database.

    The URLs are not on the command line, because other users of the machine could read them there.
    """
    return config.child_environment(_secrets(url, settings))


def _secrets(url: URL, settings: RelayConfig) -> dict[str, str]:
    secrets = {config.DATABASE_URL_VARIABLE: url.render_as_string(hide_password=False)}
    if settings.listen_url is not None:
        secrets[config.LISTEN_URL_VARIABLE] = settings.listen_url
    return secrets


def _check_database(url: URL, settings: RelayConfig, of_database: str = "") -> None:
    """Refuse to start a relay if the database has an error that waiting would not mend, such as a wrong password.

    If the database cannot be reached for now, log libpq's message. The relay then waits for the database, but its own
    log does not have that message.

    Args:
        of_database: The words before each logged message, such as the database's name.

    Raises:
        ConfigError: the server knows no such database, role or password; or the tables or a setting do not fit.
    """
    try:
        with connect(url) as connection:
            check_database(connection, settings)
    except DatabaseUnreachable as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        _log.warning("%s%s", of_database, error)
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    except DBAPIError:
        # The relay will meet the same error, and reports it.
        return


def _set_up_logging(options: RelayOptions) -> None:
    """Log to standard error, unless logging is set up already; `--log-level` applies either way."""
    handler = logging.StreamHandler(sys.stderr)
    label = config.database_label()
    # The name is not a format string, so percent signs are doubled.
    place = "%(process)d" if label is None else f"%(process)d {printable(label).replace('%', '%%')}"
    handler.setFormatter(
        JsonFormatter(label)
        if options.log_format == "json"
        else LineFormatter(f"%(asctime)s %(levelname)s [{place}] %(message)s")
    )
    level = options.log_level.upper()
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("outboxq").setLevel(level)
